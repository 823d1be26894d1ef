"""A person makes the world smaller and larger while it trains: the same training, bit for bit, and no step is done again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.resized import APART, Story, assert_nothing_is_lost_or_used_twice
from tests.faults.trained import Trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

STORY = pytest.mark.stories
STEPS = 6 * APART
HSDP = ("--nproc-per-node", 4, "--mesh", "dp_replicate=2,dp_shard=2")


def shrink(story: Story, to: int) -> None:
    left = story.slots()
    done = story.ask("shrink", to=to)
    story.go_on(to)
    assert done().text == f"the world has {to} of {story.ranks} ranks, until others are asked for (rackctl grow)"
    for slot in [slot for slot in left if slot not in story.slots()]:
        story.let_come(slot)
    story.go_on(to)


def grow(story: Story) -> None:
    done = story.ask("grow")
    story.go_on(story.ranks)
    assert done().text == f"the world has {story.ranks} of {story.ranks} ranks"


@pytest.mark.parametrize(
    ("mode", "ranks", "to", "options"),
    [
        pytest.param("ddp", 3, 1, (), marks=STORY),
        pytest.param("fsdp", 3, 2, (), marks=STORY),
        pytest.param("hsdp", 4, 2, HSDP, marks=STORY),
    ],
)
def test_ranks_leave_and_join_again_as_they_are_asked_to(
    mode: str, ranks: int, to: int, options: tuple[object, ...], story: Callable[..., Trained]
) -> None:
    def change(story: Story) -> None:
        shrink(story, to)
        grow(story)

    reference = story(mode, ranks, STEPS, "exact", lambda story: None, options)
    trained = story(mode, ranks, STEPS, "exact", change, options)
    assert_same(trained, reference)
    assert trained.sizes == [ranks, to, ranks], trained
    assert all(recovery["planned"] and not recovery["lost"] for recovery in trained.recoveries), trained
    assert {(one["rollback"], tuple(one["redone"])) for one in trained.recoveries} == {(None, ())}, trained


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_loss_while_all_are_to_pause_comes_first_and_the_rest_is_done_then(
    mode: str, story: Callable[..., Trained]
) -> None:
    """All stand between two steps: nobody has paused yet."""

    def change(story: Story) -> None:
        done = story.ask("shrink", to=2)
        story.lose(story.slots()[1], ranks=2)
        assert done().outcome == "done"

    reference = story(mode, 4, STEPS, "exact", lambda story: None)
    trained = story(mode, 4, STEPS, "exact", change)
    assert_same(trained, reference)
    assert trained.sizes[-1] == 2, trained


def assert_same(trained: Trained, reference: Trained) -> None:
    assert trained.gates == reference.gates, trained
    assert set(trained.held.values()) == set(reference.held.values()), trained
    assert_nothing_is_lost_or_used_twice(trained, STEPS)
