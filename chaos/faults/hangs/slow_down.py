"""Slow: processes get only a share of a processor."""

from __future__ import annotations

import msgspec

from rackrun.chaos.faults.fault_row import FaultRow, StrikeCost, always
from rackrun.chaos.faults.fault_types import WORKERS, BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.short_stops import shorter
from rackrun.chaos.faults.strike_tools import Machine
from rackrun.chaos.faults.targets import A_RANK, A_SPARE, A_TRAY
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike, VirtualWorker

__all__ = ["ROW", "Slow"]


class Slow(BaseFault, frozen=True, kw_only=True, tag="slow"):
    """The processes get only the share ``share`` (between 0 and 1) of a processor."""

    family = Family.SLOW
    strikes = (*WORKERS, Subjects.TRAY)
    lasts = True
    share: float = 0.3
    for_s: float | None = None


def _refusal(fault: Slow, _: Subjects, _machine: Machine) -> Complaint | None:
    return None if 0 < fault.share < 1 else (f"a share of {fault.share} is no slowness", "give one between 0 and 1")


def _simulate(fault: Slow, strike: VirtualStrike) -> bool:
    def slow(worker: VirtualWorker) -> None:
        def fast() -> None:
            worker.slow *= fault.share

        worker.slow /= fault.share
        strike.on_heal(fast)

    def slow_all(agent: VirtualAgent) -> None:
        for worker in agent.processes():
            slow(worker)

    return strike.each(worker=slow, agent=slow_all)


ROW = FaultRow(
    example=Slow(),
    how=lambda machine: machine.how_slowed(),
    inject=lambda fault, tools: tools.throttle(fault.share),
    refusal=_refusal,
    by_signals=True,
    simulate=_simulate,
    cost=always(StrikeCost.NOTHING),
    justifies_loss=always(False),
    draw=lambda d: (
        Slow(share=d.choice([0.2, 0.5]), for_s=d.choice([0.5, 1.5])),
        d.choice([A_RANK, A_RANK, A_SPARE, A_TRAY]),
    ),
    variants={
        Profile.SLOW: lambda d, for_s: [
            (Slow(share=d.choice([0.2, 0.5, 0.8]), for_s=for_s), d.choice([A_RANK, A_TRAY]))
        ],
        Profile.FEW_WORKERS: lambda *_: [(Slow(share=0.5, for_s=10.0), A_RANK)],
    },
    simpler=lambda fault: [msgspec.structs.replace(fault, for_s=for_s) for for_s in shorter(fault.for_s)],
)
