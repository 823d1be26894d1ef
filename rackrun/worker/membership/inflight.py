"""Collectives in flight, and when to go on without them after a break.

Breaking a generation ends its collectives within about 10 ms. But gloo can lose the wake-up of a collective whose
sockets are shut down, and a collective that has not ended soon after a break never will.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["InflightCollectives"]

_GRACE_S = 0.1


class Abandonable(Protocol):
    """A collective that can be abandoned."""

    def abandon(self) -> None:
        """End the wait for its result: the future completes, with a value that does not count."""


class InflightCollectives:
    """The collectives in flight of the current generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_for: dict[Abandonable, None] = {}
        self._broken_at: float | None = None
        self.some_abandoned = False
        """Whether a collective that was abandoned in this unit has not ended. Its memory must not be used again."""

    def add(self, work: Abandonable) -> None:
        """Add ``work``, whose future somebody waits for. The future will be completed, if necessary by
        `abandon_overdue`."""
        with self._lock:
            self._waited_for[work] = None

    def remove(self, work: Abandonable) -> None:
        """Remove ``work``, which has ended."""
        with self._lock:
            self._waited_for.pop(work, None)

    def mark_broken(self) -> None:
        """Record that the generation is broken now."""
        self._broken_at = time.monotonic()

    def new_generation(self) -> None:
        """Forget the collectives of the former generation."""
        with self._lock:
            self._broken_at = None
            self._waited_for.clear()

    def overdue(self) -> bool:
        """Whether the break is so long ago that a collective which has not ended never will."""
        broken_at = self._broken_at
        return broken_at is not None and time.monotonic() - broken_at >= _GRACE_S

    def abandon_overdue(self) -> None:
        """Complete the futures of collectives that have lost their wake-up. The control thread calls this at
        intervals."""
        if self.overdue():
            with self._lock:
                overdue = list(self._waited_for)
            for work in overdue:
                self.some_abandoned = True
                work.abandon()
