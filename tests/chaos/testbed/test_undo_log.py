"""What was done is taken back, whoever is left to do it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import Continue, EndProcess, RemoveFile, UndoLog, heal_all

WAIT_S = 60.0
INJECTOR = """
import signal, sys
from pathlib import Path
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import Continue, UndoLog, Watcher

folder, victim = Path(sys.argv[1]), Process.of(int(sys.argv[2]))
undo = UndoLog(folder)
watcher = Watcher(folder)
undo.record(Continue((victim,)))
victim.send(signal.SIGSTOP)
print("struck", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def victim() -> Iterator[Process]:
    with subprocess.Popen(["sleep", "600"]) as process:
        found = Process.of(process.pid)
        assert found is not None
        yield found
        process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_is_in_force_is_written_down_until_it_is_taken_back(tmp_path: Path, victim: Process) -> None:
    undo = UndoLog(tmp_path / "undo")
    number = undo.record(Continue((victim,)))
    assert len(list(undo.folder.iterdir())) == 1
    victim.send(signal.SIGSTOP)
    wait_for(lambda: victim.state == "T")
    undo.heal(number)
    wait_for(lambda: victim.state != "T")
    assert not list(undo.folder.iterdir())
    undo.heal(number)  # again: nothing


def test_the_newest_is_taken_back_first(tmp_path: Path) -> None:
    undo = UndoLog(tmp_path / "undo")
    for name in ("a", "b"):
        undo.record(RemoveFile(str(tmp_path / name)))
    assert [("/b'" in healed, "/a'" in healed) for healed in heal_all(undo.folder)] == [(True, False), (False, True)]


def test_what_cannot_be_taken_back_keeps_nothing_else_from_it(tmp_path: Path) -> None:
    undo = UndoLog(tmp_path / "undo")
    first, folder, torn = tmp_path / "a", tmp_path / "b", undo.folder / "000009.json"
    first.touch()
    folder.mkdir()
    for path in (first, folder):
        undo.record(RemoveFile(str(path)))
    torn.write_bytes(b"{")
    with pytest.raises(ExceptionGroup, match="2 of 3 could not be taken back"):
        heal_all(undo.folder)
    assert not first.exists()
    assert {path.name for path in undo.folder.iterdir()} == {"000001.json", "000009.json"}


@pytest.mark.parametrize(
    ("folder", "code", "said"),
    [("nowhere", 2, "usage"), ("", 2, "usage"), ("out", 0, "there is nothing to take back")],
)
def test_who_heals_by_hand_is_told_what_came_of_it(folder: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").touch()
    words = [sys.executable, "-m", "rackrun.chaos.testbed.machine.undo_log", str(tmp_path / folder) if folder else ""]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_a_helper_has_ended_when_its_end_is_over(tmp_path: Path, victim: Process) -> None:
    undo = UndoLog(tmp_path / "undo")
    undo.heal(undo.record(EndProcess(victim)))
    assert not victim.state


def test_another_process_with_the_same_number_gets_no_signal(victim: Process) -> None:
    stranger = Process(victim.pid, victim.started + 1)
    assert not stranger.state
    assert not stranger.send(signal.SIGKILL)
    assert victim.state


def test_an_injector_that_is_killed_leaves_nobody_stopped(tmp_path: Path, victim: Process) -> None:
    folder = tmp_path / "undo"
    injector = subprocess.Popen(
        [sys.executable, "-c", INJECTOR, str(folder), str(victim.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert injector.stdout is not None
    assert injector.stdout.readline() == b"struck\n"
    wait_for(lambda: victim.state == "T")
    os.kill(injector.pid, signal.SIGKILL)
    _, told = injector.communicate()  # the watcher holds its stderr until it has ended
    assert b"taken back: Continue" in told
    wait_for(lambda: victim.state != "T")
    assert not list(folder.iterdir())
