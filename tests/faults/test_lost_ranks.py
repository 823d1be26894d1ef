"""Ranks are lost, wherever and whenever: it is the same training, bit for bit."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import pytest

from rackrun.coordinator.report.run_report import read_report
from tests.faults.scripts.strike import CLOCK, IN_GATE, Fault
from tests.faults.stories import (
    AT_THE_END,
    AT_THE_START,
    IN_A_RECOVERY,
    IN_A_UNIT,
    Chapter,
    Plot,
    chapters,
    lost_when_it_had_finished,
    random_story,
    told,
)
from tests.faults.trained import RANKS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]
Story = dict[str, tuple[Fault, ...]]

MODES = ("ddp", "fsdp")
SOAK_SEEDS = range(100, 100 + int(os.environ.get("RACKRUN_SOAK_SEEDS", "20")))


def stories(plots: Mapping[str, Mapping[str, Plot]], *steps: int | None, ddp: int = 99, sharded: int = 99) -> list[Any]:
    """``ddp``, ``sharded``: so many of DDP's and of FSDP2's in ``make test``; the others in ``make stories``."""
    return [
        pytest.param(
            mode,
            story,
            id=f"{mode}: {title}",
            marks=[pytest.mark.stories] if number >= (sharded if mode == "fsdp" else ddp) else [],
        )
        for mode in MODES
        for number, (title, story) in enumerate(chapters(plots[mode], steps).items())
    ]


@pytest.mark.parametrize(("mode", "story"), stories(IN_A_UNIT, 3, 6, 8, 11, ddp=1, sharded=0))
def test_a_rank_is_lost_in_a_unit(mode: str, story: Story, train: Train, reference: Reference) -> None:
    """Once after the other: under DDP a live replica gives the state, under FSDP2 a snapshot, to which everybody goes back if need be."""
    trained = train(mode, told(story), spares=len(story))
    trained.assert_same_training(reference(mode), told(story))
    assert [recovery["kind"] for recovery in trained.recoveries] == ["swap"] * len(story), trained
    assert [lost["how"] for r in trained.recoveries for lost in r["lost"]] == ["SIGKILL"] * len(story), trained
    assert mode == "fsdp" or all(recovery["rollback"] is None for recovery in trained.recoveries), trained


@pytest.mark.parametrize(("mode", "story"), stories(AT_THE_START, 0, ddp=0, sharded=0))
def test_a_rank_is_lost_at_the_start(mode: str, story: Story, train: Train, reference: Reference) -> None:
    """Before the second step nobody knows who is whose replica, and before the first snapshot a shard has no copy: the
    world may have to begin again, to the same end."""
    trained = train(mode, told(story))
    trained.assert_same_training(reference(mode), told(story))
    assert len(trained.recoveries) == 1, trained


@pytest.mark.parametrize(("mode", "story"), stories(AT_THE_END, None, None, None, ddp=0, sharded=0))
def test_a_rank_is_lost_at_the_end(mode: str, story: Story, train: Train, reference: Reference) -> None:
    """Two of them may be lost in one attempt of a phase: the second when it has noticed nothing of the first yet."""
    trained = train(mode, told(story), spares=len(story))
    trained.assert_same_training(reference(mode), told(story))
    assert {recovery["kind"] for recovery in trained.recoveries} == {"swap"}, trained
    assert [lost["how"] for r in trained.recoveries for lost in r["lost"]] == ["SIGKILL"] * len(story), trained


@pytest.mark.stories
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_had_finished_is_not_replaced(mode: str, train: Train, reference: Reference) -> None:
    """Nobody needs it: it has told of its last commit, and had done all that ``main`` has to do."""
    faults = lost_when_it_had_finished(Chapter(1, None, 2), also=False)
    trained = train(mode, faults, spares=1)
    trained.held.setdefault(
        "2.json", reference(mode).held["2.json"]
    )  # what it would have written once all had finished
    trained.assert_same_training(reference(mode), faults)
    assert not trained.recoveries, trained
    assert "rank 2 had finished training, and is gone: SIGKILL" in trained.ran.stderr, trained


@pytest.mark.stories
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_had_finished_is_replaced_when_others_recover(
    mode: str, train: Train, reference: Reference
) -> None:
    """What it held is needed again."""
    faults = lost_when_it_had_finished(Chapter(1, None, 2), also=True)
    trained = train(mode, faults, spares=2)
    trained.assert_same_training(reference(mode), faults)
    assert [recovery["kind"] for recovery in trained.recoveries] == ["swap"], trained
    assert {lost["rank"] for lost in trained.recoveries[0]["lost"]} == {2, 3}, trained


@pytest.mark.parametrize(("mode", "story"), stories(IN_A_RECOVERY, 3, 7, 10, ddp=0, sharded=0))
def test_another_is_lost_in_the_recovery(mode: str, story: Story, train: Train, reference: Reference) -> None:
    trained = train(mode, told(story), spares=2 * len(story))
    trained.assert_same_training(reference(mode), told(story))
    lost = [one["how"] for recovery in trained.recoveries if not recovery["overtaken"] for one in recovery["lost"]]
    assert "restart" not in [recovery["kind"] for recovery in trained.recoveries], trained
    assert lost, trained


@pytest.mark.stories
@pytest.mark.parametrize(("mode", "seed"), [("ddp", 0), ("fsdp", 1)])
def test_ranks_are_lost_at_random_moments(mode: str, seed: int, train: Train, reference: Reference) -> None:
    check_random_story(mode, seed, train, reference)


@pytest.mark.stories
@pytest.mark.parametrize("mode", MODES)
def test_fillers_beside_the_spares_change_nothing(mode: str, train: Train, reference: Reference) -> None:
    story = next(iter(chapters(IN_A_UNIT[mode], (3, 6, 8, 11)).values()))
    filler = "sh -c 'trap : TERM; while :; do :; done'"
    trained = train(mode, told(story), spares=len(story), filler=filler)
    trained.assert_same_training(reference(mode), told(story))
    fillers = read_report(trained.ran.out_dir / "journal.sqlite").fillers
    assert sum(one.had_to_go for one in fillers) >= len(story), fillers


@pytest.mark.soak
@pytest.mark.parametrize("seed", SOAK_SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_are_lost_at_many_more_random_moments(mode: str, seed: int, train: Train, reference: Reference) -> None:
    check_random_story(mode, seed, train, reference)


def check_random_story(mode: str, seed: int, train: Train, reference: Reference) -> None:
    story = random_story(seed)
    trained = train(mode, told(story), spares=6)
    trained.assert_same_training(reference(mode), told(story))
    assert "restart" not in [recovery["kind"] for recovery in trained.recoveries], trained


@pytest.mark.stories
def test_snapshots_go_on_after_the_copy_of_a_copy(train: Train, reference: Reference) -> None:
    """Twice in a row a newcomer starts from the same snapshot, the second time from the first newcomer's (and nobody else goes
    back, for nothing has been done since); a later loss then finds a later snapshot."""
    faults = [
        Fault(name="first", place="forward", rank=1, step=6),
        Fault(name="second", place="backward", rank=1, step=5, after="first"),
        Fault(name="third", place="forward", rank=3, step=10, after="second"),
    ]
    trained = train("fsdp", faults, spares=3)
    trained.assert_same_training(reference("fsdp"), faults)
    assert [recovery["rollback"] for recovery in trained.recoveries] == [4, None, 8], trained
    assert [recovery["redone"] for recovery in trained.recoveries] == [[5, 6], [5], [9, 10]], "the broken step too"
    assert read_report(trained.ran.out_dir / "journal.sqlite").steps_redone == 4


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_connections_break_though_nobody_is_lost(mode: str, train: Train, reference: Reference) -> None:
    """The step is done again in place, by the same ranks."""
    faults = [
        Fault(name="first step", place="backward", rank=2, step=0, then="CUT"),
        Fault(name="forward", place="forward", rank=0, step=5, then="CUT"),
        Fault(name="gate", place=IN_GATE, rank=1, step=8, then="CUT"),
        Fault(name="held back", place="gate entered", rank=3, step=8, then="wait", until="gate"),
        Fault(name="at rest", place="between steps", rank=1, step=11, then="CUT"),
    ]
    trained = train(mode, faults, spares=1)
    trained.assert_same_training(reference(mode), faults)
    assert [recovery["lost"] for recovery in trained.recoveries] == [[], [], [], []], trained
    assert [recovery["rollback"] for recovery in trained.recoveries] == [None] * 4, trained


@pytest.mark.stories
@pytest.mark.parametrize("mode", MODES)
def test_every_rank_is_lost_at_once(mode: str, train: Train, reference: Reference) -> None:
    """With replicas alone there is nothing left to go on from; snapshots outlive their ranks."""
    first = Fault(name="0", place="backward", rank=0, step=7)
    others = [Fault(name=f"{rank}", place=CLOCK, rank=rank, after="0") for rank in range(1, RANKS)]
    trained = train(mode, [first, *others], spares=RANKS)
    trained.assert_same_training(reference(mode), [first, *others])


def assert_noticed_as_stopped(trained: Trained) -> None:
    with closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as journal:
        query = "SELECT body FROM events WHERE kind = 'event' AND name = 'WorkerStalled'"
        stalls = [json.loads(body) for (body,) in journal.execute(query)]
    assert any(stall["silent"] for stall in stalls), f"{stalls}\n{trained}"


def test_a_stopped_rank_is_noticed_in_time_and_replaced(train: Train, reference: Reference) -> None:
    """By that it is stopped, not by a deadline: how soon is a matter of the machine."""
    fault = Fault(name="stopped", place="forward", rank=2, step=9, then="STOP")
    trained = train("ddp", [fault])
    trained.assert_same_training(reference("ddp"), [fault])
    (recovery,) = trained.recoveries
    assert [lost["rank"] for lost in recovery["lost"]] == [2], trained
    assert_noticed_as_stopped(trained)


@pytest.mark.stories
def test_a_rank_stopped_right_after_a_recovery_is_noticed_as_soon(train: Train, reference: Reference) -> None:
    """The first steps of a new world may be slow, but who is stopped is not slow."""
    faults = [
        Fault(name="lost", place="forward", rank=1, step=7),
        Fault(name="stopped", place="backward", rank=2, step=7, after="lost", then="STOP"),
    ]
    trained = train("ddp", faults, spares=2)
    trained.assert_same_training(reference("ddp"), faults)
    assert_noticed_as_stopped(trained)
