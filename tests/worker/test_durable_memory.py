"""The buffer of a checkpoint: one, kept from one to the next, and never made where there is no memory for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Ended
from scripts import adam, ddp, fit

from rackrun.checkpoint.arena.memory_plan import Ceiling
from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.worker.loop.run import Run
from rackrun.worker.snapshots.checkpoint_buffer import Room


def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rackrun.worker.snapshots.checkpoint_buffer.ceilings", lambda _: (Ceiling("the test", 10**6, 100, "raise it"),)
    )


def test_what_was_given_back_is_taken_again_while_it_is_large_enough() -> None:
    room = Room(1)
    first = room.take(100_000)
    second = room.take(10)
    assert second is not first, "two checkpoints may be on their way"
    room.give_back(second)
    room.give_back(first)
    assert room.take(100_100) is first
    room.give_back(first)
    assert len(room.take(200_000)) >= 200_000


def test_memory_is_pinned_for_as_long_as_it_is_there() -> None:
    pinned: dict[int, int] = {}
    room = Room(1, pinned.__setitem__, pinned.__delitem__)
    first, second = room.take(100_000), room.take(10)
    assert sorted(pinned.values()) == sorted(map(len, (first, second)))
    room.give_back(second)
    assert len(pinned) == 2, "it is kept"
    room.give_back(first)
    assert list(pinned.values()) == [len(first)], "of two the larger"
    assert room.take(1000) is first
    assert len(pinned) == 1, "it was pinned before"
    room.give_back(first)
    third = room.take(200_000)
    assert list(pinned.values()) == [len(third)]


def test_what_fits_is_planned_for_all_ranks_of_the_host_and_for_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rackrun.worker.snapshots.checkpoint_buffer.ceilings",
        lambda _: (Ceiling("the test", 10**6, 10**6, "raise it"),),
    )
    assert len(Room(1).take(300_000)) >= 300_000
    with pytest.raises(MemoryPlanError, match="2 rank"):
        Room(2).take(300_000)


def test_a_checkpoint_without_memory_is_given_up_and_said_once_and_training_goes_on(
    tmp_path: Path, train: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    few_bytes(monkeypatch)

    def main(run: Run) -> None:
        model = ddp(run)
        fit(run, model, adam(model), steps=8)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    assert DurableStore(tmp_path, "run").checkpoints() == []
    said = capfd.readouterr().err
    assert said.count("is given up, there is no memory for it") == 2, "once on each rank"
    assert "--checkpoint-every" in said
    assert [one.outcome for one in ended.copied if one.kind == "checkpoint"].count("failed") > 2
