"""Costs halved and doubled by arithmetic come to what a simulation with these costs comes to."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import pytest

from rackrun.chaos.planner.analysis.recommendation import COSTS
from rackrun.chaos.planner.analysis.sensitivity import applies, resaved, rescaled
from rackrun.chaos.planner.analysis.simulation_case import Case, chosen_intervals, simulate
from rackrun.chaos.planner.inputs.fleet import FleetJob
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.model.job_state import Intervals
from rackrun.chaos.planner.model.outcome import FleetOutcome
from tests.planner.cases import case, trays

SEEDS = range(2)
SIX_RACKS = {
    "state in replicas": case(
        trays(400, 6), racks=6, job=FleetJob(group=8, replica=16, spares_per_rack=8), costs=PlanCosts()
    ),
    "state in snapshots": case(
        trays(400, 6),
        racks=6,
        job=FleetJob(group=8, replica=16, spares_per_rack=8, state="mirror"),
        costs=PlanCosts(snapshot_s=1.0),
    ),
    "state on disk": case(
        trays(400, 6), racks=6, job=FleetJob(group=8, replica=16, spares_per_rack=8, state="disk"), costs=PlanCosts()
    ),
    "a world that shrinks": case(
        trays(400, 6), racks=6, job=FleetJob(group=8, replica=16, exact=True), costs=PlanCosts(), policy="shrink"
    ),
}


def _goodput(one: Case) -> float:
    return sum(simulate(one, seed).goodput for seed in SEEDS) / len(SEEDS)


@lru_cache
def _usual(name: str) -> list[FleetOutcome]:
    return [simulate(SIX_RACKS[name], seed) for seed in SEEDS]


EVERY = [
    # each cost with one hall, and each hall with several costs
    (name, cost) if (number + which) % len(SIX_RACKS) == 0 else pytest.param(name, cost, marks=pytest.mark.stories)
    for number, cost in enumerate(COSTS)
    for which, name in enumerate(SIX_RACKS)
]


@pytest.mark.parametrize(("name", "cost"), EVERY)
def test_arithmetic_is_near_the_simulation(name: str, cost: str) -> None:
    one, usual = SIX_RACKS[name], _usual(name)
    if not all(applies(cost, found) for found in usual):
        assert cost == "start_s"
        return
    for factor in (0.5, 2.0):
        costs = msgspec.structs.replace(one.costs, **{cost: getattr(one.costs, cost) * factor})
        simulated = _goodput(msgspec.structs.replace(one, costs=costs))
        told = sum(rescaled(one, found, cost, factor).goodput for found in usual) / len(SEEDS)
        before = sum(found.goodput for found in usual) / len(SEEDS)
        assert told == pytest.approx(simulated, abs=0.0015 + 0.25 * abs(simulated - before))


def test_time_adds_up_whatever_is_scaled() -> None:
    one = SIX_RACKS["state in snapshots"]
    usual = simulate(one, 0)
    for cost in COSTS:
        assert rescaled(one, usual, cost, 2.0).where.total() == pytest.approx(usual.where.total())
        assert rescaled(one, usual, cost, 1.0).goodput == pytest.approx(usual.goodput)


def test_other_intervals_are_arithmetic_where_nothing_goes_back() -> None:
    one = SIX_RACKS["state in replicas"]
    usual, now = simulate(one, 0), chosen_intervals(one)
    for checkpoint in (now.checkpoint // 2, now.checkpoint * 3):
        other = Intervals(snapshot=0, checkpoint=checkpoint)
        simulated = simulate(msgspec.structs.replace(one, intervals=other), 0)
        assert resaved(one, usual, other).goodput == pytest.approx(simulated.goodput, abs=5e-4)


def test_a_cost_that_no_recovery_paid_changes_nothing() -> None:
    quiet = case(trays(1e7, 6), racks=2, job=FleetJob(group=8, replica=16), costs=PlanCosts(checkpoint_s=0.0), days=1)
    usual = simulate(quiet, 0)
    assert not usual.breaks
    assert rescaled(quiet, usual, "takeover_s", 2.0).goodput == usual.goodput


def test_how_fast_workers_start_is_simulated_where_spares_were_waited_for() -> None:
    usual = _usual("state in replicas")[0]
    assert applies("start_s", usual)
    waited = msgspec.structs.replace(usual, where=msgspec.structs.replace(usual.where, waiting=1.0))
    assert not applies("start_s", waited)
    assert applies("detect_s", waited)
