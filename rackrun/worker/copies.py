"""Copies tensors of a shard into memory of the host while training goes on: what neither forward nor backward changes."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from rackrun.checkpoint.device import use_device
from rackrun.checkpoint.image import write_tensor, write_tensors
from rackrun.checkpoint.registration import register_memory, unregister_memory
from rackrun.worker.image import Shard

__all__ = ["HostCopies", "copies_from"]


class HostCopies:
    """From memory to memory."""

    def ready(self) -> torch.cuda.Event | None:
        """Taken when the state is as it is to be copied."""
        return None

    def pin(self, address: int, size: int) -> None:
        """Make this memory quick to copy to, where that is possible."""

    def unpin(self, address: int) -> None:
        """Before that memory goes."""

    def copy(
        self,
        shard: Shard,
        into: memoryview,
        paths: Collection[str],
        ready: torch.cuda.Event | None,
        filled: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Any thread; returns when ``paths`` are there. ``filled``: as of `write_tensors`; it need not be told."""
        del ready
        write_tensors(shard.layout, {path: shard.tensors[path] for path in paths}, into, filled)


class _GpuCopies(HostCopies):
    """On a stream of their own, beside the next step's kernels. Pinned where the driver allows it, else slower."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def ready(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()
        event.record()
        return event

    def pin(self, address: int, size: int) -> None:
        register_memory(address, size)

    def unpin(self, address: int) -> None:
        unregister_memory(address)

    def copy(
        self,
        shard: Shard,
        into: memoryview,
        paths: Collection[str],
        ready: torch.cuda.Event | None,
        filled: Callable[[int], None] = lambda _: None,
    ) -> None:
        del filled  # the bytes come to memory, not to a cache
        assert ready is not None
        use_device(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for entry in shard.layout.entries:
                if entry.name in paths:
                    write_tensor(shard.layout, entry.name, shard.tensors[entry.name], into, non_blocking=True)
        self._stream.synchronize()


def copies_from(device: torch.device) -> HostCopies:
    return _GpuCopies(device) if device.type == "cuda" else HostCopies()
