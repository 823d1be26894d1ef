"""Draw, from a seed, chaos plans that a job survives, knowing only its number of steps and spares."""

from __future__ import annotations

import random

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.fault_types import BaseFault, Subjects
from rackrun.chaos.faults.table.fault_table import FAULTS
from rackrun.chaos.faults.targets import One
from rackrun.chaos.plan.definition import AtStep, Inject, Part, Plan, Seq

__all__ = ["draw_plan"]

LOST_MAX = 3


def draw_plan(seed: int, *, steps: int, spares: int, name: str = "") -> Plan:
    """Draw a plan for a job of ``steps`` steps with ``spares`` spares.

    As many ranks are lost as there are spares, at most three. One more rank stands still for a moment or is late. All
    strikes come in the first two thirds of the steps. Raises `PlanError` for fewer than 4 steps.
    """
    if steps < 4:
        raise PlanError(
            f"the script has {steps} steps, too few to draw a plan for.", remedy="let it train for 4 or more."
        )
    draw = stream(seed, "drawn plan")
    faults = [
        *draw.sample(_variants(draw, loses=True), min(spares, LOST_MAX)),
        draw.choice(_variants(draw, loses=False)),
    ]
    draw.shuffle(faults)
    at = sorted(draw.randrange(0, max(2 * steps // 3, 1)) for _ in faults)
    parts: list[Part] = [
        Inject(fault=fault, target=One(Subjects.RANK), when=AtStep(step=step))
        for fault, step in zip(faults, at, strict=True)
    ]
    return Plan(plan=Seq(parts=tuple(parts)), seed=seed, name=name or f"drawn from {seed}")


def _variants(draw: random.Random, *, loses: bool) -> list[BaseFault]:
    """Return all different faults that lose a rank, or that do not.

    The same error on two ranks in one step would be taken for an error of the script, not of the hardware.
    """
    return [fault for kind, row in FAULTS.items() if kind.loses is loses for fault in row.in_any_script(draw)]
