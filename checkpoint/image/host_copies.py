"""Copy an image into host memory: while training goes on for tensors that forward and backward do not change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Set

import torch

from rackrun.checkpoint.base.messages import say
from rackrun.checkpoint.host_memory.background_pinning import Pinning
from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.checkpoint.image.device_copies import DeviceCopies
from rackrun.checkpoint.image.rank_image import Image
from rackrun.checkpoint.image.safetensors_image import no_cuts, write_head, write_tensor, write_tensors

__all__ = ["HostCopies", "ImageCopy", "copies_from"]

_GROUP_BYTES = 128 * 2**20
"""Size of a group of device copies, in bytes, after which the host can use what has arrived: a few milliseconds of bus
time."""


class HostCopies:
    """Copies between two places in host memory; also the interface of copies from a device."""

    def ready(self) -> torch.cuda.Event | None:
        """Return an event that marks the current state as the one to copy; None on the host."""
        return None

    def pin(self, address: int, size: int) -> None:
        """Make copies to this memory fast (page-locked), where that is possible. Returns at once; the work is done in
        the background."""

    def unpin(self, address: int) -> None:
        """Release what `pin` did, before the memory is freed."""

    def cuts(self, address: int, size: int) -> list[int]:
        """Return the addresses at which a copy from or to these bytes must be cut."""
        return no_cuts(address, size)

    def copy_now(self, image: Image, into: memoryview, paths: Collection[str]) -> None:
        """Copy the tensors at ``paths`` into ``into`` as they are now, whatever changes them next. Called by the thread
        that trains.

        On a GPU the copy is only enqueued. Take `ready` after it and pass that to `copy`; when `copy` returns,
        ``paths`` are complete as well.
        """
        for path in paths:
            write_tensor(image.layout, path, image.tensors[path], into)

    def wait_now(self, image: Image) -> None:
        """Return when the last `copy_now`, which was of ``image``, is complete. Called by the thread that trains."""

    def held_up_s(self) -> float:
        """Return how long, in seconds, the last `copy_now` kept the device from training, without the host's time. To
        be called after the following `copy` has returned."""
        return 0.0

    def copy(
        self,
        image: Image,
        into: memoryview,
        paths: Collection[str],
        ready: torch.cuda.Event | None,
        filled: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Copy the tensors at ``paths`` into ``into``, and return when they are complete. Any thread. ``filled``: see
        `write_tensors`."""
        del ready
        write_tensors(image.layout, {path: image.tensors[path] for path in paths}, into, filled)


class _GpuCopies(HostCopies):
    """Copies from a GPU on a stream of their own, beside the next step's kernels. The memory is pinned where the driver
    allows it; otherwise copies are slower."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinning = Pinning(self._use_device, say)
        self._copies = DeviceCopies(self._pinning.cuts)
        self._copying = threading.Lock()  # an older checkpoint may still be copied
        self._now: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Events before and after the last `copy_now`."""

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

    def copy_now(self, image: Image, into: memoryview, paths: Collection[str]) -> None:
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self._copying:  # ahead of whatever changes them next, in the same stream
            begun.record()
            self._copies.enqueue(image.layout, image.tensors, paths, into)
            done.record()
        self._now = begun, done

    def wait_now(self, image: Image) -> None:
        if self._now is not None:
            self._now[1].synchronize()
        for device in {tensor.device for tensor in image.tensors.values()}:
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                torch.cuda.synchronize(device)  # the event is of the present device alone

    def held_up_s(self) -> float:
        return 0.0 if self._now is None else self._now[0].elapsed_time(self._now[1]) / 1e3

    def copy(
        self,
        image: Image,
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
                    for upto in self._copies.in_groups(image.layout, image.tensors, paths, into, _GROUP_BYTES):
                        event = torch.cuda.Event(
                            blocking=True
                        )  # this thread sleeps, and leaves its core to threads that digest
                        event.record()
                        groups.append((upto, event))
            for upto, event in groups:
                event.synchronize()
                filled(upto)
        finally:  # in any case no copy to this memory may be in flight
            self._stream.synchronize()
            ready.synchronize()

    def _use_device(self) -> None:
        """Select this object's GPU; must come first in each thread, which would create a context on the first GPU
        otherwise."""
        use_device(self._device)


class ImageCopy:
    """One image on its way into host memory, while training goes on.

    Creating it copies what may change next. `finish` copies the rest, and may run in another thread.
    """

    def __init__(
        self, image: Image, settled: Set[str], into: memoryview, device: HostCopies, *, waits: bool = False
    ) -> None:
        """``settled``: the tensors that stay unchanged until `finish` has copied them. ``into``: the image's memory.

        ``waits``: return only when the other tensors are copied. Otherwise a GPU copies them in the order of the present
        stream, and what another stream writes to them meanwhile may be in the copy.
        """
        self._image, self._settled, self._into, self._device = image, settled, into, device
        write_head(image.layout, image.plain, into)
        device.copy_now(image, into, image.tensors.keys() - settled)
        if waits:
            device.wait_now(image)
        self._versions = [(image.tensors[path], image.tensors[path]._version) for path in settled]
        self._ready = device.ready()

    def finish(self, filled: Callable[[int], None] = lambda _: None, *, drop: bool = True) -> bool:
        """Copy the rest, and return whether none of it was changed meanwhile. ``filled``: see `write_tensors`.

        ``drop``: `drop` is called in any case. Without it, the caller calls it.
        """
        try:
            self._device.copy(self._image, self._into, self._settled, self._ready, filled)
            return all(tensor._version == version for tensor, version in self._versions)
        finally:
            if drop:
                self.drop()

    def abandon(self) -> None:
        """Give the copy up instead of `finish`: return when nothing is written to its memory any more, so that the
        memory may be released or used again. Called by the thread that created the copy."""
        try:
            self._device.wait_now(self._image)
        finally:
            self.drop()

    def drop(self) -> None:
        """Drop the references to the tensors, so that the caller may free what was copied.

        The end of each tensor object gives the interpreter's lock up. Beside training that is better done by the thread
        that trains.
        """
        self._versions.clear()
        self._image.tensors.clear()


def copies_from(device: torch.device) -> HostCopies:
    """Return the copies that suit tensors on ``device``."""
    return _GpuCopies(device) if device.type == "cuda" else HostCopies()
