"""The buffer of a checkpoint: one, kept from one to the next, and never made where there is no memory for it."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rackrun.checkpoint.arena.memory_plan import Ceiling
from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.host_copies import HostCopies
from rackrun.checkpoint.image.rank_image import Image
from rackrun.worker.loop.run import Run
from rackrun.worker.snapshots.checkpoint_buffer import CheckpointBuffers
from tests.worker.harness import Ended
from tests.worker.scripts import adam, ddp, fit


def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rackrun.worker.snapshots.checkpoint_buffer.ceilings", lambda _: (Ceiling("the test", 10**6, 100, "raise it"),)
    )


def test_what_was_given_back_is_taken_again_while_it_is_large_enough() -> None:
    room = CheckpointBuffers(1)
    first = room.acquire(100_000)
    second = room.acquire(10)
    assert second is not first, "two checkpoints may be on their way"
    room.release(second)
    room.release(first)
    assert room.acquire(100_100) is first
    room.release(first)
    assert len(room.acquire(200_000)) >= 200_000


def test_memory_is_pinned_for_as_long_as_it_is_there() -> None:
    pinned: dict[int, int] = {}
    room = CheckpointBuffers(1, pinned.__setitem__, pinned.__delitem__)
    first, second = room.acquire(100_000), room.acquire(10)
    assert sorted(pinned.values()) == sorted(map(len, (first, second)))
    room.release(second)
    assert len(pinned) == 2, "it is kept"
    room.release(first)
    assert list(pinned.values()) == [len(first)], "of two the larger"
    assert room.acquire(1000) is first
    assert len(pinned) == 1, "it was pinned before"
    room.release(first)
    third = room.acquire(200_000)
    assert list(pinned.values()) == [len(third)]


def test_what_fits_is_planned_for_all_ranks_of_the_host_and_for_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rackrun.worker.snapshots.checkpoint_buffer.ceilings",
        lambda _: (Ceiling("the test", 10**6, 10**6, "raise it"),),
    )
    assert len(CheckpointBuffers(1).acquire(300_000)) >= 300_000
    with pytest.raises(MemoryPlanError, match="2 rank"):
        CheckpointBuffers(2).acquire(300_000)


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


def test_a_checkpoint_whose_thread_cannot_be_started_is_given_up_and_the_next_is_written(
    tmp_path: Path, train: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")

    def main(run: Run) -> None:
        start = threading.Thread.start

        def refused(self: threading.Thread) -> None:
            if self.name == "rackrun-checkpoint-1":  # no older one is being written
                raise RuntimeError("can't start new thread")
            start(self)

        threading.Thread.start = refused  # type: ignore[method-assign]
        wait_now, release, waited = HostCopies.wait_now, CheckpointBuffers.release, list[str]()

        def waits(self: HostCopies, image: Image) -> None:
            waited.append("waited")
            wait_now(self, image)

        def releases(self: CheckpointBuffers, memory: mmap.mmap) -> None:
            print(f"the buffer is released: {waited}", file=sys.stderr)
            release(self, memory)

        HostCopies.wait_now, CheckpointBuffers.release = waits, releases  # type: ignore[method-assign]
        model = ddp(run)
        fit(run, model, adam(model), steps=8)

    ended = train(main, ranks=1, spares=0)
    assert ended.exit_code == 0, ended
    written = [one.number for one in DurableStore(tmp_path, "run").checkpoints()]
    assert 7 in written
    assert 1 not in written
    said = capfd.readouterr().err
    assert "the checkpoint of step 1 failed: can't start new thread" in said
    assert "the buffer is released: ['waited']" in said
    assert "the buffer is released: []" not in said, "a copy may still be written to it"
