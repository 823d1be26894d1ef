"""CrashAt: a process exits at a named point in its code."""

from __future__ import annotations

import os
import random

from rackrun.chaos.faults.crash_points import MODEL_POINTS, POINTS, points_of
from rackrun.chaos.faults.fault_row import (
    FaultAndTarget,
    FaultRow,
    HookPlace,
    HookVisit,
    InProcess,
    ProcessAction,
    StrikeCost,
    always,
)
from rackrun.chaos.faults.fault_types import WORKERS, BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Machine
from rackrun.chaos.faults.targets import A_RANK, A_SPARE, AN_AGENT, THE_COORDINATOR
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike, VirtualWorker

__all__ = ["CRASHED", "ROW", "CrashAt"]

CRASHED = 77
"""Exit code of a process that crashed at a point."""
_IN_STEPS = ("gate.before", "gate.after", "commit.before", "commit.after", "report.before")
_OF_A_STEP = tuple(point for point in POINTS if point.partition(".")[0] in ("gate", "commit", "report"))

_BY_AGENTS = ("agent_pass.before", "agent_pass.after", "agent_tell.before", "agent_report.after")
"""Points that agents reach in a recovery."""
_BY_SURVIVORS = ("break.before", "break.after", "plan.before", "plan.after", "group.before", "group.after")


class CrashAt(BaseFault, frozen=True, kw_only=True, tag="crash_at"):
    """The process exits when it reaches ``point`` (`rackrun.chaos.faults.crash_points`) for the ``nth`` time.

    If it has already been there that often, it exits the next time.
    """

    family = Family.PROCESS
    strikes = (*WORKERS, Subjects.AGENT, Subjects.COORDINATOR)
    loses = True
    point: str
    nth: int = 1


def _refusal(fault: CrashAt, kind: Subjects, _: Machine) -> Complaint | None:
    if fault.point not in POINTS:
        return f"there is no point {fault.point!r}", f"give one of {', '.join(POINTS)}"
    if fault.point not in points_of(kind):
        return f"a {kind} does not come to {fault.point}", f"give one of {', '.join(points_of(kind))}"
    return None


def _nonsense(fault: CrashAt) -> Complaint | None:
    return (f"the {fault.nth}th time of a point", "count from 1") if fault.nth < 1 else None


def _due(fault: CrashAt, visit: HookVisit) -> bool:
    return visit.place is HookPlace.POINT and visit.name == fault.point and fault.nth <= visit.nth


def _crash(fault: CrashAt, process: InProcess) -> None:
    process.tell(f"crashed at {fault.point}, there for the {process.visit.nth}. time")
    os._exit(CRASHED)


def _simulate(fault: CrashAt, strike: VirtualStrike) -> bool:
    def arm(who: VirtualWorker | VirtualAgent) -> None:
        strike.crash_at(fault.point, fault.nth, who)

    return strike.each(worker=arm, agent=arm)


def _not_simulated(fault: CrashAt, kind: Subjects) -> str:
    if kind is Subjects.COORDINATOR:
        return "its coordinator does not end before the job"
    if fault.point not in MODEL_POINTS:
        return f"the model has no point {fault.point!r}, but: {', '.join(MODEL_POINTS)}"
    return ""


def _in_fuzz(d: random.Random, _: float | None) -> list[FaultAndTarget[CrashAt]]:
    fault = CrashAt(point=d.choice(MODEL_POINTS[1:]), nth=d.randint(1, 4))
    return [(fault, d.choice([A_RANK, A_RANK, A_SPARE]))]


def _armed(d: random.Random, _: float | None) -> list[FaultAndTarget[CrashAt]]:
    whom = d.choice([A_RANK, A_RANK, AN_AGENT])
    return [(CrashAt(point=d.choice(_BY_SURVIVORS if whom == A_RANK else _BY_AGENTS)), whom)]


ROW = FaultRow(
    example=CrashAt(point=POINTS[0]),
    how=f"at one of {len(POINTS)} points of workers, agents and the coordinator",
    inject=lambda fault, tools: tools.order(fault),
    refusal=_refusal,
    nonsense=_nonsense,
    inside=ProcessAction(_due, _crash),
    points=lambda fault: (fault.point,),
    simulate=_simulate,
    not_simulated=_not_simulated,
    cost=always(StrikeCost.SUBJECTS),
    looks_like=always("the exit code"),
    justifies_loss=always(True),
    draw=lambda d: (CrashAt(point=d.choice(_IN_STEPS), nth=d.randint(1, 6)), A_RANK),
    variants={
        Profile.CRASHES: _in_fuzz,
        Profile.AFTER_GATE: lambda *_: [(CrashAt(point="worker: applied"), A_RANK)],
        Profile.ARMED: _armed,
        Profile.COORDINATOR_CRASHES: lambda d, _: [
            (CrashAt(point="coordinator_heard.before", nth=d.randint(1, 40)), THE_COORDINATOR)
        ],
        Profile.ANY_SCRIPT_LOSES: lambda d, _: [(CrashAt(point=d.choice(_OF_A_STEP)), A_RANK)],
    },
)
