"""What outlives a job is seen, and only what is its own."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.chaos.testbed.machine import leaked_resources
from rackrun.chaos.testbed.machine.leaked_resources import LeakedResources, can_be_private
from rackrun.chaos.testbed.machine.undo_log import UndoLog, heal_all

NOBODY = 4_194_305
"""Above the largest process id that Linux gives."""


@pytest.fixture
def undo(tmp_path: Path) -> Iterator[UndoLog]:
    log = UndoLog(tmp_path / "undo")
    yield log
    heal_all(log.folder)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A file of some rackrun in ``/dev/shm``."""
    path = leaked_resources.SHARED / f"rackrun-of-a-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def test_a_segment_that_a_job_has_left_is_found_where_nobody_else_sees_it(tmp_path: Path, undo: UndoLog) -> None:
    if not can_be_private():
        pytest.skip("it takes root and mount namespaces")
    name = f"left-{uuid.uuid4().hex}"
    found = LeakedResources(tmp_path, ["train.py"], undo)
    assert found.found() == ()
    subprocess.run([*found.before, "sh", "-c", f"echo > /dev/shm/{name}"], check=True)
    assert found.found() == (f"/dev/shm/{name}",)
    assert not (leaked_resources.SHARED / name).exists()
    heal_all(undo.folder)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_where_it_cannot_be_private_only_what_has_our_name_is_looked_at(
    tmp_path: Path, undo: UndoLog, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaked_resources, "can_be_private", lambda: False)
    found = LeakedResources(tmp_path, ["train.py"], undo)
    outside.touch()
    assert found.found() == (str(outside),)
    assert LeakedResources(tmp_path, ["train.py"], undo).found() == (), "it was there before"


def test_a_command_that_names_shared_memory_keeps_the_hosts(tmp_path: Path, undo: UndoLog) -> None:
    assert LeakedResources(tmp_path, ["train.py", "--data=/dev/shm/tokens"], undo).before == []


def test_a_folder_with_our_name_is_found_among_temporary_files_and_the_scripts_own_are_not(
    tmp_path: Path, undo: UndoLog
) -> None:
    found = LeakedResources(tmp_path, ["train.py", "/dev/shm"], undo)
    temporary = Path(found.env["TMPDIR"])
    for name in ("rackrun-kernel-x", "pymp-y"):
        (temporary / name).mkdir()
    assert found.found() == (str(temporary / "rackrun-kernel-x"),)
    heal_all(undo.folder)
    assert not temporary.exists()


def test_a_control_group_of_the_dead_is_found(tmp_path: Path, undo: UndoLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaked_resources, "own_group", lambda: tmp_path / "group")
    (tmp_path / "group").mkdir()
    found = LeakedResources(tmp_path, ["train.py", "/dev/shm"], undo)
    for owner in (NOBODY, os.getpid()):
        (tmp_path / "group" / f"rackrun-filler-{owner}-tray-00.0").mkdir()
    (tmp_path / "group" / f"rackrun-chaos-{NOBODY}").mkdir()  # that of an injector of another run, whose name is drawn
    assert found.found() == (str(tmp_path / "group" / f"rackrun-filler-{NOBODY}-tray-00.0"),)
