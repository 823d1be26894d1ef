"""Copying tensors into a slot while training goes on: what neither forward nor backward changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from rackrun.checkpoint.arena import Arena
from rackrun.checkpoint.device import use_device
from rackrun.checkpoint.image import write_tensor
from rackrun.checkpoint.layout import ImageLayout
from rackrun.checkpoint.registration import register_memory, unregister_memory

__all__ = ["Staging"]


class Staging:
    """From memory to memory; from a GPU on a stream of its own, beside the next step's kernels, into pinned memory where
    the driver allows it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def pin(self, arena: Arena) -> None:
        if self._stream is not None:
            register_memory(*arena.memory())

    def unpin(self, arena: Arena) -> None:
        """Before the arena is closed."""
        if self._stream is not None:
            unregister_memory(arena.memory()[0])

    def ready(self) -> torch.cuda.Event | None:
        """Taken by the thread that trains, when the tensors are as they are to be copied."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def copy(
        self,
        layout: ImageLayout,
        tensors: Mapping[str, torch.Tensor],
        names: Collection[str],
        into: memoryview,
        ready: torch.cuda.Event | None,
    ) -> None:
        """Any thread; returns when ``names`` are there."""
        if ready is None:
            _copy(layout, tensors, names, into, beside=False)
            return
        assert self._stream is not None, "`ready` is of its device"
        use_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            _copy(layout, tensors, names, into, beside=True)
        self._stream.synchronize()


def _copy(
    layout: ImageLayout, tensors: Mapping[str, torch.Tensor], names: Collection[str], into: memoryview, *, beside: bool
) -> None:
    for entry in layout.entries:  # in the order of the image
        if entry.name in names:
            write_tensor(layout, entry.name, tensors[entry.name], into, non_blocking=beside)
