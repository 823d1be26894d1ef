"""A checkpoint gives way to another of its number: one of the two is whole at every moment."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.durable.durable_manifest import replaced_name
from rackrun.checkpoint.durable.durable_store import CheckpointWriter
from rackrun.checkpoint.durable.retention import sweep
from rackrun.checkpoint.durable.storage.files import FailureKind, Files
from rackrun.protocol import crash_points
from tests.checkpoint.storage import (
    CHUNK,
    JOB,
    WORLD,
    Crash,
    Crashing,
    Hooked,
    PowerLoss,
    calls_of,
    killed_at,
    save,
    store_at,
    whole,
    write_shard,
)

POINTS = [name for name in crash_points.CRASH_POINTS if name.startswith("durable.")]


def again(root: Path, *, fencing_token: int = 2) -> list[CheckpointWriter]:
    """Writers of checkpoint 1 in a later start that has passed over the one that is there, one for each rank."""
    return [store_at(root).writer(1, 99, fencing_token, WORLD, replaces=True) for _ in range(WORLD)]


def tokens(root: Path) -> list[tuple[int, int]]:
    return [(info.number, info.fencing_token) for info in store_at(root).checkpoints()]


def test_what_a_start_has_passed_over_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    writers = again(tmp_path)
    for rank, writer in enumerate(writers):
        assert not writer.finish()
        assert writer.failure is None, "shards are missing"
        assert tokens(tmp_path) == [(1, 1)]
        assert write_shard(writer, rank), writer.failure
    assert [writer.finish() for writer in writers] == [True] * WORLD
    assert [writer.replaced for writer in writers] == [True, *[False] * (WORLD - 1)]
    assert tokens(tmp_path) == [(1, 2)]
    assert store_at(tmp_path).verify(1).ok
    assert sorted(os.listdir(tmp_path / JOB)) == ["gen-000000000001"]


def test_a_checkpoint_of_the_same_start_and_of_a_later_one_do_not_give_way(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1, fencing_token=2)
    other = memoryview(b"other")
    for token in (1, 2):
        (writer, *_) = again(tmp_path, fencing_token=token)
        assert not writer.write_shard(0, other, "layout-0", chunk_crcs(other, CHUNK), chunk_bytes=CHUNK)
        assert writer.failure is not None
        assert writer.failure.kind is FailureKind.DISAGREES
    assert tokens(tmp_path) == [(1, 2)]


def test_a_checkpoint_of_a_later_step_does_not_give_way_to_a_job_that_began_anew(tmp_path: Path) -> None:
    """Both jobs have the same name, and the first has written it after the second had looked."""
    assert save(store_at(tmp_path), 1)
    writer = store_at(tmp_path).writer(1, 9, 2, WORLD, replaces=True)
    for rank in range(WORLD):
        assert not write_shard(writer, rank)
    assert not writer.finish()
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.DISAGREES
    assert whole(tmp_path) == [1]


def test_of_two_writers_that_replace_at_once_the_later_leaves_what_the_first_has_published(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    first, second = again(tmp_path)[:2]
    for rank in range(WORLD):
        assert write_shard(first, rank)
    set_aside = second._replacement._set_aside

    def late() -> Path | None:
        assert first.finish(), first.failure
        return set_aside()

    second._replacement._set_aside = late  # type: ignore[method-assign]
    assert second.finish(), second.failure
    assert (first.replaced, second.replaced) == (True, False)
    assert tokens(tmp_path) == [(1, 2)]
    assert sorted(os.listdir(tmp_path / JOB)) == ["gen-000000000001"]


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_while_it_is_replaced_one_of_them_is_whole(tmp_path: Path, point: str) -> None:
    assert save(store_at(tmp_path), 1)

    def replace() -> None:
        for rank, writer in enumerate(again(tmp_path)):
            write_shard(writer, rank)
        writer.finish()

    assert killed_at(point, replace)
    (found,) = tokens(tmp_path)
    assert found in [(1, 1), (1, 2)]
    assert store_at(tmp_path).verify(1).ok
    writers = again(tmp_path, fencing_token=3)
    for rank, writer in enumerate(writers):
        assert write_shard(writer, rank), writer.failure
    assert writers[0].finish(), writers[0].failure
    assert tokens(tmp_path) == [(1, 3)]


def replace(root: Path, files: Files | None = None) -> bool:
    writers = [store_at(root, files).writer(1, 10, 2, WORLD, replaces=True) for _ in range(WORLD)]
    written = [write_shard(writer, rank) for rank, writer in enumerate(writers)]
    return all(written) and writers[0].finish()


@pytest.mark.parametrize("power", [False, True])
def test_stopped_at_any_call_while_it_is_replaced_the_next_start_finds_one_of_them(tmp_path: Path, power: bool) -> None:
    """The next start deletes trash and what is unfinished, so the former checkpoint may not be trash too early."""
    (tmp_path / "all").mkdir()
    assert save(store_at(tmp_path / "all"), 1)
    calls = calls_of(lambda files: replace(tmp_path / "all", files))
    for at in range(1, len(calls) + 1):
        root, kept = tmp_path / f"{at}", tmp_path / f"kept-{at}"
        root.mkdir()
        kept.mkdir()
        assert save(store_at(root), 1)
        files = PowerLoss(at, random.Random(at), kept) if power else Crashing(at)
        with pytest.raises(Crash):
            replace(root, files)
        files.die()
        store = store_at(root)
        store.complete()
        done = sweep(store, fencing_token=3)
        assert not done.failures
        assert whole(root) == [1], (at, calls[at - 1])
        assert os.listdir(root / JOB) == ["gen-000000000001"]


def test_what_one_writer_has_published_is_not_trash_while_another_looks_at_it(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    first, second = again(tmp_path)[:2]
    for rank in range(WORLD):
        assert write_shard(first, rank)
    set_aside = second._replacement._set_aside

    def late() -> Path | None:
        assert first.finish(), first.failure
        aside = set_aside()
        assert not sweep(store_at(tmp_path), fencing_token=2).failures  # as the first one's rank does next
        return aside

    second._replacement._set_aside = late  # type: ignore[method-assign]
    assert second.finish(), second.failure
    assert tokens(tmp_path) == [(1, 2)]
    assert store_at(tmp_path).verify(1).ok


def test_a_writer_that_comes_between_the_two_renames_of_another_does_not_fail(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    first, second = again(tmp_path)[:2]
    for rank in range(WORLD):
        assert write_shard(first, rank)
    gives_way = second._replacement.gives_way

    def late() -> bool:
        first._replacement._former = first._replacement._set_aside()
        return gives_way()

    second._replacement.gives_way = late  # type: ignore[method-assign]
    assert second.finish(), second.failure
    assert first.finish(), first.failure
    assert (first.replaced, second.replaced) == (False, True)
    assert tokens(tmp_path) == [(1, 2)]
    assert os.listdir(tmp_path / JOB) == ["gen-000000000001"]


def test_a_writer_for_which_another_replaces_between_its_two_looks_does_not_fail(tmp_path: Path) -> None:
    """It first sees the former checkpoint, and then the new one, which does not give way."""
    assert save(store_at(tmp_path), 1)
    first, second = again(tmp_path)[:2]
    for rank in range(WORLD):
        assert write_shard(first, rank)
    gives_way = second._replacement.gives_way

    def late() -> bool:
        assert first.finish(), first.failure
        return gives_way()

    second._replacement.gives_way = late  # type: ignore[method-assign]
    assert second.finish(), second.failure
    assert (first.replaced, second.replaced) == (True, False)
    assert tokens(tmp_path) == [(1, 2)]


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_former_checkpoints_without_their_name_the_newest_whole_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool, damaged: bool
) -> None:
    """A start replaced the first and died before it was trash; the next one died while it replaced the second."""
    former = []
    for token in (1, 2):
        assert save(store_at(tmp_path), 1, fencing_token=token)
        former.append(tmp_path / JOB / replaced_name(1))
        (tmp_path / JOB / "gen-000000000001").rename(former[-1])
    if damaged:
        next(former[1].glob("*.safetensors")).unlink()
    store = store_at(tmp_path)
    listed = store.files.listdir
    monkeypatch.setattr(store.files, "listdir", lambda path: sorted(listed(path), reverse=turned))
    names = sorted(former, reverse=turned)
    assert list(store.replaced()) == names
    assert store.put_back() == [1]
    assert tokens(tmp_path) == [(1, 1 if damaged else 2)]
    assert store_at(tmp_path).verify(1).ok
    assert store.replaced() == {}, "the other one is trash"


def test_of_two_former_checkpoints_none_gets_the_name_while_one_cannot_be_read(tmp_path: Path) -> None:
    class Deaf(Hooked):
        def open(self, path: Path, flags: int) -> int:
            if path.parent == former[1]:
                raise OSError(errno.EIO, "not now")
            return super().open(path, flags)

    former = []
    for token in (1, 2):
        assert save(store_at(tmp_path), 1, fencing_token=token)
        former.append(tmp_path / JOB / replaced_name(1))
        (tmp_path / JOB / "gen-000000000001").rename(former[-1])
    assert store_at(tmp_path, Deaf()).put_back() == []
    assert sorted(store_at(tmp_path).replaced()) == sorted(former), "nothing is lost"
    assert store_at(tmp_path).put_back() == [1]
    assert tokens(tmp_path) == [(1, 2)]


def test_what_was_set_aside_has_its_name_again_when_the_new_one_cannot_take_it(tmp_path: Path) -> None:
    class Once(Hooked):
        def rename(self, old: Path, new: Path) -> None:
            if new.name == "gen-000000000001" and not new.exists():
                self.rename = super().rename  # type: ignore[method-assign]
                raise OSError(errno.EIO, "not now")
            super().rename(old, new)

    assert save(store_at(tmp_path), 1)
    assert not replace(tmp_path, Once())
    assert tokens(tmp_path) == [(1, 1)]
    assert replace(tmp_path)
    assert tokens(tmp_path) == [(1, 2)]
