"""Rules: who acts on the facts that an event has left, and what is looked at after every event.

`settle` acts on each fact; the facts that follow from one are handled before the next. `advance` then goes through the
rules of `RULES`, in order. Both tell the outbox which rule they apply, so that every command has its cause.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TypeVar

from rackrun.core.generation.facts import (
    AllTrain,
    Fact,
    HardwareChanged,
    PlanImpossible,
    RanksRetired,
    RecoveryOverdue,
    RestartDue,
    ShrinkImpossible,
    SlotFreed,
    SlotsNeeded,
    StartFailed,
    StateWrong,
    StepRepeats,
    SwapDue,
    TrayDeparts,
    WorkersMustGo,
    WorkersStall,
)
from rackrun.core.generation.world import Phase
from rackrun.core.machine.job import CoreParts
from rackrun.core.members.workers import Loss
from rackrun.protocol.commands import SetTimer
from rackrun.protocol.events import StopRequested
from rackrun.protocol.timers import QuarantineOver

__all__ = ["REACTIONS", "RULES", "advance", "settle"]

F = TypeVar("F", bound=Fact)
_Reaction = Callable[[CoreParts, F, int], None]

REACTIONS: dict[type[Fact], Callable[[CoreParts, Fact, int], None]] = {}
"""For each type of fact: who acts on it."""


def advance(job: CoreParts, at_ms: int) -> None:
    """Apply the rules that have something to look at: after almost every event none has."""
    if not any(_everything(job)):
        return
    for name, where, rule in RULES:
        if attrgetter(where)(job):
            job.out.rule = name
            rule(job, at_ms)
            if job.facts.found:
                settle(job, at_ms)


def settle(job: CoreParts, at_ms: int) -> None:
    """Act on the facts that were found, and on those that follow from them, until there is none or the job stops."""
    caller = job.out.rule
    waiting = job.facts.take()
    waiting.reverse()
    while waiting and job.world.phase is not Phase.STOPPED:
        fact = waiting.pop()
        kind = type(fact)
        job.out.rule = kind.__name__
        REACTIONS[kind](job, fact, at_ms)
        found = job.facts.take()
        found.reverse()
        waiting += found
    job.out.rule = caller


# -- facts -------------------------------------------------------------------------------------------------------------
def _on(kind: type[F]) -> Callable[[_Reaction[F]], _Reaction[F]]:
    def add(function: _Reaction[F]) -> _Reaction[F]:
        REACTIONS[kind] = function  # type: ignore[index, assignment]
        return function

    return add


@_on(SlotFreed)
def _use_slots(job: CoreParts, fact: SlotFreed, at_ms: int) -> None:  # noqa: ARG001
    """Let whatever waits for a slot continue."""
    match job.world.phase:
        case Phase.FORMING:
            job.forming.form_if_possible(at_ms)
        case Phase.TRAINING:
            job.spare_top_up.top_up(at_ms)
        case Phase.PARKING:
            job.recovery.decide(at_ms)
        case Phase.RESTARTING:
            job.restart.launch_if_possible()
        case _:
            pass


@_on(HardwareChanged)
def _look_again(job: CoreParts, fact: HardwareChanged, at_ms: int) -> None:  # noqa: ARG001
    job.facts.add(SlotFreed())
    job.facts.add(SwapDue())


@_on(SwapDue)
def _begin_swap(job: CoreParts, fact: SwapDue, at_ms: int) -> None:  # noqa: ARG001
    if job.world.stopping is None:
        job.swap.pause_if_due(at_ms)


@_on(SlotsNeeded)
def _call_off_drains(job: CoreParts, fact: SlotsNeeded, at_ms: int) -> None:  # noqa: ARG001
    job.operator_requests.call_off_drains()
    job.facts.add(SlotFreed())


@_on(RecoveryOverdue)
def _give_up(job: CoreParts, fact: RecoveryOverdue, at_ms: int) -> None:  # noqa: ARG001
    job.recovery.give_up(at_ms)


@_on(WorkersMustGo)
def _fence(job: CoreParts, fact: WorkersMustGo, at_ms: int) -> None:
    if job.world.phase in (Phase.ENDING, Phase.STOPPED):
        return  # all workers end anyway
    there = [(job.rack.occupants.get(worker.slot), worker, why) for worker, why in fact.because.items()]
    losses = [
        Loss(record=record, because=why)
        for record, worker, why in there
        if record is not None and record.alive and record.worker == worker
    ]
    for loss in losses:
        job.recovery.fencing.fence(loss.record, loss.because)
    job.losses.lost(losses, at_ms)


@_on(WorkersStall)
def _condemn(job: CoreParts, fact: WorkersStall, at_ms: int) -> None:
    job.recovery.condemn(fact.records, fact.because, at_ms)


@_on(StepRepeats)
def _repeat_step(job: CoreParts, fact: StepRepeats, at_ms: int) -> None:
    job.recovery.absorb(fact.because, at_ms)


@_on(PlanImpossible)
def _plan_again(job: CoreParts, fact: PlanImpossible, at_ms: int) -> None:
    job.recovery.plan_again(fact.because, at_ms)


@_on(ShrinkImpossible)
def _refuse_shrink(job: CoreParts, fact: ShrinkImpossible, at_ms: int) -> None:  # noqa: ARG001
    job.resize_requests.called_off(fact.because)


@_on(StartFailed)
def _start_again(job: CoreParts, fact: StartFailed, at_ms: int) -> None:
    job.restart.early(fact.because, fact.losses, at_ms)


@_on(RestartDue)
def _restart(job: CoreParts, fact: RestartDue, at_ms: int) -> None:
    job.restart.begin(fact.because, fact.loss, at_ms)


@_on(RanksRetired)
def _retire(job: CoreParts, fact: RanksRetired, at_ms: int) -> None:
    job.shutdown.retired(fact.losses, at_ms)


@_on(StateWrong)
def _replace_wrong(job: CoreParts, fact: StateWrong, at_ms: int) -> None:
    """Fence workers whose state is wrong, and use nothing that they leave behind."""
    for record in fact.records:
        record.corrupt = True
        job.recovery.fencing.fence(record, fact.because, fault=True)
    job.losses.lost([Loss(record=record, because=fact.because) for record in fact.records], at_ms)


@_on(AllTrain)
def _train(job: CoreParts, fact: AllTrain, at_ms: int) -> None:  # noqa: ARG001
    """Begin what had to wait until all ranks compute."""
    job.acquiring.allow_requests()
    job.spare_top_up.rest(at_ms)
    job.spare_top_up.top_up(at_ms)
    job.shutdown.drain()
    job.shutdown.release_if_finished(at_ms)
    if job.world.stopping is None:
        job.swap.pause_if_due(at_ms)
    job.shifting.deal()
    job.recovery.stalls.judge()


@_on(TrayDeparts)
def _depart(job: CoreParts, fact: TrayDeparts, at_ms: int) -> None:  # noqa: ARG001
    """Let a tray leave. If it is the last one, the job ends in order."""
    event = fact.event
    if not job.operator_requests.departs(event) and job.world.phase is not Phase.FORMING:
        because = f"{event.because}, and no other tray stays"
        stop = StopRequested(at_ms=event.at_ms, because=because, exit_code=event.exit_code)
        job.shutdown.departed(stop, may_drain=job.may_drain)


# -- after every event -------------------------------------------------------------------------------------------------
def _wake_breaker(job: CoreParts, at_ms: int) -> None:  # noqa: ARG001
    job.triage.set_timer()


def _follow_racks(job: CoreParts, at_ms: int) -> None:
    job.acquiring.advance(at_ms)


def _release_racks(job: CoreParts, at_ms: int) -> None:  # noqa: ARG001
    job.acquiring.release_if_not_awaited()


def _follow_requests(job: CoreParts, at_ms: int) -> None:
    if job.operator_requests.advance(at_ms):
        job.facts.add(SwapDue())


def _follow_sizes(job: CoreParts, at_ms: int) -> None:  # noqa: ARG001
    job.resize_requests.answer_if_done()


def _kill_condemned(job: CoreParts, at_ms: int) -> None:
    job.recovery.fencing.kill_if_parked(at_ms)


def _lift_quarantines(job: CoreParts, at_ms: int) -> None:  # noqa: ARG001
    for slot, until_ms in job.rack.quarantine.take_new():
        job.out.emit(SetTimer(timer=QuarantineOver(slot), at_ms=until_ms))


RULES: tuple[tuple[str, str, Callable[[CoreParts, int], None]], ...] = (
    ("BreakerWaits", "triage.breaker.waiting", _wake_breaker),
    ("RackRented", "acquiring.rented", _follow_racks),
    ("RackWithheld", "acquiring.withheld", _release_racks),
    ("RequestUnderWay", "operator_requests.under_way", _follow_requests),
    ("ResizeUnderWay", "resize_requests.under_way", _follow_sizes),
    ("FenceHeld", "recovery.fencing.held", _kill_condemned),
    ("SlotQuarantined", "rack.quarantine.new", _lift_quarantines),
)
"""The conditions that are looked at after every event: the name, where it is looked, and the rule that is applied if
there is anything."""
_everything = attrgetter(*[where for _, where, _ in RULES])
