"""What of the units that ranks have told as committed is: a pure function of the plans."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from rackrun.core.commands import Plan
from rackrun.core.ids import BEGIN, Position

__all__ = ["Eras"]


class Eras:
    """What of a history counts. An era lasts until everybody goes back, or begins again."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self._plans, self._order = plans, sorted(plans)
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
        later = bisect.bisect_right(self._order, generation)
        if later == len(self._order) or self.of(self._order[later]) != self.of(generation):
            return True
        return at <= self._plans[self._order[later]].committed
