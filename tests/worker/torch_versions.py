"""``make compat``: does rackrun work with the oldest torch that it supports, the one that is pinned, and the newest that pip gives.

Each torch has an environment of its own below ``.compat`` (the oldest and the newest bring CUDA: 13 GB, some minutes once). In each,
the trials of `rackrun.worker.torch_compat`, the workers' tests, whole jobs (ranks are swapped at random moments, and a world shrinks to
one rank and grows again with ``reduction="exact"``), and the tests of the adapters for frameworks. What came of it is the table in ``docs/torch_versions.md``.

    --brief      of the workers' tests, those of what touches torch's private parts: what CI runs when these, or the pin, change
    --only A B   these versions; the table keeps its rows of the others, if they are of the same sources
    --stands     try nothing: exit code 0 if the table is of these sources and this pin, 1 if not
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "torch_versions.md"
ENVIRONMENTS = ROOT / ".compat"
BEGIN, END = "<!-- make compat writes from here, of the sources", "<!-- to here -->"
WORKERS = ["tests/worker"]
BRIEF = [
    "torch_compat/test_compat.py",
    "script/test_conversions.py",
    "exact/test_exact.py",
    "steps/test_bits_ddp.py",
    "steps/test_bits_no_backward.py",
    "steps/test_bits_sharded.py",
    "membership/test_loopback.py",
    "script/test_misuse.py",
    "loop/test_reentry.py",
    "loop/test_resizing.py",
    "steps/test_step.py",
]
JOBS = [
    "tests/faults/test_lost_ranks.py::test_ranks_are_lost_at_random_moments",
    "tests/faults/test_resizing.py::test_down_to_one_rank_and_up_again_it_is_the_same_training",
]
FRAMEWORKS = ["tests/frameworks"]
TRIALS = (
    "import json; from rackrun.worker.torch_compat import feature_probe; found = feature_probe.problems();"
    "print(json.dumps([[what, found.get(need)] for need, (what, _) in feature_probe.TRIALS.items()]))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="VERSION")
    parser.add_argument("--stands", action="store_true")
    args = parser.parse_args()
    if args.stands:
        return int(f"{BEGIN} {stamp()} -->" not in PAGE.read_text())
    versions = args.only or list(dict.fromkeys([oldest(), pinned(), newest()]))
    rows = []
    for version in versions:
        rows.append(row(version, [f"tests/worker/{name}" for name in BRIEF] if args.brief else WORKERS))
        if not args.brief and not rows[-1]["failed"]:
            write(rows[-1:])
    for cells in rows:
        print(" | ".join(cells[name] for name in COLUMNS))
    return int(any(cells["failed"] for cells in rows))


# -- which -------------------------------------------------------------------------------------------------------------
def oldest() -> str:
    """The first patch of what pyproject.toml asks for."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, "pyproject.toml names no torch"
    return f"{found[1]}.0"


def pinned() -> str:
    found = re.search(r"^TORCH +\?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, "the Makefile pins no torch"
    return found[1]


def newest() -> str:
    """That pip would install here."""
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--report",
            "-",
            "torch",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    version: str = json.loads(told.stdout)["install"][0]["metadata"]["version"]
    return version.partition("+")[0]


def stamp() -> str:
    """What the table depends on, and would not show: the sources that know torch's private parts, and which versions are tried."""
    mark = hashlib.blake2b(f"{oldest()} {pinned()}".encode(), digest_size=8)
    for source in sorted((ROOT / "rackrun" / "worker" / "torch_compat").rglob("*.py")):
        mark.update(source.read_bytes())
    return mark.hexdigest()


# -- one of them -------------------------------------------------------------------------------------------------------
def environment(version: str) -> Path:
    """The interpreter of an environment with this torch. One that was not finished is made again."""
    folder = ENVIRONMENTS / f"torch-{version}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"== installing torch {version} in {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={version}"], check=True)
        # The interpreter of Triton 3.6, which the oldest torch brings, converts arrays to numbers as numpy 2.4 does not.
        others = ["numpy<2.4"] if version == oldest() else []
        subprocess.run([*pip, "-e", f"{ROOT}[dev]", *others], check=True, cwd=ROOT)
        ready.touch()
    return python


def row(version: str, workers: list[str]) -> dict[str, str]:
    python = environment(version)
    print(f"== torch {version}", flush=True)
    told = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    tried = subprocess.run([python, "-c", TRIALS], capture_output=True, text=True, check=False, cwd=ROOT)
    if tried.returncode:
        failed_trials = [tried.stderr.strip().rpartition("\n")[2]]
        trials = "cannot begin"
    else:
        found: list[list[Any]] = json.loads(tried.stdout.strip().rpartition("\n")[2])
        failed_trials = [f"{what}: {problem}" for what, problem in found if problem]
        trials = f"{len(found) - len(failed_trials)} of {len(found)}"
    said_of_workers, of_workers = tests(python, workers, "not soak and not stories")
    said_of_jobs, of_jobs = tests(python, JOBS, "not soak")
    said_of_frameworks, of_frameworks = tests(python, FRAMEWORKS, "not soak and not stories")
    failed = [*failed_trials, *of_workers, *of_jobs, *of_frameworks]
    for problem in failed:
        print(f"torch {version}: {problem}", flush=True)
    return {
        "torch": told.stdout.strip(),
        "role": ", ".join(
            role
            for role, which in (("oldest", oldest()), ("pinned", pinned()), ("newest", newest()))
            if which == version
        ),
        "trials": trials,
        "workers' tests": said_of_workers,
        "whole jobs": said_of_jobs,
        "frameworks": said_of_frameworks,
        "date": time.strftime("%Y-%m-%d"),
        "failed": "; ".join(failed),
    }


def tests(python: Path, which: list[str], marked: str) -> tuple[str, list[str]]:
    """What pytest says at its end, and the tests that failed."""
    command = [str(python), "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", marked]
    command += ["-n", "auto", "--dist", "worksteal", *which]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.stdout is not None
    lines = []
    with run:
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "did not run")
    if run.returncode and not failed:
        failed = [f"pytest ended with {run.returncode}: {last}"]
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)
    return ", ".join(f"{count} {what}" for count, what in counts) or last, failed


# -- the table ---------------------------------------------------------------------------------------------------------
COLUMNS = ("torch", "role", "trials", "workers' tests", "whole jobs", "frameworks", "date")


def write(rows: list[dict[str, str]]) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept: dict[str, str] = {}
    stands = old.lstrip().startswith(stamp())  # else what the other rows say was of other sources
    for line in old.splitlines() if stands else ():
        first = re.match(r"\| (\d[\w.+]*) \|", line)
        if first:
            kept[first[1]] = line
    for cells in rows:
        kept[cells["torch"]] = "| " + " | ".join(cells[name] for name in COLUMNS) + " |"
    ordered = [kept[name] for name in sorted(kept, key=lambda name: [int(n) for n in re.findall(r"\d+", name)[:3]])]
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    PAGE.write_text("\n".join([f"{before}{BEGIN} {stamp()} -->", *head, *ordered, END + after]))


if __name__ == "__main__":
    sys.exit(main())
