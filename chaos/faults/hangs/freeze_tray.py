"""Freeze: all processes of a tray stand still together for a while, as on a host that is suspended or stalled."""

from __future__ import annotations

import random

from rackrun.chaos.faults.fault_row import FaultAndTarget, FaultRow, StrikeCost
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.short_stops import is_short, shorter
from rackrun.chaos.faults.strike_tools import Injected, StrikeTools
from rackrun.chaos.faults.targets import A_TRAY
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike

__all__ = ["ROW", "FreezeTray"]


class FreezeTray(BaseFault, frozen=True, kw_only=True, tag="freeze_tray"):
    """Agent, fork server, workers and all that they started get SIGSTOP, and SIGCONT at the end.

    Unlike `rackrun.chaos.faults.hangs.pause_process.Pause`, it strikes whole trays only, and leaves no process running
    that was forked while the others were being stopped.
    """

    family = Family.HANG
    strikes = (Subjects.TRAY,)
    lasts = True
    for_s: float | None = 4.0


def _inject(_: FreezeTray, tools: StrikeTools) -> Injected:
    """Stop the agent first, so that it sees nobody stopped, then all below it; then all once more, for those that were
    forked meanwhile. They go on in the opposite order."""
    return tools.both(tools.stop(), tools.stop())


def _simulate(_: FreezeTray, strike: VirtualStrike) -> bool:
    def freeze(agent: VirtualAgent) -> None:
        agent.pause()
        for worker in agent.processes():
            worker.pause()
            strike.on_heal(worker.go_on)
        strike.on_heal(agent.go_on)

    return strike.each(agent=freeze)


def _cost(fault: FreezeTray, _: Subjects) -> StrikeCost:
    return StrikeCost.NOTHING if is_short(fault.for_s, on_workers=False) else StrikeCost.SUBJECTS


def _draw(d: random.Random) -> FaultAndTarget[FreezeTray]:
    return FreezeTray(for_s=d.choice([1.5, 4.0, 8.0])), A_TRAY


ROW = FaultRow(
    example=FreezeTray(),
    how="SIGSTOP to all processes of the tray, SIGCONT",
    inject=_inject,
    simulate=_simulate,
    cost=_cost,
    justifies_loss=lambda _, lasted_s, __: not is_short(lasted_s, on_workers=False),
    draw=_draw,
    variants={
        Profile.TRAYS: lambda d, _: [(FreezeTray(for_s=d.choice([2.0, 8.0, 40.0])), A_TRAY)],
        Profile.FEW_CONNECTIONS: lambda *_: [(FreezeTray(for_s=4.0), A_TRAY)],
    },
    simpler=lambda fault: [FreezeTray(for_s=for_s) for for_s in shorter(fault.for_s)],
)
