"""Break it on purpose, and prove that nothing was lost: faults, plans, oracles, the simulator, the planner, reports.

What is exported is what tests of a script need: plans are built from faults, targets and `seq par every burst flip_flop swizzle heal quiet`, read
and written, drawn from a seed, and carried out (`run_plan` -> `Summary`, `explain`). The pytest fixture ``chaos`` puts them together
(`rackrun.chaos.pytest_plugin`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rackrun.chaos.base.errors import NoTarget, PlanError, Unsupported
    from rackrun.chaos.evidence.explanations import explain
    from rackrun.chaos.evidence.run_evidence import Verdict
    from rackrun.chaos.faults.fault_types import (
        CrashAt,
        DelayCollective,
        DiskFails,
        DiskFull,
        Duplicate,
        ExhaustMemory,
        FlipBit,
        GpuFails,
        HoldGil,
        Kill,
        Link,
        Partition,
        Pause,
        PoisonBatch,
        Preempt,
        Raise,
        Return,
        Slow,
        StepClock,
        Subjects,
        Xid,
    )
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
    "ExhaustMemory",
    "FlipBit",
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
    "inprocess.step_probe",  # first: scripts that train import nothing else of this
    "faults.fault_types",
    "base.errors",
    "plan.builders",
    "plan.definition",
    "plan.survivable_plans",
    "evidence.run_evidence",
    "evidence.explanations",
    "runs.run_plan",
)

if not TYPE_CHECKING:  # for a type checker there is no other name than those above

    def __getattr__(name: str) -> object:
        # workers, the simulator and pytest import modules of this package; none of them is to load the others
        if name in __all__:
            for module in map(import_module, (f"rackrun.chaos.{module}" for module in _MODULES)):
                if name in module.__all__:
                    return getattr(module, name)
        raise AttributeError(f"module 'rackrun.chaos' has no attribute {name!r}")
