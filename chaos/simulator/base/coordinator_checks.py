"""Checks of a coordinator: what the core answers, and what the driver does with it.

The driver is given a core that checks its answers, and a journal that checks what is written to it: each event before
the core is asked, each command in order before it is carried out, each generation before anyone is told.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Protocol

import msgspec

from rackrun.chaos.simulator.base.coverage_marks import CoverageMarks
from rackrun.chaos.simulator.base.ground_truth import GroundTruth, Violation, must
from rackrun.core.machine.control_plane import ControlPlane, View
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    BreakGeneration,
    Command,
    Decided,
    DismissTray,
    FenceWorker,
    GenerationPlan,
    Notice,
    RequestRack,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
    WorkerCommand,
)
from rackrun.protocol.events import (
    DeviceChecked,
    Event,
    ReplicasDiffer,
    TrayLost,
    WorkerExited,
)
from rackrun.protocol.ids import SlotId, TrayId, slot_id, tray_of
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import QuarantineOver

__all__ = ["KEPT", "CheckedCore", "CheckedJob", "CheckedJournal", "CommandChecks", "Halt"]

KEPT = 60
"""The number of last exchanges with the core that are kept for a report."""


class Halt(BaseException):
    """A check has failed: the simulation ends, whatever the driver does about errors of its core."""

    def __init__(self, because: Exception) -> None:
        super().__init__(because)
        self.because = because


class CheckedJob(Protocol):
    """The part of `rackrun.chaos.simulator.cluster.simulation.Simulation` that the checks use."""

    marks: CoverageMarks
    truth: GroundTruth

    def on_event(self, event: Event) -> None:
        """Take in an event, right before the core does."""

    def flaws_found(self, event: ReplicasDiffer) -> Iterable[str]:
        """Return the flaws of the state of those who differ."""

    def planned(self, plan: GenerationPlan, *, launch: bool) -> None: ...

    def all_slots(self) -> list[SlotId]: ...


class CommandChecks:
    """What must hold of each event and of each command, and what has to be remembered for it."""

    def __init__(self, sim: CheckedJob) -> None:
        self._sim = sim
        self.answers: dict[str, list[Answer]] = {}
        self.withdrawn: dict[SlotId, str] = {}
        self.launch = False
        """Whether ranks are started by the commands that are carried out now."""
        self._departing: set[TrayId] = set()
        self._unfit: dict[SlotId, tuple[str, ...]] = {}
        """Slot -> why its GPU is unfit, as last reported."""
        self._left_out: dict[SlotId, None] = {}
        """Slots that were left out at any time, because workers were lost there."""

    def on_event(self, event: Event, phase: Callable[[], str]) -> None:
        """Take in an event, right before the core does. ``phase`` returns the core's phase."""
        match event:
            case TrayLost():
                self._departing.discard(event.tray)
                self._unfit = {slot: why for slot, why in self._unfit.items() if tray_of(slot) != event.tray}
            case DeviceChecked():
                self._unfit.pop(slot_id(event.tray, event.index), None)
                self._unfit |= {slot_id(event.tray, event.index): event.unfit} if event.unfit else {}
            case ReplicasDiffer():
                self._distrust(event, phase())
            case _:
                pass
        lost = isinstance(event, TrayLost) or (isinstance(event, WorkerExited) and event.exit_code != 0)
        if lost and (now := phase()) in ("parking", "resuming"):
            self._sim.marks.sometimes(f"a loss came while others {'parked' if now == 'parking' else 'resumed'}")
        self._sim.on_event(event)

    def _distrust(self, event: ReplicasDiffer, phase: str) -> None:
        """Take in a found difference.

        The first report from a generation that trains is believed; all ranks report the same.
        """
        truth, flaws = self._sim.truth, self._sim.flaws_found(event)
        if event.generation == max(truth.plans) and phase in ("training", "resuming", "parking"):
            truth.distrust(int(event.good.step), flaws)

    def on_answers(self, commands: Sequence[Command]) -> None:
        """Take in all that the core has answered to one event."""
        if not commands:
            return
        decided = [one.decision for one in commands if isinstance(one, Decided)]
        stops = [number for number, one in enumerate(commands, 1) if isinstance(one, StopJob)]
        restarts = any(one.rung is Rung.RESTART and one.by != "rule" for one in decided)
        must(not (restarts and stops), "a restart was decided, and the job ended")
        must(stops in ([], [len(commands)]), "the end is not the last")
        self.launch = any(isinstance(command, StartWorker) and not command.spare for command in commands)

    def on_command(self, command: Command) -> None:
        """Take in a command, right before the driver carries it out."""
        sim, sometimes = self._sim, self._sim.marks.sometimes
        match command:
            case SetTimer(timer=QuarantineOver(slot=slot)):
                self._left_out[slot] = None
                sometimes("a slot was left out for a while")
            case BreakGeneration():
                must(command.because, "a break without a reason")
                sim.truth.announces(command.generation)
            case ResumeGeneration():
                must(command.because, "a plan without a reason")
                self._planned(command)
            case StartWorker():
                if command.slot in self._left_out:
                    sometimes("a slot that was left out was tried again")
                must(command.slot not in self._withdrawn_slots(), "a worker starts in a place that is drained")
            case FenceWorker():
                if not command.swept_along:
                    sometimes("a rank was fenced")
            case DismissTray():
                sometimes("a tray was dismissed")
            case AskPolicy():
                sometimes("the policy was asked")
            case RequestRack():
                sometimes("a rack was asked for")
            case Notice():
                must(command.text, "a notice without words")
            case Answer():
                self._answered(command)
            case StopJob():
                must(command.because, "a stop without a reason")
            case _:
                pass

    def _planned(self, command: ResumeGeneration) -> None:
        plan, before = command.plan, self._sim.truth.plans
        known = {(m.slot, m.incarnation) for m in before[max(before)].members} if before else set()
        new = [m.slot for m in plan.members if (m.slot, m.incarnation) not in known]
        if self._unfit and new:
            self._sim.marks.sometimes("a GPU was unfit when ranks were placed")
        must(not any(slot in self._unfit for slot in new), "a rank on a GPU that may not be used")
        must(not any(slot in self._withdrawn_slots() for slot in new), "a rank in a place that is drained")
        self._sim.planned(plan, launch=self.launch)

    def _withdrawn_slots(self) -> dict[SlotId, str]:
        leaving = {slot: "departs" for slot in self._sim.all_slots() if tray_of(slot) in self._departing}
        return {**self.withdrawn, **leaving}

    def _answered(self, answer: Answer) -> None:
        self.withdrawn, self._departing = dict(answer.drained), set(answer.departing)
        said = self.answers.setdefault(answer.request, [])
        must(answer.text, "an answer without words")
        must(all(one.outcome == "begun" for one in said), "an answer after the last one")
        must(bool(answer.refusal) == (answer.outcome == "refused"), "a refusal that is none")
        said.append(answer)
        if answer.outcome == "refused":
            self._sim.marks.sometimes("a person was refused")


class CheckedJournal:
    """The journal of a simulated job, as `rackrun.coordinator.shell.ports.JobJournal`. It keeps only what checks
    need."""

    path = "of a simulated job"

    def __init__(self, checks: CommandChecks) -> None:
        self._checks = checks
        self.on_death: Callable[[str], None] = lambda _because: None
        self.newest: Event | None = None
        """The event that was written last."""
        self._id = 0
        self._due: deque[Command] = deque()
        """What the core has answered to it, and what is not written yet."""
        self._on_disk: set[tuple[type[Command], int]] = set()

    def expects(self, commands: Sequence[Command]) -> None:
        """The core has answered: each of its commands has to be written, in this order, and carried out."""
        self._due.extend(commands)

    def event(self, event: Event) -> int:
        if self._due:
            raise Violation(f"commands were not carried out: {[*self._due]}")
        must(self.newest is None or event.at_ms >= self.newest.at_ms, "the time goes back")
        self.newest = event
        self._id += 1
        return self._id

    def command(self, command: Command, at_ms: int, cause: int, rule: str = "") -> None:  # noqa: ARG002
        if not self._due or self._due.popleft() is not command:
            raise Violation(f"the driver wrote a command that the core did not return, or out of order: {command}")
        must(self.newest is not None and (at_ms, cause) == (self.newest.at_ms, self._id), "a command of another event")
        self._checks.on_command(command)

    def persist(self, command: BreakGeneration | ResumeGeneration, at_ms: int) -> None:
        must(self.newest is not None and at_ms == self.newest.at_ms, "a generation of another event")
        self._on_disk.add(_stage(command))

    def sent(self, command: WorkerCommand) -> None:
        """Check that a command may be sent to an agent."""
        if isinstance(command, BreakGeneration | ResumeGeneration):
            stage = _stage(command)
            must(stage in self._on_disk, f"generation {stage[1]} was told before it was on disk")

    def recovery(self, recovery: object) -> None: ...

    def unit(self, unit: object, at_ms: float) -> None: ...

    def filler(self, told: object, at_ms: float) -> None: ...

    def fact(self, key: str, value: object) -> None: ...


def _stage(command: BreakGeneration | ResumeGeneration) -> tuple[type[Command], int]:
    generation = command.generation if isinstance(command, BreakGeneration) else command.plan.generation
    return type(command), int(generation)


class CheckedCore:
    """The core, as the driver asks it. It keeps a hash of all that the core was told and has answered."""

    def __init__(self, core: ControlPlane, journal: CheckedJournal, checks: CommandChecks, now_s: Callable[[], float]):
        self._core, self._journal, self._checks, self._now_s = core, journal, checks, now_s
        self.events = 0
        self._last: deque[tuple[float, Event, Sequence[Command], Sequence[str]]] = deque(maxlen=KEPT)
        self._hash = hashlib.blake2b(digest_size=16)
        self._encode = msgspec.msgpack.Encoder().encode

    def view(self) -> View:
        return self._core.view()

    @property
    def sent_by(self) -> Sequence[str]:
        return self._core.sent_by

    def handle(self, event: Event) -> Sequence[Command]:
        try:
            return self._handle(event)
        except Exception as error:
            raise Halt(error) from error

    def _handle(self, event: Event) -> Sequence[Command]:
        must(self._journal.newest is event, "the core is asked before the event is in the journal")
        self.events += 1
        self._checks.on_event(event, lambda: self._core.view().phase)
        commands = self._core.handle(event)
        self._hash.update(self._encode(event))
        self._hash.update(self._encode(commands))
        self._last.append((self._now_s(), event, commands, self.sent_by))
        self._core.check_invariants()
        self._checks.on_answers(commands)
        self._journal.expects(commands)
        return commands

    def trace(self) -> str:
        """Return the hash."""
        return self._hash.hexdigest()

    def last(self) -> tuple[str, ...]:
        """Return a line for each of the last events, with the core's answers, each after the rule that sent it."""
        return tuple(
            f"{now_s:.6f} {event} -> {', '.join(_with_rules(commands, rules)) or 'nothing'}"
            for now_s, event, commands, rules in self._last
        )


def _with_rules(commands: Sequence[Command], rules: Sequence[str]) -> list[str]:
    """Return a text for each command. A core that was made wrong for a test may not say the rule of every command."""
    return [f"{rule}: {command}" for command, rule in zip(commands, chain(rules, repeat("?")), strict=False)]
