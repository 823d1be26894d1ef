"""Who is slow, from what each rank spent on its own, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.core.stragglers.straggler_detection import Limits, RankPlace, Stragglers, StragglerVerdict
from rackrun.protocol.ids import Rank, SlotId

WINDOW = Limits().window
SETTLE = Limits().settle
STEP_S = 1.0
"""Longer than a row: every step is one."""
Own = Callable[[random.Random, int], Sequence[float]]
"""Of a step: each rank's own seconds."""


def seats(ranks: int, *, group: Callable[[int], int] = lambda _rank: 0) -> list[RankPlace]:
    return [RankPlace(SlotId(f"t{rank // 4}/{rank % 4}"), rank, group(rank)) for rank in range(ranks)]


def judged(own: Own, ranks: int, steps: int, seed: int = 0) -> list[tuple[int, StragglerVerdict]]:
    """(step, verdict), steps counted from the first that is looked at."""
    rng, stragglers = random.Random(seed), Stragglers()
    stragglers.world(seats(ranks))
    for _ in range(SETTLE):
        stragglers.step([STEP_S] * ranks, STEP_S)
    found = ((step, stragglers.step(own(rng, step), STEP_S)) for step in range(steps))
    return [(step, verdict) for step, verdict in found if verdict is not None]


def noisy(ranks: int, sigma: float, slower: dict[int, float] | None = None, since: int = 0) -> Own:
    """Log-normal, and ``slower`` ranks by their factor ``since`` a step."""

    def own(rng: random.Random, step: int) -> list[float]:
        factors = slower if slower and step >= since else {}
        return [0.6 * rng.lognormvariate(0, sigma) * factors.get(rank, 1.0) for rank in range(ranks)]

    return own


def who(verdict: StragglerVerdict) -> list[int]:
    return [one.rank for one in verdict.slow]


# -- nobody is condemned ---------------------------------------------------------------------------------------------
@settings(max_examples=15, derandomize=True, deadline=None)
@given(ranks=st.integers(1, 12), sigma=st.floats(0.0, 0.6), seed=st.integers(0, 2**16))
def test_noise_condemns_nobody(ranks: int, sigma: float, seed: int) -> None:
    assert not judged(noisy(ranks, sigma), ranks, 120, seed)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    ranks=st.integers(2, 8),
    blips=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.floats(1.5, 1e4)), max_size=12),
)
def test_blips_condemn_nobody_however_long_they_are(ranks: int, blips: list[tuple[int, int, float]]) -> None:
    """At most 12 in a window of 20."""

    def own(_rng: random.Random, step: int) -> list[float]:
        times = [0.6] * ranks
        for late, rank, factor in blips:
            if step == 30 + late:
                times[rank % ranks] *= factor
        return times

    assert not judged(own, ranks, 60)


@settings(max_examples=15, derandomize=True, deadline=None)
@given(rank=st.integers(0, 3), rows=st.integers(1, Limits().hits - 1), factor=st.floats(1.5, 100.0))
def test_a_spell_that_is_shorter_than_the_window_asks_for_condemns_nobody(rank: int, rows: int, factor: float) -> None:
    assert not judged(
        lambda _rng, step: [0.6 * (factor if one == rank and 30 <= step < 30 + rows else 1) for one in range(4)], 4, 90
    )


def test_a_rank_that_nobody_has_to_wait_for_is_not_slow() -> None:
    """Three times as long, but of a step that is spent in collectives."""
    assert not judged(lambda _rng, _step: [0.01, 0.01, 0.01, 0.03], 4, 60)


def test_a_pipelines_heavier_stage_is_compared_with_itself() -> None:
    stragglers = Stragglers()
    stragglers.world(seats(6, group=lambda rank: rank // 3))
    for _ in range(60):
        assert stragglers.step([0.3, 0.3, 0.3, 0.6, 0.6, 0.6], STEP_S) is None
    found = [stragglers.step([0.3, 0.3, 0.3, 0.9, 0.6, 0.6], STEP_S) for _ in range(WINDOW)]
    assert [who(verdict) for verdict in found if verdict] == [[3]]


# -- who is slow is found --------------------------------------------------------------------------------------------
@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    ranks=st.integers(2, 16),
    rank=st.integers(0, 15),
    factor=st.floats(1.5, 20.0),
    since=st.integers(0, 60),
    seed=st.integers(0, 2**16),
)
def test_a_rank_half_as_slow_again_is_found_within_a_window(
    ranks: int, rank: int, factor: float, since: int, seed: int
) -> None:
    slow = rank % ranks
    (found,) = judged(noisy(ranks, 0.03, {slow: factor}, since), ranks, since + 3 * WINDOW, seed)
    step, verdict = found
    assert who(verdict) == [slow]
    assert step < since + WINDOW
    assert 0.85 * factor < verdict.slow[0].times < 1.15 * factor


@settings(max_examples=15, derandomize=True, deadline=None)
@given(ranks=st.integers(3, 8), sigma=st.floats(0.7, 0.9), seed=st.integers(0, 2**16))
def test_a_rank_whose_peers_vary_is_found_if_it_does_not(ranks: int, sigma: float, seed: int) -> None:
    """They wait for it most of the time: the little that is their own is what the host makes of it."""

    def own(rng: random.Random, _step: int) -> list[float]:
        host = 0.1 * rng.lognormvariate(0, sigma)
        peers = [host * rng.lognormvariate(0, 0.1) for _ in range(ranks - 1)]
        return [*peers, 0.6 * rng.lognormvariate(0, 0.03)]

    found = judged(own, ranks, 2 * WINDOW, seed)
    assert who(found[-1][1]) == [ranks - 1]


@settings(max_examples=15, derandomize=True, deadline=None)
@given(ranks=st.integers(3, 8), sigma=st.floats(0.3, 0.6), seed=st.integers(0, 2**16))
def test_a_rank_is_found_where_the_work_of_all_varies(ranks: int, sigma: float, seed: int) -> None:
    """Long samples and short ones."""

    def own(rng: random.Random, _step: int) -> list[float]:
        work = 0.3 * rng.lognormvariate(0, sigma)
        return [work] * (ranks - 1) + [1.5 * work]

    found = judged(own, ranks, 2 * WINDOW, seed)
    assert who(found[-1][1]) == [ranks - 1]


@settings(max_examples=12, derandomize=True, deadline=None)
@given(pair=st.sets(st.integers(0, 7), min_size=2, max_size=2), seed=st.integers(0, 2**16))
def test_two_slow_ranks_of_eight_are_both_found(pair: set[int], seed: int) -> None:
    found = judged(noisy(8, 0.03, dict.fromkeys(pair, 1.6), 40), 8, 40 + WINDOW, seed)
    assert who(found[-1][1]) == sorted(pair)


def test_a_tray_that_is_slow_together_is_found_rank_by_rank() -> None:
    found = judged(noisy(8, 0.03, dict.fromkeys((4, 5, 6, 7), 1.6), 40), 8, 40 + WINDOW)
    assert who(found[-1][1]) == [4, 5, 6, 7]


def test_tiny_steps_are_added_up_until_they_are_worth_a_look() -> None:
    """Steps of 1 ms: a second of one rank's trouble is a thousand steps, and still only two rows."""
    stragglers = Stragglers()
    stragglers.world(seats(4))

    def steps(count: int, own: Sequence[float]) -> list[StragglerVerdict]:
        return [verdict for _ in range(count) if (verdict := stragglers.step(own, 0.001)) is not None]

    assert not steps(12_000, [0.0006] * 4)
    assert not steps(1_000, [0.0006, 0.0006, 0.1, 0.0006])
    assert not steps(12_000, [0.0006] * 4)
    (verdict,) = steps(10_000, [0.0006, 0.0006, 0.0012, 0.0006])
    assert who(verdict) == [2]


def test_it_says_how_slow_against_its_peers_and_its_own_past() -> None:
    ((_, verdict),) = judged(noisy(4, 0.0, {1: 1.5}, 40), 4, 40 + WINDOW)
    (one,) = verdict.slow
    assert (one.rank, one.slot, one.times, one.past, one.own_ms) == (Rank(1), SlotId("t0/1"), 1.5, 1.5, 900.0)
    assert (one.rows, one.window) == (Limits().hits, WINDOW)


def test_one_that_has_always_been_slow_has_no_better_past() -> None:
    ((_, verdict),) = judged(noisy(4, 0.0, {1: 1.5}), 4, 60)
    assert verdict.slow[0].past in (0.0, 1.0)


# -- hysteresis ------------------------------------------------------------------------------------------------------
def test_a_slow_rank_that_becomes_much_slower_is_told_of_again() -> None:
    found = judged(lambda _rng, step: [0.6, 0.6, 0.6, 0.9 if step < 60 else 1.8], 4, 100)
    assert [[round(one.times, 1) for one in verdict.slow] for _, verdict in found] == [[1.5], [3.0]]


def test_a_slow_rank_that_wavers_is_not_told_of_again() -> None:
    found = judged(lambda _rng, step: [0.6, 0.6, 0.6, 0.9 if step // 10 % 2 else 1.1], 4, 200)
    assert [who(verdict) for _, verdict in found] == [[3]]


def test_a_slow_rank_that_recovers_is_slow_no_more() -> None:
    found = judged(lambda _rng, step: [0.6, 0.6, 0.6, 1.2 if 30 <= step < 60 else 0.6], 4, 100)
    assert [who(verdict) for _, verdict in found] == [[3], []]
    assert found[1][0] >= 60 + WINDOW - Limits().clear - 1


def test_a_rank_that_is_slow_every_other_step_does_not_flutter() -> None:
    """Once it is slow it stays so, until it is clearly not."""
    found = judged(lambda _rng, step: [0.6, 0.6, 0.6, 1.2 if step < 40 or step % 2 else 0.6], 4, 200)
    assert [who(verdict) for _, verdict in found] == [[3]]


# -- all at once -----------------------------------------------------------------------------------------------------
@settings(max_examples=12, derandomize=True, deadline=None)
@given(ranks=st.integers(1, 12), factor=st.floats(1.7, 20.0), seed=st.integers(0, 2**16))
def test_when_all_are_slow_at_once_it_is_said_and_nobody_is_blamed(ranks: int, factor: float, seed: int) -> None:
    found = judged(noisy(ranks, 0.03, dict.fromkeys(range(ranks), factor), 40), ranks, 40 + WINDOW, seed)
    assert found
    assert not any(who(verdict) for _, verdict in found)
    assert found[-1][1].everybody > 1.5


def test_slowness_that_creeps_up_on_all_is_seen_against_the_best_past() -> None:
    found = judged(lambda _rng, step: [0.1 * 1.005**step] * 4, 4, 200)
    assert [bool(verdict.everybody) for _, verdict in found] == [True]


def test_all_are_as_fast_again() -> None:
    found = judged(lambda _rng, step: [1.0 if 40 <= step < 80 else 0.3] * 4, 4, 140)
    assert [bool(verdict.everybody) for _, verdict in found] == [True, False]


# -- the world changes -----------------------------------------------------------------------------------------------
def test_whoever_takes_over_is_judged_anew_and_the_others_keep_what_is_known_of_them() -> None:
    stragglers, here = Stragglers(), seats(4)
    stragglers.world(here)
    for _ in range(SETTLE + 2 * WINDOW):
        stragglers.step([0.5, 1.0, 0.5, 0.5], STEP_S)
    stragglers.world([here[0], RankPlace(SlotId("t9/0"), 9, 0), *here[2:]])
    found = [stragglers.step([0.5, 0.5, 0.5, 0.5], STEP_S) for _ in range(SETTLE + 2 * WINDOW)]
    assert [who(verdict) for verdict in found if verdict] == [[]]
    assert found[SETTLE] is not None, "at the first row: it is slow no more, for it is gone"


def test_the_first_steps_of_a_generation_are_not_looked_at() -> None:
    stragglers = Stragglers()
    for _ in range(2 * WINDOW):
        stragglers.world(seats(4))
        for _ in range(SETTLE):
            assert stragglers.step([0.1, 9.0, 0.1, 0.1], 10.0) is None


def test_a_world_of_another_size_begins_with_no_past() -> None:
    stragglers = Stragglers()
    stragglers.world(seats(4))
    for _ in range(3 * WINDOW):
        stragglers.step([0.1] * 4, STEP_S)
    stragglers.world(seats(2))
    assert not any(stragglers.step([0.9] * 2, STEP_S) for _ in range(3 * WINDOW)), "more work for each is not slowness"


def test_the_same_steps_give_the_same_verdicts() -> None:
    def play() -> list[tuple[int, StragglerVerdict]]:
        return judged(noisy(8, 0.1, {3: 1.7}, 30), 8, 90, seed=7)

    assert play() == play()
