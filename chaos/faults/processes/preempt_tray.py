"""Preempt: a tray is asked to leave, and killed when its notice is over."""

from __future__ import annotations

from rackrun.chaos.faults.fault_row import FaultRow, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.targets import A_TRAY
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike

__all__ = ["ROW", "Preempt"]


class Preempt(BaseFault, frozen=True, kw_only=True, tag="preempt"):
    """The tray's agent gets SIGTERM; if it is alive after ``notice_s`` seconds, the tray's processes are killed."""

    family = Family.HARDWARE
    strikes = (Subjects.TRAY,)
    loses = True
    notice_s: float = 30.0


def _simulate(fault: Preempt, strike: VirtualStrike) -> bool:
    def ask(agent: VirtualAgent) -> None:
        strike.ask_to_leave(agent)
        strike.after(fault.notice_s, agent.die)

    return strike.each(agent=ask)


ROW = FaultRow(
    example=Preempt(),
    how="SIGTERM to the agent, SIGKILL after the notice",
    inject=lambda fault, tools: tools.ask_to_leave(fault.notice_s),
    simulate=_simulate,
    cost=always(StrikeCost.SUBJECTS),
    justifies_loss=always(True),
    draw=lambda d: (Preempt(notice_s=d.choice([0.0, 2.0, 10.0])), A_TRAY),
    variants={Profile.LEAVING: lambda d, _: [(Preempt(notice_s=d.choice([2.0, 30.0])), A_TRAY)]},
)
