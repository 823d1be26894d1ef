"""Room for the image that goes to disk: one buffer, kept from one checkpoint to the next.

The first one is planned: what the host cannot bear is refused then, and not by the kernel in the middle of training.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

from rackrun.checkpoint.arena.memory_plan import MemoryPlan, ceilings
from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.checkpoint.redundancy.shard_placement import Redundancy

__all__ = ["Room"]

_SPARE_ROOM = 64
"""It has room for an image larger by one part in so many: plain state grows a little."""


class Room:
    """For so many ranks of this host at once: the first time all take theirs; a newcomer finds the others' taken. ``pin`` is told address and
    size of what is new, ``unpin`` the address of what goes."""

    def __init__(
        self,
        ranks: int,
        pin: Callable[[int, int], None] = lambda _address, _size: None,
        unpin: Callable[[int], None] = lambda _address: None,
    ) -> None:
        self._ranks, self._pin, self._unpin = ranks, pin, unpin
        self._kept: mmap.mmap | None = None

    def take(self, size: int) -> mmap.mmap:
        """At least ``size`` bytes, until they are given back. Raises `MemoryPlanError` when there is not enough: for two, as
        the last checkpoint of a run does not wait for the one before."""
        kept, self._kept = self._kept, None
        if kept is not None and len(kept) >= size:
            return kept
        if kept is not None:
            self._unpin(_address(kept))
        del kept
        room = max(size + size // _SPARE_ROOM, mmap.PAGESIZE)
        MemoryPlan(self._ranks, room, Redundancy.local(), ceilings(None)).check()
        try:
            memory = mmap.mmap(-1, room)
        except OSError as error:
            raise MemoryPlanError(
                f"{room} bytes cannot be had: {error.strerror}.", remedy="see the limits of this process."
            ) from error
        self._pin(_address(memory), room)
        return memory

    def give_back(self, memory: mmap.mmap) -> None:
        """Nothing is copied to it any more."""
        goes: mmap.mmap | None = memory
        if self._kept is None or len(self._kept) < len(memory):
            goes, self._kept = self._kept, memory
        if goes is not None:
            self._unpin(_address(goes))


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
