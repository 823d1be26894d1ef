"""What may notice a mistake, cheapest first: fast tests that reach its line, the simulator, whole jobs with faults."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["FAST", "Rung", "notices", "pytest_command", "run", "rungs_for"]

TEST_S = 100
"""A test that takes longer hangs."""
FIRST_MAX = 40
"""So many tests of those that reach a mistake run before all others do."""
FAST = ("-m", "not stories and not soak and not slow")
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


def rungs_for(tree: Path, module: Path, reaching: Sequence[str], budget_s: float) -> list[Rung]:
    """``module``: relative to ``tree``; ``reaching``: the tests that reach the mistake, in the order in which they are to run."""
    part = _part(module)
    jobs = [path for path in _JOBS[part] if (tree / path).exists()]
    rungs = []
    if reaching:
        first = pytest_command("-p", "no:xdist", *reaching[:FIRST_MAX])
        rungs.append(Rung("reaching, the first", first, 0.3 * budget_s))
    if reaching[FIRST_MAX:]:
        rungs.append(Rung("reaching", pytest_command("-p", "no:xdist", *reaching[FIRST_MAX:]), 0.4 * budget_s))
    if part == "core":
        fuzz = (sys.executable, "-m", "rackrun.chaos.simulator", "fuzz", "--seeds", "0:400", "--jobs", "1")
        rungs.append(Rung("simulator", fuzz, 0.25 * budget_s, is_pytest=False))
    rungs.append(Rung("whole jobs", pytest_command("-m", "not stories and not soak", *jobs), 0.35 * budget_s))
    tally = str(tree / "mutant-campaign.jsonl")
    words = ["examples/chaos/small.py", "{wrap}", "{reduction}", "40", "{out}", "{flags}"]
    options = ["chaos", "campaign", "--seeds", CAMPAIGN, "--jobs", "1", "--tally", tally, "--"]
    campaign = (sys.executable, "-m", "rackrun.ctl", *options, *words)
    rungs.append(Rung("campaign", campaign, 0.35 * budget_s, is_pytest=False))
    return rungs


def notices(tree: Path, rung: Rung, well: Path, limit_s: float) -> tuple[str, float]:
    """Who notices the mistake in the ``tree`` ("": nobody), and after how many seconds.

    A test has noticed it that fails twice, and does not in the tree without the mistake (``well``): otherwise it is left out, and the others go on.
    These second looks are taken beside, and take none of the seconds.
    """
    seconds, left_out = 0.0, list[str]()
    while seconds < limit_s:
        began = time.monotonic()
        code, said = run(tree, (*rung.command, *left_out), limit_s - seconds)
        seconds += time.monotonic() - began
        if code in (0, 5, None):  # 5: no test is selected; None: there was no more time
            break
        if not rung.is_pytest:
            return (said.strip().splitlines() or [rung.name])[-1][:160], seconds
        by = failed_in(said, rung.command)
        if "::" not in by:  # no test could be found or begun at all, or one has ended the process
            works = run(well, rung.command, 200)[0] in (0, None)
            return (by or f"exit code {code}") if works else "", seconds
        again = pytest_command("-m", "not stories and not soak", by)
        if run(tree, again, 200)[0] != 0 and run(well, again, 200)[0] == 0:
            return by, seconds
        left_out += ["--deselect", by]
    return "", seconds


def run(
    tree: Path, command: Sequence[str], limit_s: float, more_env: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Exit code (None: it was ended after ``limit_s``) and output. It leaves no process."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **(more_env or {})}
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


def failed_in(said: str, command: Sequence[str] = ()) -> str:
    """The first test that failed, as ``command`` names it; else without what it is called with, which may have spaces. "" and no name of a test:
    none has failed."""
    found = re.search(r"^(?:FAILED|ERROR) (.*)", said, re.MULTILINE)
    if found:
        named = [word for word in command if "::" in word and found[1].startswith(word)]
        return max(named, key=len, default=found[1].partition(" ")[0].partition("[")[0])
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def pytest_command(*arguments: str, stop: bool = True) -> tuple[str, ...]:
    """``stop``: at the first test that fails."""
    words = (
        *(["-x"] if stop else []),
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
