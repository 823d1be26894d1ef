"""Xid: the driver of a GPU reports an error by its number."""

from __future__ import annotations

from functools import partial

from rackrun.chaos.faults.fault_row import FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.hardware.gpu_failure import ANSWERS
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import GpuReport
from rackrun.chaos.faults.targets import A_RANK, A_SPARE
from rackrun.chaos.faults.virtual_strike import VirtualStrike, VirtualWorker
from rackrun.protocol.gpu_health import Health
from rackrun.topology.health.xid_table import CATALOGUE

__all__ = ["ROW", "Xid", "report_of"]

_FALLEN_OFF_THE_BUS = 79
_OF_RESETS = ("RESET_GPU", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR")
_HEALTH = {13: Health.APP, 31: Health.APP, 48: Health.RESET, 63: Health.DEGRADED, 79: Health.LOST, 94: Health.DEGRADED}
"""Xid code -> the health that the simulator makes of it; any other code is `Health.DEGRADED`."""


class Xid(BaseFault, frozen=True, kw_only=True, tag="xid"):
    """The GPU's driver reports the Xid error ``code``; `rackrun.topology` says what each code means."""

    family = Family.HARDWARE
    strikes = (Subjects.RANK, Subjects.SPARE)
    lasts = True
    code: int
    for_s: float | None = None


def report_of(fault: Xid) -> GpuReport:
    """Return what the driver reports. Where the catalogue's entry for the Xid asks for a reset, so does the driver."""
    entry, says = CATALOGUE.get(fault.code), {}
    if fault.code == _FALLEN_OFF_THE_BUS:
        says = ANSWERS["lost"]
    elif entry is not None and entry.action in _OF_RESETS:
        says = ANSWERS["reset"]
    return GpuReport(f"Xid {fault.code}", says, fault.code)


def _simulate(fault: Xid, strike: VirtualStrike) -> bool:
    def report(worker: VirtualWorker) -> None:
        strike.judge_gpu(worker.slot, _HEALTH.get(fault.code, Health.DEGRADED), f"Xid {fault.code}")
        strike.on_heal(partial(strike.judge_gpu, worker.slot, Health.OK, "it was reset"))

    return strike.each(worker=report)


ROW = FaultRow(
    example=Xid(code=79),
    how="a driver of ours, compiled here, for a job with --rack",
    inject=lambda fault, tools: tools.report_gpu(report_of(fault)),
    refusal=lambda _fault, _kind, machine: machine.without_driver(),
    needs=always(frozenset({Need.DRIVER})),
    simulate=_simulate,
    cost=always(StrikeCost.SLOTS),
    justifies_loss=always(True),
    draw=lambda d: (Xid(code=d.choice([13, 31, 48, 63, 79, 94, 95]), for_s=2.0), d.choice([A_RANK, A_RANK, A_SPARE])),
    variants={
        Profile.HARDWARE: lambda d, for_s: [
            (Xid(code=d.choice([13, 48, 63, 79, 94]), for_s=for_s), d.choice([A_RANK, A_SPARE]))
        ]
    },
)
