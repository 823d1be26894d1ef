"""Copies tensors of a shard into memory of the host while training goes on: what neither forward nor backward changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import torch

from rackrun.checkpoint.host_memory.background_pinning import Pinning
from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.checkpoint.image.device_copies import DeviceCopies
from rackrun.checkpoint.image.safetensors_image import no_cuts, write_tensor, write_tensors
from rackrun.worker.process.reports import say
from rackrun.worker.state.state_image import Shard

__all__ = ["HostCopies", "copies_from"]

_GROUP_BYTES = 128 * 2**20
"""Of a device's copies, behind which the host can go on with what has come: a few milliseconds of the bus."""


class HostCopies:
    """From memory to memory."""

    def ready(self) -> torch.cuda.Event | None:
        """Taken when the state is as it is to be copied."""
        return None

    def pin(self, address: int, size: int) -> None:
        """Make this memory quick to copy to, where that is possible, in the course of time: nobody waits for it."""

    def unpin(self, address: int) -> None:
        """Before that memory goes."""

    def cuts(self, address: int, size: int) -> list[int]:
        """Where a copy from or to these bytes is to be cut."""
        return no_cuts(address, size)

    def copy_now(self, shard: Shard, into: memoryview, paths: Collection[str]) -> None:
        """The thread that trains, as the state is now, whatever changes it next. On a GPU only asked for: take `ready` after it, and call `copy` with
        that; when that returns, ``paths`` are there as well."""
        for path in paths:
            write_tensor(shard.layout, path, shard.tensors[path], into)

    def held_up_s(self) -> float:
        """How long the last `copy_now` has kept the device from training, without the host. To be asked when a `copy` after it has returned."""
        return 0.0

    def copy(
        self,
        shard: Shard,
        into: memoryview,
        paths: Collection[str],
        ready: torch.cuda.Event | None,
        filled: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Any thread; returns when ``paths`` are there. ``filled``: as of `write_tensors`."""
        del ready
        write_tensors(shard.layout, {path: shard.tensors[path] for path in paths}, into, filled)


class _GpuCopies(HostCopies):
    """On a stream of their own, beside the next step's kernels. Pinned where the driver allows it, else slower."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinning = Pinning(self._use_device, say)
        self._copies = DeviceCopies(self._pinning.cuts)
        self._copying = threading.Lock()  # an older checkpoint may still be copied
        self._now: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Before and behind the last `copy_now`."""

    def ready(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()
        event.record()
        return event

    def pin(self, address: int, size: int) -> None:
        self._pinning.pin(address, size)

    def unpin(self, address: int) -> None:
        with self._copying:
            self._copies.forget()
        self._pinning.unpin(address)

    def cuts(self, address: int, size: int) -> list[int]:
        return self._pinning.cuts(address, size)

    def copy_now(self, shard: Shard, into: memoryview, paths: Collection[str]) -> None:
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self._copying:  # in front of what changes them next, in the same stream
            begun.record()
            self._copies.enqueue(shard.layout, shard.tensors, paths, into)
            done.record()
        self._now = begun, done

    def held_up_s(self) -> float:
        return 0.0 if self._now is None else self._now[0].elapsed_time(self._now[1]) / 1e3

    def copy(
        self,
        shard: Shard,
        into: memoryview,
        paths: Collection[str],
        ready: torch.cuda.Event | None,
        filled: Callable[[int], None] = lambda _: None,
    ) -> None:
        assert ready is not None
        self._use_device()
        groups: list[tuple[int, torch.cuda.Event]] = []
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                with self._copying:
                    for upto in self._copies.in_groups(shard.layout, shard.tensors, paths, into, _GROUP_BYTES):
                        event = torch.cuda.Event(
                            blocking=True
                        )  # this thread sleeps, and leaves its core to who digests
                        event.record()
                        groups.append((upto, event))
            for upto, event in groups:
                event.synchronize()
                filled(upto)
        finally:  # nothing is on its way to this memory, whatever happens
            self._stream.synchronize()
            ready.synchronize()

    def _use_device(self) -> None:
        """First in each thread: else it would make a context on the first GPU."""
        use_device(self._device)


def copies_from(device: torch.device) -> HostCopies:
    return _GpuCopies(device) if device.type == "cuda" else HostCopies()
