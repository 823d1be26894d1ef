"""Whose files in ``/dev/shm`` are removed, and whose stay."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.agent.host.tensor_files import TensorFiles

Ended = Callable[[TensorFiles, int], Path]


@pytest.fixture
def ended() -> Iterator[Ended]:
    """``ended(files, status)``: the file of a process with this wait status, of which ``files`` is told."""
    paths = []

    def end(files: TensorFiles, status: int) -> Path:
        process = subprocess.Popen(["true"])
        process.wait()
        path = Path(f"/dev/shm/torch_{process.pid}_7_0")
        path.write_text("half")
        paths.append(path)
        files.reaped(process.pid, status)
        return path

    yield end
    for path in paths:
        path.unlink(missing_ok=True)


def test_the_file_of_a_killed_process_is_removed(ended: Ended) -> None:
    files = TensorFiles()
    path = ended(files, signal.SIGKILL)
    files.remove()
    assert not path.exists()


def test_what_a_process_leaves_that_has_exited_by_itself_stays(ended: Ended) -> None:
    """Another may still open it by its name (sharing strategy ``file_system``)."""
    files = TensorFiles()
    path = ended(files, 0)
    files.remove()
    assert path.exists()


def test_a_file_that_anybody_holds_stays_until_it_is_let_go(ended: Ended) -> None:
    files = TensorFiles()
    path = ended(files, signal.SIGKILL)
    with path.open("rb"):
        files.remove()
        assert path.exists()
    files.remove()
    assert not path.exists()


def test_a_file_that_is_older_stays(ended: Ended) -> None:
    files = TensorFiles()
    path = ended(files, signal.SIGKILL)
    os.utime(path, (0, 0))
    files.remove()
    assert path.exists()


def test_files_of_others_stay(ended: Ended) -> None:
    files, others = TensorFiles(), TensorFiles()
    path = ended(others, signal.SIGKILL)
    ended(files, signal.SIGKILL)
    files.remove()
    assert path.exists()
