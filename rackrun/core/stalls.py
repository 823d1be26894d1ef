"""Who is to blame when nobody moves.

A worker that stands in user code has entered fewer collectives than those that wait for it, and all of them stop
moving at about the same time. So reports are gathered for a window, and those with the lowest count are to blame, if
they are not the most. If all have the same count, they wait in one collective that nobody left; if most are behind, the
machine is slow rather than the ranks. Nobody is killed then, and the step is done again in place.

Where all enter ``main`` again, those are heard that stand in their own code there for much longer than it has ever taken: if they are
not the most, the others wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rackrun.core.commands import Command, SetTimer
from rackrun.core.config import JobConfig
from rackrun.core.events import WorkerStalled
from rackrun.core.ids import Rank
from rackrun.core.sources import named
from rackrun.core.workers import WorkerRecord, WorkerState
from rackrun.core.world import Phase, World

__all__ = ["STALL_PATIENCE_MS", "Blame", "StallWindow", "Standstill"]

STALL_GATHER_MS = 50
STALL_PATIENCE_MS = 500
"""How long those that have not reported a stall are waited for, after the first window."""


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


class _Stop(Protocol):
    def __call__(self, exit_code: int, because: str, *, remedy: str = "") -> None: ...


@dataclass(slots=True)
class Standstill:
    """Hears of stalls, and sees to it that they end: by fencing those to blame, or by doing the step again."""

    config: JobConfig
    world: World
    emit: Callable[[Command], None]
    stop: _Stop
    condemn: Callable[[Sequence[WorkerRecord], str, int], None]
    absorb: Callable[[str, int], None]
    window: StallWindow = field(default_factory=StallWindow)

    def forget(self) -> None:
        """The generation is broken, or there is a new world."""
        self.window = StallWindow()

    def stalled(self, record: WorkerRecord, event: WorkerStalled) -> None:
        """A member does not move."""
        assert record.rank is not None
        if event.silent:
            self.condemn([record], f"silent for {event.for_ms} ms at step {event.step}", event.at_ms)
        elif self.world.phase in (Phase.TRAINING, Phase.RESUMING):
            if self.window.add(record.rank, event):
                window_ms = max(self.config.gather_ms, STALL_GATHER_MS)
                self.emit(SetTimer(name=f"stalled:{self.world.generation}", at_ms=event.at_ms + window_ms))
            self.judge(event.at_ms)

    def window_closed(self, kind: str, at_ms: int) -> None:
        if not self.window.reports:
            return
        self.window.closed = 1 if kind == "stalled" else 2
        if kind == "stalled":
            self.emit(SetTimer(name=f"judge:{self.world.generation}", at_ms=at_ms + STALL_PATIENCE_MS))
        self.judge(at_ms)

    def judge(self, at_ms: int) -> None:
        members = self.world.members
        if self.world.phase is Phase.RESUMING:
            self._judge_entry(at_ms)
            return
        if self.world.phase is not Phase.TRAINING or not self.window.may_judge(members):
            return
        finished = sorted(rank for rank, record in members.items() if record.finished)
        if finished:
            waiting = sorted(rank for rank, record in members.items() if not record.finished)
            self.stop(
                1,
                f"{named(finished)} returned from main, while {named(waiting)} wait in a step for all ranks",
                remedy="let all ranks leave the loop after the same step.",
            )
            return
        blame = self.window.judge(self.world.size)
        if blame.ranks:
            self.condemn([members[rank] for rank in blame.ranks], f"stalled {blame.because}", at_ms)
            return
        self.absorb(f"stalled: {blame.because}", at_ms)

    def entered(self, record: WorkerRecord) -> None:
        """It has resumed: what was told of it before does not count."""
        if self.window.reports and record.rank is not None:
            self.window.forget(record.rank)

    def _judge_entry(self, at_ms: int) -> None:
        members, reports = self.world.members, self.window.reports
        late = {rank: reports[rank] for rank in sorted(reports) if members[rank].state is WorkerState.RESUMING}
        if not late or self.window.closed < 2:
            return
        first = min(report.collective for report in late.values())
        behind = [rank for rank, report in late.items() if report.collective == first]
        if 2 * len(behind) > len(members):
            return  # the machine is slow, or what all of them read from: the resume timeout is the judge
        for_ms = min(late[rank].for_ms for rank in behind)
        self.condemn([members[rank] for rank in behind], f"not at run.steps() again, for {for_ms} ms in main", at_ms)
