"""Break a training job on purpose and prove that nothing was lost: faults, plans, oracles, simulator, planner, reports.

The names exported here are what a test of a training script needs. Plans are built from faults, targets and `seq par
every burst flip_flop swizzle heal quiet`; they can be read, written, drawn from a seed, and carried out (`run_plan`
returns a `Summary`, which `explain` puts into words). The pytest fixture ``chaos`` combines all of this
(`rackrun.chaos.pytest_plugin`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rackrun.chaos.base.errors import NoTarget, PlanError, Unsupported
    from rackrun.chaos.evidence.explanations import explain
    from rackrun.chaos.evidence.run_evidence import Verdict
    from rackrun.chaos.faults.data.flip_bit import FlipBit
    from rackrun.chaos.faults.data.poison_batch import PoisonBatch
    from rackrun.chaos.faults.data.step_clock import StepClock
    from rackrun.chaos.faults.fault_types import Subjects
    from rackrun.chaos.faults.hangs.delay_collective import DelayCollective
    from rackrun.chaos.faults.hangs.freeze_tray import FreezeTray
    from rackrun.chaos.faults.hangs.hold_gil import HoldGil
    from rackrun.chaos.faults.hangs.pause_process import Pause
    from rackrun.chaos.faults.hangs.slow_down import Slow
    from rackrun.chaos.faults.hardware.gpu_failure import GpuFails
    from rackrun.chaos.faults.hardware.xid_error import Xid
    from rackrun.chaos.faults.network.bad_link import Link
    from rackrun.chaos.faults.network.network_partition import Partition
    from rackrun.chaos.faults.processes.crash_at_point import CrashAt
    from rackrun.chaos.faults.processes.duplicate_process import Duplicate
    from rackrun.chaos.faults.processes.exhaust_descriptors import ExhaustDescriptors
    from rackrun.chaos.faults.processes.exhaust_memory import ExhaustMemory
    from rackrun.chaos.faults.processes.kill import Kill
    from rackrun.chaos.faults.processes.preempt_tray import Preempt
    from rackrun.chaos.faults.processes.raise_exception import Raise
    from rackrun.chaos.faults.processes.return_tray import Return
    from rackrun.chaos.faults.storage.disk_failure import DiskFails
    from rackrun.chaos.faults.storage.disk_full import DiskFull
    from rackrun.chaos.inprocess.step_probe import report_step
    from rackrun.chaos.plan.builders import (
        buddy_of,
        burst,
        every,
        exactly,
        flip_flop,
        heal,
        inject,
        last,
        majority,
        make_plan,
        minority,
        neighbour_of,
        one,
        par,
        quiet,
        seq,
        several,
        swizzle,
    )
    from rackrun.chaos.plan.definition import Plan, read_plan, schema, write_plan
    from rackrun.chaos.plan.survivable_plans import draw_plan
    from rackrun.chaos.runs.run_plan import Summary, run_plan

__all__ = [
    "CrashAt",
    "DelayCollective",
    "DiskFails",
    "DiskFull",
    "Duplicate",
    "ExhaustDescriptors",
    "ExhaustMemory",
    "FlipBit",
    "FreezeTray",
    "GpuFails",
    "HoldGil",
    "Kill",
    "Link",
    "NoTarget",
    "Partition",
    "Pause",
    "Plan",
    "PlanError",
    "PoisonBatch",
    "Preempt",
    "Raise",
    "Return",
    "Slow",
    "StepClock",
    "Subjects",
    "Summary",
    "Unsupported",
    "Verdict",
    "Xid",
    "buddy_of",
    "burst",
    "draw_plan",
    "every",
    "exactly",
    "explain",
    "flip_flop",
    "heal",
    "inject",
    "last",
    "majority",
    "make_plan",
    "minority",
    "neighbour_of",
    "one",
    "par",
    "quiet",
    "read_plan",
    "report_step",
    "run_plan",
    "schema",
    "seq",
    "several",
    "swizzle",
    "write_plan",
]

_MODULES = (
    "inprocess.step_probe",  # first: a training script imports this module and no other of the package
    "faults.fault_types",
    "faults.table.fault_table",
    "base.errors",
    "plan.builders",
    "plan.definition",
    "plan.survivable_plans",
    "evidence.run_evidence",
    "evidence.explanations",
    "runs.run_plan",
)

if not TYPE_CHECKING:  # a type checker must see no names but those above

    def __getattr__(name: str) -> object:
        # Workers, the simulator and pytest import single modules of this package; none of these imports may load the
        # others.
        if name in __all__:
            for module in map(import_module, (f"rackrun.chaos.{module}" for module in _MODULES)):
                if name in module.__all__:
                    return getattr(module, name)
                if name in getattr(module, "CLASSES", ()):
                    return module.CLASSES[name]
        raise AttributeError(f"module 'rackrun.chaos' has no attribute {name!r}")
