"""The folder of arenas: the last to leave removes it, and nobody loses it who has just come in."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.checkpoint.arena import arena_folder
from rackrun.checkpoint.arena.arena_folder import ArenaFolder, MemoryTier

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

_PROCESSES, _TIMES = 4, 150


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def folder_of(shm: Path, job: str = "run") -> ArenaFolder:
    return ArenaFolder(MemoryTier(shm), job, shm / "checkpoints", 0, 1)


def test_the_last_to_leave_removes_everything(shm: Path) -> None:
    first, second = folder_of(shm, "first"), folder_of(shm, "second")
    first.leave(remove=True, fencing_token=1)
    assert second.path.is_dir()
    second.leave(remove=True, fencing_token=1)
    assert os.listdir(shm) == []


def test_the_lock_stays_while_another_job_has_something_there(shm: Path) -> None:
    first, second = folder_of(shm, "first"), folder_of(shm, "second")
    first.leave(remove=False, fencing_token=1)
    second.leave(remove=True, fencing_token=1)
    assert first.path.is_dir()
    assert sorted(os.listdir(first.path.parent)) == sorted([first.path.name, "lock"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_lock_that_was_removed_while_it_was_waited_for_is_not_taken(
    shm: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    base, taken = shm / f"rackrun-{os.geteuid()}", list[int]()

    def flock(fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)
        taken.append(fd)
        if len(taken) == 1:  # its former holder was leaving, as the last
            (base / "lock").unlink()
            if whole:
                base.rmdir()

    monkeypatch.setattr(arena_folder, "fcntl", type("Fcntl", (), {"flock": flock, "LOCK_EX": fcntl.LOCK_EX}))
    folder = folder_of(shm)
    assert len(taken) == 2
    assert folder.path.is_dir()
    folder.leave(remove=True, fencing_token=1)
    assert os.listdir(shm) == []


def test_processes_that_come_and_go_at_the_same_moment_keep_their_folders_and_leave_nothing(shm: Path) -> None:
    inside = shm / "inside"

    def comes_and_goes(number: int) -> None:
        for _ in range(_TIMES):
            folder = folder_of(shm, f"job{number}")
            (folder.path / "rank").touch()
            with folder._locked():
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # nobody else holds the lock
                inside.unlink()
            (folder.path / "rank").unlink()
            folder.leave(remove=True, fencing_token=1)

    children = []
    for number in range(_PROCESSES):
        if not (pid := os.fork()):
            try:
                comes_and_goes(number)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * _PROCESSES
    assert os.listdir(shm) == []
