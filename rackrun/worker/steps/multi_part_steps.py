"""Detects steps of several parts, which go on with collectives after their first ``optimizer.step()``.

A GAN trains its discriminator and then runs the backward pass of its generator; a reduced loss drives a scheduler. If a
peer is lost in such a second part, a gate before the first ``optimizer.step()`` would have committed the step already,
while the ranks hold neither the state before it nor the one after. So the gate of these steps stands at their end, and
all that they change is copied when they begin (`rackrun.worker.steps.undo.unit_undo`).

The first step of a script, whose gate always stands at its end, shows whether the script has such steps; a later step
may show it, too. All ranks agree on it in a gate, and it is part of the state that a newcomer is given. A collective
that is the last thing to happen to tracked state (a loss reduced for display) does not count.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.tensor_lists import marks, storages

__all__ = ["MultiPartWatch"]

_PACKAGES = (
    str(Path(__file__).resolve().parents[2]),
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"],
)
_LOOKED_AT_WHOLE = 3
"""The number of collectives after which the state's content is compared. Later ones compare versions only, and content
at every power of two."""


class MultiPartWatch:
    """Watches collectives from a unit's first ``optimizer.step()`` on, to find out whether the script's steps have
    several parts."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._times = 0
        self._signature: tuple[object, ...] | None = None
        self._where = self._because = ""
        self.found = ""
        """Why this script's steps have several parts, for a message; empty while none was seen."""

    def begin_unit(self) -> None:
        """Forget the collectives of the unit before."""
        self._signature, self._because = None, ""

    def called(self, name: str, result: Any) -> None:
        """Note that the collective ``name`` follows the first ``optimizer.step()`` of a step. ``result``: the tensors
        that it writes, nested in lists. Safe to call in any thread."""
        if self.found or self._because or self._signature is not None:
            return
        with self._lock:
            if torch._C._current_graph_task_id() != -1 or self._state.gathered:
                self._because = f"{name} at {_line()}, in a forward or backward pass"
            elif writes_tracked(self._state, result):
                self._because = f"{name} at {_line()}, which writes tracked state"
            else:
                self._times += 1
                self._where = f"{name} at {_line()}, and then tracked state"
                self._signature = self._sign()

    def ends(self) -> None:
        """Conclude the step, right before a gate at its end: its last collective counts if tracked state has changed
        since."""
        if self._signature is not None and self._signature != self._sign():
            self._because = self._where
        self.found = self.found or self._because
        self._signature = None

    def _sign(self) -> tuple[object, ...]:
        """Return a value that differs when tracked state has changed: versions and plain values, and at times the
        content."""
        tensors = self._state.tensors()
        versions = list(tensors), marks(tensors.values())
        whole = self._times <= _LOOKED_AT_WHOLE or not self._times & (self._times - 1)
        return versions, self._state.encode_plain(), self._state.content(buffers=True) if whole else 0


def writes_tracked(state: TrackedState, result: Any) -> bool:
    """Whether a collective writes tracked state. ``result``: the tensors that it writes, nested in lists."""
    mine = storages([tensor for tensor in state.tensors().values() if tensor.nbytes])
    return any(tensor.untyped_storage().data_ptr() in mine for tensor in _tensors(result))


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for one in nested:
            yield from _tensors(one)


def _line() -> str:
    """Return the file and line of the script that led to this call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "a line of the script"
