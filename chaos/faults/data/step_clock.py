"""StepClock: the wall clock of a process jumps."""

from __future__ import annotations

from rackrun.chaos.faults.fault_row import FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Machine
from rackrun.chaos.faults.targets import AN_AGENT, THE_COORDINATOR

__all__ = ["ROW", "StepClock"]


class StepClock(BaseFault, frozen=True, kw_only=True, tag="step_clock"):
    """The wall clock of the process jumps by ``by_s`` seconds. This must change nothing."""

    family = Family.CLOCK
    strikes = (Subjects.AGENT, Subjects.COORDINATOR)
    lasts = True
    by_s: float
    for_s: float | None = None


def _refusal(_: StepClock, _kind: Subjects, machine: Machine) -> Complaint | None:
    problem = machine.clock_problem()
    return (f"wall clocks of single processes cannot be moved: {problem}", "install a C compiler") if problem else None


ROW = FaultRow(
    example=StepClock(by_s=1.0),
    how="a library in front of libc's, in agents and the coordinator",
    inject=lambda fault, tools: tools.move_clocks(fault.by_s),
    refusal=_refusal,
    needs=always(frozenset({Need.CLOCKS})),
    simulate=always(True),  # neither the model nor the core reads wall clocks
    cost=always(StrikeCost.NOTHING),
    justifies_loss=always(False),
    draw=lambda d: (
        StepClock(by_s=d.choice([-3600.0, -1.0, 5.0, 86_400.0]), for_s=2.0),
        d.choice([AN_AGENT, THE_COORDINATOR]),
    ),
    variants={
        Profile.CONTROL: lambda *_: [(StepClock(by_s=3600.0, for_s=5.0), AN_AGENT)],
        Profile.FEW_CONNECTIONS: lambda *_: [(StepClock(by_s=-60.0, for_s=5.0), AN_AGENT)],
    },
)
