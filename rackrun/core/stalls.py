"""Who is to blame when nobody moves.

A worker that stands in user code has entered fewer collectives than those that wait for it, and all of them stop
moving at about the same time. So reports are gathered for a window, and those with the lowest count are to blame, if
they are not the most. If all have the same count, they wait in one collective that nobody left; if most are behind, the
machine is slow rather than the ranks. Nobody is killed then, and the step is done again in place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rackrun.core.events import WorkerStalled
from rackrun.core.ids import Rank

__all__ = ["Blame", "StallWindow"]


@dataclass(frozen=True, slots=True)
class Blame:
    ranks: tuple[Rank, ...]
    """Nobody: absorb."""
    because: str


@dataclass(slots=True)
class StallWindow:
    """The stalls of one generation that have been reported so far."""

    reports: dict[Rank, WorkerStalled] = field(default_factory=dict)
    closed: int = 0
    """How many windows have passed since the first report: after the first, everybody's report is enough to judge;
    after the second, those at hand are."""

    def add(self, rank: Rank, report: WorkerStalled) -> bool:
        """Whether this report opens the window."""
        self.reports[rank] = report
        return len(self.reports) == 1

    def forget(self, rank: Rank) -> None:
        self.reports.pop(rank, None)

    def may_judge(self, members: Collection[Rank]) -> bool:
        if not self.reports or not self.closed:
            return False
        return self.closed >= 2 or all(rank in self.reports for rank in members)

    def judge(self, world_size: int) -> Blame:
        counts = {rank: report.collective for rank, report in sorted(self.reports.items())}
        low, high = min(counts.values()), max(counts.values())
        heard = f"{len(counts)} of {world_size} ranks report"
        if low == high:
            return Blame((), f"all stand at collective {low} ({heard}): the step is done again in place")
        behind = tuple(rank for rank, count in counts.items() if count == low)
        if 2 * len(behind) > len(counts):
            return Blame(
                (), f"most ranks stand at collective {low}, some at {high} ({heard}): the step is done again in place"
            )
        return Blame(behind, f"at collective {low}, others wait at {high} ({heard})")
