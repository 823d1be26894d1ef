"""`ControlPlane`, the core's entry point: events in, commands out, and a view of the job for status pages.

Everything here is a pure function of the configuration and the events so far. The time is ``event.at_ms``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from rackrun.core.faults.peer_times import hangs
from rackrun.core.faults.stalls import stands
from rackrun.core.generation.world import Phase
from rackrun.core.machine.job import JobMachine
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.slot_order import natural
from rackrun.core.members.workers import Loss, WorkerRecord, WorkerState
from rackrun.core.placement.snapshot_keepers import keepers_of
from rackrun.protocol.commands import Command, SetTimer, StopJob
from rackrun.protocol.events import (
    BatchChanged,
    BreakerClosed,
    CostsMeasured,
    DepartureAnnounced,
    DeviceChecked,
    DeviceJudged,
    DrainRequested,
    Event,
    GrowRequested,
    JobEvent,
    JournalFailed,
    LossNotRepeated,
    OfWorker,
    PolicyAnswered,
    PolicyRequested,
    RackDelivered,
    RackPreempted,
    RackRefused,
    ReplicasDiffer,
    ReturnRequested,
    ShrinkRequested,
    SlowRanksChanged,
    SnapshotDamaged,
    SnapshotMirrored,
    SnapshotStriped,
    StopRequested,
    SwapRequested,
    TimerFired,
    TrayDescribed,
    TrayJoined,
    TrayLost,
    WorkerBusy,
    WorkerElastic,
    WorkerEvent,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WorkerSevered,
    WorkerStalled,
    WorkerUnbuilt,
)
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig

__all__ = ["ControlPlane", "RankView", "SpareView", "TrayView", "View"]


_OF_A_START = (WorkerReady, WorkerElastic)
"""Events that a spare sends when it starts. They say nothing about the members."""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank on the status page."""

    rank: Rank
    slot: SlotId
    incarnation: Incarnation | None
    """The worker that holds the rank; None while no worker does."""
    state: str


class SpareView(msgspec.Struct, frozen=True, kw_only=True):
    """One spare on the status page."""

    slot: SlotId
    incarnation: Incarnation
    state: str


class TrayView(msgspec.Struct, frozen=True, kw_only=True):
    """One tray on the status page."""

    tray: TrayId
    host: str
    slots: int
    quarantined: tuple[SlotId, ...]
    against: dict[SlotId, str]
    """Known problems of its GPUs, by slot."""
    withdrawn: dict[SlotId, str] = {}
    """Slots that are drained or about to be, each with the reason."""
    unjudged: str = ""
    """Which GPU checks are ignored on this tray, and why."""
    rack: str = ""
    """The serial number of its chassis."""
    clique: str = ""
    """Its NVLink clique; the first one, if the tray is divided among several."""
    keepers: tuple[TrayId, ...] = ()
    """The trays that keep copies or parity of its snapshots."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The job as a status page shows it."""

    phase: str
    elastic: bool
    generation: Generation
    world_size: int
    most: int
    """Number of ranks up to which the world grows by itself."""
    policy: str
    """The active policy, as options of the launcher."""
    restarts: int
    committed: Position
    """The last committed unit of the latest plan. The core is not informed of every step."""
    reason: str
    """The reason of the latest decision."""
    ranks: tuple[RankView, ...]
    spares: tuple[SpareView, ...]
    trays: tuple[TrayView, ...]


class ControlPlane:
    """The core of one job, driven by `handle`."""

    def __init__(self, config: JobConfig) -> None:
        self._out: list[Command] = []
        self._began = False
        self._config = config
        self._rack = RackMachine()
        self._job = JobMachine(config, self._rack, self._out.append)
        self._forget_members = self._job.recovery.parked_members.forget

    def begin(self, at_ms: int) -> Sequence[Command]:
        """Start the job's time: trays may join from now on. Without this call, the first event does it."""
        return self.handle(TimerFired(name="begin", at_ms=at_ms))

    def handle(self, event: Event) -> Sequence[Command]:
        """Return the commands that follow from ``event``, in order. Events that are too early or too late are
        ignored."""
        if not self._began:
            self._began = True
            self._out.append(SetTimer(name="join", at_ms=event.at_ms + self._config.join_timeout_ms))
        self._rack.now_ms = event.at_ms
        self._job.meter.heard(event)
        if self._job.world.phase is not Phase.STOPPED:
            if isinstance(event, OfWorker):
                self._of_worker(event)
            else:
                self._forget_members()
                self._dispatch(event)
                self._forget_members()
            self._job.look(event.at_ms)
            for slot, until_ms in self._rack.quarantine.take_new():
                self._out.append(SetTimer(name=f"quarantine:{slot}", at_ms=until_ms))
        if not self._out:
            return ()
        commands = _up_to_the_end(self._out)
        self._job.meter.told(commands, event.at_ms)
        self._out.clear()
        return commands

    def _dispatch(self, event: JobEvent) -> None:
        match event:
            case TrayJoined():
                self._tray_joined(event)
            case TrayLost():
                because = f"{event.tray} lost: {event.because}"
                self._tray_lost(event.tray, because, event.at_ms, returns=event.returns)
            case TimerFired():
                self._job.timer(event.name, event.at_ms)
            case StopRequested():
                self._job.stop_requested(event)
            case DeviceJudged() | DeviceChecked() | BreakerClosed() | SlowRanksChanged():
                self._judged(event)
            case DrainRequested() | ReturnRequested() | SwapRequested():
                self._job.control.ask(event)
            case ShrinkRequested() | GrowRequested() | PolicyRequested():
                self._job.asked(event)
            case DepartureAnnounced():
                self._job.departs(event)
            case TrayDescribed():
                self._job.described(event)
            case PolicyAnswered():
                self._job.recovery.answered(event)
            case RackDelivered() | RackRefused() | RackPreempted():
                self._provider_says(event)
            case CostsMeasured():
                pass  # the meter has recorded it
            case JournalFailed():
                because = f"generation {self._job.world.generation} could not be persisted: {event.because}"
                self._job.stop(3, because, remedy="free disk space where the journal is kept, and start again.")
            case _:
                assert_never(event)

    def _provider_says(self, event: RackDelivered | RackRefused | RackPreempted) -> None:
        match event:
            case RackDelivered():
                self._job.acquiring.delivered(event)
            case RackRefused():
                self._job.acquiring.refused(event)
            case RackPreempted():
                self._job.acquiring.preempted(event)

    def _judged(self, event: DeviceJudged | DeviceChecked | BreakerClosed | SlowRanksChanged) -> None:
        match event:
            case DeviceJudged():
                self._job.triage.judged(event)
            case DeviceChecked():
                self._job.triage.checked(event)
            case BreakerClosed():
                self._job.close_breaker(event.at_ms)
            case SlowRanksChanged():
                self._job.slow_ranks(event)

    def _of_worker(self, event: WorkerEvent) -> None:
        record = self._rack.current(event)
        if record is None:
            return
        if record.rank is None and isinstance(event, _OF_A_START) and record.alive:
            self._of_living(event, record)  # these events say nothing about the members
            return
        self._forget_members()
        if isinstance(event, WorkerExited):
            self._exited(event, record)
        elif record.alive:
            self._of_living(event, record)
        elif isinstance(event, SnapshotMirrored | SnapshotStriped) and not record.lied:
            self._job.recovery.sources.heard(
                record, event
            )  # copies outlive the worker; nothing else from a condemned worker counts
        self._forget_members()

    def _of_living(self, event: WorkerEvent, record: WorkerRecord) -> None:
        match event:  # events that all ranks send at once are matched first
            case WorkerParked():
                self._job.recovery.parked(record, event)
            case WorkerResumed():
                self._job.recovery.resumed(record, event)
            case SnapshotMirrored() | SnapshotStriped() | SnapshotDamaged():
                self._job.recovery.sources.heard(record, event)
            case WorkerReady():
                self._job.numerics.heard(event)
                self._job.beginning.ready(record, event, event.at_ms)
            case WorkerElastic():
                self._job.beginning.elastic(event.at_ms)
            case WorkerPaused():
                self._job.swap.paused(record, event)
            case WorkerFinished():
                self._job.finished(record, event)
            case WorkerSevered():
                self._job.recovery.severed(record, event)
            case WorkerUnbuilt():
                self._job.unbuilt(record, event)
            case WorkerStalled() | WorkerBusy():
                self._stands_still(event, record)
            case ReplicasDiffer() | LossNotRepeated():
                self._job.corruption.heard(event, record)
            case BatchChanged():
                self._job.batches.heard(event)
            case WorkerExited():
                raise AssertionError("it is not alive then")
            case _:
                assert_never(event)

    def _tray_joined(self, event: TrayJoined) -> None:
        if event.tray in self._rack.trays:
            self._tray_lost(event.tray, f"{event.tray} came back empty", event.at_ms)
        if self._job.world.phase is not Phase.STOPPED:
            self._rack.join(event)
            self._job.acquiring.tray_joined(event.tray, event.at_ms)
            self._job.joined(event)

    def _tray_lost(self, tray: TrayId, because: str, at_ms: int, *, returns: bool = False) -> None:
        if tray not in self._rack.trays:
            if self._rack.returning.pop(tray, None) and self._job.world.phase is not Phase.STOPPED:
                self._job.slot_empty(at_ms)  # whatever waits for the tray has to be checked again
            return
        address = self._rack.trays[tray].snapshots
        if (why := self._rack.departing.get(tray)) is not None:
            because = f"{because}; {why}"
        losses = self._rack.lose_tray(tray, because, returns=returns)
        self._job.triage.forget(tray)
        self._job.control.tray_lost(tray)
        self._job.acquiring.tray_lost(tray, at_ms)
        self._job.recovery.sources.forget_tray(tray)
        self._job.lost(losses, at_ms)
        self._job.recovery.sources.tray_lost(tray, address, at_ms)

    def _exited(self, event: WorkerExited, record: WorkerRecord) -> None:
        condemned = not record.alive
        self._job.world.reached = max(self._job.world.reached, Position(event.step))
        loss = self._rack.exited(record, event)
        self._job.recovery.sources.remember(record, event)
        if condemned:  # it was counted as lost when it was fenced
            self._job.recovery.seen_to_end(loss)
            self._job.slot_empty(event.at_ms)
        else:
            self._job.lost([loss], event.at_ms)

    def _stands_still(self, event: WorkerStalled | WorkerBusy, record: WorkerRecord) -> None:
        """Handle a worker without progress. A member's stall concerns the whole world, a spare's only itself."""
        if isinstance(event, WorkerBusy):
            if record.rank is not None:
                self._job.recovery.standstill.works(record, event)
            return
        because = f"silent for {event.for_ms} ms" if event.silent else f"stalled for {event.for_ms} ms"
        because += f": {stands(event)}" if event.unit else f": {event.where}" if event.where else ""
        if event.over:
            if record.rank is not None:
                self._job.recovery.standstill.stalled(record, event)
        elif record.state is WorkerState.RELEASED:
            self._job.finale.stands_still(
                record, event, because, lambda one, why: self._rack.fence(one, why, fault=True)
            )
        elif record.rank is None:
            if not event.early or self._hangs_in_setup(event, record):
                self._out.append(self._rack.fence(record, because, fault=True))
        elif self._job.world.phase is Phase.SETUP and event.early:
            self._job.recovery.standstill.stalled(record, event)
            if record.rank in self._job.recovery.standstill.hung(event.at_ms):
                self._out.append(self._rack.fence(record, because, fault=True))
                self._job.lost([Loss(record=record, because=because)], event.at_ms)
        elif self._job.world.phase is Phase.SETUP:
            if event.silent or not event.waiting:
                self._out.append(self._rack.fence(record, because, fault=True))
                self._job.lost([Loss(record=record, because=because)], event.at_ms)
        else:
            self._job.recovery.standstill.stalled(record, event)

    def _hangs_in_setup(self, event: WorkerStalled, record: WorkerRecord) -> bool:
        """Return whether an idle spare hangs in its setup, by the setup times of other workers."""
        known_ms = self._job.beginning.setup_ms
        return record.state is WorkerState.STARTING and known_ms >= 0 and hangs(event.for_ms, [known_ms])

    # -- looking on ------------------------------------------------------------------------------------------------
    def view(self) -> View:
        """Return the job as a status page shows it."""
        world, rack, seating = self._job.world, self._rack, self._job.seating
        racks, cliques = seating.racks(), seating.cliques()
        keepers = keepers_of(world.plan) if world.plan else {}
        return View(
            phase=world.phase.value,
            elastic=world.elastic,
            generation=world.generation,
            world_size=world.size,
            most=world.most,
            policy=str(world.policy),
            restarts=world.restarts,
            committed=world.plan.committed if world.plan else BEGIN,
            reason=world.reason,
            ranks=tuple(self._rank_view(rank, slot) for rank, slot in sorted(world.seats.items())),
            spares=tuple(
                SpareView(slot=record.worker.slot, incarnation=record.worker.incarnation, state=record.state.value)
                for record in rack.spares()
            ),
            trays=tuple(
                TrayView(
                    tray=tray,
                    host=rack.trays[tray].host,
                    slots=rack.trays[tray].slots,
                    quarantined=tuple(s for s in rack.slots_on(tray) if rack.quarantined(s)),
                    against={s: why for s, why in rack.devices.against().items() if tray_of(s) == tray},
                    withdrawn={s: why for s in rack.slots_on(tray) if (why := rack.withdrawn(s))},
                    unjudged=rack.trays[tray].unjudged,
                    rack=racks.get(tray, ""),
                    clique=str(cliques.get(tray, "")),
                    keepers=keepers.get(tray, ()),
                )
                for tray in sorted(rack.trays, key=natural)
            ),
        )

    def _rank_view(self, rank: Rank, slot: SlotId) -> RankView:
        record = self._job.world.members.get(rank)
        if record is None:
            return RankView(rank=rank, slot=slot, incarnation=None, state="lost")
        state = "finished" if record.finished and record.state is WorkerState.TRAINING else record.state.value
        return RankView(rank=rank, slot=slot, incarnation=record.worker.incarnation, state=state)

    def check_invariants(self) -> None:
        """Raise AssertionError if the core contradicts itself. Tests call it after every event."""
        self._rack.check_invariants()
        self._job.world.check_invariants()
        self._job.shifting.check_invariants()
        self._job.recovery.fencing.check_invariants()


def _up_to_the_end(commands: Sequence[Command]) -> tuple[Command, ...]:
    """Return the commands up to the one that ends the job. One event may give several reasons to act, and the later
    ones no longer matter."""
    end = next((at for at, command in enumerate(commands) if isinstance(command, StopJob)), len(commands))
    return tuple(commands[: end + 1])
