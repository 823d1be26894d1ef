"""Timers: one table from each type of timer to the function that is called when it has expired."""

# ruff: noqa: ARG001 - all of the table's functions take the same arguments

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rackrun.core.generation.facts import SlotFreed, SwapDue
from rackrun.core.generation.world import Phase
from rackrun.core.lifecycle.shutdown import EXITS_MS
from rackrun.core.machine.job import CoreParts
from rackrun.protocol.commands import Worker
from rackrun.protocol.timers import (
    BreakerWakes,
    CondemnedExitsOver,
    CopiesOver,
    DrainOver,
    ExitsOver,
    FenceOver,
    GatherOver,
    GrowthDue,
    HoldReminder,
    JobBegins,
    JoinGraceOver,
    JoinOver,
    LateStallsGathered,
    ParkOver,
    PauseOver,
    PolicyOver,
    QuarantineOver,
    RackStageOver,
    RecoverOver,
    RecoverySettled,
    RepairOver,
    ResumeOver,
    SelfExitOver,
    StallsGathered,
    StandstillsGathered,
    StartsGathered,
    Timer,
    UnfitWaitOver,
)

__all__ = ["TIMERS", "fire"]

T = TypeVar("T", bound=Timer)
_Expiry = Callable[[CoreParts, T, int], None]

TIMERS: dict[type[Timer], Callable[[CoreParts, Timer, int], None]] = {}
"""For each type of timer: what happens when it has expired."""


def fire(job: CoreParts, timer: Timer, at_ms: int) -> None:
    """Handle an expired timer."""
    kind = type(timer)
    job.out.rule = kind.__name__
    TIMERS[kind](job, timer, at_ms)


def _on(kind: type[T]) -> Callable[[_Expiry[T]], _Expiry[T]]:
    def add(function: _Expiry[T]) -> _Expiry[T]:
        TIMERS[kind] = function  # type: ignore[index, assignment]
        return function

    return add


@_on(JobBegins)
def _begin(job: CoreParts, timer: JobBegins, at_ms: int) -> None:
    """Nothing: the time limit for trays to join is set by the first event, whatever it is."""


@_on(JoinOver)
def _join_over(job: CoreParts, timer: JoinOver, at_ms: int) -> None:
    job.forming.join_over()


@_on(JoinGraceOver)
def _last_call_over(job: CoreParts, timer: JoinGraceOver, at_ms: int) -> None:
    job.forming.last_call_over(at_ms)


@_on(UnfitWaitOver)
def _fit_over(job: CoreParts, timer: UnfitWaitOver, at_ms: int) -> None:
    job.forming.fit_over()


@_on(StartsGathered)
def _starts_gathered(job: CoreParts, timer: StartsGathered, at_ms: int) -> None:
    job.losses.bugs_overdue(at_ms)


@_on(DrainOver)
def _drain_over(job: CoreParts, timer: DrainOver, at_ms: int) -> None:
    job.shutdown.overdue()


@_on(GatherOver)
def _gather_over(job: CoreParts, timer: GatherOver, at_ms: int) -> None:
    job.recovery.gather_over(at_ms)


@_on(ParkOver)
def _park_over(job: CoreParts, timer: ParkOver, at_ms: int) -> None:
    job.recovery.park_over(at_ms)


@_on(CondemnedExitsOver)
def _owed_over(job: CoreParts, timer: CondemnedExitsOver, at_ms: int) -> None:
    job.recovery.owed_over(at_ms)


@_on(RecoverOver)
def _recover_over(job: CoreParts, timer: RecoverOver, at_ms: int) -> None:
    job.recovery.recover_over(at_ms)


@_on(RepairOver)
def _repair_over(job: CoreParts, timer: RepairOver, at_ms: int) -> None:
    job.recovery.repair_over(at_ms)


@_on(HoldReminder)
def _remind_of_hold(job: CoreParts, timer: HoldReminder, at_ms: int) -> None:
    job.recovery.hold.remind(at_ms)


@_on(ResumeOver)
def _resume_over(job: CoreParts, timer: ResumeOver, at_ms: int) -> None:
    job.recovery.resume_over(at_ms)


@_on(FenceOver)
def _fence_over(job: CoreParts, timer: FenceOver, at_ms: int) -> None:
    job.recovery.fencing.overdue(Worker(timer.slot, timer.incarnation))


@_on(StallsGathered)
def _stalls_gathered(job: CoreParts, timer: StallsGathered, at_ms: int) -> None:
    job.recovery.stalls.gathered(at_ms)


@_on(LateStallsGathered)
def _patience_over(job: CoreParts, timer: LateStallsGathered, at_ms: int) -> None:
    job.recovery.stalls.patience_over()


@_on(PolicyOver)
def _policy_over(job: CoreParts, timer: PolicyOver, at_ms: int) -> None:
    job.recovery.overdue(timer.question, at_ms)


@_on(StandstillsGathered)
def _standstills_gathered(job: CoreParts, timer: StandstillsGathered, at_ms: int) -> None:
    job.standstills.gathered(at_ms)


@_on(BreakerWakes)
def _breaker_wakes(job: CoreParts, timer: BreakerWakes, at_ms: int) -> None:
    job.triage.tick(at_ms)


@_on(SelfExitOver)
def _last_words_over(job: CoreParts, timer: SelfExitOver, at_ms: int) -> None:
    job.triage.overdue(Worker(timer.slot, timer.incarnation))


@_on(QuarantineOver)
def _quarantine_over(job: CoreParts, timer: QuarantineOver, at_ms: int) -> None:
    if job.rack.lift_quarantine(timer.slot):
        job.facts.add(SlotFreed())


@_on(PauseOver)
def _pause_over(job: CoreParts, timer: PauseOver, at_ms: int) -> None:
    job.swap.pause_over(at_ms)


@_on(CopiesOver)
def _copies_over(job: CoreParts, timer: CopiesOver, at_ms: int) -> None:
    job.operator_requests.copies_over(timer.request, at_ms)


@_on(RecoverySettled)
def _calm_over(job: CoreParts, timer: RecoverySettled, at_ms: int) -> None:
    if job.world.phase is Phase.TRAINING:
        job.spare_top_up.top_up(at_ms)


@_on(GrowthDue)
def _growth_due(job: CoreParts, timer: GrowthDue, at_ms: int) -> None:
    job.facts.add(SwapDue())


@_on(RackStageOver)
def _rack_stage_over(job: CoreParts, timer: RackStageOver, at_ms: int) -> None:
    job.acquiring.stage_over(timer.request, timer.stage, at_ms)


@_on(ExitsOver)
def _exits_over(job: CoreParts, timer: ExitsOver, at_ms: int) -> None:
    """Stop the job if workers did not exit in time during a restart or at the end."""
    world, restarting = job.world, job.world.phase is Phase.RESTARTING
    if not restarting and world.phase is not Phase.ENDING:
        return
    if restarting and not job.rack.occupants:
        job.restart.no_slots()
        return
    left = sorted(job.rack.occupants) if restarting else job.shutdown.not_gone()
    within_ms = job.config.join_timeout_ms if restarting else max(job.config.join_timeout_ms, EXITS_MS)
    job.end.stop(
        3,
        f"{', '.join(left)} did not exit within {within_ms} ms ({world.reason})",
        remedy="look for processes that cannot be killed (state D): a device or a file system hangs.",
    )
