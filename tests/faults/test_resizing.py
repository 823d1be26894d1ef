"""Ranks are lost one after another with no spare left, down to one, and come back, in an order from a seed: the same training."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rackrun.coordinator.report.run_report import read_report
from tests.faults.resized import APART, Story, assert_nothing_is_lost_or_used_twice
from tests.faults.trained import Trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def down_and_up(seed: int, lowest: int = 1) -> Callable[[Story], None]:
    """Down to ``lowest`` ranks and up again; now and then one comes back on the way down, or another is lost on the way up."""

    def change(story: Story) -> None:
        rng = random.Random(seed)
        while story.ranks - len(story.gone) > lowest:
            story.lose(rng.choice(sorted(story.slots())))
            if rng.random() < 0.2:
                story.take_back(rng.choice(story.gone))
        while story.gone:
            story.take_back(rng.choice(story.gone))
            if rng.random() < 0.1:
                story.lose(rng.choice(sorted(story.slots())))

    return change


STORY, SOAK = pytest.mark.stories, (pytest.mark.stories, pytest.mark.soak)


@pytest.mark.parametrize(
    ("mode", "ranks", "seed"),
    [
        pytest.param("ddp", 3, 1, marks=SOAK),
        pytest.param("fsdp", 3, 1, marks=STORY),
        pytest.param("ddp", 8, 1, marks=STORY),
        pytest.param("fsdp", 8, 1, marks=SOAK),
        pytest.param("ddp", 8, 2, marks=SOAK),
        pytest.param("fsdp", 8, 2, marks=SOAK),
    ],
)
def test_down_to_one_rank_and_up_again_it_is_the_same_training(
    mode: str, ranks: int, seed: int, story: Callable[..., Trained]
) -> None:
    steps = 3 * APART * ranks + APART
    reference = story(mode, ranks, steps, "exact", lambda story: None)
    trained = story(mode, ranks, steps, "exact", down_and_up(seed))
    assert min(trained.sizes) == 1, trained
    assert trained.sizes[-1] == ranks, trained
    assert trained.gates == reference.gates, trained
    assert trained.held == reference.held, trained
    assert_nothing_is_lost_or_used_twice(trained, steps)
    assert not any(recovery["kind"] == "restart" for recovery in trained.recoveries), trained


@pytest.mark.stories
def test_one_that_hangs_when_main_is_entered_again_is_lost_and_the_others_go_on(story: Callable[..., Trained]) -> None:
    """It is told before the job begins which one that will be."""

    def change(story: Story) -> None:
        lost, hangs = story.slots()[1], "tray-00-2"
        story.lose(lost, ranks=2)
        assert hangs not in story.slots()

    steps = 4 * APART
    reference = story("fsdp", 4, steps, "exact", lambda story: None)
    trained = story("fsdp", 4, steps, "exact", change, ("--nproc-per-node", 4), hangs=["tray-00-2"])
    assert trained.sizes == [4, 3, 2], trained
    assert trained.gates == reference.gates, trained
    assert_nothing_is_lost_or_used_twice(trained, steps)


@pytest.mark.stories
def test_with_the_fast_reduction_it_is_the_same_but_for_rounding(story: Callable[..., Trained]) -> None:
    """Over the first steps after a change; what rounding makes of it later is another training of the same worth."""
    reference = story("ddp", 4, 60, "fast", lambda story: None)
    trained = story("ddp", 4, 60, "fast", down_and_up(5))
    assert_nothing_is_lost_or_used_twice(trained, 60)
    changed = 20
    for (step, phase), (loss, *samples) in trained.gates.items():
        expected, *same = reference.gates[step, phase]
        assert samples == same, trained
        if step < changed:
            assert loss == pytest.approx(expected, rel=1e-5), trained
    last = [gates[59, 0][0] for gates in (trained.gates, reference.gates)]
    assert last[0] == pytest.approx(last[1], rel=0.01), last


def there_and_back(story: Story) -> None:
    """4, 3, 4, then 2, the second of them lost in the recovery from the first, 3, 4."""
    first, second, third, _ = sorted(story.slots())
    story.lose(second)
    story.take_back(second)
    story.lose_both(third, first)
    story.take_back(first)
    story.take_back(third)


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_with_a_batch_that_follows_the_world_it_is_the_training_of_one_rank_that_is_told_of_these_batches(
    mode: str, story: Callable[..., Trained]
) -> None:
    steps = 9 * APART
    trained = story(mode, 4, steps, "exact", there_and_back, batch="scale_lr")
    full, worlds = trained.worlds
    assert [full, *(size for _, size in worlds)] in ([4, 4, 3, 4, 2, 3, 4], [4, 4, 3, 4, 3, 2, 3, 4]), trained
    reference = story(mode, 1, steps, "exact", lambda story: None, batch="scale_lr", worlds=trained.worlds)
    assert trained.gates == reference.gates, trained
    assert set(trained.held.values()) == set(reference.held.values()), trained
    assert sorted(trained.samples) == list(range(steps)), trained
    delivered = [sample for by_rank in trained.samples.values() for ids in by_rank.values() for sample in ids]
    assert len(delivered) == len(set(delivered)), "of one epoch"
    sizes = [next(size for first, size in reversed(worlds) if first <= step) for step in range(steps)]
    assert len(delivered) == sum(8 * size for size in sizes), trained
    report = read_report(trained.ran.out_dir / "journal.sqlite")
    assert report.ledger.ok, report.ledger
    said = [notice.text for notice in report.notices if "learning rates" in notice.text]
    assert len(said) == len(worlds) - 1, said
