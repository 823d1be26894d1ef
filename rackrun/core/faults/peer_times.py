"""Whether a rank hangs in a place where it has no history of its own, judged by the other ranks' times.

A *place* is the stretch of a rank's own code between two collectives. It needs no name: a rank that waits in a
collective which another rank has not entered has passed the place in which that other rank stands. A rank hangs if all
other ranks have passed its place, or have returned from ``main``, and it has been idle for at least three times as long
as the slowest of them took. Agents report an idle rank only when it has been idle for longer than any unknown place may
take (`rackrun.worker.steps.unit_times`).

A rank without a report works, so no rank is compared then: the working rank may be what the idle ones wait for, in a
way that cannot be seen. The same holds if most ranks are idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rackrun.protocol.events import WorkerStalled
from rackrun.protocol.ids import Rank

__all__ = ["IDLE_HOLDS_MS", "PEERS_FACTOR", "PeerTimes", "hangs"]

PEERS_FACTOR = 3
"""How many times longer than the slowest peer a rank must be idle to count as hanging."""
IDLE_HOLDS_MS = 12_000
"""How long a report of an idle rank holds, in milliseconds. An idle rank reports every 5 s."""


def hangs(idle_ms: int, took_ms: Iterable[int]) -> bool:
    """Return whether a rank that has been idle for ``idle_ms`` in its own code hangs: for at least `PEERS_FACTOR` times
    as long as the slowest other rank took there.

    ``took_ms``, not empty: the milliseconds that each other rank needed between the same two collectives.
    """
    return idle_ms >= PEERS_FACTOR * max(took_ms)


@dataclass(slots=True)
class PeerTimes:
    """The early reports of one generation (`WorkerStalled.early`)."""

    reports: dict[Rank, WorkerStalled] = field(default_factory=dict)

    def add(self, rank: Rank, report: WorkerStalled) -> None:
        """Record the early report of ``rank``; it replaces an earlier one."""
        self.reports[rank] = report

    def forget(self, rank: Rank) -> None:
        """Drop the report of ``rank``, if there is one."""
        self.reports.pop(rank, None)

    def clear(self) -> None:
        """Drop all reports, because another generation begins."""
        self.reports.clear()

    def idle(self, at_ms: int) -> dict[Rank, WorkerStalled]:
        """Return the ranks that are idle in their own code now, with their reports."""
        return {
            rank: report
            for rank, report in sorted(self.reports.items())
            if not report.waiting and at_ms - report.at_ms <= IDLE_HOLDS_MS
        }

    def judge(
        self, stalled: Mapping[Rank, WorkerStalled], returned: Mapping[Rank, int], others: Iterable[Rank], at_ms: int
    ) -> dict[Rank, WorkerStalled]:
        """Return the ranks that hang, with their latest reports.

        ``stalled`` holds the reports of ranks whose own limits are over. ``returned`` holds the milliseconds that ranks
        took which have returned from ``main``; ``others`` are all other ranks.
        """
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
