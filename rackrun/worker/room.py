"""Room for the image that goes to disk: one buffer, kept from one checkpoint to the next.

The first one is planned: what the host cannot bear is refused then, and not by the kernel in the middle of training.
"""

from __future__ import annotations

import mmap

from rackrun.checkpoint.errors import MemoryPlanError
from rackrun.checkpoint.memory import MemoryPlan, ceilings
from rackrun.checkpoint.placement import Redundancy

__all__ = ["Room"]

_SPARE_ROOM = 64
"""It has room for an image larger by one part in so many: plain state grows a little."""


class Room:
    """For so many ranks of this host at once: the first time all take theirs; a newcomer finds the others' taken."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._kept: mmap.mmap | None = None

    def take(self, size: int) -> mmap.mmap:
        """At least ``size`` bytes, until they are given back. Raises `MemoryPlanError` when there is not enough: for two, as
        the last checkpoint of a run does not wait for the one before."""
        kept, self._kept = self._kept, None
        if kept is not None and len(kept) >= size:
            return kept
        del kept
        room = max(size + size // _SPARE_ROOM, mmap.PAGESIZE)
        MemoryPlan(self._ranks, room, Redundancy.local(), ceilings(None)).check()
        try:
            return mmap.mmap(-1, room)
        except OSError as error:
            raise MemoryPlanError(
                f"{room} bytes cannot be had: {error.strerror}.", remedy="see the limits of this process."
            ) from error

    def give_back(self, memory: mmap.mmap) -> None:
        if self._kept is None or len(self._kept) < len(memory):
            self._kept = memory
