"""What is there and cannot be read is an error with its reason, or a fall-back that is told; never an empty directory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rackrun.checkpoint import CheckpointManager, MemoryTier
from rackrun.checkpoint.arena.arena_folder import commits_in
from rackrun.checkpoint.base.errors import NoUsableCheckpoint
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.storage.files import Files
from tests.checkpoint.manager.test_manager import Training, arenas, crash, manager, shm, trained

__all__ = ["manager", "shm"]

Make = Callable[..., CheckpointManager]


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def gone(path: Path) -> None:
    path.unlink()


def deep(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(b'{"body":' + b"[" * 100_000 + b"]" * 100_000 + b',"digest":""}' + b" " * size)


FILES = ("MANIFEST.json", "rank-00000-of-00001.json", "rank-00000-of-00001.safetensors")
DAMAGE = (flipped, a_directory, cut_short, gone, deep)


def saved(manager: Make, tmp_path: Path, checkpoints: int) -> list[Path]:
    """A job that has ended, with its checkpoints on disk, oldest first."""
    one = manager(memory=None, durable_every=1, keep=100)
    training = Training()
    one.prepare(training.state)
    one.restore()
    for step in range(1, checkpoints + 1):
        training.step()
        assert one.save(step, durable=True).durable.result()
    one.close()
    return sorted((tmp_path / "checkpoints" / "run").glob("gen-*"))


def next_start(manager: Make, **options: Any) -> CheckpointManager:
    one = manager(memory=None, durable_every=1, **options)
    one.prepare(Training(seed=1).state)
    return one


@pytest.mark.parametrize("harm", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_the_only_checkpoint_is_damaged_and_the_job_does_not_begin_anew(
    manager: Make, tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    (only,) = saved(manager, tmp_path, 1)
    harm(only / name)
    one = next_start(manager)
    with pytest.raises(NoUsableCheckpoint, match="heckpoint 1"):
        one.restore()
    assert only.exists()


@pytest.mark.parametrize("harm", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_the_newest_is_damaged_and_the_fall_back_is_told_and_quarantined(
    manager: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, harm: Callable[[Path], None]
) -> None:
    older, newest = saved(manager, tmp_path, 2)
    harm(newest / name)
    one = next_start(manager, keep=1)
    report = one.restore()
    assert report is not None
    assert (report.number, list(report.passed_over)) == (1, [2])
    assert report.passed_over[2]
    assert "checkpoint 2 is not used: " in capfd.readouterr().err
    assert list(Probation(older.parent).quarantined()) == [2]
    one.close()
    again = next_start(manager)
    report = again.restore()
    assert report is not None
    assert report.number == 1
    assert report.passed_over.keys() == {2}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("call", ["open", "stat"])
def test_storage_that_does_not_give_the_newest_is_told_and_nothing_is_held_against_it(
    manager: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, number: int, call: str
) -> None:
    older, newest = saved(manager, tmp_path, 2)

    class Broken(Files):
        def open(self, path: Path, flags: int) -> int:
            return super().open(self.refused("open", path), flags)

        def stat(self, path: Path) -> os.stat_result:
            return super().stat(self.refused("stat", path))

        def refused(self, by: str, path: Path) -> Path:
            if by == call and path == newest / name:
                raise OSError(number, os.strerror(number))
            return path

    one = manager(memory=None)
    one._store.files = Broken()
    one.prepare(Training(seed=1).state)
    report = one.restore()
    if report is None or report.number != 2:
        assert report is not None
        assert (report.number, list(report.passed_over)) == (1, [2])
        assert os.strerror(number) in report.passed_over[2]
        assert "checkpoint 2 is not used: " in capfd.readouterr().err
    else:
        assert (name, call) == ("MANIFEST.json", "stat")  # it is not looked at in this way
    assert not Probation(older.parent).quarantined()


def test_more_damaged_checkpoints_than_are_looked_at_at_once_hide_no_good_one(manager: Make, tmp_path: Path) -> None:
    _, *rest = saved(manager, tmp_path, 20)
    for number in rest:
        flipped(number / FILES[1])
    one = next_start(manager)
    report = one.restore()
    assert report is not None
    assert (report.number, sorted(report.passed_over)) == (1, list(range(2, 21)))


def test_commit_records_in_memory_that_cannot_be_read_are_not_taken_for_none(manager: Make, shm: Path) -> None:
    one = manager()
    trained(one, 1)
    one.wait_until_finished()
    crash(one)
    (record,) = shm.glob("rackrun-*/*/commit-*.json")
    flipped(record)
    two = manager()
    two.prepare(Training(seed=1).state)
    with pytest.raises(NoUsableCheckpoint, match="commit record"):
        two.restore()


@pytest.mark.parametrize("damage", [flipped, cut_short, a_directory])
def test_a_commit_record_that_cannot_be_read_is_named_beside_those_that_can(
    damage: Callable[[Path], None], manager: Make, shm: Path
) -> None:
    one = manager()
    trained(one, 1)
    one.wait_until_finished()
    crash(one)
    (record,) = shm.glob("rackrun-*/*/commit-*.json")
    (number,) = [known.number for known in commits_in(record.parent)[0]]
    damage(record)
    found, unreadable = commits_in(record.parent)
    assert found == []
    assert list(unreadable) == [number]
    assert str(record) in unreadable[number]


# -- what retention takes
def test_a_run_that_has_restored_nothing_takes_nothing_from_the_one_before(manager: Make, tmp_path: Path) -> None:
    """It is at step 3 of another training, and the directory has step 5 of this one."""
    theirs = saved(manager, tmp_path, 5)
    one, training = next_start(manager, keep=1), Training(seed=1)
    for step in range(1, 4):
        training.step()
        assert one.save(step, durable=True).durable.result()
    one.wait_until_finished()
    kept = sorted((tmp_path / "checkpoints" / "run").glob("gen-*"))
    assert [path for path in theirs if path.exists() and int(path.name[4:]) > 3] == theirs[3:]
    assert theirs[-1] in kept
    assert len(kept) < 8  # its own go as they should


# -- an explicit durable save
class Stalled(Files):
    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, fd: int, data: memoryview) -> int:
        assert self.go.wait(60)
        return super().write(fd, data)


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    files = Stalled()
    yield files
    files.go.set()


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("every", [None, 1])
def test_an_explicit_durable_save_waits_for_an_older_one_and_is_never_dropped(
    manager: Make, tmp_path: Path, shm: Path, stalled: Stalled, memory: bool, every: int | None
) -> None:
    one = manager(memory=MemoryTier(shm) if memory else None, durable_every=every)
    one._store.files = stalled
    training = Training()
    one.prepare(training.state)
    for step in range(1, 4):
        training.step()
        if step == 3:  # it may need the first one's slot
            threading.Timer(0.1, stalled.go.set).start()
        handle = one.save(step, durable=True if step in (1, 3) else None)
        assert step == 3 or handle.committed.result()
    one.close()
    assert handle.durable.result()
    assert (tmp_path / "checkpoints" / "run" / "gen-000000000003").is_dir()
    assert arenas(shm) == []


def test_the_last_that_was_due_is_written_at_the_end(manager: Make, tmp_path: Path, stalled: Stalled) -> None:
    one = manager(durable_every=1)
    one._store.files = stalled
    training = Training()
    one.prepare(training.state)
    for step in range(1, 6):
        training.step()
        assert one.save(step).committed.result()
    stalled.go.set()
    one.close()
    assert (tmp_path / "checkpoints" / "run" / "gen-000000000005").is_dir()


def test_memory_stays_when_what_was_due_cannot_be_written(manager: Make, shm: Path) -> None:
    class Full(Files):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "full")

    one = manager(durable_every=1)
    one._store.files = Full()
    whole = trained(one, 2)
    one.close()
    two, training = manager(), Training(seed=1)
    two.prepare(training.state)
    report = two.restore()
    assert report is not None
    assert report.step == 2
    assert training.bits() == whole.bits()
