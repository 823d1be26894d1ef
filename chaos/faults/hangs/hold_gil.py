"""HoldGil: no Python code runs in a process for a while."""

from __future__ import annotations

import ctypes

from rackrun.chaos.faults.fault_row import FaultRow, HookPlace, InProcess, ProcessAction, StrikeCost, always
from rackrun.chaos.faults.fault_types import WORKERS, BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.short_stops import is_short, shorter
from rackrun.chaos.faults.strike_tools import Machine
from rackrun.chaos.faults.targets import A_RANK
from rackrun.chaos.faults.virtual_strike import VirtualStrike, VirtualWorker

__all__ = ["ROW", "HoldGil"]


class HoldGil(BaseFault, frozen=True, kw_only=True, tag="hold_gil"):
    """The process holds the GIL for ``for_s`` seconds: no Python code runs in it, but its native threads do."""

    family = Family.HANG
    strikes = WORKERS
    for_s: float = 2.0


def _refusal(_: HoldGil, kind: Subjects, _machine: Machine) -> Complaint | None:
    return ("the GIL is held in a step, and a spare does none", "name a rank") if kind is not Subjects.RANK else None


def _hold(fault: HoldGil, process: InProcess) -> None:
    process.tell(f"holds the GIL for {fault.for_s} s in step {process.step()}")
    ctypes.PyDLL(None).usleep(int(fault.for_s * 1e6))


def _simulate(fault: HoldGil, strike: VirtualStrike) -> bool:
    def hold(worker: VirtualWorker) -> None:
        worker.pause()
        strike.after(fault.for_s, worker.go_on)

    return strike.each(worker=hold)


ROW = FaultRow(
    example=HoldGil(),
    how="in the step function, for its seconds",
    inject=lambda fault, tools: tools.order(fault),
    refusal=_refusal,
    inside=ProcessAction(lambda _, visit: visit.place is HookPlace.STEP, _hold),
    simulate=_simulate,
    cost=always(StrikeCost.SUBJECTS),
    justifies_loss=lambda fault, *_: not is_short(fault.for_s, on_workers=True),
    draw=lambda d: (HoldGil(for_s=d.choice([0.3, 1.0, 2.0])), A_RANK),
    variants={
        Profile.HANGS: lambda d, _: [(HoldGil(for_s=d.choice([1.0, 5.0, 30.0])), A_RANK)],
        Profile.ANY_SCRIPT_STOPS: lambda *_: [(HoldGil(for_s=0.3), A_RANK)],
    },
    simpler=lambda fault: [HoldGil(for_s=for_s) for for_s in shorter(fault.for_s)],
)
