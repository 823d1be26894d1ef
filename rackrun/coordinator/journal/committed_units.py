"""What of the units that ranks have told as committed is: a pure function of the plans."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from rackrun.protocol.commands import Plan
from rackrun.protocol.ids import BEGIN, Position

__all__ = ["Eras"]


class Eras:
    """What of a history counts. An era lasts until everybody goes back, or begins again."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self._plans, self._order = plans, sorted(plans)
        self._ends: dict[int, Position | None] = {}
        self._backs = [
            generation
            for at, generation in enumerate(self._order)
            if plans[generation].rollback is not None or (at and plans[generation].committed == BEGIN)
        ]

    def of(self, generation: int) -> int:
        return bisect.bisect_right(self._backs, generation)

    def counts(self, at: Position, generation: int) -> bool:
        """Whether a unit that a rank of ``generation`` told as committed is: not when that rank was lost, with all who knew. The
        next generation does it again then, perhaps with its samples dealt out to fewer ranks."""
        if generation not in self._ends:
            self._ends[generation] = self._end_of(generation)
        end = self._ends[generation]
        return end is None or at <= end

    def _end_of(self, generation: int) -> Position | None:
        """The last unit that a rank of ``generation`` can have committed; None: nobody knows better than that rank."""
        end: Position | None = None
        for later in self._order[bisect.bisect_right(self._order, generation) :]:
            plan, over = self._plans[later], self.of(later) != self.of(generation)
            if over and plan.rollback is None:
                return end  # all began again, and nobody was asked
            end = plan.committed if end is None else min(end, plan.committed)
            if over:
                return end
        return end
