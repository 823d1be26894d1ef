"""Simulated goodput within 5 % of the closed forms, wherever those apply."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackrun.chaos.planner.analysis import closed_forms
from rackrun.chaos.planner.analysis.applicable_formulas import restart_only, takeovers_only, whole_share
from rackrun.chaos.planner.analysis.seed_statistics import spread_of
from rackrun.chaos.planner.analysis.simulation_case import Case, chosen_intervals, simulate
from rackrun.chaos.planner.inputs.failures import FailureProcess
from rackrun.chaos.planner.inputs.fleet import FleetJob
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.model.job_state import Intervals
from tests.planner.cases import HOUR, NEVER, QUICK, case, trays

TOLERANCE = 0.05
SEEDS = range(2)
DISK = msgspec.structs.replace(QUICK, checkpoint_s=300.0, start_s=300.0, load_s=300.0)


def wall(one: Case) -> float:
    return spread_of([simulate(one, seed).wall_goodput for seed in SEEDS]).mean


def on_disk(mtbf_h: float, every_s: float, costs: PlanCosts = DISK) -> Case:
    """One rack whose processes all die at once; everybody begins again from the newest checkpoint."""
    dies = FailureProcess(name="rack", domain="rack", mtbf_s=mtbf_h * HOUR)
    return case(
        dies,
        racks=1,
        days=60 * mtbf_h / 24 * 4,
        job=FleetJob(group=8, replica=64, state="disk"),
        costs=costs,
        intervals=Intervals(snapshot=0, checkpoint=round(every_s)),
    )


@pytest.mark.parametrize("mtbf_h", [24.0, 6.0, 2.0])
@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_one_level_on_disk_is_daly_s_complete_expression(mtbf_h: float, times: float) -> None:
    every_s = times * closed_forms.daly(300, mtbf_h * HOUR)
    one = on_disk(mtbf_h, every_s)
    formula, estimate = restart_only(one, one.intervals or NEVER)
    assert formula.value == pytest.approx(closed_forms.daly_efficiency(round(every_s), 300, mtbf_h * HOUR, 600))
    assert wall(one) == pytest.approx(formula.value, rel=TOLERANCE)
    if mtbf_h == 24:
        assert wall(one) == pytest.approx(estimate.value, rel=TOLERANCE)


def test_daly_s_interval_is_the_best_one_simulated_too() -> None:
    best_s = closed_forms.daly(300, 6 * HOUR)
    figures = {times: wall(on_disk(6.0, times * best_s)) for times in (0.25, 1.0, 4.0)}
    assert figures[1.0] == max(figures.values())
    assert min(figures[1.0] - figures[0.25], figures[1.0] - figures[4.0]) > 0.02


def test_the_planner_s_own_choice_is_daly_s() -> None:
    one = msgspec.structs.replace(on_disk(6.0, 1.0), intervals=None)
    ranks_s = closed_forms.daly(300, 6 * HOUR)
    assert chosen_intervals(one).checkpoint == pytest.approx(ranks_s, abs=1)


@pytest.mark.parametrize("state", ["replicas", "mirror"])
@pytest.mark.parametrize("mtbf_h", [8000, 500])
def test_spares_that_answer_everything_are_a_renewal_cycle(state: str, mtbf_h: float) -> None:
    costs = PlanCosts(step_s=10.0, takeover_s=40.0, regroup_s=10.0, first_step_s=5.0, between_steps_s=0.5)
    job = FleetJob(spares_per_rack=16, group=8, replica=16, state=state)  # type: ignore[arg-type]
    one = case(trays(mtbf_h, 2), racks=20, job=job, costs=costs)
    outcomes = [simulate(one, seed) for seed in SEEDS]
    rungs: dict[str, float] = {}
    for outcome in outcomes:
        for name, count in outcome.rungs.items():
            rungs[name] = rungs.get(name, 0.0) + count
    formula = takeovers_only(one, chosen_intervals(one), rungs)
    assert formula.value is not None, formula.why_not
    assert spread_of([outcome.wall_goodput for outcome in outcomes]).mean == pytest.approx(formula.value, rel=0.01)


def test_two_levels_waste_what_the_first_order_says() -> None:
    """Trays go back to a snapshot in memory, racks to the disk: their copies are lost with them."""
    costs = msgspec.structs.replace(QUICK, snapshot_s=2.0, checkpoint_s=60.0, start_s=1.0, load_s=0.0, takeover_s=0.0)
    tray, rack = trays(200, 0.01), FailureProcess(name="rack", domain="rack", mtbf_s=200 * HOUR, repair_s=36.0)
    rates = [72 / 200 / HOUR * 0.75, 4 / 200 / HOUR]
    snapshot_s, checkpoint_s = closed_forms.two_levels([2.0, 60.0], rates)
    waste = closed_forms.multi_level_waste([2.0, 60.0], rates)
    assert 0.03 < waste < 0.2
    job = FleetJob(group=8, replica=24, spare_racks=1, state="mirror")
    every = Intervals(snapshot=round(snapshot_s), checkpoint=round(checkpoint_s))
    one = case(tray, rack, job=job, costs=costs, intervals=every, policy="swap,move,restart")
    outcomes = [simulate(one, seed) for seed in SEEDS]
    lost = [(outcome.where.saving + outcome.where.redone) / outcome.wall_s for outcome in outcomes]
    assert 1 - spread_of(lost).mean == pytest.approx(1 - waste, rel=TOLERANCE)
    assert spread_of(lost).mean == pytest.approx(waste, rel=0.2)
    assert all(outcome.rungs["restart"] > 5 for outcome in outcomes)


def test_the_formula_for_takeovers_does_not_speak_of_anything_else() -> None:
    one = case(trays(8000, 4))
    assert takeovers_only(one, NEVER, {"swap": 3, "shrink": 1}).why_not == "it was not only swaps and moves: shrink"
    aged = takeovers_only(case(trays(8000, 4, shape=0.7)), NEVER, {"swap": 3})
    assert (aged.value, aged.why_not) == (None, "not exponential: tray")


def stalls(group: int, *, mtbf_h: float = 400, repair_h: float = 12, **more: Any) -> Case:
    """The world has one size: all stand still until a rack that is short of trays is whole again."""
    job = FleetJob(group=group, replica=group, min_ranks=0, wait_for_hardware_s=1e9)
    return case(trays(mtbf_h, repair_h), racks=20, job=job, intervals=NEVER, policy="swap,wait", days=40, **more)


@pytest.mark.parametrize("spare_trays", [1, 2, 3])
def test_waiting_for_short_racks_is_the_binomial_distribution(spare_trays: int) -> None:
    one = stalls(4 * (18 - spare_trays), mtbf_h=1200 if spare_trays == 1 else 400)
    formula = whole_share(one)
    assert formula.value is not None
    assert 0.1 < formula.value < 0.99
    assert wall(one) == pytest.approx(formula.value, abs=TOLERANCE)


@pytest.mark.parametrize("law", ["exponential", "fixed"])
def test_how_repairs_are_spread_does_not_matter_while_there_are_crews(law: str) -> None:
    one = stalls(64)
    one = msgspec.structs.replace(one, processes=(trays(400, 12, repair_law=law),))
    assert wall(one) == pytest.approx(whole_share(one).value, abs=TOLERANCE)


def test_few_crews_are_erlang_s_queue() -> None:
    """13 crews for 10.5 trays that are down on average: who fails waits for a crew one time in three."""
    slow, ample = stalls(64, crews=13), stalls(64)
    expected, easier = whole_share(slow).value, whole_share(ample).value
    assert expected is not None
    assert easier is not None
    assert expected < easier - 0.05
    assert wall(slow) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("crews", [9, 11])
def test_crews_that_can_hardly_keep_up_have_no_formula(crews: int) -> None:
    formula = whole_share(stalls(64, crews=crews))
    assert (formula.value, formula.why_not) == (None, "the crews can hardly keep up")


def test_spare_racks_are_the_binomial_distribution_of_racks() -> None:
    job = FleetJob(group=64, replica=64, spare_racks=2, min_ranks=0, wait_for_hardware_s=1e9)
    one = case(trays(300, 12), racks=20, job=job, intervals=NEVER, policy="swap,move,wait", days=40)
    formula, without = (
        whole_share(one),
        whole_share(msgspec.structs.replace(one, job=msgspec.structs.replace(job, spare_racks=0))),
    )
    assert formula.value is not None
    assert without.value is not None
    assert formula.value > without.value + 0.1
    assert wall(one) == pytest.approx(formula.value, abs=TOLERANCE)
