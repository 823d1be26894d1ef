"""What a job under test has before its first process: all of it is taken back, also when the job never starts, or the harness dies first."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rackrun.chaos.evidence.history import HistoryWriter
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.targets import One, Scene
from rackrun.chaos.injectors import StrikeOutcome
from rackrun.chaos.plan.conductor import Observation
from rackrun.chaos.plan.definition import Inject, Plan
from rackrun.chaos.runs.run_plan import Performance
from rackrun.chaos.testbed import job_under_test
from rackrun.chaos.testbed.job_under_test import JobUnderTest
from rackrun.chaos.testbed.machine.leaked_resources import can_be_private
from rackrun.chaos.testbed.machine.processes import Process, marked

HELD = """
import sys
from pathlib import Path
from typing import Any
from rackrun.chaos.testbed.job_under_test import JobUnderTest

class Held(JobUnderTest):
    def _prepare(self, *given: Any, **more: Any) -> None:
        super()._prepare(*given, **more)
        print("prepared", flush=True)
        sys.stdin.read()

Held(Path(sys.argv[1]), ["nowhere.py"])
"""


def made(folder: Path, temporary: Path) -> list[str]:
    """What is there of a job in ``folder``."""
    mounted = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]
    undo = folder / "undo"
    return [
        *mounted,
        *map(str, temporary.glob("rackrun-chaos-*")),
        *(map(str, undo.iterdir()) if undo.exists() else ()),
    ]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


def test_a_job_that_cannot_be_prepared_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    folder = tmp_path / "job"
    (folder / "clocks").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        JobUnderTest(folder, ["nowhere.py"], own_clocks=True)
    assert made(folder, temporary) == []


def test_a_harness_that_is_killed_before_its_job_starts_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    folder = tmp_path / "job"
    harness = subprocess.Popen(
        [sys.executable, "-c", HELD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert harness.stdout is not None
    assert harness.stdout.readline() == b"prepared\n"
    assert made(folder, temporary)
    os.kill(harness.pid, signal.SIGKILL)
    harness.communicate()  # the watcher holds its stderr until it has ended
    assert made(folder, temporary) == []


class Escaping(JobUnderTest):
    def _program(self, _: Sequence[str]) -> list[str]:
        return ["-c", "import subprocess; subprocess.Popen(['env', '-i', 'setsid', 'sleep', '600'])"]


@pytest.mark.skipif(not can_be_private(), reason="it takes root and mount namespaces")
def test_a_process_that_clears_its_environment_is_seen_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_under_test, "SETTLE_S", 0.5)
    with Escaping(tmp_path / "job", ["nowhere.py"]) as escaping:
        ended = escaping.finish(60.0)
    (left,) = ended.left
    assert left.endswith("sleep 600 ")
    found = Process.of(int(left.split(":")[0].split()[1]))
    assert found is None or not found.state


def test_a_folder_on_which_nothing_is_mounted_is_nobodys_shared_memory(tmp_path: Path) -> None:
    assert marked("NOBODY=HAS", tmp_path) == []
    assert marked("NOBODY=HAS", Path("/dev/shm")) == []


class Gone:
    """A strike whose subject has taken along all that it could be seen by."""

    def outcome(self) -> StrikeOutcome | None:
        raise FileNotFoundError("/proc/1/fd")

    def take_back(self) -> None:
        raise AssertionError("it does not last")


def test_a_strike_that_cannot_be_looked_at_any_more_has_no_known_effect(tmp_path: Path, scene: Scene) -> None:
    said: list[str] = []
    plan = Plan(plan=Inject(fault=Kill(), target=One(Subjects.RANK)))
    performance: Any = Performance(plan, [], tmp_path, None, said.append)
    performance._job, performance._history = SimpleNamespace(now_s=1.0), HistoryWriter(io.StringIO())
    performance.conductor.see(Observation(1.0, 3, scene))
    performance._under_way[0] = Gone()
    performance._hear()
    assert [record.took for record in performance.conductor.records] == [False]
    assert "nobody knows" in said[0]
