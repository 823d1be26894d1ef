"""Count of consecutive recoveries without a committed step between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rackrun.protocol.ids import Position

__all__ = ["NoProgress"]


@dataclass(slots=True)
class NoProgress:
    """Counts recoveries, and steps repeated in place, since the last committed step."""

    recoveries_max: int
    """Number of recoveries that are allowed without a committed step between them."""
    _absorbs: int = 0
    _absorbed_at: Position | None = None
    _stuck_at: Position | None = None
    _stuck: list[str] = field(default_factory=list)

    def absorbs(self, committed: Position) -> int:
        """Return how often the step after ``committed`` was repeated in place."""
        return self._absorbs if committed == self._absorbed_at else 0

    def goes_on(self, committed: Position, told: str, *, absorbing: bool) -> Sequence[str]:
        """Count another recovery, with the reason ``told``. Return () if it is allowed, else the reasons of all
        recoveries at this step."""
        if committed != self._stuck_at:
            self._stuck_at, self._stuck = committed, []
        self._stuck.append(told)
        if len(self._stuck) > self.recoveries_max:
            return self._stuck
        if absorbing:
            self._absorbs = self.absorbs(committed) + 1
            self._absorbed_at = committed
        return ()
