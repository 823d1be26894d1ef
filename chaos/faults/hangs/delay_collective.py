"""DelayCollective: a rank is late for a collective."""

from __future__ import annotations

import time

from rackrun.chaos.faults.fault_row import FaultRow, HookPlace, InProcess, ProcessAction, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.short_stops import is_short, shorter
from rackrun.chaos.faults.targets import A_RANK, Exactly

__all__ = ["ROW", "DelayCollective"]


class DelayCollective(BaseFault, frozen=True, kw_only=True, tag="delay_collective"):
    """The rank enters its next collective ``for_s`` seconds late."""

    family = Family.HANG
    strikes = (Subjects.RANK,)
    for_s: float = 2.0


def _wait(fault: DelayCollective, process: InProcess) -> None:
    process.tell(f"late by {fault.for_s} s")
    time.sleep(fault.for_s)


ROW = FaultRow(
    example=DelayCollective(),
    how="before its next collective",
    inject=lambda fault, tools: tools.order(fault),
    inside=ProcessAction(lambda _, visit: visit.place is HookPlace.COLLECTIVE, _wait),
    simulate=lambda fault, strike: strike.each(worker=lambda _: strike.delay(fault.for_s)),
    cost=always(StrikeCost.SUBJECTS),
    justifies_loss=lambda fault, *_: not is_short(fault.for_s, on_workers=True),
    draw=lambda d: (DelayCollective(for_s=d.choice([0.3, 1.0, 2.0])), A_RANK),
    variants={
        Profile.HANGS: lambda d, _: [(DelayCollective(for_s=d.choice([2.0, 10.0, 10_000.0])), A_RANK)],
        Profile.FEW_WORKERS: lambda *_: [(DelayCollective(for_s=2.0), A_RANK)],
        Profile.LONG_HANGS: lambda *_: [(DelayCollective(for_s=10_000.0), Exactly(Subjects.RANK, ("0",)))],
        Profile.ANY_SCRIPT_STOPS: lambda *_: [(DelayCollective(for_s=0.3), A_RANK)],
    },
    simpler=lambda fault: [DelayCollective(for_s=for_s) for for_s in shorter(fault.for_s)],
)
