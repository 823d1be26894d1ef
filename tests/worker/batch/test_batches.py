"""The global batch of every step where it follows the world: how large, which samples, which learning rates. Arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from rackrun.errors import UsageError
from rackrun.worker.batch.batch_runs import BatchRun, place, shards_before
from rackrun.worker.batch.lr_rule import ScaleLR, factor_at, scaling
from rackrun.worker.data.global_batch import Batches, data_ranks
from rackrun.worker.data.loader import BatchPlan
from tests.worker import harness  # noqa: F401 - sets the number of threads before torch is imported

PLAN = BatchPlan(32, 2, 0)
"""16 micro-batches: 4 on each of 4 ranks."""


def batches(worlds: list[tuple[int, int]], scale: ScaleLR | None = None, full: int = 4) -> Batches:
    return Batches(PLAN, scale or ScaleLR(), lambda size: size, lambda: (full, worlds))


def sizes(of: Batches, steps: int) -> list[int]:
    return [of.of(step).shards for step in range(steps)]


def commit(of: Batches, steps: int) -> None:
    for step in range(of._upto + 1, steps):
        of.committed(step, of.of(step))


# -- how large
def test_every_rank_keeps_its_micro_batches() -> None:
    assert sizes(batches([(0, 4), (2, 3), (4, 1), (5, 4)]), 7) == [16, 16, 12, 12, 4, 16, 16]


def test_a_world_that_has_shrunk_before_its_first_step_knows_how_it_began() -> None:
    assert sizes(batches([(0, 3)]), 2) == [12, 12]


def test_a_world_that_is_yet_to_come_is_no_run_of_an_earlier_step() -> None:
    of = batches([(0, 4), (4, 3), (6, 3)])
    assert of.runs(3) == ((0, 16),)
    assert of.runs(4) == of.runs(7) == ((0, 16), (4, 12))
    commit(of, 4)
    assert of.runs(2) == of.runs(3) == ((0, 16),)
    assert of.runs(4) == ((0, 16), (4, 12))


def test_a_step_that_is_done_again_has_the_batch_that_it_had() -> None:
    """The state goes back, with the history in it; what was committed since is in the plan."""
    worlds = [(0, 4)]
    of = batches(worlds)
    commit(of, 3)
    old = of.state_dict()
    commit(of, 6)
    worlds.append((6, 3))
    of.load_state_dict(old)
    assert sizes(of, 8) == [16] * 6 + [12] * 2


def test_what_a_checkpoint_says_of_the_past_counts_whatever_world_goes_on_from_it() -> None:
    before = batches([(0, 4), (2, 3)])
    commit(before, 5)
    after = batches([(0, 2)], full=2)
    after.load_state_dict(before.state_dict())
    assert sizes(after, 7) == [16, 16, 12, 12, 12, 8, 8]


def test_more_ranks_than_at_the_beginning_share_the_whole_batch() -> None:
    before = batches([(0, 4)])
    commit(before, 2)
    after = batches([(0, 8)], full=8)
    after.load_state_dict(before.state_dict())
    assert sizes(after, 4) == [16] * 4


def test_a_constant_batch_stays_and_has_no_history() -> None:
    of = Batches(PLAN, None, lambda size: size, lambda: (4, [(0, 4), (2, 3)]))
    assert sizes(of, 4) == [16] * 4
    assert not of.committed(7, of.of(7))
    assert {of.of(step).lr_factor for step in range(4)} == {1.0}


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [((), 8), ((("dp", 8),), 8), ((("dp", 4), ("tp", 2)), 4), ((("dp_replicate", 2), ("dp_shard", 4)), 8)],
)
def test_only_axes_that_split_the_data_count(axes: Any, ranks: int) -> None:
    assert data_ranks(axes, 8) == ranks


def test_shares_that_begin_uneven_are_refused() -> None:
    with pytest.raises(UsageError, match="3 ranks share 16"):
        batches([(0, 3)], full=3).check([1, 2, 3])


def test_a_run_that_goes_on_with_more_ranks_than_micro_batches_is_refused() -> None:
    before = batches([(0, 4)])
    commit(before, 2)
    after = batches([(0, 17)], full=17)
    after.load_state_dict(before.state_dict())
    with pytest.raises(UsageError, match="some would have none"):
        after.check([17])


def test_the_first_step_with_another_batch_is_told_of() -> None:
    of = batches([(0, 4), (2, 3), (4, 4)])
    assert [of.committed(step, of.of(step)) for step in range(6)] == [False, False, True, False, True, False]


# -- which samples
def slowly(runs: list[BatchRun], steps: int, samples: int, micro: int) -> list[tuple[int, int]]:
    """Step after step."""
    found, epoch, used = [], 0, 0
    for step in range(steps):
        batch = next(shards for first, shards in reversed(runs) if first <= step) * micro
        if used + batch > samples:
            epoch, used = epoch + 1, 0
        found.append((epoch, used))
        used += batch
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_used_by_one_step_of_an_epoch_at_the_most(seed: int) -> None:
    rng = random.Random(seed)
    micro, samples = rng.randint(1, 3), rng.randint(36, 150)
    runs = [(0, 12)] + [(step, rng.randint(1, 12)) for step in sorted(rng.sample(range(1, 60), 5))]
    places = [place(runs, step, samples, micro) for step in range(80)]
    assert places == slowly(runs, 80, samples, micro)
    assert [shards_before(runs, step) for step in range(81)] == [
        sum(next(shards for first, shards in reversed(runs) if first <= before) for before in range(step))
        for step in range(81)
    ]


def test_a_constant_batch_leaves_out_the_last_partial_one_of_an_epoch() -> None:
    assert [place(((0, 4),), step, 10, 1) for step in range(5)] == [(0, 0), (0, 4), (1, 0), (1, 4), (2, 0)]


# -- which learning rates
@pytest.mark.parametrize(
    ("rule", "factor"), [("linear", 0.75), ("sqrt", math.sqrt(0.75)), (lambda batch, full: batch / full / 2, 0.375)]
)
def test_a_rule_says_the_factor(rule: Any, factor: float) -> None:
    assert batches([(0, 4), (1, 3)], ScaleLR(rule)).of(1).lr_factor == factor


def test_short_forms() -> None:
    assert scaling("constant") is None
    assert scaling("scale_lr") == ScaleLR("linear", warmup_steps=0)
    assert scaling(ScaleLR("sqrt", 5)) == ScaleLR("sqrt", warmup_steps=5)


def factors(runs: list[BatchRun], steps: int, warmup: int) -> list[float]:
    return [factor_at(runs, step, lambda shards: shards / 16, warmup) for step in range(steps)]


def test_a_factor_falls_at_once_and_rises_step_by_step() -> None:
    assert factors([(0, 16), (2, 8), (4, 16)], 9, 3) == [1, 1, 0.5, 0.5, 0.625, 0.75, 0.875, 1, 1]
    assert factors([(0, 16), (2, 8), (4, 16)], 6, 0) == [1, 1, 0.5, 0.5, 1, 1]


def test_a_change_while_it_rises_begins_where_it_is() -> None:
    assert factors([(0, 16), (1, 8), (2, 16), (4, 12)], 6, 3) == [1, 0.5, 0.625, 0.75, 0.75, 0.75]
    assert factors([(0, 16), (1, 4), (2, 8), (3, 16)], 6, 1) == [1, 0.25, 0.375, 0.6875, 1, 1]


def test_what_a_run_begins_with_is_no_change() -> None:
    assert factors([(0, 12)], 3, 5) == [0.75] * 3


# -- bad input
def raises(batch: int, full: int) -> float:
    raise KeyError("lr")


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda batch, full: math.nan, "nan"),
        (lambda batch, full: math.inf, "inf"),
        (lambda batch, full: 0.0, "0.0"),
        (lambda batch, full: -0.5, "-0.5"),
        (lambda batch, full: 1e6, "1000000.0"),
        (lambda batch, full: 10**400, "not from 1e-09 to 100"),
        (lambda batch, full: "0.5", "not a number"),
        (lambda batch, full: None, "not a number"),
        (lambda batch, full: True, "not a number"),
        (lambda batch, full: 0.5 if batch > 8 else math.nan, "batch of 8 of 32"),
        (lambda batch: 1.0, "raised TypeError"),
        (raises, "'raises'.*raised KeyError"),
    ],
)
def test_a_rule_that_says_nonsense_for_any_world_that_can_be_is_refused_at_the_start(
    rule: Callable[..., Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        batches([(0, 4)], ScaleLR(rule)).check([1, 2, 3, 4])


def test_a_rule_is_not_asked_about_worlds_that_cannot_be() -> None:
    batches([(0, 4)], ScaleLR(lambda batch, full: 0.5 if batch >= 16 else math.nan)).check([2, 3, 4])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ScaleLR("cubic"), "'cubic' is not known"),  # type: ignore[arg-type]
        (lambda: ScaleLR(0.5), "0.5 is not known"),  # type: ignore[arg-type]
        (lambda: ScaleLR(["linear"]), "is not known"),  # type: ignore[arg-type]
        (lambda: ScaleLR(warmup_steps=-1), "-1 is no number"),
        (lambda: ScaleLR(warmup_steps=1.5), "1.5 is no number"),  # type: ignore[arg-type]
        (lambda: scaling("scale"), "'scale' is not known"),  # type: ignore[arg-type]
        (lambda: scaling(None), "None is not known"),  # type: ignore[arg-type]
    ],
)
def test_unknown_choices_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()
