"""Pure machine of one tray: which worker is started, killed and reported, and when the agent leaves.

It is given facts with the time, and answers with effects (`rackrun.agent.tray.tray_facts`). It has no clock and no I/O:
the agent runs it (`rackrun.agent.tray.tray`), and so does the simulator, in virtual time.

- A slot has one process at a time. A second start kills the first process and waits until it is gone.
- Incarnations of a slot only grow. A start with one that was seen before, or an older one, is ignored.
- Every worker that was admitted is reported to have exited, once.
- A worker that is fenced before its process was asked for never has one, and is reported at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import assert_never

from rackrun.agent.tray import tray_facts as t
from rackrun.agent.tray.process_states import ProcessRecord, ProcessState, ProcessTrigger
from rackrun.protocol import commands as c
from rackrun.protocol.events import (
    DepartureAnnounced,
    ScriptFailure,
    TrayStoodStill,
    WorkerEvent,
    WorkerExited,
    WorkerReady,
)
from rackrun.protocol.ids import SlotId, TrayId
from rackrun.protocol.wire import Logged, StateCopied, UnitCommitted, UnitSealed, Upward

__all__ = ["TrayMachine"]

_LEFT_IN_SLOT_MAX = 2
"""Number of exited workers with snapshots whose page and snapshots a slot keeps. The core counts in the same way
(`rackrun.core.generation.snapshot_locations.LEFT_IN_SLOT_MAX`)."""
_FAILED_GRACE_S = 1.0
_KILL_S = 10.0


class TrayMachine:
    """Decides for one tray. ``grace_s``: seconds from SIGTERM to SIGKILL, and those that leaving may take."""

    def __init__(self, tray: TrayId, grace_s: float) -> None:
        self._tray, self._grace_s = tray, grace_s
        self.resume: c.ResumeGeneration | None = None
        """The latest plan. A first plan arrives before the workers that it names are started."""
        self._places: dict[SlotId, list[ProcessRecord]] = {}
        """Slot -> its processes, oldest first, without those that were forgotten."""
        self.stopping = False
        """Whether the agent ends its workers, and starts none any more."""
        self._departing = self._leaving = self._emptied = False
        self._now_s = 0.0
        self._effects: list[t.TrayEffect] = []

    def handle(self, fact: t.TrayFact, now_s: float) -> list[t.TrayEffect]:
        """Take in a fact at ``now_s``, in seconds of any monotonic clock, and return what is to be done, in order."""
        self._now_s, self._effects = now_s, []
        self._take_in(fact)
        return self._effects

    def state_of(self, worker: c.Worker) -> ProcessState | None:
        """Return a worker's state; None: it is not known, or was forgotten."""
        record = self._record(worker)
        return None if record is None else record.state

    def _take_in(self, fact: t.TrayFact) -> None:
        match fact:
            case t.CommandArrived():
                self._obey(fact.command)
            case t.LeaveAsked():
                self._leave_soon(fact)
            case t.JobOver():
                if not fact.connected:
                    self._leave(failed=True)
            case t.StoodStill():
                self._stood_still(fact)
            case t.StopBegun():
                self._stop(failed=fact.failed)
            case t.DeadlinePassed():
                self._pass_deadline(fact.deadline)
            case t.ForkServerDied():
                for record in self._present():
                    if record.state not in (ProcessState.WAITING, ProcessState.STARTING) and not record.born:
                        self._never_born(record, "the fork server died")
            case _:
                if known := self._find(fact.worker):
                    self._take_in_of(known, fact)

    def _take_in_of(self, record: ProcessRecord, fact: t.WorkerFact) -> None:
        """Take in a fact about a worker that is not gone."""
        match fact:
            case t.StoreFound():
                record.move(ProcessTrigger.FOUND)
                self._do(t.ForkWorker(record.command))
            case t.WorkerStartFailed():
                self._never_born(record, fact.because)
            case t.WorkerBorn():
                record.move(ProcessTrigger.BORN)
                record.born = True
            case t.WorkerSaid():
                self._message_arrived(record, fact.message)
            case t.WorkerGarbled():
                self._do(t.PrintLine(f"{record.worker.slot} sent what is no message, and is killed: {fact.error}"))
                self._fence(record)
            case t.EndSeen():
                self._end(record, fact.exit_code, fact.signal)
            case t.ProcessReaped():
                self._end(record, fact.exit_code, fact.signal)
                record.keeps = fact.keeps
                self._gone(record, ProcessTrigger.REAP)
            case _:
                assert_never(fact)

    # -- commands
    def _obey(self, command: c.WorkerCommand) -> None:
        match command:
            case c.StartWorker():
                self._start(command)
            case c.FenceWorker():
                if record := self._find(c.Worker(command.slot, command.incarnation)):
                    self._do(t.SpareLeaves(record.worker, "the spare is fenced"))
                    self._fence(record)
            case c.BreakGeneration() | c.PauseWorkers() | c.DealShards() | c.DrainWorkers() | c.ReleaseWorkers():
                self._pass_on(command, command.workers)
            case c.ResumeGeneration():
                self.resume = command
                self._pass_on(command, (c.Worker(one.slot, one.incarnation) for one in command.plan.members))
            case c.StopJob():
                self._leave(failed=command.exit_code != 0)
            case c.DismissTray():
                self._leave(failed=False)
            case _:
                assert_never(command)

    def _pass_on(self, command: c.WorkerCommand, to: Iterable[c.Worker]) -> None:
        self._do(t.PassOn(command, tuple(worker for worker in to if self._find(worker))))

    # -- starts
    def _start(self, command: c.StartWorker) -> None:
        place = self._places.setdefault(command.slot, [])
        if self.stopping or (place and place[-1].worker.incarnation >= command.incarnation):
            return  # a repeated or outdated command
        for previous in [one for one in place if not one.gone]:
            self._fence(previous)
        record = ProcessRecord(command)
        place.append(record)
        self._do(t.AdmitWorker(command, self.resume if self._is_member(record) else None))
        self._clear(place)

    def _clear(self, place: list[ProcessRecord]) -> None:
        """Go on with the start that waits in a place, if there is one and the place is free now."""
        record = place[-1]
        if record.state is not ProcessState.WAITING or not all(one.gone for one in place[:-1]):
            return
        record.move(ProcessTrigger.CLEARED)
        kept = [one for one in place[:-1] if one.keeps][-_LEFT_IN_SLOT_MAX:]
        for one in place[:-1]:
            if one not in kept:
                self._do(t.ForgetWorker(one.worker))
        place[:-1] = kept
        self._do(t.FindStore(record.command))

    def _never_born(self, record: ProcessRecord, because: str) -> None:
        """There will be no process. ``because`` "": it is not wanted any more, which is no failure."""
        failure = None
        if because:
            self._do(t.PrintLine(f"{record.worker.slot} cannot start: {because}"))
            failure = ScriptFailure(type="rackrun.StartFailed", message=because, traceback="", where="rackrun.agent")
        if not record.reported:
            self._report(record, None, None if because else int(signal.SIGKILL), failure)
        self._gone(record, ProcessTrigger.FAIL)

    # -- ends
    def _fence(self, record: ProcessRecord) -> None:
        if record.state in (ProcessState.WAITING, ProcessState.STARTING):
            self._never_born(record, "")
        else:
            record.move(ProcessTrigger.FENCE)
            self._do(t.KillWorker(record.worker))

    def _end(
        self, record: ProcessRecord, exit_code: int | None, signal_: int | None, failure: ScriptFailure | None = None
    ) -> bool:
        """Report an exit that was not reported before. Return whether it was not."""
        if record.reported:
            return False
        record.move(ProcessTrigger.END)
        self._report(record, exit_code, signal_, failure)
        return True

    def _report(
        self, record: ProcessRecord, exit_code: int | None, signal_: int | None, failure: ScriptFailure | None
    ) -> None:
        self._do(
            t.SpareLeaves(record.worker, "the spare is gone"), t.ReportExit(record.worker, exit_code, signal_, failure)
        )

    def _gone(self, record: ProcessRecord, trigger: ProcessTrigger) -> None:
        record.move(trigger)
        self._do(t.BuryWorker(record.worker))
        self._clear(self._places[record.worker.slot])
        self._check_empty()

    # -- messages of workers
    def _message_arrived(self, record: ProcessRecord, message: Upward) -> None:
        match message:
            case UnitCommitted() | StateCopied():
                self._do(t.Forward(t.Urgency.SOON))
            case Logged():
                self._do(t.Forward(t.Urgency.MAYBE))
            case UnitSealed():
                pass  # the agent reports this itself
            case WorkerExited():
                # The script is over; exit handlers may take a while, but not for ever.
                if self._end(record, message.exit_code, message.signal, message.failure):
                    self._set(t.GraceOver(record.worker), self._grace_s)
            case _ if isinstance(message, WorkerEvent) and not record.reported:
                self._do(t.Forward(t.Urgency.NOW))
                if isinstance(message, WorkerReady) and record.command.spare and not self._is_member(record):
                    self._do(t.SpareWaits(record.worker))
            case _:
                pass  # too late: its exit has been reported

    # -- standstills
    def _stood_still(self, fact: t.StoodStill) -> None:
        """Report a standstill. What the coordinator decided meanwhile is not known here: if it gave the tray up, it
        refuses the agent, which then ends with its workers."""
        if not self.stopping:
            event = TrayStoodStill(tray=self._tray, for_ms=fact.for_ms, workers_ran=fact.workers_ran)
            self._do(t.SendEvent(event))

    # -- the end of the agent
    def _leave_soon(self, asked: t.LeaveAsked) -> None:
        """Announce that the tray leaves. t.Leave when the coordinator dismisses it, when its time is up, or when it is
        asked again."""
        if self._departing:
            self._leave(failed=True)
            return
        self._departing = True
        self._do(t.SendEvent(DepartureAnnounced(tray=self._tray, because=asked.because, exit_code=asked.exit_code)))
        self._set(t.DepartureOver(), self._grace_s)

    def _leave(self, *, failed: bool) -> None:
        if not self._leaving:
            self._leaving = True
            self._do(t.Leave(failed))

    def _stop(self, *, failed: bool) -> None:
        self.stopping = True
        for record in self._present():
            if record.state in (ProcessState.RUNNING, ProcessState.FENCING, ProcessState.ENDING) and record.born:
                self._do(t.TerminateWorker(record.worker))
            else:
                self._fence(record)
        self._check_empty()
        if not self._emptied:
            self._set(t.StopGraceOver(), _FAILED_GRACE_S if failed else self._grace_s)

    def _check_empty(self) -> None:
        if self.stopping and not self._emptied and not self._present():
            self._emptied = True
            self._do(t.Emptied())

    def _pass_deadline(self, deadline: t.TrayDeadline) -> None:
        match deadline:
            case t.GraceOver():
                if record := self._find(deadline.worker):
                    self._fence(record)
            case t.DepartureOver():
                self._leave(failed=True)
            case t.StopGraceOver():
                if not self._emptied:
                    for record in self._present():
                        self._fence(record)
                    self._set(t.KillOver(), _KILL_S)
            case t.KillOver():
                if not self._emptied:
                    self._emptied = True
                    self._do(
                        t.PrintLine("some workers do not end, though killed: the kernel holds them (a driver?)"),
                        t.Emptied(),
                    )
            case _:
                assert_never(deadline)

    # -- who is here
    def _record(self, worker: c.Worker) -> ProcessRecord | None:
        return next((one for one in self._places.get(worker.slot, ()) if one.worker == worker), None)

    def _find(self, worker: c.Worker) -> ProcessRecord | None:
        """Return a worker of this tray that is not gone."""
        record = self._record(worker)
        return None if record is None or record.gone else record

    def _present(self) -> list[ProcessRecord]:
        return [record for place in self._places.values() for record in place if not record.gone]

    def _is_member(self, record: ProcessRecord) -> bool:
        """Return whether a worker is a member of the latest generation."""
        members = self.resume.plan.members if self.resume else ()
        return any((one.slot, one.incarnation) == (record.worker.slot, record.worker.incarnation) for one in members)

    def _do(self, *effects: t.TrayEffect) -> None:
        self._effects.extend(effects)

    def _set(self, deadline: t.TrayDeadline, after_s: float) -> None:
        self._do(t.SetDeadline(deadline, self._now_s + after_s))
