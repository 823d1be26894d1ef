"""Collectives that break after the gate has passed, where the step counts and cannot be undone any more.

The usual one is harmless: a loss or an accuracy, reduced over the ranks to be shown. One that averages weights is not: this
rank's state is then neither that before nor that after. What tells them apart is the tracked state: the collective must not
have written to it, and it must be the same, bit for bit, at the end of the step as when the collective broke.
"""

from __future__ import annotations

import threading
from typing import Any

from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.multi_part_steps import writes_tracked

__all__ = ["LateBreaks"]


class LateBreaks:
    """Of the unit in hand."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._content: int | None = None
        self._written = False

    def begin_unit(self) -> None:
        self._content, self._written = None, False

    def broke(self, result: Any) -> None:
        """``result``: the tensors that the collective was to write, nested in lists. Any thread."""
        with self._lock:
            if self._state.gathered or writes_tracked(self._state, result):
                self._written = True  # of shards it cannot be told while a forward is under way
            elif self._content is None:
                self._content = self._state.content(buffers=True)

    @property
    def any(self) -> bool:
        return self._written or self._content is not None

    def torn(self) -> bool:
        """Asked at the end of the unit."""
        return self._written or (self._content is not None and self._content != self._state.content(buffers=True))
