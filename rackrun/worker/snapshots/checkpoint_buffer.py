"""Provides the buffer for the image that goes to disk, kept from one checkpoint to the next.

The first allocation is planned: what the host has no memory for is refused then, and not by the kernel in the middle of
training.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

from rackrun.checkpoint.arena.memory_plan import MemoryPlan, ceilings, with_spare_room
from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.checkpoint.redundancy.shard_placement import Redundancy

__all__ = ["CheckpointBuffers"]


class CheckpointBuffers:
    """The checkpoint buffers of one rank.

    ``ranks``: how many ranks of this host allocate a buffer at the same time; the host's memory is checked for that
    many. It is all of them at the first checkpoint, and 1 for a newcomer, because the others have theirs already.
    ``pin`` is called with address and size of new memory, ``unpin`` with the address of memory that is freed.
    """

    def __init__(
        self,
        ranks: int,
        pin: Callable[[int, int], None] = lambda _address, _size: None,
        unpin: Callable[[int], None] = lambda _address: None,
    ) -> None:
        self._ranks, self._pin, self._unpin = ranks, pin, unpin
        self._kept: mmap.mmap | None = None

    def acquire(self, size: int) -> mmap.mmap:
        """Return a buffer of at least ``size`` bytes, to be given back. Raises `MemoryPlanError` when there is not
        enough memory.

        Two buffers may be in use at once, because the last checkpoint of a run does not wait for the one before.
        """
        kept, self._kept = self._kept, None
        if kept is not None and len(kept) >= size:
            return kept
        if kept is not None:
            self._unpin(_address(kept))
        del kept
        room = max(with_spare_room(size), mmap.PAGESIZE)
        MemoryPlan(self._ranks, room, Redundancy.local(), ceilings(None)).check()
        try:
            memory = mmap.mmap(-1, room)
        except OSError as error:
            raise MemoryPlanError(
                f"{room} bytes cannot be had: {error.strerror}.", remedy="see the limits of this process."
            ) from error
        self._pin(_address(memory), room)
        return memory

    def release(self, memory: mmap.mmap) -> None:
        """Return a buffer to which nothing is copied any more. The larger of two is kept."""
        goes: mmap.mmap | None = memory
        if self._kept is None or len(self._kept) < len(memory):
            goes, self._kept = self._kept, memory
        if goes is not None:
            self._unpin(_address(goes))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
