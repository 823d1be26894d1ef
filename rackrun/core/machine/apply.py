"""Apply: one table from each type of event to the function that takes it into the state.

What is stale is rejected here, once: what a former worker or generation says, and what is said of a tray that is not
there. A stale event changes nothing. Whether an event fits the phase is up to who handles it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from rackrun.core.faults.peer_times import hangs
from rackrun.core.faults.stall_window import stands
from rackrun.core.generation.facts import HardwareChanged, SlotFreed, StartFailed, SwapDue, TrayDeparts
from rackrun.core.generation.world import Phase
from rackrun.core.machine.job import CoreParts
from rackrun.core.machine.rules import settle
from rackrun.core.machine.timers import fire
from rackrun.core.members.workers import Loss, WorkerRecord, WorkerState
from rackrun.core.policy.measured_costs import MEASURED
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
    SourcesDiffer,
    StopRequested,
    SwapRequested,
    TimerFired,
    TrayDescribed,
    TrayJoined,
    TrayLost,
    TrayStoodStill,
    WorkerBusy,
    WorkerElastic,
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
from rackrun.protocol.ids import Position, TrayId
from rackrun.protocol.timers import OfGeneration

__all__ = ["APPLY", "APPLY_OF_WORKER", "apply"]

E = TypeVar("E", bound=Event)
W = TypeVar("W", bound=OfWorker)
_OfJob = Callable[[CoreParts, E], None]
_OfWorker = Callable[[CoreParts, WorkerRecord, W], None]

APPLY: dict[type[Event], Callable[[CoreParts, Event], None]] = {}
"""For each type of event that no worker sends: the function that takes it into the state."""
APPLY_OF_WORKER: dict[type[Event], Callable[[CoreParts, WorkerRecord, Event], None]] = {}
"""The same for the events of workers. The function is given the worker's record."""

_OF_A_START = frozenset((WorkerReady, WorkerElastic))
"""Events that a spare sends when it starts. They say nothing about the members."""
_OF_GENERATION = frozenset((WorkerParked, WorkerResumed, WorkerPaused, WorkerSevered, WorkerUnbuilt))
"""Events that count in the present generation only."""
_OF_PLAN = frozenset((ReplicasDiffer, SlowRanksChanged))
"""Events that count as long as the latest plan is that of their generation, even if it is broken."""
_OF_TRAY = frozenset((DeviceJudged, DeviceChecked, TrayDescribed, TrayStoodStill))
"""Events that count while their tray is there."""
_OUTLIVES = frozenset((SnapshotMirrored, SnapshotStriped))
"""Events that count although their worker is condemned, because copies outlive it."""


_Kind: TypeAlias = tuple[str, Callable[..., None], bool, bool, bool, Callable[[CoreParts, Any], bool] | None]
"""What there is to know about a type of event, found by one look-up, since a job of thousands of ranks has many events:
its name; its function in the table; whether it is a worker's; whether a spare sends it when it starts; whether costs are
measured from it; and what tells whether one is stale although its worker, if it has one, is there (None: it never is).
"""


def apply(job: CoreParts, event: Event) -> bool:
    """Take an event into the state, and act on the facts that it leaves. Return False, with nothing changed, if the
    event is stale."""
    name, act, of_worker, of_start, measured, is_stale = _KINDS[type(event)]
    if job.world.phase is Phase.STOPPED:
        return False
    record = job.rack.current(event) if of_worker else None  # type: ignore[arg-type]
    if of_worker and (record is None or not (record.alive or _outlives(record, event))):
        return False
    if is_stale is not None and is_stale(job, event):
        return False
    if measured:
        job.cost_meter.measure_event(event)
    members = job.recovery.parked_members
    of_spare = of_start and record is not None and record.rank is None
    if not of_spare and members.found is not None:
        members.forget()
    job.out.rule = name
    if of_worker:
        act(job, record, event)
    else:
        act(job, event)
    if job.facts.found:
        settle(job, event.at_ms)
    if not of_spare and members.found is not None:
        members.forget()
    return True


def _outlives(record: WorkerRecord, event: Event) -> bool:
    """Return whether an event of a condemned worker counts: its exit, and its copies unless its state was wrong."""
    kind = type(event)
    return kind is WorkerExited or (kind in _OUTLIVES and not record.corrupt)


def _kind(kind: type[Event]) -> _Kind:
    of_worker = kind in APPLY_OF_WORKER
    act: Callable[..., None] = APPLY_OF_WORKER[kind] if of_worker else APPLY[kind]
    return kind.__name__, act, of_worker, kind in _OF_A_START, kind in MEASURED, _staleness(kind)


def _staleness(kind: type[Event]) -> Callable[[CoreParts, Any], bool] | None:
    """Return what tells whether an event of this type comes from a generation, or about a tray, that is no more."""
    if kind in _OF_GENERATION:
        return lambda job, event: event.generation != job.world.generation
    if kind in _OF_PLAN:
        return lambda job, event: job.world.plan is None or event.generation != job.world.plan.generation
    if kind in _OF_TRAY:
        return lambda job, event: event.tray not in job.rack.trays
    if kind is TrayLost:
        return lambda job, event: event.tray not in job.rack.trays and event.tray not in job.rack.returning
    if kind is TimerFired:
        return lambda job, event: (
            isinstance(event.timer, OfGeneration) and event.timer.generation != job.world.generation
        )
    return None


def _on(kind: type[E]) -> Callable[[_OfJob[E]], _OfJob[E]]:
    def add(function: _OfJob[E]) -> _OfJob[E]:
        APPLY[kind] = function  # type: ignore[index, assignment]
        return function

    return add


def _on_worker(kind: type[W]) -> Callable[[_OfWorker[W]], _OfWorker[W]]:
    def add(function: _OfWorker[W]) -> _OfWorker[W]:
        APPLY_OF_WORKER[kind] = function  # type: ignore[index, assignment]
        return function

    return add


# -- members: what a generation hears from its ranks -------------------------------------------------------------------
@_on_worker(WorkerParked)
def _parked(job: CoreParts, record: WorkerRecord, event: WorkerParked) -> None:
    job.recovery.parked(record, event)


@_on_worker(WorkerResumed)
def _resumed(job: CoreParts, record: WorkerRecord, event: WorkerResumed) -> None:
    job.recovery.resumed(record, event)


@_on_worker(WorkerSevered)
def _severed(job: CoreParts, record: WorkerRecord, event: WorkerSevered) -> None:
    job.recovery.severed(record, event)


@_on_worker(WorkerUnbuilt)
def _unbuilt(job: CoreParts, record: WorkerRecord, event: WorkerUnbuilt) -> None:
    if job.world.phase is not Phase.SETUP:
        job.recovery.unbuilt(record, event)
    elif record.rank is not None:
        # All ranks were there, and the others may wait for this rank in NCCL; only ending them ends that wait.
        because = f"could not build its groups ({event.because})"
        losses = [Loss(record=record, because=because)]
        job.facts.add(StartFailed(f"rank {record.rank} {because}", losses))


@_on_worker(WorkerPaused)
def _paused(job: CoreParts, record: WorkerRecord, event: WorkerPaused) -> None:
    job.swap.paused(record, event)


@_on_worker(WorkerReady)
def _ready(job: CoreParts, record: WorkerRecord, event: WorkerReady) -> None:
    job.numerics.compare(event)
    job.beginning.ready(record, event, event.at_ms)


@_on_worker(WorkerElastic)
def _elastic(job: CoreParts, record: WorkerRecord, event: WorkerElastic) -> None:  # noqa: ARG001
    job.beginning.elastic()


@_on_worker(WorkerFinished)
def _finished(job: CoreParts, record: WorkerRecord, event: WorkerFinished) -> None:
    """Record that ``main`` has returned on a rank."""
    if record.rank is None or record.state is WorkerState.RELEASED:
        return
    record.finished, record.returned_in_ms = True, event.took_ms
    if record.state is WorkerState.STARTING:  # its `main` returned before the first step
        job.beginning.ready(record, None, event.at_ms)
        settle(job, event.at_ms)
    elif job.world.phase is Phase.TRAINING:
        job.world.answered(record.rank)
    job.shutdown.release_if_finished(event.at_ms)


@_on_worker(WorkerExited)
def _exited(job: CoreParts, record: WorkerRecord, event: WorkerExited) -> None:
    condemned = not record.alive
    job.world.reached = max(job.world.reached, Position(event.step))
    loss = job.rack.exited(record, event)
    job.recovery.sources.remember(record, event)
    if condemned:  # it was counted as lost when it was fenced
        job.recovery.seen_to_end(loss)
        job.facts.add(SlotFreed())
    else:
        job.losses.lost([loss], event.at_ms)


@_on_worker(WorkerStalled)
def _stalled(job: CoreParts, record: WorkerRecord, event: WorkerStalled) -> None:
    """A worker makes no progress. A member's stall concerns the whole world, a spare's only itself."""
    standstill, setup = job.recovery.stalls, job.world.phase is Phase.SETUP
    because = f"silent for {event.for_ms} ms" if event.silent else f"stalled for {event.for_ms} ms"
    because += f": {stands(event)}" if event.unit else f": {event.where}" if event.where else ""
    if event.over:
        if record.rank is not None:
            standstill.stalled(record, event)
            job.recovery.runs_again(record, event.at_ms)
    elif record.state is WorkerState.RELEASED:
        job.shutdown.stands_still(record, event, because)
    elif record.rank is None:
        if not event.early or _hangs_in_setup(job, record, event):
            job.out.emit(job.rack.fence(record, because, fault=True))
    elif setup and event.early:
        standstill.stalled(record, event)
        if record.rank in standstill.hung(event.at_ms):
            _lose_in_setup(job, record, because, event.at_ms)
    elif setup:
        if event.silent or not event.waiting:
            _lose_in_setup(job, record, because, event.at_ms)
    elif not (event.silent and job.recovery.leave_silent(record, event.where or because, event.at_ms)):
        standstill.stalled(record, event)


def _lose_in_setup(job: CoreParts, record: WorkerRecord, because: str, at_ms: int) -> None:
    job.out.emit(job.rack.fence(record, because, fault=True))
    job.losses.lost([Loss(record=record, because=because)], at_ms)


def _hangs_in_setup(job: CoreParts, record: WorkerRecord, event: WorkerStalled) -> bool:
    """Return whether an idle spare hangs in its setup, by the setup times of other workers."""
    known_ms = job.beginning.setup_ms
    return record.state is WorkerState.STARTING and known_ms >= 0 and hangs(event.for_ms, [known_ms])


@_on_worker(WorkerBusy)
def _busy(job: CoreParts, record: WorkerRecord, event: WorkerBusy) -> None:
    if record.rank is not None:
        job.recovery.stalls.works(record, event)


@_on_worker(BatchChanged)
def _batch_changed(job: CoreParts, record: WorkerRecord, event: BatchChanged) -> None:  # noqa: ARG001
    job.batches.report(event)


@_on_worker(ReplicasDiffer)
def _replicas_differ(job: CoreParts, record: WorkerRecord, event: ReplicasDiffer) -> None:  # noqa: ARG001
    job.corruption.replicas_differ(event)


@_on_worker(LossNotRepeated)
def _loss_not_repeated(job: CoreParts, record: WorkerRecord, event: LossNotRepeated) -> None:
    if record.rank is not None:
        job.corruption.loss_not_repeated(event, record.rank)


# -- snapshots ---------------------------------------------------------------------------------------------------------
@_on_worker(SnapshotMirrored)
def _mirrored(job: CoreParts, record: WorkerRecord, event: SnapshotMirrored) -> None:
    job.recovery.sources.mirrored(record, event)


@_on_worker(SnapshotStriped)
def _striped(job: CoreParts, record: WorkerRecord, event: SnapshotStriped) -> None:
    job.recovery.sources.striped(record, event)


@_on_worker(SnapshotDamaged)
def _damaged(job: CoreParts, record: WorkerRecord, event: SnapshotDamaged) -> None:
    job.recovery.sources.damaged(record, event)


@_on_worker(SourcesDiffer)
def _sources_differ(job: CoreParts, record: WorkerRecord, event: SourcesDiffer) -> None:
    job.recovery.sources.differ(record, event)


# -- trays -------------------------------------------------------------------------------------------------------------
@_on(TrayJoined)
def _tray_joined(job: CoreParts, event: TrayJoined) -> None:
    """A tray has joined: its slots are free."""
    if event.tray in job.rack.trays:
        _lose_tray(job, event.tray, f"{event.tray} came back empty", event.at_ms)
        settle(job, event.at_ms)
    if job.world.phase is Phase.STOPPED:
        return
    job.rack.join(event)
    job.acquiring.tray_joined(event.tray, event.at_ms)
    settle(job, event.at_ms)
    if job.world.phase is Phase.FORMING:
        job.forming.joined(event)
    else:
        job.forming.joined_late(event)
        job.facts.add(SlotFreed())


@_on(TrayDescribed)
def _tray_described(job: CoreParts, event: TrayDescribed) -> None:
    """The topology of a tray that has already joined is known now."""
    joined = msgspec.structs.replace(job.rack.trays[event.tray], at_ms=event.at_ms, topology=event.topology)
    job.rack.describe(joined)
    if job.world.phase is not Phase.FORMING:
        job.forming.joined_late(joined)
        job.facts.add(HardwareChanged())


@_on(TrayLost)
def _tray_lost(job: CoreParts, event: TrayLost) -> None:
    _lose_tray(job, event.tray, f"{event.tray} lost: {event.because}", event.at_ms, returns=event.returns)


def _lose_tray(job: CoreParts, tray: TrayId, because: str, at_ms: int, *, returns: bool = False) -> None:
    if tray not in job.rack.trays:
        if job.rack.returning.pop(tray, None):
            job.facts.add(SlotFreed())  # whatever waits for the tray has to be checked again
        return
    address = job.rack.trays[tray].snapshots
    if (why := job.rack.departing.get(tray)) is not None:
        because = f"{because}; {why}"
    losses = job.rack.lose_tray(tray, because, returns=returns)
    job.triage.forget(tray)
    job.operator_requests.tray_lost(tray)
    job.acquiring.tray_lost(tray, at_ms)
    job.recovery.sources.forget_tray(tray)
    job.losses.lost(losses, at_ms)
    job.recovery.sources.tray_lost(tray, address)


@_on(DepartureAnnounced)
def _departs(job: CoreParts, event: DepartureAnnounced) -> None:
    job.facts.add(TrayDeparts(event))


# -- hardware ----------------------------------------------------------------------------------------------------------
@_on(DeviceJudged)
def _device_judged(job: CoreParts, event: DeviceJudged) -> None:
    job.triage.judged(event)


@_on(DeviceChecked)
def _device_checked(job: CoreParts, event: DeviceChecked) -> None:
    job.triage.checked(event)


@_on(TrayStoodStill)
def _stood_still(job: CoreParts, event: TrayStoodStill) -> None:
    job.standstills.stood_still(event)


@_on(BreakerClosed)
def _breaker_closed(job: CoreParts, event: BreakerClosed) -> None:
    """Act on the verdicts that the circuit breaker holds back."""
    job.triage.close_breaker(event.at_ms)
    settle(job, event.at_ms)
    if job.world.plan is not None:
        job.straggler_response.close_breaker(job.world.seats, event.at_ms)


@_on(SlowRanksChanged)
def _slow_ranks_changed(job: CoreParts, event: SlowRanksChanged) -> None:
    job.straggler_response.report(event, job.world.seats)
    settle(job, event.at_ms)  # a swap that begins now ends the generation, and no shares are dealt
    job.shifting.measure(event)


# -- operators, policy and provider ------------------------------------------------------------------------------------
@_on(DrainRequested)
def _drain_requested(job: CoreParts, event: DrainRequested) -> None:
    job.operator_requests.drain(event)


@_on(ReturnRequested)
def _return_requested(job: CoreParts, event: ReturnRequested) -> None:
    job.operator_requests.give_back(event)


@_on(SwapRequested)
def _swap_requested(job: CoreParts, event: SwapRequested) -> None:
    job.operator_requests.swap(event)


@_on(ShrinkRequested)
def _shrink_requested(job: CoreParts, event: ShrinkRequested) -> None:
    job.resize_requests.ask(event)
    job.facts.add(SwapDue())


@_on(GrowRequested)
def _grow_requested(job: CoreParts, event: GrowRequested) -> None:
    job.resize_requests.ask(event)
    job.facts.add(SwapDue())


@_on(PolicyRequested)
def _policy_requested(job: CoreParts, event: PolicyRequested) -> None:
    job.operator_requests.change_policy(event)
    job.facts.add(SwapDue())


@_on(PolicyAnswered)
def _policy_answered(job: CoreParts, event: PolicyAnswered) -> None:
    job.recovery.answered(event)


@_on(RackDelivered)
def _rack_delivered(job: CoreParts, event: RackDelivered) -> None:
    job.acquiring.delivered(event)


@_on(RackRefused)
def _rack_refused(job: CoreParts, event: RackRefused) -> None:
    job.acquiring.refused(event)


@_on(RackPreempted)
def _rack_preempted(job: CoreParts, event: RackPreempted) -> None:
    job.acquiring.preempted(event)


@_on(StopRequested)
def _stop_requested(job: CoreParts, event: StopRequested) -> None:
    job.shutdown.requested(event, may_drain=job.may_drain)


# -- the coordinator itself --------------------------------------------------------------------------------------------
@_on(CostsMeasured)
def _costs_measured(job: CoreParts, event: CostsMeasured) -> None:
    """The meter has recorded them."""


@_on(JournalFailed)
def _journal_failed(job: CoreParts, event: JournalFailed) -> None:
    because = f"generation {job.world.generation} could not be persisted: {event.because}"
    job.end.stop(3, because, remedy="free disk space where the journal is kept, and start again.")


@_on(TimerFired)
def _timer_fired(job: CoreParts, event: TimerFired) -> None:
    fire(job, event.timer, event.at_ms)


_KINDS = {kind: _kind(kind) for kind in (*APPLY, *APPLY_OF_WORKER)}
