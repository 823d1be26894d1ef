"""Which ranks are to blame when no rank makes progress.

A worker without progress either is in its own code or waits for others in a collective. A worker that has been in its
own code for longer than its unit may take is to blame, unless most of the world is: the waiting ranks have entered more
collectives. If *all* wait, the ranks that have entered the fewest collectives are to blame, unless they are the
majority. Otherwise no rank is killed, and the unit is repeated in place: the machine is slow rather than the ranks, or
they wait in one collective that no rank left.

Reports are gathered for a window, because all ranks stop at about the same time. A rank that has not reported still
works in its own code, and the others rightly wait for it, for as long as it takes.

Limits of minutes, such as that of a newcomer's first step, are not waited for if all ranks are blocked in collectives
and wait for each other (`rackrun.core.faults.deadlock`). Nothing can change that any more, so it is judged at once.

A limit comes from a rank's own history. If that says too little, the times of the other ranks are used
(`rackrun.core.faults.peer_times`).

When all ranks are called to another generation, those that have been in their own code for too long are to blame,
because the others wait for them. If they are the majority, the machine may be slow, so they have until the resume
timeout. A rank that works there is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.faults.deadlock import is_deadlock
from rackrun.core.faults.peer_times import PeerTimes
from rackrun.core.faults.stall_window import StallWindow, WindowState, WindowTrigger, seconds_text, stands
from rackrun.core.generation.facts import Facts, StepRepeats, WorkersStall
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.restore_sources import named
from rackrun.core.generation.world import IN_PLACE, Phase, World
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.protocol.commands import Notice, SetTimer
from rackrun.protocol.events import WorkerBusy, WorkerStalled
from rackrun.protocol.ids import Rank, at_step
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import LateStallsGathered, StallsGathered

__all__ = ["STALL_PATIENCE_MS", "Stalls"]

STALL_GATHER_MS = 50
"""Milliseconds for which stall reports are gathered after the first."""
STALL_PATIENCE_MS = 500
"""Milliseconds for which further reports are awaited after the first window."""
BUSY_HOLDS_MS = 15_000
"""How long a report of a busy worker holds, in milliseconds. A worker that is called and still works reports every few
seconds."""
_CALLED = (WorkerState.BREAKING, WorkerState.PARKED, WorkerState.RESUMING)


@dataclass(slots=True)
class Stalls:
    """Handles reports of stalls, and ends them by fencing the ranks to blame or by repeating the step."""

    config: JobConfig
    world: World
    out: Outbox
    facts: Facts
    end: JobEnd
    window: StallWindow = field(default_factory=StallWindow)
    peers: PeerTimes = field(default_factory=PeerTimes)
    busy: dict[Rank, int] = field(default_factory=dict)
    """Members that were called to this generation and still work in their own code, with the time of their latest
    report."""
    blocked: dict[Rank, WorkerStalled] = field(default_factory=dict)
    """Members known to be blocked in a collective, with their latest reports."""
    _last: tuple[object, ...] = ()
    """`Blame.again` of the previous stall."""
    _told_of: dict[str, None] = field(default_factory=dict)
    """Notices that were given in this generation."""

    def forget(self) -> None:
        """Forget all reports, because the generation is broken or there is a new world."""
        self.window = StallWindow()
        self.peers.clear()
        self.busy.clear()
        self.blocked.clear()
        self._told_of.clear()

    def works(self, record: WorkerRecord, event: WorkerBusy) -> None:
        """Handle a report that a member has been in its own code for long and works there."""
        assert record.rank is not None
        place = f"{event.unit}{f', at {event.where}' if event.where else ''}"
        if event.awaited:
            self.busy[record.rank] = event.at_ms
            self._tell(f"awaited {record.rank}", f"all wait for rank {record.rank}, which works in {place}")
        else:
            self._tell(
                f"long {record.rank} {event.unit}",
                f"rank {record.rank} works in {place}, for {seconds_text(event.for_ms)} without progress; as long as it works it may for "
                f"{seconds_text(event.allowed_ms)} there, and run.expect(seconds) allows more",
            )

    def _tell(self, once: str, text: str) -> None:
        if once not in self._told_of:
            self._told_of[once] = None
            self.out.emit(Notice(text=text))

    def awaited(self, at_ms: int) -> list[Rank]:
        """Return the members that are still busy, as far as is known. One that idles is not."""
        idle = self.idle()
        return [
            rank for rank, told_ms in sorted(self.busy.items()) if at_ms - told_ms <= BUSY_HOLDS_MS and rank not in idle
        ]

    def idle(self) -> dict[Rank, WorkerStalled]:
        """Return the members that are called to another generation and have idled in their own code for too long, with
        their reports."""
        members = self.world.members
        return {
            rank: report
            for rank, report in sorted(self.window.reports.items())
            if rank in members and members[rank].state in _CALLED and not report.waiting
        }

    def stalled(self, record: WorkerRecord, event: WorkerStalled) -> None:
        """Handle a report that a member makes no progress."""
        assert record.rank is not None
        if self._is_deadlock(record.rank, event):
            self.window.reports = dict(self.blocked)
            self.window.move(WindowTrigger.LOCK)
            self.judge()
        elif event.over:
            self.window.forget(record.rank)
            self.peers.forget(record.rank)
        elif event.early and not self._is_late(record, event):
            self._compare(record.rank, event)
        elif event.silent or (record.finished and self.world.phase is Phase.TRAINING):
            place = f": {event.where}" if event.where else ""
            self.facts.add(WorkersStall([record], f"silent for {event.for_ms} ms {at_step(event.step)}{place}"))
        elif self.world.phase in IN_PLACE:
            if self.window.add(record.rank, event):
                window_ms = max(self.config.gather_ms, STALL_GATHER_MS)
                self.out.emit(SetTimer(timer=StallsGathered(self.world.generation), at_ms=event.at_ms + window_ms))
            self.judge()

    def _is_deadlock(self, rank: Rank, event: WorkerStalled) -> bool:
        """Return whether this report shows a deadlock. It is looked for only if the report has something new."""
        before, now = self.blocked.pop(rank, None), event.blocked
        if now is None or not event.waiting:
            return False
        self.blocked[rank] = event
        members, generation = self.world.members, self.world.generation
        if len(self.blocked) < len(members) or (before is not None and before.blocked == now):
            return False
        waits = {one: self.blocked[one].blocked for one in members if one in self.blocked}
        known = {one: wait for one, wait in waits.items() if wait is not None and wait.generation == generation}
        return len(known) == len(members) and is_deadlock(known)

    def _is_late(self, record: WorkerRecord, event: WorkerStalled) -> bool:
        """Return whether the member idles in its own code although all are called to another generation. That is too
        late, whatever its usual times are."""
        called = self.world.phase in (Phase.PARKING, Phase.RESUMING) and record.state in _CALLED
        return called and not event.waiting and not event.silent

    def _compare(self, rank: Rank, event: WorkerStalled) -> None:
        """Compare an idle rank with the times of the other ranks."""
        self.peers.add(rank, event)
        hung = self.hung(event.at_ms) if self.world.phase is Phase.TRAINING else {}
        if hung:
            known = {rank: report for rank, report in self.peers.reports.items() if report.waiting}
            self.window.reports.update(known | hung)
            self.window.move(WindowTrigger.COMPARE)
            self.judge()

    def hung(self, at_ms: int) -> dict[Rank, WorkerStalled]:
        """Return the ranks that hang, judged by the times of the others."""
        members = self.world.members
        returned = {rank: record.returned_in_ms for rank, record in members.items() if record.finished}
        others = [rank for rank in members if rank not in returned]
        return self.peers.judge(self.window.reports, returned, others, at_ms)

    def gathered(self, at_ms: int) -> None:
        """Judge if all members report. Otherwise further reports are awaited."""
        if self.window.state is not WindowState.EMPTY:
            self.window.move(WindowTrigger.GATHER)
            self.out.emit(SetTimer(timer=LateStallsGathered(self.world.generation), at_ms=at_ms + STALL_PATIENCE_MS))
            self.judge()

    def patience_over(self) -> None:
        """Judge the reports at hand."""
        if self.window.state is not WindowState.EMPTY:
            self.window.move(WindowTrigger.EXPIRE)
            self.judge()

    def judge(self) -> None:
        """Judge the present stalls if the reports are enough, and act on the result."""
        members = self.world.members
        if self.world.phase in (Phase.PARKING, Phase.RESUMING):
            self._judge_entry()
            return
        if self.world.phase is not Phase.TRAINING or not self.window.may_judge(members):
            return
        finished = sorted(rank for rank, record in members.items() if record.finished)
        waiting = sorted(rank for rank, record in members.items() if not record.finished)
        told = self.window.reports
        if finished and all(rank in told and (told[rank].waiting or not told[rank].unit) for rank in waiting):
            self.end.stop(
                1,
                f"{named(finished)} returned from main, while {named(waiting)} wait in a step for all ranks",
                remedy="let all ranks leave the loop after the same step.",
            )
            return
        blame = self.window.judge(waiting, len(finished))
        if blame is None:
            return
        if blame.again and blame.again == self._last:
            self.end.stop(
                1,
                f"the same stall came twice, {blame.because.replace(': the step is done again in place', '')}",
                remedy="look at these lines: a collective that not every rank enters, a lock that nobody releases, a call that does not return.",
            )
            return
        self._last = blame.again
        if blame.ranks:
            self.facts.add(WorkersStall([members[rank] for rank in blame.ranks], f"stalled {blame.because}"))
            return
        self.facts.add(StepRepeats(f"stalled: {blame.because}"))

    def entered(self, record: WorkerRecord) -> None:
        """Forget earlier reports of a member that has resumed."""
        if record.rank is not None:
            self.blocked.pop(record.rank, None)
            if self.window.reports:
                self.window.forget(record.rank)

    def _judge_entry(self) -> None:
        """Condemn members that do not come to the next generation, unless they are the majority."""
        members, late = self.world.members, self.idle()
        if not late or not self.window.is_due:
            return
        first = min(report.collective for report in late.values())
        behind = [rank for rank, report in late.items() if report.collective == first]
        if 2 * len(behind) > (len(members) if self.world.phase is Phase.RESUMING else self.world.size):
            return  # the machine, or storage that all read from, is slow: the resume timeout decides
        for_ms = min(late[rank].for_ms for rank in behind)
        told = ", ".join(dict.fromkeys(stands(late[rank]) for rank in behind if late[rank].unit))
        what = (
            f"did not come to the recovery, {told}, for {for_ms} ms"
            if told
            else f"not at run.steps() again, for {for_ms} ms in main"
        )
        self.facts.add(WorkersStall([members[rank] for rank in behind], what))
