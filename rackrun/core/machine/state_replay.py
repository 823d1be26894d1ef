"""Reconstruction of a job's placement and hardware state from its events and commands, without deciding anything.

The parts that decide in a running job (`RackMachine`, `Triage`, `Seating`) are brought to the state that they had.
Questions put to them now have the answers that the job would have had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from rackrun.core.faults.corruption import suspect, suspect_loss
from rackrun.core.faults.standstills import Standstills
from rackrun.core.faults.triage import Triage
from rackrun.core.generation.facts import Facts
from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.quarantine import QUARANTINE_LOSSES
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.slot_order import natural
from rackrun.core.members.workers import Trigger, WorkerRecord, WorkerState
from rackrun.core.placement import mesh_resize
from rackrun.core.placement.seating import Seating, Takeovers
from rackrun.core.stragglers.straggler_response import StragglerResponse
from rackrun.protocol.commands import (
    Answer,
    Command,
    CondemnWorker,
    FenceWorker,
    GenerationPlan,
    Notice,
    ReleaseWorkers,
    ResumeGeneration,
    StartWorker,
    StopJob,
    Worker,
)
from rackrun.protocol.events import (
    BreakerClosed,
    DeviceChecked,
    DeviceJudged,
    Event,
    LossNotRepeated,
    ReplicasDiffer,
    SlowRanksChanged,
    TimerFired,
    TrayDescribed,
    TrayJoined,
    TrayLost,
    TrayStoodStill,
    WorkerElastic,
    WorkerExited,
    WorkerFinished,
    WorkerReady,
)
from rackrun.protocol.gpu_health import Response
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId, TrayId, slot_id, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import BreakerWakes, JoinGraceOver, QuarantineOver, StandstillsGathered
from rackrun.topology.model.errors import TopologyError
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.racks import Gpu, Rack, Topology, Tray

__all__ = ["COMMANDS", "EVENTS", "StateReplay", "SeatChange", "SlotStatus", "Trouble"]

EVENTS = (
    TrayJoined, TrayDescribed, TrayLost, DeviceJudged, DeviceChecked, BreakerClosed, SlowRanksChanged, TimerFired, WorkerElastic,
    WorkerReady, WorkerFinished, WorkerExited, ReplicasDiffer,
    LossNotRepeated, TrayStoodStill,
)  # fmt: skip
COMMANDS = (StartWorker, CondemnWorker, FenceWorker, ResumeGeneration, ReleaseWorkers, Answer, StopJob)
"""Together with `EVENTS`, everything that `StateReplay` evaluates."""

Trouble: TypeAlias = Literal["", "lost", "out", "quarantined", "drained", "failing", "unfit", "withheld"]
"""What is wrong with a slot.

``lost``: its tray, or the worker that held its rank, is lost. ``out``: a verdict took it out of use. ``quarantined``:
it lost too many workers. ``drained``: an operator, or its tray's notice, took it out of use. ``failing``: its GPU is
failing but still works. ``unfit``: it must not be taken into use now. ``withheld``: a verdict that is not acted on.
"""


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one slot."""

    slot: SlotId
    rank: Rank | None = None
    spare: Literal["", "starting", "ready"] = ""
    trouble: Trouble = ""
    why: str = ""
    """What is known of the problem; "": nothing."""


class SeatChange(NamedTuple):
    """A rank moved to a slot, or was started there again."""

    generation: Generation
    at_ms: int
    worker: Worker


@dataclass(slots=True)
class StateReplay:
    """State of a job at some moment. Pass events and commands to it in their order, then call `finish`."""

    config: JobConfig
    gathers_standstills: bool = True
    """Whether the job gathered reports of standstills, as it does since `StandstillsGathered` is in journals. Older ones
    acted on each report at once."""
    rack: RackMachine = field(default_factory=RackMachine)
    seating: Seating = field(init=False)
    triage: Triage = field(init=False)
    standstills: Standstills = field(init=False)
    straggler_response: StragglerResponse = field(init=False)
    said: list[Command] = field(default_factory=list)
    """Notices about the hardware that triage emits again."""
    _out: Outbox = field(default_factory=Outbox)
    _facts: Facts = field(default_factory=Facts)
    """Facts that are found again. Nobody acts on them: what was done is in the commands."""
    generation: Generation = Generation(0)
    seats: dict[Rank, SlotId] = field(default_factory=dict)
    sat: dict[Rank, list[SeatChange]] = field(default_factory=dict)
    lost: dict[TrayId, str] = field(default_factory=dict)
    """Lost trays, each with the reason."""
    spares_wanted: int = 0
    broken: str = ""
    """Which bound group spans several cliques, or on what trays contradict each other; "": nothing."""
    over: StopJob | None = None
    _trays: dict[TrayId, TrayJoined] = field(default_factory=dict)
    """All trays that have ever joined."""
    _gone: dict[SlotId, str] = field(default_factory=dict)
    """How the last worker of each slot ended."""
    _left: dict[SlotId, WorkerRecord] = field(default_factory=dict)
    """Workers that exited as they should; they are shown in their slots."""
    _elastic: bool = False
    _differed: Generation = Generation(0)

    def __post_init__(self) -> None:
        self.seating = Seating(self.config, self.rack)
        self.triage = Triage(self.rack, self._out, self._facts)
        self.standstills = Standstills(self.rack, self._out, self._facts)
        self.straggler_response = StragglerResponse(self.config, self.rack.devices, self._out, self._facts)

    # -- what happened
    def apply_event(self, event: Event) -> None:
        """Apply an event."""
        if self.over is not None:
            return
        self.rack.now_ms = event.at_ms
        self._apply(event)
        self.said += self._out.take()
        self._facts.take()

    def _apply(self, event: Event) -> None:
        match event:
            case TrayJoined():
                self._tray_lost(event.tray, "it came back empty")
                self.lost.pop(event.tray, None)
                self._trays[event.tray] = event
                self.rack.join(event)
                if self.generation:
                    self._learn_late(event)
                elif len(self.rack.trays) >= self.config.trays_max:
                    self._learn(list(self.rack.trays.values()), event.at_ms)
            case TrayLost():
                self._tray_lost(event.tray, event.because)
            case DeviceJudged() | DeviceChecked() | BreakerClosed() | SlowRanksChanged():
                self._judged(event)
            case ReplicasDiffer() | LossNotRepeated():
                self._suspect(event)
            case TrayStoodStill() | TimerFired(timer=StandstillsGathered()):
                self._stood_still(event)
            case TrayDescribed():
                self._described(event)
            case TimerFired(timer=BreakerWakes()):
                self.triage.tick(event.at_ms)
            case TimerFired(timer=QuarantineOver(slot=slot)):
                self.rack.lift_quarantine(slot)
            case TimerFired(timer=JoinGraceOver()) if not self.generation:
                if len(self.rack.trays) >= self.config.trays_min:
                    self._learn(list(self.rack.trays.values()), event.at_ms)
            case WorkerElastic() | WorkerReady() | WorkerFinished() | WorkerExited():
                record = self.rack.current(event)
                if record is not None:
                    self._worker(record, event)
            case _:
                pass

    def _stood_still(self, event: TrayStoodStill | TimerFired) -> None:
        if isinstance(event, TimerFired):
            self.standstills.gathered(event.at_ms)
        elif event.tray in self.rack.trays:
            self.standstills.stood_still(event)
            if not self.gathers_standstills:
                self.standstills.gathered(event.at_ms)

    def _judged(self, event: DeviceJudged | DeviceChecked | BreakerClosed | SlowRanksChanged) -> None:
        match event:
            case DeviceJudged():
                self.triage.judged(event)
            case DeviceChecked():
                self.triage.checked(event)
            case BreakerClosed():
                self.triage.close_breaker(event.at_ms)
                self.straggler_response.close_breaker(self.seats, event.at_ms)
            case SlowRanksChanged() if event.generation == self.generation:
                self.straggler_response.report(event, self.seats)
            case SlowRanksChanged():
                pass

    def _suspect(self, event: ReplicasDiffer | LossNotRepeated) -> None:
        teller = self._occupant(event.slot, event.incarnation)
        if teller is None or not teller.alive:
            return
        if isinstance(event, LossNotRepeated):
            if teller.rank is not None:
                suspect_loss(event, self.rack.devices)
        elif event.generation == self.generation and event.generation != self._differed and not self._begins():
            self._differed = event.generation
            there = {rank: slot for rank, slot in self.seats.items() if self._holds(slot, rank)}
            suspect(event, self.rack.devices, there)

    def _begins(self) -> bool:
        """Return whether some ranks, as far as known, have not reached their first step. Reports about replicas are
        ignored until then."""
        there = [self.rack.occupants.get(slot) for slot in self.seats.values()]
        return any(record is not None and record.alive and record.state is WorkerState.STARTING for record in there)

    def _holds(self, slot: SlotId, rank: Rank) -> bool:
        record = self.rack.occupants.get(slot)
        return record is not None and record.alive and record.rank == rank

    def _described(self, event: TrayDescribed) -> None:
        known = self.rack.trays.get(event.tray)
        if known is not None:
            joined = msgspec.structs.replace(known, at_ms=event.at_ms, topology=event.topology)
            self._trays[event.tray] = joined
            self.rack.describe(joined)
            if self.generation:
                self._learn_late(joined)

    def apply_command(self, command: Command, at_ms: int) -> None:
        """Apply a command that the core emitted at ``at_ms``."""
        match command:
            case StartWorker():
                rank = None if command.spare else command.rank
                worker = Worker(command.slot, command.incarnation)
                self.rack.occupy(WorkerRecord(worker, rank))
                self._gone.pop(command.slot, None)
            case CondemnWorker() | FenceWorker():
                record = self._occupant(command.slot, command.incarnation)
                if record is not None and record.alive:
                    self.rack.fence(record, command.because, fault=command.fault)
            case ResumeGeneration():
                self._resume(command.plan, at_ms)
            case ReleaseWorkers():
                for worker in command.workers:
                    record = self._occupant(worker.slot, worker.incarnation)
                    if record is not None and record.alive:
                        record.move(Trigger.RELEASE)
            case Answer():
                self.rack.drained, self.rack.departing = dict(command.drained), dict(command.departing)
                for slot in command.forgiven:
                    self.rack.forgive(slot)
            case StopJob():
                self.over = command
            case _:
                pass

    def finish(self) -> None:
        """Complete the reconstruction after the last event and command."""
        mesh = self.seating.mesh
        if not self.generation:
            self._learn(list(self._trays.values()), 0)
        elif mesh is not None and mesh.world_size == len(self.seats):
            self.broken = self.seating.adopt(mesh, self.seats)

    def _worker(self, record: WorkerRecord, event: WorkerElastic | WorkerReady | WorkerFinished | WorkerExited) -> None:
        if isinstance(event, WorkerExited):
            self._exited(record, event)
            return
        if not record.alive:
            return
        self._elastic |= not isinstance(event, WorkerFinished)
        if isinstance(event, WorkerReady) and event.mesh and record.rank is not None:
            if math.prod(size for _, size in event.mesh) != len(self.seats):
                return  # the job stops because of this
            mesh = Mesh.of(dict(event.mesh))
            if self.seating.mesh != mesh:
                self.seating.adopt(mesh, self.seats)
        if not isinstance(event, WorkerElastic) and record.state is WorkerState.STARTING:
            record.move(Trigger.READY)

    def _exited(self, record: WorkerRecord, event: WorkerExited) -> None:
        slot, state, alive = record.worker.slot, record.state, record.alive
        loss = self.rack.exited(record, event)
        well = event.exit_code == 0 and not event.signal and event.failure is None
        if well and (state is WorkerState.RELEASED or (alive and record.rank is not None and not self._elastic)):
            self._left[slot] = record
        else:
            self._gone[slot] = record.fenced_for or loss.because

    def _resume(self, plan: GenerationPlan, at_ms: int) -> None:
        if not self.generation:
            slots = len(self.rack.slots())
            self.spares_wanted = slots - plan.world_size if self.config.mesh else self.config.spares
            self._learn(list(self.rack.trays.values()), at_ms)
        mesh = self.seating.mesh
        if mesh is not None and (axes := mesh_resize.fitted(mesh.axes, plan.world_size)):
            self.seating.mesh = Mesh.of(dict(axes))
        self.generation = plan.generation
        self.seats = {member.rank: member.slot for member in plan.members}
        self.rack.trains(self.seats.values())
        for member in plan.members:
            worker = Worker(member.slot, member.incarnation)
            sat = self.sat.setdefault(member.rank, [])
            if not sat or sat[-1].worker != worker:
                sat.append(SeatChange(plan.generation, at_ms, worker))
            record = self._occupant(member.slot, member.incarnation)
            if record is not None:
                record.rank = member.rank

    def _tray_lost(self, tray: TrayId, because: str) -> None:
        if tray in self.rack.trays:
            for loss in self.rack.lose_tray(tray, because):
                self._gone[loss.record.worker.slot] = f"its tray was lost ({because})"
            self.triage.forget(tray)
            self.lost[tray] = because

    def _learn(self, joined: Sequence[TrayJoined], at_ms: int) -> None:
        try:
            self.seating.learn(joined)
        except TopologyError as error:
            self.broken = error.what
            return
        self.triage.learn(self.seating.cliques(), at_ms)

    def _learn_late(self, event: TrayJoined) -> None:
        try:
            self.seating.learn([event])
        except TopologyError as error:
            self._out.emit(Notice(text=f"{event.tray} is not used: {error}"))
            self.rack.devices.refuse(event.tray, event.slots, error.what)
            return
        self.triage.learn(self.seating.cliques(), event.at_ms)

    def _occupant(self, slot: SlotId, incarnation: Incarnation) -> WorkerRecord | None:
        record = self.rack.occupants.get(slot)
        return record if record is not None and record.worker.incarnation == incarnation else None

    # -- what it looks like
    def topology(self) -> Topology:
        """Return the topology of all trays that have ever joined. If none has reported one: a single rack of them
        without cliques."""
        if self.seating.board is not None:
            return self.seating.board.topology
        trays = tuple(
            Tray(
                name=tray,
                index=at,
                gpus=tuple(Gpu(uuid=slot_id(tray, index), index=index) for index in range(self._trays[tray].slots)),
            )
            for at, tray in enumerate(sorted(self._trays, key=natural))
        )
        return Topology.of([Rack(serial="", trays=trays)] if trays else [])

    def standings(self) -> dict[SlotId, SlotStatus]:
        """Return the state of every slot: those of the topology first, then others, because a rank's last slot may no
        longer exist."""
        every = chain((SlotId(seat.slot) for seat in self.topology().seats), self.rack.slots(), self.seats.values())
        ranks = {slot: rank for rank, slot in self.seats.items()}
        return {slot: self._standing(slot, ranks.get(slot)) for slot in dict.fromkeys(every)}

    def _standing(self, slot: SlotId, rank: Rank | None) -> SlotStatus:
        record = self._there(slot)
        spare: Literal["", "starting", "ready"] = ""
        if record is not None and record.rank is None:
            spare = "starting" if record.state is WorkerState.STARTING else "ready"
        trouble, why = self._trouble(slot, rank)
        return SlotStatus(slot=slot, rank=rank, spare=spare, trouble=trouble, why=why)

    def _there(self, slot: SlotId) -> WorkerRecord | None:
        record = self.rack.occupants.get(slot)
        return record if record is not None and record.alive else self._left.get(slot)

    def _trouble(self, slot: SlotId, rank: Rank | None) -> tuple[Trouble, str]:
        tray, devices = tray_of(slot), self.rack.devices
        record, verdict = self._there(slot), devices.verdict(slot)
        faults, unfit = self.rack.quarantine.faults.get(slot, 0), devices.unfit(slot)
        withheld = self.triage.breaker.withheld.get((tray, int(slot.rpartition("/")[2])))
        if tray in self.lost:
            return "lost", f"its tray is lost: {self.lost[tray]}"
        if rank is not None and (record is None or record.rank != rank):
            condemned = self.rack.occupants.get(slot)
            how = (condemned.fenced_for if condemned is not None else "") or self._gone.get(slot, "")
            return "lost", f"its worker is gone: {how or 'it was never started'}"
        if (withdrawn := self.rack.withdrawn(slot)) and (verdict is None or verdict.response is not Response.FENCE):
            return "drained", withdrawn
        if verdict is not None:
            whose = "" if slot == slot_id(tray, verdict.index) else f"of its tray's GPU {verdict.index}: "
            repair = f". Repair: {verdict.repair}" if verdict.repair else ""
            why = f"{whose}{verdict.health.value}: {verdict.reasons}{repair}"
            return "out" if verdict.response is Response.FENCE else "failing", why
        if (until_ms := self.rack.quarantine.until_ms.get(slot)) is not None:
            again = f"; it is tried again in {max(until_ms - self.rack.now_ms, 0) / 1e3:.0f} s"
            return "quarantined", f"it has lost {faults} workers by hangs, errors or failed starts{again}"
        if unfit and rank is None:
            return "unfit", "; ".join(unfit)
        if withheld is not None:
            said = withheld.verdict
            return "withheld", f"{said.health.value}: {said.reasons}. Not acted on: {withheld.reason}"
        return self._doubt(slot, faults)

    def _doubt(self, slot: SlotId, faults: int) -> tuple[Trouble, str]:
        if self.rack.devices.on_probation(slot):
            return "failing", self.rack.devices.because(slot)
        lost = (
            f"it has lost {faults} of the {QUARANTINE_LOSSES} workers after which it is left out"
            if faults and slot not in self._left
            else ""
        )
        return "", lost

    # -- what would be
    def ready(self) -> list[SlotId]:
        """Return the slots of ready spares."""
        return [record.worker.slot for record in self.rack.ready_spares()]

    def successors(self, rank: Rank, most: int = 4) -> list[Takeovers]:
        """Return who would take over if ``rank`` were lost now, in addition to all lost ranks; then who would if that
        spare were lost too, and so on."""
        standings = self.standings()
        lost = [one for one, slot in self.seats.items() if standings[slot].trouble == "lost" and one != rank]
        ready = self.ready()
        found: list[Takeovers] = []
        while len(found) < most:
            staff = self.seating.staff(self.seats, [*lost, rank], ready)
            if staff is None:
                break
            found.append(staff)
            taken = [staff.seats[one] for one in (rank, *staff.uprooted)]
            ready = [slot for slot in ready if slot not in taken]
        return found

    def leaving(self) -> dict[Rank, SlotId]:
        """Return the ranks that should leave a failing GPU at the next step boundary, and their new slots."""
        return self.seating.leaving(self.seats, self.ready())
