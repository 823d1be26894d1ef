"""Which of the units that ranks reported as committed count in the end: a pure function of the plans."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import BEGIN, Position

__all__ = ["RollbackEras"]


class RollbackEras:
    """Which parts of a job's history count. An era lasts until all ranks go back or begin again."""

    def __init__(self, plans: Mapping[int, GenerationPlan]) -> None:
        self._plans, self._order = plans, sorted(plans)
        self._ends: dict[int, Position | None] = {}
        self._backs = [
            generation
            for at, generation in enumerate(self._order)
            if plans[generation].rollback is not None or (at and plans[generation].committed == BEGIN)
        ]

    def of(self, generation: int) -> int:
        """Return the number of the era that a generation belongs to."""
        return bisect.bisect_right(self._backs, generation)

    def counts(self, at: Position, generation: int) -> bool:
        """Return whether a unit that a rank of ``generation`` reported as committed counts.

        It does not if that rank was lost together with all that knew of it. The next generation then computes it again,
        perhaps divided among fewer ranks.
        """
        if generation not in self._ends:
            self._ends[generation] = self._end_of(generation)
        end = self._ends[generation]
        return end is None or at <= end

    def _end_of(self, generation: int) -> Position | None:
        """Return the last unit that a rank of ``generation`` can have committed; None: no limit is known."""
        end: Position | None = None
        for later in self._order[bisect.bisect_right(self._order, generation) :]:
            plan, over = self._plans[later], self.of(later) != self.of(generation)
            if over and plan.rollback is None:
                return end  # all began again, without reports
            end = plan.committed if end is None else min(end, plan.committed)
            if over:
                return end
        return end
