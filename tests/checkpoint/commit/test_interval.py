"""The interval between snapshots: figures worked by hand, bounds, and that it neither differs nor flaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.commit.snapshot_interval import (
    IntervalPolicy,
    ObservedCosts,
    choose_interval,
    due_early,
    mtbf_ns,
)

MS = 10**6
SECOND = 10**9
HOUR = 3600 * SECOND


def observed(
    *, step_ms: int = 1000, cost_ms: int = 500, run_h: int = 0, failures: int = 0, samples: int = 10
) -> ObservedCosts:
    return ObservedCosts(
        steps=samples, step_ns=samples * step_ms * MS, snapshots=samples, snapshot_ns=samples * cost_ms * MS,
        run_ns=run_h * HOUR, failures=failures,
    )  # fmt: skip


def free(**changes: float) -> IntervalPolicy:
    """A policy without bounds that matter; the prior is one failure an hour."""
    settings = {"overhead_max": 1.0, "prior_failures": 1.0, "prior_s": 3600.0, "hysteresis": 0.0} | changes
    return IntervalPolicy(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step_ms", "cost_ms", "mtbf_s", "steps"),
    [
        (1000, 500, 3600, 60),  # sqrt(2 * 0.5 * 3600) = sqrt(3600) = 60 s
        (1000, 100, 3600, 27),  # sqrt(720) = 26.8 s
        (1000, 60_000, 3600, 658),  # sqrt(432000) = 657.3 s, 11 minutes
        (250, 500, 3600, 240),  # 60 s of quarter seconds
        (1000, 2, 1_000_000, 64),  # sqrt(4000) = 63.2 s
        (60_000, 500, 3600, 1),  # one step is as long as the optimum: sqrt(3600) = 60 s
    ],
)
def test_the_optimum_is_youngs(step_ms: int, cost_ms: int, mtbf_s: int, steps: int) -> None:
    assert choose_interval(observed(step_ms=step_ms, cost_ms=cost_ms), free(prior_s=mtbf_s)).steps == steps


def test_the_rate_moves_from_the_prior_to_what_is_observed() -> None:
    policy = free(prior_s=24 * 3600)
    assert mtbf_ns(observed(), policy) == 24 * HOUR
    assert mtbf_ns(observed(run_h=24, failures=0), policy) == 48 * HOUR  # a day without a failure
    assert mtbf_ns(observed(run_h=24, failures=3), policy) == 12 * HOUR  # (24 + 24) / (1 + 3)
    assert mtbf_ns(observed(run_h=976, failures=999), policy) == HOUR  # 1000 / 1000
    assert choose_interval(observed(run_h=976, failures=999), policy).steps == 60


def test_without_any_failure_the_interval_is_finite() -> None:
    # 24 h + 1000 h without a failure: sqrt(2 * 0.5 * 3686400) = 1920 s
    assert choose_interval(observed(run_h=1000), free(prior_s=24 * 3600)).steps == 1920


def test_the_overhead_is_bounded() -> None:
    # Failures every minute ask for sqrt(2 * 0.5 * 60) = 8 steps; 0.5 s in each 1 s * 50 is 1 %.
    often = observed(run_h=0)
    assert choose_interval(often, free(prior_s=60)).steps == 8
    bounded = choose_interval(often, free(prior_s=60, overhead_max=0.01))
    assert (bounded.steps, bounded.reason) == (50, "overhead bound")


def test_the_callers_minimum_and_maximum_hold() -> None:
    assert choose_interval(observed(), free(minimum=100)).steps == 100
    assert choose_interval(observed(), free(maximum=20)).steps == 20


def test_the_maximum_wins_over_the_overhead_and_says_so() -> None:
    found = choose_interval(observed(cost_ms=5000), IntervalPolicy(maximum=100))
    assert found.steps == 100
    assert "500 would keep the overhead" in found.reason


def test_a_free_snapshot_is_taken_at_every_step() -> None:
    assert choose_interval(observed(cost_ms=0), IntervalPolicy()).steps == 1


def test_steps_longer_than_the_time_between_failures_are_each_kept() -> None:
    assert choose_interval(observed(step_ms=100_000, cost_ms=90_000), free(prior_s=60)).steps == 1


def test_nothing_measured_yet_keeps_what_is_in_use_or_the_minimum() -> None:
    nothing = ObservedCosts(steps=0, step_ns=0, snapshots=0, snapshot_ns=0, run_ns=0, failures=0)
    assert choose_interval(nothing, IntervalPolicy(minimum=7)).steps == 7
    assert choose_interval(nothing, IntervalPolicy(), current=33).steps == 33


def test_noise_does_not_move_it() -> None:
    policy = free(hysteresis=0.25)
    current = choose_interval(observed(), policy).steps
    assert current == 60
    for cost_ms in (330, 450, 550, 750):  # sqrt(2 c 3600): 49, 57, 63, 74 steps, within 45..75
        assert choose_interval(observed(cost_ms=cost_ms), policy, current).steps == 60
    assert choose_interval(observed(cost_ms=800), policy, current).steps == 76
    assert choose_interval(observed(cost_ms=200), policy, current).steps == 38


def test_a_broken_bound_moves_it_at_once() -> None:
    policy = free(hysteresis=0.9, overhead_max=0.01)
    assert (
        choose_interval(observed(cost_ms=620), policy, 60).steps == 67
    )  # 0.62 s in 62 s; sqrt(2 * 0.62 * 3600) = 66.8
    assert choose_interval(observed(), free(hysteresis=0.9, maximum=50), 60).steps == 50


def test_negative_sums_and_unusable_settings_are_refused() -> None:
    with pytest.raises(CheckpointError, match="monotonic"):
        choose_interval(observed(cost_ms=-1), IntervalPolicy())
    for wrong in ({"overhead_max": 0.0}, {"minimum": 0}, {"maximum": 0}, {"prior_s": 0.0}, {"hysteresis": 1.0}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            IntervalPolicy(**wrong)


sums = st.builds(
    ObservedCosts,
    steps=st.integers(1, 10**7), step_ns=st.integers(1, 10**18), snapshots=st.integers(1, 10**6),
    snapshot_ns=st.integers(0, 10**18), run_ns=st.integers(0, 10**18), failures=st.integers(0, 10**5),
)  # fmt: skip


@given(sums, st.integers(1, 20_000), st.sampled_from([1, 2, 50]))
def test_the_same_sums_give_the_same_steps_within_the_bounds_and_stay(
    seen: ObservedCosts, current: int, minimum: int
) -> None:
    policy = IntervalPolicy(minimum=minimum)
    found = choose_interval(seen, policy, current)
    assert found == choose_interval(seen, policy, current)
    assert minimum <= found.steps <= policy.maximum
    cost = seen.snapshot_ns * seen.steps
    within = cost * 100 <= found.steps * seen.step_ns * seen.snapshots
    assert within or found.steps == policy.maximum
    assert choose_interval(seen, policy, found.steps).steps == found.steps  # it does not flap


def test_early_snapshots_are_twice_as_far_apart_each_time() -> None:
    cheap = observed(step_ms=30, cost_ms=3)
    assert choose_interval(cheap, IntervalPolicy()).steps > 500, "a failure a day: each would cost many steps"
    assert [since for since in range(100) if due_early(cheap, since)] == [1, 2, 4, 8, 16, 32, 64]


def test_early_snapshots_that_cost_too_much_are_left_out_after_the_first_three() -> None:
    slow = observed(step_ms=1000, cost_ms=5000)  # a twentieth of 100 s
    assert [since for since in range(1000) if due_early(slow, since)] == [1, 2, 4, 256, 512]
