"""Plans for tests, small and quick."""

from __future__ import annotations

from typing import Any

from rackrun.chaos.planner.analysis.simulation_case import Case
from rackrun.chaos.planner.inputs.failures import FailureProcess
from rackrun.chaos.planner.inputs.fleet import Fleet, FleetJob
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.model.job_state import Intervals

HOUR, DAY = 3600.0, 86400.0
QUICK = PlanCosts(
    step_s=1.0,
    detect_s=0.0,
    regroup_s=1.0,
    takeover_s=2.0,
    reenter_s=1.0,
    start_s=30.0,
    load_s=10.0,
    snapshot_s=0.0,
    copy_s=0.0,
    checkpoint_s=0.0,
    write_s=0.0,
)
"""Recoveries that take nearly no time."""
NEVER = Intervals(snapshot=0, checkpoint=0)


def trays(mtbf_h: float, repair_h: float, **more: Any) -> FailureProcess:
    return FailureProcess(name="tray", domain="tray", mtbf_s=mtbf_h * HOUR, repair_s=repair_h * HOUR, **more)


def case(
    *processes: FailureProcess, racks: int = 4, tray_count: int = 18, gpus: int = 4, days: float = 30, **more: Any
) -> Case:
    job = more.pop("job", FleetJob(group=8, replica=16))
    costs = more.pop("costs", QUICK)
    fleet = Fleet(racks=racks, trays=tray_count, gpus=gpus)
    return Case(fleet=fleet, job=job, costs=costs, processes=processes, horizon_s=days * DAY, **more)
