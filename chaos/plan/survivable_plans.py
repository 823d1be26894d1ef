"""Draw, from a seed, chaos plans that a job survives, knowing only its number of steps and spares."""

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
    """Draw a plan for a job of ``steps`` steps with ``spares`` spares.

    As many ranks are lost as there are spares, at most three. One more rank stands still for a moment or is late. All
    strikes come in the first two thirds of the steps. Raises `PlanError` for fewer than 4 steps.
    """
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
    """Return faults that lose a rank, all different.

    The same error on two ranks in one step would be taken for an error of the script, not of the hardware.
    """
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
