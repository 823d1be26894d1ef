"""Find out which faults this machine can inject, and why not the others.

A plan with a fault that cannot be injected here refuses to start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from rackrun.chaos.base.errors import PlanError, Unsupported
from rackrun.chaos.faults.crash_points import POINTS
from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.faults.table.fault_table import FAULTS, row_of
from rackrun.chaos.injectors import refusal
from rackrun.chaos.injectors.machine_abilities import ThisMachine
from rackrun.chaos.plan.definition import AtPoint, FlipFlop, Inject, Plan, Swizzle, kind_of, parts_of

__all__ = ["FaultSupport", "check_plan", "examine"]


class FaultSupport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this machine can inject one kind of fault."""

    fault: str
    family: str
    can: bool
    how: str
    """How the fault is injected or, if it cannot be, why not."""
    remedy: str = ""


def examine() -> list[FaultSupport]:
    """Return one finding for each kind of fault."""
    found = []
    machine = _machine()
    for kind, row in FAULTS.items():
        refused = machine or refusal(row.example, kind.strikes[0])
        how, remedy = refused or (row.how if isinstance(row.how, str) else row.how(ThisMachine()), "")
        found.append(
            FaultSupport(fault=name_of(kind), family=kind.family.value, can=not refused, how=how, remedy=remedy)
        )
    return found


def check_plan(plan: Plan) -> None:
    """Check that a real job on this machine can have every fault of the plan.

    Raises `Unsupported` for a fault that it cannot have, and `PlanError` for a point that does not exist.
    """
    if machine := _machine():
        raise Unsupported(f"{machine[0]}.", remedy=f"{machine[1]}.")
    for point in plan.watch:
        if point not in POINTS:
            raise PlanError(f"there is no point {point!r}.", remedy=f"give one of {', '.join(POINTS)}.")
    for part in parts_of(plan.plan):
        if not isinstance(part, Inject | FlipFlop | Swizzle):
            continue
        refused = refusal(part.fault, kind_of(part.target))
        if refused and row_of(part.fault).points(part.fault):
            raise PlanError(f"{refused[0]}.", remedy=f"{refused[1]}.")
        if refused:
            raise Unsupported(f"{refused[0]}.", remedy=f"{refused[1]}.")
        if isinstance(part, Inject) and isinstance(part.when, AtPoint) and part.when.point not in POINTS:
            raise PlanError(f"there is no point {part.when.point!r}.", remedy=f"give one of {', '.join(POINTS)}.")


def _machine() -> tuple[str, str] | None:
    """Return why no fault at all can be injected here, and what to do about it; None if faults can be injected."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return "processes cannot be held on to by pidfd here", "use Linux 5.3 or newer"
    if not Path("/proc/self/maps").is_file():
        return "/proc is not there, by which processes are found", "mount it"
    return None
