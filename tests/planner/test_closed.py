"""The closed forms against figures that others have published."""

from __future__ import annotations

import pytest

from rackrun.chaos.planner.analysis.closed_forms import (
    all_racks_ok,
    daly,
    daly_efficiency,
    erlang_b,
    erlang_c,
    ettr,
    meta_ettr,
    multi_level_waste,
    rack_ok,
    repair_time,
    two_levels,
    unavailability,
    young,
)
from rackrun.chaos.planner.inputs.published_failure_rates import PRESETS


@pytest.mark.parametrize(("mtbf_min", "interval_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_gives_the_intervals_under_his_figures_3_to_5(mtbf_min: float, interval_min: float) -> None:
    """A checkpoint of 5 minutes; mean times to interrupt of 24 h, 6 h and 15 min."""
    assert daly(5, mtbf_min) == pytest.approx(interval_min, rel=0.01)


def test_daly_never_waits_longer_than_the_mean_time_between_failures() -> None:
    assert daly(10, 5) == 5


def test_young_is_daly_where_checkpoints_are_cheap() -> None:
    assert young(1, 1e6) == pytest.approx(daly(1, 1e6), rel=2e-3)
    assert young(2, 100) == 20


@pytest.mark.parametrize(("cost", "mtbf", "restart"), [(5, 1440, 10), (5, 360, 10), (1, 100, 0)])
def test_the_complete_expression_is_best_at_daly_s_interval(cost: float, mtbf: float, restart: float) -> None:
    best = max(range(1, 2000), key=lambda tenths: daly_efficiency(tenths / 10, cost, mtbf, restart)) / 10
    assert best == pytest.approx(daly(cost, mtbf), rel=0.01, abs=0.1)


def test_rsc_1_s_rate_gives_the_published_mean_times_to_failure() -> None:
    """1.8 h for 16,384 GPUs, 0.23 h for 131,072."""
    assert PRESETS["rsc-1"].mtbf_s(16384) / 3600 == pytest.approx(1.8, rel=0.01)
    assert PRESETS["rsc-1"].mtbf_s(131072) / 3600 == pytest.approx(0.23, rel=0.03)


def test_llama_3_s_rate_gives_its_interruptions() -> None:
    assert 54 * 86400 / PRESETS["llama3"].mtbf_s(16384) == pytest.approx(419)


def test_meta_s_estimate_and_the_renewal_cycle_agree_where_little_is_lost() -> None:
    nodes, rate, restart, interval, cost = 2048, 6.5e-3 / 86400, 120.0, 600.0, 5.0
    estimate = meta_ettr(nodes, rate, restart, interval, cost)
    assert estimate == pytest.approx((1 - nodes * rate * 420) / (1 + 5 / 600))
    assert ettr(nodes * rate, restart + interval / 2, cost / interval) == pytest.approx(estimate, rel=0.01)


@pytest.mark.parametrize(("need", "all_ok"), [(18, 0.000), (17, 0.158), (16, 0.971), (15, 1.000)])
def test_spares_of_1389_racks_of_18_trays(need: int, all_ok: float) -> None:
    """Tray MTBF 8,000 h, repair 24 h: by hand, from the binomial distribution."""
    down = unavailability(8000, 24)
    by_hand = sum(
        count * down**k * (1 - down) ** (18 - k) for k, count in ((0, 1), (1, 18), (2, 153), (3, 816)) if k <= 18 - need
    )
    assert rack_ok(18, need, down) == pytest.approx(by_hand, rel=1e-9)
    assert all_racks_ok(1389, 18, need, down) == pytest.approx(all_ok, abs=5e-4)


def test_spare_racks_stand_in_for_whole_racks() -> None:
    down = unavailability(8000, 24)
    chances = [all_racks_ok(1389, 18, 17, down, spare) for spare in range(6)]
    assert chances == sorted(chances)
    assert chances[-1] > 0.97
    assert all_racks_ok(3, 1, 1, 0.5, 1) == pytest.approx(0.5)


def test_a_hundred_thousand_trays_do_not_overflow() -> None:
    assert rack_ok(100_000, 98_000, 0.01) == pytest.approx(1.0)
    assert rack_ok(4, 4, 0.0) == 1.0


def test_erlang_s_formulas_by_known_values() -> None:
    """Loss: 2 servers and 1 erlang, 1/5. Delay: 1/3. 14 servers and 10 erlangs, the example of call centres: 17.4 %."""
    assert erlang_b(2, 1.0) == pytest.approx(1 / 5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(14, 10.0) == pytest.approx(0.174, abs=5e-4)
    assert erlang_c(1, 0.7) == pytest.approx(0.7)


def test_repairs_wait_for_crews() -> None:
    assert repair_time(0.5, 1.0, None) == 1.0
    assert repair_time(0.5, 1.0, 1) == pytest.approx(2.0)  # M/M/1
    assert repair_time(3.0, 1.0, 2) == float("inf")


def test_each_level_has_its_interval() -> None:
    assert two_levels([2.0, 50.0], [0.01, 0.0001]) == pytest.approx((20.0, 1000.0))
    assert multi_level_waste([2.0, 50.0], [0.01, 0.0001]) == pytest.approx(0.3)
    assert two_levels([1.0], [0.0]) == (float("inf"),)
