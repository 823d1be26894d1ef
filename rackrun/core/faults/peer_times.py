"""Whether a rank hangs in a place where it has no history of its own: the other ranks' times say so.

A *place* is the stretch of a rank's own code between two collectives, so it needs no name: whoever waits in a collective that another rank has
not entered has passed the place in which that one stands. If all other ranks have passed it, or have returned from ``main``, and the slowest
of them took a third of the time for which the last one has been idle, at most, that one hangs. Agents tell of an idle rank only when it has been idle
for longer than any place may take that nobody knows (`rackrun.worker.steps.unit_times`).

A rank of which nothing is heard works, so nobody is compared: it may be what the idle ones wait for, in a way that cannot be seen. The same holds
where most are idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rackrun.protocol.events import WorkerStalled
from rackrun.protocol.ids import Rank

__all__ = ["IDLE_HOLDS_MS", "PEERS_FACTOR", "PeerTimes", "hangs"]

PEERS_FACTOR = 3
IDLE_HOLDS_MS = 12_000
"""A rank that is idle says so every 5 s."""


def hangs(idle_ms: int, took_ms: Iterable[int]) -> bool:
    """``took_ms``: of the other ranks, in the same place."""
    return idle_ms >= PEERS_FACTOR * max(took_ms)


@dataclass(slots=True)
class PeerTimes:
    """The early reports of one generation (`WorkerStalled.early`)."""

    reports: dict[Rank, WorkerStalled] = field(default_factory=dict)

    def add(self, rank: Rank, report: WorkerStalled) -> None:
        self.reports[rank] = report

    def forget(self, rank: Rank) -> None:
        self.reports.pop(rank, None)

    def clear(self) -> None:
        self.reports.clear()

    def idle(self, at_ms: int) -> dict[Rank, WorkerStalled]:
        """Who is idle in its own code now."""
        return {
            rank: report
            for rank, report in sorted(self.reports.items())
            if not report.waiting and at_ms - report.at_ms <= IDLE_HOLDS_MS
        }

    def judge(
        self, stalled: Mapping[Rank, WorkerStalled], returned: Mapping[Rank, int], others: Iterable[Rank], at_ms: int
    ) -> dict[Rank, WorkerStalled]:
        """The ranks that hang, with what they said last. ``stalled``: whose own limits are over. ``returned``: how long, in milliseconds, those
        took that have returned from ``main``. ``others``: all ranks that have not."""
        waiting = {rank: report for rank, report in {**self.reports, **stalled}.items() if report.waiting}
        idle = {rank: report for rank, report in self.idle(at_ms).items() if rank not in waiting}
        took = [*returned.values(), *(report.took_ms for report in waiting.values())]
        ranks = list(others)
        if not idle or not took or min(took) < 0 or 2 * len(idle) > len(ranks) + len(returned):
            return {}
        if any(rank not in idle and rank not in waiting for rank in ranks):
            return {}
        furthest = max(report.collective for report in idle.values())
        if any(report.collective <= furthest for report in waiting.values()):
            return {}
        return {rank: report for rank, report in idle.items() if hangs(report.for_ms, took)}
