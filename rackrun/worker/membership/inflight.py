"""Collectives in flight, and when to go on without them.

Breaking a generation ends what is in flight within some 10 ms; but gloo can lose the wake-up of a collective whose sockets
are shut down, and what has not ended soon after a break never will.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Flights"]

_GRACE_S = 0.1


class Leavable(Protocol):
    def leave(self) -> None: ...


class Flights:
    """Of the present generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_for: dict[Leavable, None] = {}
        self._broken_at: float | None = None
        self.some_left_behind = False
        """One that was left in this unit has not ended: its memory must not be used again."""

    def take_off(self, work: Leavable) -> None:
        """Somebody waits for this one's future: it will be completed, if need be by `leave_overdue`."""
        with self._lock:
            self._waited_for[work] = None

    def land(self, work: Leavable) -> None:
        with self._lock:
            self._waited_for.pop(work, None)

    def broke(self) -> None:
        self._broken_at = time.monotonic()

    def new_generation(self) -> None:
        with self._lock:
            self._broken_at = None
            self._waited_for.clear()

    def overdue(self) -> bool:
        """Whether what has not ended by now never will."""
        broken_at = self._broken_at
        return broken_at is not None and time.monotonic() - broken_at >= _GRACE_S

    def leave_overdue(self) -> None:
        """Called by the control thread, now and then: complete the futures of those that have lost their wake-up."""
        if self.overdue():
            with self._lock:
                overdue = list(self._waited_for)
            for work in overdue:
                self.some_left_behind = True
                work.leave()
