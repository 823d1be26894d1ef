"""Deadlines of what is no step come from that unit's own history."""

from __future__ import annotations

import random

import pytest

from rackrun.worker.steps.hang_deadlines import HangDeadlines
from rackrun.worker.steps.unit_times import EXITS, PEERS_LEAST_MS, UNKNOWN, UnitTimes

STEP_S = 0.05


def paced(steps: int = 20) -> HangDeadlines:
    pace = HangDeadlines()
    for _ in range(2):
        pace.committed()
    for _ in range(steps):
        pace.took(STEP_S)
    return pace


def test_a_first_phase_has_minutes_whatever_steps_take() -> None:
    pace = paced()
    assert pace.step_allowance().idle_ms == 1000
    assert pace.allowance("evaluate") == UNKNOWN
    assert UNKNOWN.idle_ms >= 600_000


def test_what_is_regular_is_found_within_three_times_what_was_observed() -> None:
    pace = paced()
    for _ in range(5):
        pace.unit_took("evaluate", 4.0)
    assert pace.allowance("evaluate").idle_ms == 12_000
    assert pace.allowance("save") == UNKNOWN, "another phase"


def test_code_between_steps_that_takes_next_to_nothing_is_found_within_seconds() -> None:
    times = UnitTimes()
    for _ in range(50):
        times.took(random.Random(1).uniform(0.0001, 0.02))
    assert times.allowance(1.0).idle_ms == 2000


@pytest.mark.parametrize(
    "seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(60, 200))]
)
def test_phases_of_any_length_are_within_the_busy_limit_and_nearly_always_within_the_idle_one(seed: int) -> None:
    rng, times = random.Random(seed), UnitTimes()
    times.took(STEP_S * 10 ** rng.uniform(-1, 2))
    for _ in range(60):
        seconds = STEP_S * 10 ** rng.uniform(-1, 2)
        allowed = times.allowance(STEP_S)
        assert seconds * 1000 <= allowed.busy_ms
        if not times.regular:
            assert seconds * 1000 <= allowed.idle_ms
        times.took(seconds)


def test_what_grows_from_a_tenth_of_a_step_to_a_hundred_is_within_its_limits() -> None:
    times, seconds = UnitTimes(), 0.1 * STEP_S
    times.took(seconds)
    while seconds < 100 * STEP_S:
        seconds *= 1.5
        assert seconds * 1000 <= times.allowance(STEP_S).idle_ms
        times.took(seconds)


def test_run_expect_raises_both_limits_once() -> None:
    pace = paced()
    for _ in range(5):
        pace.unit_took("save", 1.0)
    pace.expect(500.0)
    allowed = pace.allowance("save")
    assert (allowed.idle_ms, allowed.busy_ms) == (500_000, 500_000)
    assert pace.allowance("save").idle_ms == 3000


def test_where_a_rank_knows_too_little_the_times_of_others_count_after_half_a_minute() -> None:
    pace = HangDeadlines()
    for _ in range(5):
        pace.took(1.0)
    assert pace.allowance("save").least_ms == PEERS_LEAST_MS == 30_000
    pace.unit_took("save", 20.0)
    assert pace.allowance("save") == (150_000, 300_000, 60_000), "three times what it took itself"
    pace.expect(500.0)
    assert pace.allowance("save").least_ms == 500_000
    for _ in range(4):
        pace.unit_took("save", 20.0)
    assert pace.allowance("save") == (60_000, 180_000, 0), "it knows enough"


def test_first_steps_too() -> None:
    pace = HangDeadlines()
    assert pace.step_allowance() == (600_000, 0, 30_000)
    pace.took(15.0)
    assert pace.step_allowance() == (150_000, 0, 45_000)
    pace.expect(100.0)
    assert pace.step_allowance() == (100_000, 0, 100_000)
    assert paced().step_allowance() == (1000, 0, 0)


def test_a_copy_beside_a_step_has_time_by_its_size_until_one_was_seen() -> None:
    pace = paced()
    assert pace.step_allowance(copying_bytes=20_000_000).idle_ms == 2000
    assert pace.step_allowance(copying_bytes=10**12).idle_ms == 61_000
    pace.copied(0.0)
    assert pace.step_allowance(copying_bytes=10**12).idle_ms == 1000
    pace.copied(0.5)
    assert pace.step_allowance(copying_bytes=1).idle_ms == 3000
    assert pace.step_allowance().idle_ms == 1000


def test_a_copy_is_no_reason_to_be_without_a_sign_of_life() -> None:
    pace = HangDeadlines()
    pace.took(0.1)
    alone, beside = pace.step_allowance(), pace.step_allowance(copying_bytes=10**12)
    assert (alone.least_ms, beside.least_ms) == (30_000, 30_000)
    assert beside.idle_ms == alone.idle_ms + 60_000


def test_after_main_seconds_are_enough() -> None:
    assert EXITS.least_ms == 12_000, "more than the ten seconds that some scripts sleep at their end"


def test_run_expect_holds_for_the_code_after_the_loop_and_after_main_too() -> None:
    pace = paced()
    assert pace.unobserved(EXITS) == EXITS
    pace.expect(100.0)
    assert pace.unobserved(UNKNOWN).least_ms == pace.unobserved(EXITS).least_ms == 100_000


def test_what_was_slow_and_no_hang_has_more_time_the_next_time() -> None:
    pace = paced()
    for _ in range(5):
        pace.unit_took("save", 1.0)
    pace.new_generation(nobody_lost=True)
    assert pace.allowance("save").idle_ms == 6000
