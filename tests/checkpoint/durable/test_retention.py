"""Retention: what stays is decided by a rule, and whatever happens while the rest goes, the newest verified one stays."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.base.errors import IntegrityError
from rackrun.checkpoint.base.process_identity import process_of
from rackrun.checkpoint.durable.durable_manifest import checkpoint_number, shard_name
from rackrun.checkpoint.durable.durable_store import CheckpointInfo
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.retention import LOG, Collected, Retention, choose, collect, sweep
from rackrun.checkpoint.durable.storage.files import FailureKind, Files
from rackrun.checkpoint.durable.storage.partial_files import partial_path
from rackrun.protocol import crash_points
from tests.checkpoint.storage import (
    JOB,
    WORLD,
    Crash,
    Crashing,
    Failing,
    Hooked,
    PowerLoss,
    Quick,
    calls_of,
    ended,
    in_child,
    killed_at,
    payload_of,
    save,
    store_at,
    whole,
    write_shard,
)

POINTS = [name for name in crash_points.CRASH_POINTS if name.startswith("retention.")]
TTL_S = 100.0


def gc(root: Path, retention: Retention | None = None, *, files: Files | None = None, **given: object) -> Collected:
    arguments = {"fencing_token": 1, "now": time.time, "orphan_ttl_s": TTL_S} | given
    return collect(store_at(root, files), retention or Retention(keep_last=1), **arguments)  # type: ignore[arg-type]


def saved(root: Path, *checkpoints: int, verified: int | None = None) -> None:
    for number in checkpoints:
        assert save(store_at(root), number)
    if verified is not None:
        assert store_at(root).verify(verified).ok


def listed(root: Path) -> list[int]:
    return [info.number for info in store_at(root).checkpoints()]


def marked(root: Path) -> list[int]:
    return [info.number for info in store_at(root).checkpoints() if info.verified]


# -- the rule
def info(number: int, step: int) -> CheckpointInfo:
    return CheckpointInfo(number, step, 1, 1, 0, "", False, Path())


INFOS = st.dictionaries(st.integers(0, 60), st.integers(0, 600)).map(
    lambda steps: [info(number, step) for number, step in sorted(steps.items(), reverse=True)]
)
RETENTIONS = st.builds(Retention, keep_last=st.integers(1, 5), keep_every=st.integers(0, 200))


@given(INFOS, RETENTIONS, st.sets(st.integers(0, 60)), st.data())
def test_the_newest_the_pinned_the_first_of_each_span_and_the_newest_verified_stay(
    infos: list[CheckpointInfo], retention: Retention, pins: set[int], data: st.DataObject
) -> None:
    numbers = [found.number for found in infos]
    verified = data.draw(st.sampled_from(numbers)) if infos else None
    choice = choose(infos, retention, pins=pins, newest_verified=verified)
    assert sorted([*choice.keep, *choice.drop]) == sorted(numbers)
    assert list(choice.drop) == sorted(choice.drop)
    assert {*numbers[: retention.keep_last], *pins.intersection(numbers)} <= set(choice.keep)
    assert verified is None or verified in choice.keep
    if retention.keep_every:
        kept_spans = {found.step // retention.keep_every for found in infos if found.number in choice.keep}
        assert kept_spans == {found.step // retention.keep_every for found in infos}
    left = [found for found in infos if found.number in choice.keep]
    assert choose(left, retention, pins=pins, newest_verified=verified).drop == ()


@given(INFOS, RETENTIONS)
def test_nothing_goes_while_none_is_verified(infos: list[CheckpointInfo], retention: Retention) -> None:
    assert choose(infos, retention, pins=(), newest_verified=None).drop == ()


@given(INFOS, RETENTIONS, st.sets(st.integers(0, 60)))
def test_what_no_restore_takes_does_not_push_out_what_one_can(
    infos: list[CheckpointInfo], retention: Retention, barred: set[int]
) -> None:
    usable = [found.number for found in infos if found.number not in barred]
    newest = usable[: retention.keep_last]
    choice = choose(infos, retention, pins=(), newest_verified=next(iter(usable), None), barred=barred)
    assert set(newest) <= set(choice.keep)
    if retention.keep_every:
        spans = {found.step // retention.keep_every for found in infos if found.number in usable}
        assert spans == {
            found.step // retention.keep_every for found in infos if found.number in {*choice.keep} - barred
        }
    left = [found for found in infos if found.number in choice.keep]
    assert choose(left, retention, pins=(), newest_verified=next(iter(usable), None), barred=barred).drop == ()


def test_the_newest_verified_one_is_not_one_that_no_restore_takes(tmp_path: Path) -> None:
    """Otherwise nothing that is kept may be right."""
    saved(tmp_path, 1, 2, 3, verified=2)
    Probation(tmp_path / JOB).quarantine(2, "the loss is not a number after it")
    with store_at(tmp_path).data(store_at(tmp_path).manifest(3)[0]).joinpath(shard_name(0, WORLD)).open("r+b") as file:
        file.write(b"??????")
    done = gc(tmp_path, Retention(keep_last=1))
    assert done.kept[1] == "the newest verified"
    assert 1 in listed(tmp_path)
    assert 3 in listed(tmp_path), "found damaged: newer than what stays"


def test_a_run_keeps_as_many_as_were_asked_for_and_the_first_does_not_stay_for_good(tmp_path: Path) -> None:
    for number in range(1, 6):
        saved(tmp_path, number)
        gc(tmp_path, Retention(keep_last=2), began=-1)
    assert listed(tmp_path) == [5, 4]


def test_a_quarantined_checkpoint_goes_when_enough_newer_ones_are_there_and_its_number_is_free_again(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 1, 2, 3, verified=2)
    probation = Probation(tmp_path / JOB)
    probation.quarantine(3, "bad")
    assert gc(tmp_path, Retention(keep_last=2)).dropped == []
    saved(tmp_path, 4, verified=4)
    assert gc(tmp_path, Retention(keep_last=2)).dropped == [1]
    saved(tmp_path, 5)
    assert gc(tmp_path, Retention(keep_last=2)).dropped == [2, 3]
    assert probation.barred() == {}


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, 0), (-1, 5), (1, -1)])
def test_a_rule_that_keeps_nothing_is_refused(keep_last: int, keep_every: int) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        Retention(keep_last, keep_every)


# -- what it does
def test_what_the_rule_drops_is_gone_and_why_the_rest_stays_is_written_down(tmp_path: Path) -> None:
    saved(tmp_path, *range(1, 10), verified=7)
    done = gc(tmp_path, Retention(keep_last=2, keep_every=40), pins=[2])
    assert done.dropped == [3, 5, 6]
    assert done.failures == []
    assert whole(tmp_path) == [9, 8, 7, 4, 2, 1]
    assert LOG in os.listdir(tmp_path / JOB)
    assert msgspec.json.decode((tmp_path / JOB / LOG).read_bytes()) == {
        "epoch": 1,
        "keep": {
            "1": "the first from step 0 on",
            "2": "pinned",
            "4": "the first from step 40 on",
            "7": "the newest verified",
            "8": "one of the newest 2",
            "9": "one of the newest 2",
        },
        "drop": [3, 5, 6],
    }


def test_doing_it_again_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, *range(1, 6), verified=5)
    gc(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    again = gc(tmp_path)
    assert (again.dropped, again.trash, again.failures) == ([], 0, [])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_job_that_never_saved_has_nothing_to_collect(tmp_path: Path) -> None:
    assert gc(tmp_path) == Collected()
    assert os.listdir(tmp_path) == []


def test_when_none_is_marked_the_newest_that_verifies_now_is_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    for damaged in (3, 4):
        path = store_at(tmp_path).path(damaged) / shard_name(0, WORLD)
        path.write_bytes(bytes(path.stat().st_size))
    done = gc(tmp_path)
    assert done.dropped == [1]
    assert done.kept[2] == "the newest verified"
    assert done.kept[3] == done.kept[4] == "not to be relied on, but newer than others that stay"
    assert marked(tmp_path) == [2]


def test_when_nothing_verifies_nothing_goes(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    for damaged in (1, 2, 3):
        path = store_at(tmp_path).path(damaged) / shard_name(0, WORLD)
        path.write_bytes(bytes(path.stat().st_size))
    assert gc(tmp_path).dropped == []
    assert listed(tmp_path) == [3, 2, 1]


def test_a_directory_that_is_not_whole_is_left_to_people(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, verified=3)
    (store_at(tmp_path).path(1) / shard_name(0, WORLD)).unlink()
    assert gc(tmp_path).dropped == [2]
    assert store_at(tmp_path).path(1).is_dir()


def test_a_reader_of_a_checkpoint_that_goes_gets_the_right_bytes_or_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, verified=2)
    with store_at(tmp_path).open(1) as reader:
        mapped = reader.shard(0)
        assert gc(tmp_path).dropped == [1]
        assert bytes(mapped) == payload_of(1, 0)  # what is open stays readable
        assert bytes(reader.read(0, 0, 100)) == payload_of(1, 0)[:100]
        with pytest.raises(IntegrityError, match="cannot be read"):
            reader.read(1, 0, 1)
        mapped.release()


# -- orphans
def _orphan(root: Path, number: int, fencing_token: int) -> Path:
    assert write_shard(store_at(root).writer(number, 10 * number, fencing_token, WORLD), 0)
    (path,) = (root / JOB).glob(f".tmp-gen-{number}-{fencing_token}-*")
    return path


@pytest.mark.parametrize(
    ("fencing_token", "age_s", "goes"),
    [(3, TTL_S + 10, False), (4, TTL_S + 10, False), (2, TTL_S - 10, False), (2, TTL_S + 10, True), (2, -1e6, False)],
)
def test_an_unfinished_checkpoint_goes_only_when_its_fencing_token_is_over_and_it_is_old(
    tmp_path: Path, fencing_token: int, age_s: float, goes: bool
) -> None:
    path = _orphan(tmp_path, 1, fencing_token)
    newest = max(file.stat().st_mtime for file in (path, *path.iterdir()))
    done = gc(tmp_path, fencing_token=3, now=lambda: newest + age_s)
    assert path.is_dir() != goes
    assert done.orphans == ([path.name] if goes else [])


def test_a_late_writer_of_a_collected_checkpoint_fails_without_harm(tmp_path: Path) -> None:
    writer = store_at(tmp_path).writer(1, 10, 1, WORLD)
    assert write_shard(writer, 0)
    assert gc(tmp_path, fencing_token=2, now=lambda: time.time() + 2 * TTL_S).orphans
    assert write_shard(writer, 1)
    assert not writer.finish()
    assert whole(tmp_path) == []


def _left_by(process: subprocess.Popen[bytes], path: Path) -> Path:
    """Make the partial file that a process would leave if it were killed while it writes ``path``."""
    ours, theirs = (f"-{pid}-{process_of(pid).start}-" for pid in (os.getpid(), process.pid))
    left = path.with_name(partial_path(path).name.replace(ours, theirs))
    left.write_bytes(b"half")
    return left


def test_partial_files_of_dead_writers_go_at_once_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, verified=1)
    job = tmp_path / JOB
    written = (LOG, "OWNER.json", "clock", f"gen-{1:012d}/VERIFIED.json", f"gen-{1:012d}/manifest.json")
    with subprocess.Popen(["sleep", "600"]) as writer:
        try:
            left = [_left_by(writer, job / name) for name in written]
            assert gc(tmp_path).partial == []
            assert sweep(store_at(tmp_path), fencing_token=2).partial == []
        finally:
            writer.kill()
    assert gc(tmp_path).partial == [path.name for path in sorted(left, key=lambda path: (len(path.parts), path.name))]
    left = [job / f".{LOG}-0ddbacf1.part", job / ".clock-0ddbacf1"]  # of an earlier release
    for path in left:
        path.write_bytes(b"half")
    assert gc(tmp_path).partial == []
    assert len(gc(tmp_path, now=lambda: time.time() + 2 * TTL_S).partial) == 2
    assert list(job.rglob(".*")) == []


class Closed(Quick):
    """One checkpoint cannot be listed, and nothing in it deleted: it is another user's."""

    def listdir(self, path: Path) -> list[str]:
        if path.name == f"gen-{9:012d}":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return super().listdir(path)

    def unlink(self, path: Path) -> None:
        if path.name.startswith(f".{LOG}-"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        super().unlink(path)


def test_what_cannot_be_listed_or_deleted_keeps_nothing_else_from_being_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, verified=3)
    job = tmp_path / JOB
    (job / f"gen-{9:012d}").mkdir()
    with subprocess.Popen(["sleep", "600"]) as writer:
        _left_by(writer, job / LOG)
        clock = _left_by(writer, job / "clock")
        writer.kill()
    done = gc(tmp_path, Retention(keep_last=1), files=Closed())
    assert done.partial == [clock.name]
    assert [failure.errno for failure in done.failures] == [errno.EACCES]
    assert not [path for path in job.iterdir() if path.name.startswith(".trash")]


def test_a_start_deletes_partial_files_of_dead_writers(tmp_path: Path) -> None:
    saved(tmp_path, 1, verified=1)
    with subprocess.Popen(["sleep", "600"]) as writer:
        left = _left_by(writer, tmp_path / JOB / LOG)
        writer.kill()
    assert sweep(store_at(tmp_path), fencing_token=2).partial == [left.name]


# -- what fails
@pytest.mark.parametrize("onward", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "how",
    [errno.EIO, *(pytest.param(how, marks=pytest.mark.stories) for how in (errno.ENOSPC, errno.EROFS, errno.ESTALE))],
    ids=str,
)
def test_whichever_call_fails_it_does_not_raise_and_the_newest_verified_stays(
    tmp_path: Path, how: int, onward: bool
) -> None:
    template = tmp_path / "template"
    template.mkdir()
    saved(template, 1, 2, 3, verified=2)
    shutil.copytree(template, tmp_path / "counted")
    calls = calls_of(lambda files: gc(tmp_path / "counted", files=files))
    for at in range(1, len(calls) + 1):
        root = tmp_path / f"{at}"
        shutil.copytree(template, root)
        gc(root, files=Failing(at, how, root / JOB, onward=onward))
        left = listed(root)
        assert 3 in left, f"call {at} ({calls[at - 1]})"
        assert 2 in left or marked(root) == [3], f"call {at} ({calls[at - 1]})"
        assert gc(root).failures == []
        newest_verified = marked(root)[0]  # 3, when the mark of 2 could not be read and 3 was verified instead
        assert listed(root) == sorted({3, newest_verified}, reverse=True)
        assert list((root / JOB).glob(".trash-*")) == []
        shutil.rmtree(root)


def test_a_full_disk_is_made_room_on(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, verified=3)

    class Full(Hooked):
        def around(self, operation, real, *args):  # type: ignore[no-untyped-def]
            if operation in ("write", "mkdir", "link"):
                raise OSError(errno.ENOSPC, "full")
            return real(*args)

    done = gc(tmp_path, files=Full())
    assert done.dropped == [1, 2]
    assert [failure.kind for failure in done.failures] == [FailureKind.FULL]  # the decision is not written down
    assert whole(tmp_path) == [3]


def test_without_a_synced_directory_nothing_goes(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, verified=3)

    class Unsynced(Hooked):
        def around(self, operation, real, *args):  # type: ignore[no-untyped-def]
            if operation == "fsync":
                raise OSError(errno.EIO, "lost")
            return real(*args)

    done = gc(tmp_path, files=Unsynced())
    assert (done.dropped, [failure.kind for failure in done.failures]) == ([], [FailureKind.UNSYNCED])
    assert whole(tmp_path) == [3, 2, 1]


def test_a_checkpoint_whose_name_may_not_be_on_disk_takes_nobodys_place(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    calls = calls_of(lambda files: save(store_at(tmp_path, files), 2))
    shutil.rmtree(tmp_path / JOB / "gen-000000000002")
    syncs = [number for number, call in enumerate(calls, 1) if call == "fsync"]
    store = store_at(tmp_path, Failing(syncs[-2], errno.EIO, tmp_path / JOB))
    assert not save(store, 2)
    assert whole(tmp_path) == [2, 1]

    def collected() -> list[int]:
        return collect(store, Retention(keep_last=1), fencing_token=1, now=time.time, orphan_ttl_s=TTL_S).dropped

    assert collected() == []
    assert save(store, 3)
    assert store.verify(3).ok
    assert collected() == [1, 2]


def test_many_at_once_come_to_the_same_end(tmp_path: Path) -> None:
    saved(tmp_path, *range(30), verified=28)
    children = [in_child(lambda: gc(tmp_path)) for _ in range(4)]
    assert [ended(pid) for pid in children] == [0] * 4
    assert gc(tmp_path).failures == []
    assert whole(tmp_path) == [29, 28]
    assert [path for path in (tmp_path / JOB).iterdir() if path.name.startswith(".trash")] == []


# -- crashes
@pytest.mark.parametrize("name", POINTS)
def test_killed_at_a_named_point_and_run_again_it_ends_as_if_nothing_had_been(tmp_path: Path, name: str) -> None:
    passed = 0
    for nth in range(1, 30):
        root = tmp_path / f"{nth}"
        root.mkdir()
        saved(root, 1, 2, 3, 4, verified=3)
        killed = killed_at(name, lambda root=root: gc(root), nth)  # type: ignore[misc]
        assert listed(root)[:2] == [4, 3]
        assert marked(root) == [3]
        assert gc(root).failures == []
        assert listed(root) == [4, 3]
        assert sorted(p.name for p in (root / JOB).iterdir() if p.name[:4] not in ("gen-", ".RET")) == [LOG]
        if not killed:
            break
        passed += 1
    assert passed > 0


@pytest.mark.parametrize("power", [False, True], ids=["process", "power"])
@pytest.mark.parametrize("crashes", [200, pytest.param(500, marks=pytest.mark.stories)])
def test_after_any_of_hundreds_of_crashes_what_was_promised_is_there(tmp_path: Path, crashes: int, power: bool) -> None:
    """One history of saves, verifications and collections, cut at random calls. Promised: what a save said True to, or
    something newer; the newest verified checkpoint, until there is a newer one; and that all that is seen is whole."""
    rng = random.Random(2026 + power)
    root, aside = tmp_path / "root", tmp_path / "aside"
    root.mkdir()
    aside.mkdir()
    retention = Retention(keep_last=1)
    number, promised, verified = 0, -1, -1
    for fencing_token in range(1, crashes + 1):
        at = rng.randint(1, 220)
        files = PowerLoss(at, rng, aside) if power else Crashing(at)
        store = store_at(root, files)
        try:
            if rng.random() < 0.5:
                collect(store, retention, fencing_token=fencing_token, now=lambda: 1e12, orphan_ttl_s=TTL_S)
            while True:
                number += 1
                writer = store.writer(number, 10 * number, fencing_token, WORLD)
                assert all(write_shard(writer, rank) for rank in range(WORLD)), writer.failure
                assert writer.finish(), writer.failure
                promised = number
                assert rng.random() < 0.5 or store.verify(number).ok
                done = collect(store, retention, fencing_token=fencing_token, now=lambda: 1e12, orphan_ttl_s=TTL_S)
                assert done.failures == []
                verified = max(marked(root), default=-1)
        except Crash:
            pass
        files.die()
        seen = listed(root)
        assert seen == _named(root)  # not even a name of something half deleted
        assert max(seen, default=-1) >= promised
        assert max(seen, default=-1) >= verified
        for found in seen:
            with store_at(root).open(found) as reader:
                assert all(reader.reader(rank).verify() == [] for rank in range(WORLD)), (fencing_token, found)
    assert gc(root, fencing_token=fencing_token + 1, now=lambda: 1e12).failures == []
    assert len(whole(root)) <= 2
    assert [path.name for path in (root / JOB).iterdir() if path.name.startswith(".")] == []


def _named(root: Path) -> list[int]:
    names = os.listdir(root / JOB) if (root / JOB).is_dir() else []
    return sorted((found for name in names if (found := checkpoint_number(name)) is not None), reverse=True)
