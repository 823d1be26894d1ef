"""Copy tensors into a slot while training goes on: those that neither forward nor backward changes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

import torch

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.host_memory.background_pinning import Pinning
from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.checkpoint.image.device_copies import DeviceCopies
from rackrun.checkpoint.image.image_layout import ImageLayout
from rackrun.checkpoint.image.safetensors_image import write_tensor

__all__ = ["Staging"]


class Staging:
    """Copies tensors into host memory.

    From a GPU it copies on a stream of its own, beside the next step's kernels, into pinned memory where the driver
    allows that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinning = Pinning(self._use_device, _tell)
        self._copies = DeviceCopies(self._pinning.cuts)

    def pin(self, arena: Arena) -> None:
        """Begin to pin the arena's memory. Copies are slower until that is done. No effect without a GPU."""
        if self._stream is not None:
            self._pinning.pin(*arena.memory())

    def unpin(self, arena: Arena) -> None:
        """Unpin the arena's memory. Call it before the arena is closed, when nothing is being copied to it."""
        if self._stream is not None:
            self._copies.forget()
            self._pinning.unpin(arena.memory()[0])

    def ready(self) -> torch.cuda.Event | None:
        """Record an event at which the tensors have the values to be copied.

        Call it in the training thread; None without a GPU.
        """
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
        """Copy the tensors ``names`` into the image ``into``; return when they are there. Any thread may call this."""
        if ready is None:
            _copy(layout, tensors, names, into)
            return
        assert self._stream is not None, "`ready` is of its device"
        self._use_device()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            self._copies.enqueue(layout, tensors, names, into)
        self._stream.synchronize()

    def _use_device(self) -> None:
        """Select the device. Call it first in each thread: otherwise CUDA makes a context on the first GPU."""
        use_device(self._device)


def _copy(layout: ImageLayout, tensors: Mapping[str, torch.Tensor], names: Collection[str], into: memoryview) -> None:
    for entry in layout.entries:  # in the order of the image
        if entry.name in names:
            write_tensor(layout, entry.name, tensors[entry.name], into)


def _tell(what: str) -> None:
    print(f"rackrun: {what}", file=sys.stderr, flush=True)
