"""The shell around the core: sets the time of events, asks the core, and carries out its commands in order.

Everything runs on the event loop's thread, without an await between an event and the last of its commands: the journal
first, then the outboxes. `rackrun.coordinator.server.http_server` sends from the outboxes. All that is outside comes
through `rackrun.coordinator.shell.ports`, so the simulator runs this very driver, in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import assert_never

import msgspec

from rackrun.coordinator.journal.journal_writer import JournalError
from rackrun.coordinator.observe.job_progress import JobProgress, Ledger, UnreportedCommits
from rackrun.coordinator.observe.metrics import Metrics
from rackrun.coordinator.observe.recoveries import RecoveryRecord, RecoveryWatch
from rackrun.coordinator.observe.slow_ranks import SlowWatch
from rackrun.coordinator.observe.speed_measurements import SpeedMeasurements
from rackrun.coordinator.observe.step_log import StepLog
from rackrun.coordinator.shell.job_completion import JobCompletion
from rackrun.coordinator.shell.ports import (
    AgentConnection,
    Core,
    JobJournal,
    Loop,
    LoopTimer,
    NoValues,
    Observer,
    ValueSinks,
)
from rackrun.coordinator.shell.request_waiters import Requests
from rackrun.link.channel import frame
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    BreakGeneration,
    Command,
    CondemnWorker,
    DealShards,
    Decided,
    DismissTray,
    DrainWorkers,
    FenceWorker,
    Notice,
    PauseWorkers,
    ReleaseRack,
    ReleaseWorkers,
    RequestRack,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
    WorkerCommand,
)
from rackrun.protocol.events import (
    DepartureAnnounced,
    Event,
    JournalFailed,
    PolicyAnswered,
    RackRefused,
    TimerFired,
    TrayJoined,
    TrayLost,
)
from rackrun.protocol.ids import SlotId, TrayId, tray_of
from rackrun.protocol.timers import JobBegins
from rackrun.protocol.wire import FillerState, Logged, StateCopied, Telemetry, UnitCommitted, UnitSealed

__all__ = ["Driver", "Status"]

_log = logging.getLogger(__name__)
_STOOD_STILL_MS, _CATCH_UP_MS = 1_000, 250
"""A timer that is this late shows that the coordinator stood still. It first handles what has arrived meanwhile
(`_CATCH_UP_MS`), because workers whose time seems to be up may have answered long ago."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``GET /api/status``."""

    run_id: str
    uptime_s: float
    trays: tuple[TrayId, ...]
    progress: JobProgress
    recoveries: int
    last_recovery: str
    """One line about the latest recovery; "": there was none."""
    last_recovery_s: float | None
    over: StopJob | None
    core: msgspec.Struct
    """As `ControlPlane.view`."""


class Driver:
    """Runs one job. Await `finished` for its end. ``sinks`` receive the values of ``run.log``; ``slow_after_s`` is as in
    `SlowWatch`; ``loop`` is the running event loop if none is given."""

    def __init__(
        self,
        core: Core,
        journal: JobJournal,
        *,
        run_id: str,
        observer: Observer,
        sinks: ValueSinks | None = None,
        slow_after_s: float | None = None,
        loop: Loop | None = None,
    ) -> None:
        self.finished = JobCompletion()
        self.ledger = Ledger()
        self.watch = RecoveryWatch(self._recovered)
        self.metrics = Metrics(run_id, lambda: self.watch.plan)
        self._slow = SlowWatch(slow_after_s, self.submit, self.metrics.slow)
        self.recoveries: list[RecoveryRecord] = []
        self.requests = Requests()
        self._unreported_commits = UnreportedCommits()
        self._core = core
        self._journal = journal
        self._loop: Loop = asyncio.get_running_loop() if loop is None else loop
        journal.on_death = self._journal_died
        self._run_id = run_id
        self._observer = observer
        self._sinks: ValueSinks = NoValues() if sinks is None else sinks
        self._began = self._loop.time()
        journal.fact("began_monotonic_s", self._began)
        self._at_ms = 0
        self._links: dict[TrayId, AgentConnection] = {}
        self.fence: Callable[[TrayId, int], None] = lambda _tray, _pid: None
        """Called with a lost tray and its agent's process id. If that process is on this host it must end, even if it
        is only stopped."""
        self.returns: Callable[[TrayId], bool] = lambda _tray: False
        """Returns whether the agent of a lost tray is started again."""
        self.how_ended: Callable[[TrayId, int], str] = lambda _tray, _pid: ""
        """Returns how a tray's agent ended, given its process id; "": it runs, or is on another host."""
        self.ask: Callable[[AskPolicy], None] = self._nobody_to_ask
        """Asks the user's policy; `PolicyAnswered` must be submitted within about a second."""
        self.provide: Callable[[RequestRack | ReleaseRack], None] = self._nobody_to_provide
        """Passes a command to the provider; `RackDelivered` or `RackRefused` must be submitted."""
        self.prepare: Callable[[str], None] = lambda _function: None
        """Loads another policy function before it is first asked."""
        self._pace = SpeedMeasurements()
        self._going: set[TrayId] = set()
        """Trays that were told to leave, and leave by themselves."""
        self._inbox: deque[tuple[Event, float]] = deque()
        self._handling = False
        self._timers: set[LoopTimer] = set()
        self._step_log = StepLog(self._line)
        self._unusable: set[tuple[type, type]] = set()
        """Type of a telemetry message and of the error that it caused: each is shown once."""
        self._snapshots, self._protected, self._told_protected = False, "", ""

    # -- who is there
    @property
    def over(self) -> StopJob | None:
        """The command that ended the job; None while it runs."""
        return self.finished.stop

    def link_of(self, tray: TrayId) -> AgentConnection | None:
        """Return the connection to a tray's agent; None if there is none now."""
        return self._links.get(tray)

    def joined(self, event: TrayJoined, link: AgentConnection) -> None:
        """Register an agent that has introduced itself."""
        assert event.tray not in self._links, "at most one agent acts for a tray"
        self._links[event.tray] = link
        self._going.discard(event.tray)
        self.metrics.trays.set(len(self._links))
        self.submit(event)

    def lost(self, tray: TrayId, link: AgentConnection, because: str) -> None:
        """Handle the end of a tray's link. Only the tray's current link counts."""
        if self._links.get(tray) is link:
            self._give_tray_up(tray, self.how_ended(tray, link.pid) or because)
            if self.over is None and tray not in self._going:
                self.fence(tray, link.pid)

    def _give_tray_up(self, tray: TrayId, because: str) -> None:
        del self._links[tray]
        self.metrics.fillers.drop_tray(tray)
        self.metrics.trays.set(len(self._links))
        if self.over is None:
            self.submit(TrayLost(tray=tray, because=because, returns=self.returns(tray)))

    # -- what happens
    def begin(self) -> None:
        """Start the job's time: the core waits for trays from now on."""
        self.submit(TimerFired(timer=JobBegins()))

    def submit(self, event: Event) -> None:
        """Handle ``event`` and everything that follows from it, now. Does nothing once the job is over."""
        self._inbox.append((event, self.now_ms()))
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox and self.over is None:
                self._handle(*self._inbox.popleft())
        finally:
            self._inbox.clear()
            self._handling = False

    def notice(self, text: str) -> None:
        """Show a text to people."""
        self._observer.notice(text)

    def hosts(self) -> list[tuple[str, str]]:
        """Return the present trays with their hosts."""
        return [(str(tray), link.host) for tray, link in sorted(self._links.items())]

    def receive_telemetry(self, telemetry: Iterable[Telemetry]) -> None:
        """Handle telemetry that arrived together."""
        now_ms = self.now_ms()
        lines = []
        for message in telemetry:
            if isinstance(message, Logged):
                lines.append(message)
                continue
            try:
                self._receive_one(message, now_ms)
            except Exception as error:  # noqa: BLE001 - what is told about a job must not end it
                kind = type(message), type(error)
                if kind not in self._unusable:
                    self._unusable.add(kind)
                    _log.exception("telemetry that cannot be used (further ones are not shown): %r", message)
        if lines:
            self._step_log.print_first(lines)
        if self.over is None and (news := self._pace.news()) is not None:
            self.submit(news)

    def _receive_one(self, message: UnitCommitted | UnitSealed | StateCopied | FillerState, now_ms: float) -> None:
        match message:
            case UnitCommitted():
                self._committed(message, now_ms)
                self.watch.committed(message, now_ms)
                self._pace.committed(message)
                self._slow.committed(message)
            case UnitSealed():
                self._unreported_commits.record(message)
            case StateCopied():
                self.metrics.copies.record_copy(message)
                self._pace.copied(message, now_ms)
                self.watch.copied(message)
                if message.kind == "snapshot" and not self._snapshots:
                    self._snapshots = True
                    self._tell_protected()
            case FillerState():
                self._journal.filler(message, now_ms)
                self.metrics.fillers.record_state(message)
            case _:
                assert_never(message)

    def stop(self, command: StopJob) -> None:
        """End the job without asking the core, because the core is broken or the job did not end in time."""
        if self.over is None:
            self._journal.command(command, int(self.now_ms()), 0)
            self._carry_out(command)

    def _journal_died(self, because: str) -> None:
        """Called on the journal's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: self._stop_without_journal(because))

    def _stop_without_journal(self, because: str) -> None:
        because = f"the journal {self._journal.path} is not written any more: {because}"
        self.stop(StopJob(exit_code=3, because=because, remedy="start the same command again, and please report this."))

    def close(self) -> None:
        """Cancel all timers and end the measurement of an open recovery."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.watch.finish()

    # -- what it looks like
    def now_ms(self) -> float:
        """Return the milliseconds since the job's time started."""
        return (self._loop.time() - self._began) * 1e3

    def status(self) -> Status:
        """Return the status that ``/status`` and ``rackctl status`` show."""
        last = self.recoveries[-1] if self.recoveries else None
        return Status(
            run_id=self._run_id,
            uptime_s=self.now_ms() / 1e3,
            trays=tuple(sorted(self._links)),
            progress=self.ledger.progress(self.now_ms()),
            recoveries=len(self.recoveries),
            last_recovery=last.line() if last else "",
            last_recovery_s=last.seconds if last else None,
            over=self.over,
            core=self._core.view(),
        )

    # -- one event
    def _handle(self, event: Event, arrived_ms: float) -> None:
        # A timer may fire a fraction early, and one arrival is never before another.
        self._at_ms = max(self._at_ms, int(arrived_ms), event.at_ms if isinstance(event, TimerFired) else 0)
        event = msgspec.structs.replace(event, at_ms=self._at_ms)
        cause = self._journal.event(event)
        if isinstance(event, DepartureAnnounced):
            self._going.add(event.tray)
        self.watch.on_event(event, arrived_ms)
        self._slow.on_event(event)
        self.metrics.record_event(event)
        try:
            commands = self._core.handle(event)
            rules = self._core.sent_by
        except Exception as error:  # noqa: BLE001 - whatever it is, the job must end with a reason, not hang
            _log.exception("the core failed on %r", event)
            because = f"rackrun contradicts itself on {type(event).__name__}: {type(error).__name__}: {error}"
            remedy = f"please report this, with {self._journal.path}"
            commands, rules = (StopJob(exit_code=3, because=because, remedy=remedy),), ()
        for command, rule in zip(commands, chain(rules, repeat("")), strict=False):
            self._journal.command(command, self._at_ms, cause, rule)
            self._carry_out(command)
            self.watch.on_command(command, arrived_ms, self.now_ms())
            self._slow.on_command(command)
        self._tell_protected()
        self.metrics.handle_s.observe((self.now_ms() - arrived_ms) / 1e3)

    def _tell_protected(self) -> None:
        """Say what snapshots survive, if there are any and it has changed."""
        if self._snapshots and self._protected != self._told_protected:
            self._told_protected = self._protected
            self._observer.protected(self._protected or "one tray is left: snapshots are lost with it")

    def _carry_out(self, command: Command) -> None:
        match command:
            case SetTimer():
                self._set_timer(command)
            case BreakGeneration():
                if self._persist(command):
                    self._send(command, (worker.slot for worker in command.workers))
            case ResumeGeneration():
                if self._persist(command):
                    for unit in self._unreported_commits.settle(command.plan):
                        self._committed(unit, self.now_ms())
                    if self._step_log.allow_again(command.plan) and command.plan.rollback is not None:
                        self._sinks.rewind(command.plan.rollback)
                    self._protected = command.protected
                    self.metrics.generation.set(command.plan.generation)
                    self.metrics.world_size.set(command.plan.world_size)
                    self._send(command, (member.slot for member in command.plan.members))
            case StartWorker() | FenceWorker():
                self._send(command, (command.slot,))
            case PauseWorkers() | DealShards() | DrainWorkers() | ReleaseWorkers():
                self._send(command, (worker.slot for worker in command.workers))
            case DismissTray():
                self._send_to(frame(command), (command.tray,))
            case AskPolicy() | RequestRack() | ReleaseRack():
                self._hand_on(command)
            case Notice() | Answer() | Decided() | CondemnWorker():
                self._show_command(command)
            case StopJob():
                data = frame(command)
                for link in self._links.values():
                    link.send(data)
                self.finished.reach(command)
                self.requests.end(command)
            case _:
                assert_never(command)

    def _persist(self, command: BreakGeneration | ResumeGeneration) -> bool:
        began = self.now_ms()
        try:
            self._journal.persist(command, self._at_ms)
        except JournalError as error:
            self.submit(JournalFailed(because=error.what))
            return False
        self.metrics.persist_s.observe((self.now_ms() - began) / 1e3)
        return True

    def _hand_on(self, command: AskPolicy | RequestRack | ReleaseRack) -> None:
        """Pass a command to user code, which answers later."""
        if isinstance(command, AskPolicy):
            self.ask(command)
        else:
            self.provide(command)

    def _nobody_to_ask(self, command: AskPolicy) -> None:
        self.submit(PolicyAnswered(question=command.question, trouble="has nobody who could ask it"))

    def _nobody_to_provide(self, command: RequestRack | ReleaseRack) -> None:
        if isinstance(command, RequestRack):
            self.submit(RackRefused(request=command.request, because="nobody is there who could be asked"))

    def _send(self, command: WorkerCommand, slots: Iterable[SlotId]) -> None:
        self._send_to(frame(command), dict.fromkeys(tray_of(slot) for slot in slots))

    def _send_to(self, data: bytes, trays: Iterable[TrayId]) -> None:
        for tray in trays:
            if link := self._links.get(tray):  # else: its TrayLost is handled already, or comes next
                link.send(data)

    def _show_command(self, command: Notice | Answer | Decided | CondemnWorker) -> None:
        """Show a command that changes no worker. Decisions and condemned workers are also in the journal and in the
        recovery's record."""
        if isinstance(command, Notice | Answer):
            self._observer.notice(command.text)
        if isinstance(command, Answer):
            self.requests.record_answer(command)

    def _set_timer(self, command: SetTimer, *, again: bool = False) -> None:
        """Set a timer. ``again``: it fired too late and is given a short further time."""
        now_ms = self.now_ms()
        at_ms = now_ms + _CATCH_UP_MS if again else command.at_ms

        def fire() -> None:
            self._timers.discard(timer)
            if self.over is not None:
                return
            if not again and self.now_ms() - max(at_ms, now_ms) > _STOOD_STILL_MS:
                self._set_timer(command, again=True)
            else:
                self.submit(TimerFired(timer=command.timer, at_ms=command.at_ms))

        # One that is due already has its place in the order of all that are.
        timer = self._loop.call_later((at_ms - now_ms) / 1e3, fire)
        self._timers.add(timer)

    # -- telemetry
    def _committed(self, unit: UnitCommitted, now_ms: float) -> None:
        self._journal.unit(unit, now_ms)
        plan = self.watch.plan
        if self.ledger.commit(unit, plan.world_size if plan else 1, now_ms) and unit.at.phase == 0:
            self.metrics.step.set(unit.at.step)

    def _line(self, text: str, logged: Logged) -> None:
        self.ledger.logged(logged)
        self._observer.line(text, logged)
        self._sinks.write(logged.at, logged.values, began=self.ledger.began)

    def _recovered(self, recovery: RecoveryRecord) -> None:
        recovery.measure(self._pace.step_s)
        self.recoveries.append(recovery)
        self.metrics.record_recovery(recovery)
        self._journal.recovery(recovery)
        self._observer.recovered(recovery)
