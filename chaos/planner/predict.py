"""Predict a small job whose ranks are killed at a given rate, so that a real soak can be compared with it.

Ranks are killed as ``rackctl chaos`` kills them: one process at a time, on hardware that is in order. A spare takes
over, and a new spare starts in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.planner.analysis.applicable_formulas import Formula
from rackrun.chaos.planner.analysis.seed_statistics import SeedMean, spread_of
from rackrun.chaos.planner.inputs.failures import UnitFailure
from rackrun.chaos.planner.inputs.fleet import Fleet, FleetJob
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.model.fleet_simulation import FleetSimulation
from rackrun.chaos.planner.model.job_state import Intervals
from rackrun.chaos.planner.model.outcome import FleetOutcome
from rackrun.core.policy.choice import parse_rules

__all__ = ["Kills", "Prediction", "predict"]


class Kills:
    """Kills of one rank at a time, each rank as likely. A `rackrun.chaos.planner.inputs.failures.FailureSource`."""

    def __init__(self, ranks: int, every_s: float, horizon_s: float, seed: int, *, even: bool) -> None:
        self._ranks, self._every_s, self._horizon_s, self._seed, self._even = ranks, every_s, horizon_s, seed, even

    def begin(self) -> list[tuple[float, UnitFailure]]:
        draw = stream(self._seed, "kills")
        found: list[tuple[float, UnitFailure]] = []
        at_s = 0.0
        while True:
            at_s += self._every_s if self._even else draw.expovariate(1 / self._every_s)
            if at_s >= self._horizon_s:
                return found
            found.append((at_s, UnitFailure(0, "rank", draw.randrange(self._ranks), 0.0, turn=len(found))))

    def again(self, strike: UnitFailure, since_s: float) -> tuple[float, UnitFailure] | None:  # noqa: ARG002
        return None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for a job."""

    kept: SeedMean
    """The share of the throughput without faults that is kept."""
    wall: SeedMean
    """Productive time over wall time (ETTR), from the first step on."""
    kills: float
    """The mean number of kills in a run."""
    rungs: dict[str, float]
    formula: Formula
    """The closed form for ``kept``."""
    guessed: tuple[str, ...]


def predict(
    costs: PlanCosts,
    *,
    ranks: int,
    spares: int,
    every_s: float,
    horizon_s: float,
    seeds: Sequence[int] = range(10),
    policy: str = "",
    even: bool = False,
) -> Prediction:
    """Predict a job of ``ranks`` whole replicas (DDP) on one tray.

    ``every_s``: the mean seconds from one kill to the next; ``even``: always exactly as many. Raises PlannerError.
    """
    if ranks < 1 or spares < 0 or not every_s > 0 or not 0 < horizon_s < math.inf or not seeds:
        raise PlannerError(
            f"{ranks} ranks, {spares} spares, a kill every {every_s} s for {horizon_s} s cannot be predicted.",
            remedy="give a rank or more, spares from 0, times above 0, and a seed.",
        )
    fleet = Fleet(racks=1, trays=1, gpus=ranks + spares)
    job = FleetJob(spares_per_rack=spares, group=1, replica=1, micro_batches=0)

    def run(seed: int) -> FleetOutcome:
        return FleetSimulation(
            fleet=fleet,
            job=job,
            costs=costs,
            intervals=Intervals(snapshot=0, checkpoint=0),
            source=Kills(ranks, every_s, horizon_s, seed, even=even),
            horizon_s=horizon_s,
            rules=parse_rules(policy),
        ).run()

    found = [run(seed) for seed in seeds]
    calm = costs.step_s / (costs.step_s + costs.between_steps_s)
    names = sorted({name for one in found for name in one.rungs})
    return Prediction(
        kept=spread_of([one.wall_goodput / calm for one in found]),
        wall=spread_of([one.wall_goodput for one in found]),
        kills=sum(one.strikes for one in found) / len(found),
        rungs={name: sum(one.rungs.get(name, 0) for one in found) / len(found) for name in names},
        formula=_formula(costs, every_s, names),
        guessed=tuple(costs.guessed()),
    )


def _formula(costs: PlanCosts, every_s: float, rungs: Sequence[str]) -> Formula:
    name = "renewal (ETTR)"
    if others := [rung for rung in rungs if rung != "swap"]:
        return Formula(name=name, value=None, why_not=f"it was not only swaps: {', '.join(others)}")
    lost = costs.detect_s + costs.takeover_s + costs.first_step_s + (costs.step_s + costs.between_steps_s) / 2
    if lost >= every_s:
        return Formula(name=name, value=None, why_not="kills come faster than recoveries")
    return Formula(name=name, value=1 - lost / every_s)
