"""Pause: processes are stopped for a while."""

from __future__ import annotations

import random

from rackrun.chaos.faults.fault_row import FaultAndTarget, FaultRow, StrikeCost
from rackrun.chaos.faults.fault_types import PROCESSES, WORKERS, BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.short_stops import is_short, shorter
from rackrun.chaos.faults.targets import A_RANK, A_SPARE, A_TRAY, AN_AGENT, THE_COORDINATOR
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike, VirtualWorker

__all__ = ["ROW", "Pause"]


class Pause(BaseFault, frozen=True, kw_only=True, tag="pause"):
    """The processes get SIGSTOP, and SIGCONT at the end. Whoever was given up meanwhile wakes up again and must do no
    harm."""

    family = Family.HANG
    strikes = (*PROCESSES, Subjects.COORDINATOR)
    lasts = True
    for_s: float | None = None


def _simulate(_: Pause, strike: VirtualStrike) -> bool:
    def stop(who: VirtualWorker | VirtualAgent) -> None:
        who.pause()
        strike.on_heal(who.go_on)

    def stop_agent(agent: VirtualAgent) -> None:
        if strike.subject.kind is not Subjects.AGENT:
            for worker in agent.processes():
                stop(worker)
        stop(agent)

    if strike.subject.kind is Subjects.COORDINATOR:
        return strike.stop_coordinator()
    return strike.each(worker=stop, agent=stop_agent)


def _cost(fault: Pause, kind: Subjects) -> StrikeCost:
    return StrikeCost.NOTHING if is_short(fault.for_s, on_workers=kind in WORKERS) else StrikeCost.SUBJECTS


def _unsure(fault: Pause, kind: Subjects, _: bool) -> str:
    if kind is Subjects.COORDINATOR and not is_short(fault.for_s, on_workers=False):
        return "agents may give a coordinator up that stands still for long"
    return ""


def _draw(d: random.Random) -> FaultAndTarget[Pause]:
    return d.choice(
        [
            (Pause(for_s=d.choice([0.3, 0.6, 1.5, 3.0])), d.choice([A_RANK, A_RANK, A_SPARE])),
            (Pause(for_s=d.choice([0.5, 2.0, 4.0])), d.choice([AN_AGENT, A_TRAY, THE_COORDINATOR])),
        ]
    )


ROW = FaultRow(
    example=Pause(),
    how="SIGSTOP, SIGCONT",
    inject=lambda _, tools: tools.stop(),
    by_signals=True,
    simulate=_simulate,
    cost=_cost,
    unsure=_unsure,
    justifies_loss=lambda _, lasted_s, on_workers: not is_short(lasted_s, on_workers=on_workers),
    draw=_draw,
    variants={
        Profile.HANGS: lambda d, for_s: [(Pause(for_s=for_s), d.choice([A_RANK, A_RANK, A_SPARE]))],
        Profile.TRAYS: lambda d, _: [(Pause(for_s=d.choice([5.0, 20.0, 60.0])), d.choice([AN_AGENT, A_TRAY]))],
        Profile.CONTROL: lambda d, _: [(Pause(for_s=d.choice([0.5, 5.0, 30.0])), THE_COORDINATOR)],
        Profile.FEW_WORKERS: lambda *_: [(Pause(for_s=1.0), A_RANK)],
        Profile.FEW_CONNECTIONS: lambda *_: [(Pause(for_s=2.0), THE_COORDINATOR)],
        Profile.STOPPED_IN_RECOVERY: lambda *_: [(Pause(for_s=1.5), A_RANK)],
        Profile.ANY_SCRIPT_STOPS: lambda *_: [(Pause(for_s=0.3), A_RANK)],
    },
    in_soak={"pause": Pause(for_s=3.0)},
    simpler=lambda fault: [Pause(for_s=for_s) for for_s in shorter(fault.for_s)],
)
