"""Does the job get anywhere? Recoveries are counted as long as no step is committed between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rackrun.protocol.ids import Position

__all__ = ["Progress"]


@dataclass(slots=True)
class Progress:
    recoveries_max: int
    """Without one committed step between them."""
    _absorbs: int = 0
    _absorbed_at: Position | None = None
    _stuck_at: Position | None = None
    _stuck: list[str] = field(default_factory=list)

    def absorbs(self, committed: Position) -> int:
        """How often the step after this was done again in place."""
        return self._absorbs if committed == self._absorbed_at else 0

    def goes_on(self, committed: Position, told: str, *, absorbing: bool) -> Sequence[str]:
        """Another recovery, because of ``told``. Not (): what all of them were told for; they are too many."""
        if committed != self._stuck_at:
            self._stuck_at, self._stuck = committed, []
        self._stuck.append(told)
        if len(self._stuck) > self.recoveries_max:
            return self._stuck
        if absorbing:
            self._absorbs = self.absorbs(committed) + 1
            self._absorbed_at = committed
        return ()
