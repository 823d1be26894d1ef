"""Durable checkpoints: whole or not there, whoever writes them and whatever fails."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, IntegrityError, NoUsableCheckpoint
from rackrun.checkpoint.durable.durable_manifest import (
    MANIFEST,
    Fragment,
    Manifest,
    fragment_name,
    seal,
    shard_name,
    unseal,
)
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.storage.files import FailureKind, Files
from rackrun.protocol import crash_points
from tests.checkpoint.storage import (
    CHUNK,
    JOB,
    WORLD,
    Crash,
    Crashing,
    Failing,
    Hooked,
    calls_of,
    ended,
    in_child,
    killed_at,
    payload_of,
    save,
    shard_args,
    store_at,
    whole,
    write_shard,
)
from tests.variants import in_stories

POINTS = [name for name in crash_points.CRASH_POINTS if name.startswith("durable.")]


# -- what is written is what is read
def test_a_checkpoint_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, JOB)  # with real fsyncs
    assert save(store, 5)
    with store.open(5) as reader:
        for rank in range(WORLD):
            assert bytes(reader.shard(rank)) == payload_of(5, rank)
            assert (tmp_path / JOB / "gen-000000000005" / shard_name(rank, WORLD)).read_bytes() == payload_of(5, rank)
            assert reader.reader(rank).layout_hash == f"layout-{rank}"
            assert reader.reader(rank).verify() == []
    assert whole(tmp_path) == [5]


def test_checkpoints_are_listed_newest_first_by_their_number_not_by_their_age(tmp_path: Path) -> None:
    for number in (7, 2, 10**12, 4):
        assert save(store_at(tmp_path), number)
    assert whole(tmp_path) == [10**12, 7, 4, 2]


def test_a_job_without_a_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert store_at(tmp_path / "nowhere").checkpoints() == []
    with pytest.raises(NoUsableCheckpoint):
        store_at(tmp_path).open(1)


def test_a_vanished_root_is_not_made_again(tmp_path: Path) -> None:
    """It may be a mount point: what is written under it would fill the wrong disk."""
    store = store_at(tmp_path / "unmounted")
    writer = store.writer(1, 10, 1, WORLD)
    assert not write_shard(writer, 0)
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.VANISHED
    assert not writer.finish()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", "-x", "a\0b", ".hidden", "x" * 129, "ü"])
def test_a_job_whose_name_is_a_path_is_refused(tmp_path: Path, job: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be the name"):
        DurableStore(tmp_path, job)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 4 * CHUNK), data=st.data())
def test_any_range_of_a_shard_is_read_verified(
    tmp_path_factory: pytest.TempPathFactory, size: int, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("ranges")
    payload = bytes(i * 7 % 251 for i in range(size))
    store = store_at(root)
    writer = store.writer(1, 10, 1, 1)
    assert writer.write_shard(0, memoryview(payload), "h", chunk_crcs(memoryview(payload), CHUNK), chunk_bytes=CHUNK)
    assert writer.finish()
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    with store.open(1) as reader:
        assert bytes(reader.read(0, start, stop)) == payload[start:stop]
        assert bytes(reader.shard(0)) == payload
        with pytest.raises(IndexError):
            reader.read(0, 0, size + 1)
    shutil.rmtree(root)


# -- whole or not there
def test_nothing_is_seen_before_every_rank_is_there_and_somebody_finished(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = store.writer(1, 10, 1, WORLD)
    assert write_shard(writer, 0)
    assert not writer.finish()
    assert writer.failure is None
    assert write_shard(store_at(tmp_path).writer(1, 10, 1, WORLD), 1)
    assert whole(tmp_path) == []
    assert store_at(tmp_path).writer(1, 10, 1, WORLD).finish()
    assert whole(tmp_path) == [1]
    assert writer.finish()


def test_ranks_are_written_by_processes_that_know_nothing_of_each_other(tmp_path: Path) -> None:
    """Every process writes two shards, so that each shard is written twice, and tries to finish."""

    def work(first: int) -> None:
        for number in range(20):
            writer = store_at(tmp_path).writer(number, 10 * number, 1, 4)
            for rank in (first, (first + 1) % 4):
                assert write_shard(writer, rank), writer.failure
            writer.finish()
            assert writer.failure is None, writer.failure

    children = [in_child(lambda first=first: work(first)) for first in range(4)]  # type: ignore[misc]
    assert [ended(pid) for pid in children] == [0] * 4
    assert store_at(tmp_path).writer(0, 0, 1, 4).finish()
    assert whole(tmp_path) == list(range(19, -1, -1))
    assert list((tmp_path / JOB).glob("gen-*/.*")) == []


def test_the_same_shard_twice_is_fine(tmp_path: Path) -> None:
    writers = [store_at(tmp_path).writer(1, 10, 1, WORLD) for _ in range(2)]
    for rank in range(WORLD):
        assert [write_shard(writer, rank) for writer in writers] == [True, True]
    assert [writer.finish() for writer in writers] == [True, True]
    assert [write_shard(writer, 0) for writer in writers] == [True, True]  # after it is published
    assert whole(tmp_path) == [1]
    assert os.listdir(tmp_path / JOB) == ["gen-000000000001"]


@pytest.mark.parametrize("published", [False, True])
def test_other_bytes_for_a_shard_that_is_there_are_refused(tmp_path: Path, published: bool) -> None:
    store = store_at(tmp_path)
    writer = store.writer(1, 10, 1, WORLD)
    assert write_shard(writer, 0)
    if published:
        assert write_shard(writer, 1)
        assert writer.finish()
    other = memoryview(b"other")
    assert not writer.write_shard(0, other, "layout-0", chunk_crcs(other, CHUNK), chunk_bytes=CHUNK)
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.DISAGREES
    assert write_shard(writer, 1)
    assert writer.finish()
    assert whole(tmp_path) == [1]


def test_other_bytes_are_refused_when_the_first_writer_died_before_its_fragment(tmp_path: Path) -> None:
    assert killed_at("durable.data_named", lambda: save(store_at(tmp_path), 1))
    writer = store_at(tmp_path).writer(1, 10, 1, WORLD)
    other = memoryview(b"other")
    assert not writer.write_shard(0, other, "layout-0", chunk_crcs(other, CHUNK), chunk_bytes=CHUNK)
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.DISAGREES
    assert save(store_at(tmp_path), 1)
    assert whole(tmp_path) == [1]


def test_of_two_fencing_tokens_that_wrote_the_same_one_is_kept(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1, fencing_token=2)
    assert save(store_at(tmp_path), 1, fencing_token=1)
    assert [info.fencing_token for info in store_at(tmp_path).checkpoints()] == [2]
    first, second = (store_at(tmp_path).writer(2, 20, fencing_token, WORLD) for fencing_token in (1, 2))
    for writer in (first, second):
        assert all(write_shard(writer, rank) for rank in range(WORLD))
    assert first.finish()
    assert second.finish()
    assert sorted(os.listdir(tmp_path / JOB)) == ["gen-000000000001", "gen-000000000002"]
    assert whole(tmp_path) == [2, 1]


def test_a_checkpoint_with_another_step_is_not_taken_for_this_one(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    writer = store_at(tmp_path).writer(1, 99, 2, WORLD)
    assert not writer.finish()
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.DISAGREES
    assert whole(tmp_path) == [1]


# -- the source
def test_a_payload_that_is_not_what_was_sealed_is_refused(tmp_path: Path) -> None:
    writer = store_at(tmp_path).writer(1, 10, 1, WORLD)
    rank, payload, layout, crcs = shard_args(1, 0)
    for flipped in range(len(payload) * 8):
        bad = bytearray(payload)
        bad[flipped // 8] ^= 1 << flipped % 8
        assert not writer.write_shard(rank, memoryview(bad), layout, crcs, chunk_bytes=CHUNK)
        assert writer.failure is not None
        assert writer.failure.kind is FailureKind.SOURCE
    assert [os.listdir(path) for path in (tmp_path / JOB).iterdir()] == [[]]


def test_a_lease_that_ends_in_the_middle_is_a_failure_not_an_exception(tmp_path: Path) -> None:
    rank, payload, layout, crcs = shard_args(1, 0)

    class Ended:
        @property
        def payload(self) -> memoryview:
            payload.release()
            return payload

    writer = store_at(tmp_path).writer(1, 10, 1, WORLD)
    assert not writer.write_shard(rank, Ended(), layout, crcs, chunk_bytes=CHUNK)
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.SOURCE


def test_a_payload_that_is_overwritten_while_it_is_written_is_seen(tmp_path: Path) -> None:
    rank, payload, layout, crcs = shard_args(1, 0)
    memory = bytearray(payload)

    class Overwriting(Hooked):
        def around(self, operation, real, *args):  # type: ignore[no-untyped-def]
            if operation == "write":
                memory[:] = bytes(len(memory))
            return real(*args)

    writer = store_at(tmp_path, Overwriting()).writer(1, 10, 1, WORLD)
    assert not writer.write_shard(rank, memoryview(memory), layout, crcs, chunk_bytes=CHUNK)
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.SOURCE


def test_the_number_of_checksums_must_fit_the_payload(tmp_path: Path) -> None:
    writer = store_at(tmp_path).writer(1, 10, 1, WORLD)
    assert not writer.write_shard(0, memoryview(b"x"), "h", np.zeros(2, np.uint32), chunk_bytes=CHUNK)
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.SOURCE


# -- storage that fails
@pytest.mark.parametrize(
    ("how", "onward"),
    [
        *((how, onward) for how in (errno.EIO, "vanish") for onward in (False, True)),
        *((how, False) for how in ("short", "nothing")),
        *in_stories(*((how, onward) for how in (errno.ENOSPC, errno.EPERM) for onward in (False, True)), names=2),
        *in_stories((errno.EROFS, False), (errno.ESTALE, False), names=2),
    ],
    ids=str,
)
def test_whichever_call_fails_nothing_raises_and_nothing_is_half_visible(
    tmp_path: Path, how: int | str, onward: bool
) -> None:
    calls = calls_of(lambda files: save(store_at(tmp_path, files), 1))
    for at in range(1, len(calls) + 1):
        root = tmp_path / f"{at}"
        root.mkdir()
        done = save(store_at(root, Failing(at, how, root / JOB, onward=onward)), 1)
        seen = whole(root)
        assert seen == [1] or not done
        assert save(store_at(root), 1), f"call {at} ({calls[at - 1]})"  # another process tries again
        assert whole(root) == [1]
        shutil.rmtree(root)


@pytest.mark.parametrize("how", [errno.EIO, errno.EPERM], ids=str)
def test_whichever_call_fails_of_a_second_writer_the_published_checkpoint_stays(tmp_path: Path, how: int) -> None:
    def second(root: Path, files: Files | None = None) -> None:
        writer = store_at(root, files).writer(1, 10, 2, WORLD)
        for rank in range(WORLD):
            write_shard(writer, rank)
        if files is None:
            return
        save(store_at(root), 1, fencing_token=1)
        writer.finish()

    for at in range(1, 200):
        root = tmp_path / f"{at}"
        root.mkdir()
        files = Failing(at, how, root / JOB)
        second(root, files)
        assert whole(root) == [1]
        shutil.rmtree(root)
        if files.count < at:
            break
    else:
        pytest.fail("more calls than expected")


def test_a_file_whose_fsync_failed_is_written_anew(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    calls = calls_of(lambda files: save(store_at(tmp_path, files), 1))
    at = calls.index("fsync") + 1
    store = store_at(root, Failing(at, errno.EIO, root / JOB))
    writer = store.writer(1, 10, 1, WORLD)
    assert not write_shard(writer, 0)
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.UNSYNCED
    (temporary,) = (root / JOB).iterdir()
    assert os.listdir(temporary) == []
    assert write_shard(writer, 0)
    assert write_shard(writer, 1)
    assert writer.finish()
    assert whole(root) == [1]


def test_a_directory_whose_fsync_failed_is_set_aside(tmp_path: Path) -> None:
    calls = calls_of(lambda files: save(store_at(tmp_path, files), 1))
    root = tmp_path / "r"
    root.mkdir()
    syncs = [number for number, call in enumerate(calls, 1) if call == "fsync"]
    store = store_at(root, Failing(syncs[-3], errno.EIO, root / JOB))  # the directory, then its parents
    writer = store.writer(1, 10, 1, WORLD)
    assert all(write_shard(writer, rank) for rank in range(WORLD))
    assert not writer.finish()
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.UNSYNCED
    assert [name[:7] for name in os.listdir(root / JOB)] == [".trash-"]
    assert not writer.finish()  # all of it has to be written again
    assert all(write_shard(writer, rank) for rank in range(WORLD))
    assert writer.finish()
    assert whole(root) == [1]


def test_a_name_whose_fsync_failed_is_not_called_durable_by_this_process_again(tmp_path: Path) -> None:
    calls = calls_of(lambda files: save(store_at(tmp_path, files), 1))
    root = tmp_path / "r"
    root.mkdir()
    syncs = [number for number, call in enumerate(calls, 1) if call == "fsync"]
    store = store_at(root, Failing(syncs[-2], errno.EIO, root / JOB))
    assert not save(store, 1)
    assert whole(root) == [1]  # it is there, and whole, until the power goes
    writer = store.writer(1, 10, 1, WORLD)
    assert not writer.finish()
    assert writer.failure is not None
    assert writer.failure.kind is FailureKind.UNSYNCED
    assert save(store, 2)  # or a moment's fault would end the checkpoints of a job for good


# -- crashes
@pytest.mark.parametrize("name", POINTS)
def test_killed_at_a_named_point_the_save_is_not_seen_and_can_be_done_again(tmp_path: Path, name: str) -> None:
    assert save(store_at(tmp_path), 1)
    for nth in (1, 2, 3):
        killed = killed_at(name, lambda nth=nth: save(store_at(tmp_path), 1 + nth), nth)  # type: ignore[misc]
        assert killed or nth > 1
        seen = whole(tmp_path)
        assert 1 in seen
        published = not killed or name in ("durable.renamed", "durable.parent_synced")
        assert (1 + nth in seen) == published
        assert save(store_at(tmp_path), 1 + nth)
    assert whole(tmp_path) == [4, 3, 2, 1]


def test_crashed_at_any_call_the_save_is_done_by_whoever_comes_next(tmp_path: Path) -> None:
    calls = calls_of(lambda files: save(store_at(tmp_path, files), 1))
    for at in range(1, len(calls) + 1):
        root = tmp_path / f"{at}"
        root.mkdir()
        with pytest.raises(Crash):
            save(store_at(root, Crashing(at)), 1)
        assert whole(root) in ([], [1])
        assert save(store_at(root), 1)
        assert whole(root) == [1]
        assert [path.name for path in (root / JOB).glob("gen-*/.rank-*")] == []  # the dead writer's were swept
        shutil.rmtree(root)


# -- what is on disk is not believed
def _files(root: Path) -> list[Path]:
    return sorted((root / JOB / "gen-000000000001").iterdir())


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1, world=1)
    store = store_at(tmp_path)
    for path in _files(tmp_path):
        good = path.read_bytes()
        for flipped in range(len(good) * 8):
            bad = bytearray(good)
            bad[flipped // 8] ^= 1 << flipped % 8
            path.write_bytes(bad)
            assert not store.verify(1).ok, (path.name, flipped)
        path.write_bytes(good)
    assert whole(tmp_path) == [1]


def test_a_file_that_is_cut_longer_missing_or_a_link_is_not_trusted(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    store = store_at(tmp_path)
    for path in _files(tmp_path):
        good = path.read_bytes()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(good)
        for damage in (
            lambda path=path, good=good: path.write_bytes(good[:-1]),
            lambda path=path: path.write_bytes(b""),
            lambda path=path, good=good: path.write_bytes(good + b"x"),
            lambda path=path: path.unlink(),
            lambda path=path, elsewhere=elsewhere: path.symlink_to(elsewhere),
            lambda path=path: (path.unlink(), path.mkdir()),
            lambda path=path: [step(path) for step in (os.rmdir, os.mkfifo)],
        ):
            damage()
            assert store.checkpoints() == []
            with pytest.raises(IntegrityError):
                store.open(1)
            assert not store.verify(1).ok
        path.unlink()
        path.write_bytes(good)
    assert whole(tmp_path) == [1]


def test_two_shards_that_changed_places_are_found(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = store.writer(1, 10, 1, WORLD)
    for rank in range(WORLD):
        payload = memoryview(bytes([rank]) * 100)
        assert writer.write_shard(rank, payload, "h", chunk_crcs(payload, CHUNK), chunk_bytes=CHUNK)
    assert writer.finish()
    for name in (shard_name, fragment_name):
        a, b = (store.path(1) / name(rank, WORLD) for rank in range(WORLD))
        a.rename(tmp_path / "x")
        b.rename(a)
        (tmp_path / "x").rename(b)
        assert not store.verify(1).ok


def test_a_file_that_changes_under_a_reader_is_an_error_not_a_crash(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    store = store_at(tmp_path)
    with store.open(1) as reader:
        assert reader.read(0, 0, 1)
        os.truncate(store.path(1) / shard_name(0, WORLD), 10)
        with pytest.raises(IntegrityError, match="ends at byte"):
            reader.read(0, CHUNK, CHUNK + 1)
        shutil.rmtree(store.path(1))
        with pytest.raises(IntegrityError, match="cannot be read"):
            reader.read(1, 0, 1)


def test_a_checkpoint_under_another_number_or_job_is_not_trusted(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    shutil.copytree(store_at(tmp_path).path(1), store_at(tmp_path).path(2))
    shutil.copytree(tmp_path / JOB, tmp_path / "another")
    assert whole(tmp_path) == [1]
    assert DurableStore(tmp_path, "another").checkpoints() == []


@pytest.mark.parametrize("kind", [Manifest, Fragment])
def test_a_newer_format_is_refused_by_name(tmp_path: Path, kind: type[Any]) -> None:
    assert save(store_at(tmp_path), 1, world=1)
    store = store_at(tmp_path)
    path = store.path(1) / (MANIFEST if kind is Manifest else fragment_name(0, 1))
    body, _ = unseal(path.read_bytes(), kind, path)
    newer, _ = seal(type(body)(**{name: getattr(body, name) for name in body.__struct_fields__} | {"format": 2}))
    path.write_bytes(newer)
    with pytest.raises(FormatVersionError, match="format 2"), store.open(1) as reader:
        reader.shard(0)


@pytest.mark.parametrize(
    "lie",
    [
        {"world_size": 3},
        {"world_size": 10**18},
        {"shards": ()},
        {"number": 2},
        {"job": "../other"},
        {"step": "x"},
        {"shards": ({"rank": 0, "size": -1, "layout_hash": "", "fragment": "", "fragment_bytes": 0},)},
        {"shards": ({"rank": 0, "size": 2**62, "layout_hash": "", "fragment": "", "fragment_bytes": 2**62},)},
    ],
    ids=str,
)
def test_a_manifest_that_lies_under_a_right_digest_is_refused(tmp_path: Path, lie: dict[str, object]) -> None:
    assert save(store_at(tmp_path), 1, world=1)
    store = store_at(tmp_path)
    path = store.path(1) / MANIFEST
    body, _ = unseal(path.read_bytes(), Manifest, path)
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    path.write_bytes(seal(Manifest(**fields | lie))[0])
    assert store.checkpoints() == []
    with pytest.raises(IntegrityError):
        store.open(1)


def test_verify_says_where_the_damage_is_and_reports_its_progress(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    store = store_at(tmp_path)
    path = store.path(1) / shard_name(1, WORLD)
    data = bytearray(path.read_bytes())
    data[2 * CHUNK] ^= 1
    path.write_bytes(data)
    told: list[tuple[int, int]] = []
    verification = store.verify(1, lambda done, total: told.append((done, total)))
    assert [(damage.rank, damage.chunk) for damage in verification.damage] == [(1, 2)]
    assert told[-1] == (verification.bytes, verification.bytes)
    assert told == sorted(told)


def test_a_checkpoint_is_called_verified_only_after_all_bytes_were_right(tmp_path: Path) -> None:
    assert save(store_at(tmp_path), 1)
    store = store_at(tmp_path)
    assert [info.verified for info in store.checkpoints()] == [False]
    assert store.verify(1).ok
    assert [info.verified for info in store.checkpoints()] == [True]
    path = store.path(1) / shard_name(0, WORLD)
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    assert not store.verify(1).ok
    assert [info.verified for info in store.checkpoints()] == [False]
