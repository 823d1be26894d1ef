"""The process around a filler, by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.agent.fillers.filler_runner import CAGE
from rackrun.agent.fillers.filler_supervisor import FillerOrder
from rackrun.agent.host.cgroup import Cgroup


def cage(*command: str, said: bytes | None = None, cwd: Path | None = None) -> int:
    """Its exit code; ``said``: by the agent before it starts. None: nothing, until it has ended."""
    order = FillerOrder(command=list(command), hold_s=100.0, grace_s=100.0, cpus=[], cgroup="", last_in_line=False)
    return run(json.dumps(order), said, cwd)


def run(order: str, said: bytes | None = None, cwd: Path | None = None) -> int:
    theirs, ours = os.pipe()
    try:
        os.write(ours, said or b"")
        arguments = [sys.executable, *CAGE, str(os.getpid()), order]
        return subprocess.run(arguments, stdin=theirs, cwd=cwd, check=False).returncode
    finally:
        os.close(theirs)
        os.close(ours)


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 128 + 9)])
def test_it_ends_as_its_filler_has_ended(script: str, code: int) -> None:
    assert cage("sh", "-c", script) == code


def test_a_filler_whose_slot_is_needed_by_the_time_its_cage_runs_is_not_started(tmp_path: Path) -> None:
    assert cage("touch", str(tmp_path / "ran"), said=b".") == 0
    assert not (tmp_path / "ran").exists()


def test_modules_in_the_users_folder_are_not_taken_for_pythons_own(tmp_path: Path) -> None:
    for name in ("json", "select", "signal", "rackrun"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(5)")
    assert cage("touch", "ran", cwd=tmp_path) == 0
    assert (tmp_path / "ran").exists()


def test_a_cage_that_fails_ends_as_if_killed_so_that_the_agent_looks_for_what_it_leaves() -> None:
    assert run("no order") == -signal.SIGKILL


def test_control_groups_that_dead_agents_have_left_are_removed_and_no_others() -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    names = [f"rackrun-test-{pid}-{os.getpid()}" for pid in (dead, os.getpid())]
    left, ours = (Cgroup.make(name) for name in names)
    if left is None or ours is None:
        pytest.skip("there is no control group (v2) that we may write")
    try:
        Cgroup.sweep("rackrun-test-")
        assert (os.path.exists(left.path), os.path.exists(ours.path)) == (False, True)
    finally:
        left.remove()
        ours.remove()
