"""Plans for a job of which only its size and its steps are known, drawn from a seed. All of them are such that the job survives them."""

from __future__ import annotations

import random

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.crash_points import POINTS
from rackrun.chaos.faults.fault_types import CrashAt, DelayCollective, Fault, HoldGil, Kill, Pause, Raise, Subjects
from rackrun.chaos.faults.targets import One
from rackrun.chaos.plan.definition import AtStep, Inject, Part, Plan, Seq

__all__ = ["draw_plan"]

LOST_MAX = 3
_IN_A_STEP = tuple(point for point in POINTS if point.partition(".")[0] in ("gate", "commit", "report"))


def draw_plan(seed: int, *, steps: int, spares: int, name: str = "") -> Plan:
    """For a job of ``steps`` with so many ``spares``: as many ranks are lost as there are spares for them, at most three, and one stands still for
    a moment, or comes late, all in the first two thirds. Raises `PlanError` for fewer than 4 steps."""
    if steps < 4:
        raise PlanError(
            f"the script has {steps} steps, too few to draw a plan for.", remedy="let it train for 4 or more."
        )
    draw = stream(seed, "drawn plan")
    faults = [*draw.sample(_losing(draw), min(spares, LOST_MAX)), _lasting(draw)]
    draw.shuffle(faults)
    at = sorted(draw.randrange(0, max(2 * steps // 3, 1)) for _ in faults)
    parts: list[Part] = [
        Inject(fault=fault, target=One(Subjects.RANK), when=AtStep(step=step))
        for fault, step in zip(faults, at, strict=True)
    ]
    return Plan(plan=Seq(parts=tuple(parts)), seed=seed, name=name or f"drawn from {seed}")


def _losing(draw: random.Random) -> list[Fault]:
    """All different: the same error twice at one step is the script's, not the hardware's."""
    found: list[Fault] = [
        Kill(),
        Kill(signal=draw.choice(["SEGV", "ABRT", "BUS"])),
        Raise(),
        CrashAt(point=draw.choice(_IN_A_STEP)),
    ]
    return found


def _lasting(draw: random.Random) -> Fault:
    found: list[Fault] = [Pause(for_s=0.3), HoldGil(for_s=0.3), DelayCollective(for_s=0.3)]
    return draw.choice(found)
