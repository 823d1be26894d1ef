"""Draw, from a seed, chaos plans that a job survives, knowing only its number of steps and spares."""

from __future__ import annotations

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.table.fault_table import variants_of
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
    strikes = [  # all different: the same error on two ranks in one step would be taken for an error of the script
        *draw.sample(variants_of(Profile.ANY_SCRIPT_LOSES, draw), min(spares, LOST_MAX)),
        draw.choice(variants_of(Profile.ANY_SCRIPT_STOPS, draw)),
    ]
    draw.shuffle(strikes)
    at = sorted(draw.randrange(0, max(2 * steps // 3, 1)) for _ in strikes)
    parts: list[Part] = [
        Inject(fault=fault, target=target, when=AtStep(step=step))
        for (fault, target), step in zip(strikes, at, strict=True)
    ]
    return Plan(plan=Seq(parts=tuple(parts)), seed=seed, name=name or f"drawn from {seed}")
