"""What may notice a mistake in a module, nearest first: its own tests, those of its neighbours, the simulator, whole jobs with faults."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Rung", "notices", "rungs_for"]

TEST_S = 100
"""A test that takes longer hangs."""
NEAR_MAX = 8
"""So many files of tests are near, at the most."""
_FAST = ("-m", "not stories and not soak and not slow")
_DIRECTORIES = {"core": ("tests/core",), "worker": ("tests/worker",), "checkpoint": ("tests/checkpoint",)}
_JOBS = {
    "core": ("tests/faults/test_lost_ranks.py", "tests/faults/test_resizing.py"),
    "worker": ("tests/faults/test_lost_ranks.py", "tests/faults/test_resizing.py"),
    "checkpoint": ("tests/faults/test_lost_jobs.py", "tests/faults/test_lost_ranks.py"),
}
CAMPAIGN = "0:6"


class Rung(NamedTuple):
    name: str
    command: tuple[str, ...]
    limit_s: float
    is_pytest: bool = True


def rungs_for(tree: Path, module: Path, budget_s: float) -> list[Rung]:
    """``module``: relative to ``tree``."""
    part = _part(module)
    near = nearest(tree, module)
    every = [path for path in _DIRECTORIES[part] if (tree / path).exists()]
    jobs = [path for path in _JOBS[part] if (tree / path).exists()]
    rungs = []
    if near:
        rungs.append(Rung("nearest", _pytest(*_FAST, *map(str, near)), 0.3 * budget_s))
    rungs.append(Rung("neighbours", _pytest(*_FAST, *every), 0.4 * budget_s))
    if part == "core":
        fuzz = (sys.executable, "-m", "rackrun.chaos.sim", "fuzz", "--seeds", "0:400", "--jobs", "1")
        rungs.append(Rung("simulator", fuzz, 0.25 * budget_s, is_pytest=False))
    rungs.append(Rung("whole jobs", _pytest("-m", "not stories and not soak", *jobs), 0.35 * budget_s))
    tally = str(tree / "mutant-campaign.jsonl")
    words = ["examples/chaos/small.py", "{wrap}", "{reduction}", "40", "{out}", "{flags}"]
    options = ["chaos", "campaign", "--seeds", CAMPAIGN, "--jobs", "1", "--tally", tally, "--"]
    campaign = (sys.executable, "-m", "rackrun.ctl", *options, *words)
    rungs.append(Rung("campaign", campaign, 0.35 * budget_s, is_pytest=False))
    return rungs


def nearest(tree: Path, module: Path) -> list[Path]:
    """Files of tests that bear its name, then those that import it, those with the fewest other imports first."""
    dotted = _dotted(module)
    named, importing = [], []
    for path in sorted((tree / "tests").rglob("test_*.py")):
        if path.stem.removeprefix("test_") == module.stem:
            named.append(path)
            continue
        text = path.read_text()
        if re.search(rf"\b{re.escape(dotted)}\b", text):
            importing.append((text.count("from rackrun"), path))
    found = [*named, *(path for _, path in sorted(importing))]
    return [path.relative_to(tree) for path in found[:NEAR_MAX]]


def notices(tree: Path, rung: Rung, well: Path, limit_s: float) -> tuple[str, float]:
    """Who notices the mistake in the ``tree`` ("": nobody), and after how many seconds.

    What fails in the one without it (``well``) too has noticed nothing; that is tried beside, and takes none of the seconds.
    """
    began = time.monotonic()
    code, said = run(tree, rung.command, limit_s)
    seconds = time.monotonic() - began
    if code in (0, 5, None):  # 5: no test is selected; None: there was no more time
        return "", seconds
    by = failed_in(said) if rung.is_pytest else said.strip().splitlines()[-1][:160] if said.strip() else rung.name
    if rung.is_pytest and "::" in by:
        again, _ = run(well, _pytest("-m", "", by.partition("[")[0]), 200)
        if again not in (0, None):
            return "", seconds
    return by or f"exit code {code}", seconds


def run(tree: Path, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: it was ended after ``limit_s``) and output. It leaves no process."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # it ends what it has started
        try:
            said, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        return None, said
    return process.returncode, said


def failed_in(said: str) -> str:
    """The first test that failed, as pytest names it."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if found:
        return found[1]
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def _pytest(*arguments: str) -> tuple[str, ...]:
    words = (
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--assert=plain",
        "--timeout",
        str(TEST_S),
        "--durations=0",
        "--durations-min=1000",
    )
    return (sys.executable, "-m", "pytest", *words, *arguments)


def _part(module: Path) -> str:
    return "checkpoint" if module.parts[0] == "checkpoint" else module.parts[1]


def _dotted(module: Path) -> str:
    parts = module.with_suffix("").parts
    return ".".join(parts if parts[0] == "rackrun" else ("rackrun", *parts))
