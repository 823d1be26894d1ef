"""How micro-batches are shared out when some ranks are slow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.core.stragglers.shares import GAIN_MIN, shared_out, sharing


def longest(shares: tuple[int, ...], times: list[float], rest: float) -> float:
    return max(slow * (rest + share) for slow, share in zip(times, shares, strict=True))


def all_ways(total: int, places: int) -> list[tuple[int, ...]]:
    """To share ``total`` out, one at the least for each."""
    cuts = itertools.combinations(range(1, total), places - 1)
    return [tuple(stop - start for start, stop in itertools.pairwise((0, *cut, total))) for cut in cuts]


def test_a_rank_at_a_third_of_the_speed_gets_about_a_third() -> None:
    assert shared_out(32, [1.0, 1.0, 3.0, 1.0]) == (10, 10, 3, 9)


@given(times=st.lists(st.floats(1.0, 8.0), min_size=2, max_size=4), total=st.integers(4, 12), rest=st.floats(0.0, 3.0))
def test_no_other_way_lets_the_last_be_done_earlier(times: list[float], total: int, rest: float) -> None:
    shares = shared_out(total, times, rest)
    best = min(longest(one, times, rest) for one in all_ways(total, len(times)))
    even = max(times) * (rest + -(-total // len(times)))
    if shares:
        assert (sum(shares), min(shares) > 0) == (total, True)
        assert longest(shares, times, rest) == pytest.approx(best)
        assert best <= (1 - GAIN_MIN) * even
    else:
        assert max(times) == 1 or best > (1 - GAIN_MIN) * even


def test_a_rank_keeps_one_however_slow_it_is() -> None:
    assert shared_out(8, [1.0, 1000.0]) == (7, 1)


@pytest.mark.parametrize("times", [[1.0, 1.0], [1.0, 1.05]])
def test_what_would_gain_next_to_nothing_is_left_as_it_is(times: list[float]) -> None:
    assert shared_out(8, times) == ()


def test_with_one_micro_batch_each_there_is_nothing_to_shift() -> None:
    assert shared_out(4, [1.0, 3.0, 1.0, 1.0]) == ()


def test_what_a_step_costs_beside_its_micro_batches_stays_with_a_slow_rank() -> None:
    assert shared_out(32, [1.0, 1.0, 3.0, 1.0], rest=3.0)[2] == 1


def test_ranks_that_differ_only_along_other_axes_share_their_samples() -> None:
    assert sharing((("pp", 2), ("dp", 2), ("tp", 2)), 8) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert sharing((), 3) == [(0,), (1,), (2,)]
