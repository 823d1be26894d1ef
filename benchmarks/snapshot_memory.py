"""The memory that snapshots are written to: what it costs to have it, and who waits for it.

    python benchmarks/snapshot_memory.py                      2 GiB, and jobs with half a GB of state (about 5 minutes)
    python benchmarks/snapshot_memory.py --against /tmp/old   the same jobs with another tree of this repository too
    python benchmarks/snapshot_memory.py --quick              a quarter of it, once

**Pages**: an arena is made as Python's own calls make it (``posix_fallocate``, then ``mmap`` with MAP_POPULATE), and
by `Arena.create` with several threads. *Others stood* is the longest time in which another thread of the process did
not run. **Jobs**: one rank and a spare; the rank is killed in a step, and the spare goes on from its snapshot. Each
has no live copy of its state, so its first snapshot follows its first step. All figures are also told as ratios:
machines differ, and this one may be busy.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import mmap
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import ROOT, Job, Mark, machine, median_range, rackrun_command, save

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.host_memory.populate import Populating

FIRST_STEPS = 12
"""In which two snapshots are taken."""
KILLED_AFTER = 16


class Standstill(threading.Thread):
    """The longest time in which this thread, which wants to run every millisecond, did not."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s, self._over = 0.0, False

    def run(self) -> None:
        last = time.monotonic()
        while not self._over:
            time.sleep(0.001)
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now

    def __enter__(self) -> Standstill:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self.join()


def by_python(fd: int, size: int) -> Callable[[], None]:
    os.posix_fallocate(fd, 0, size)
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE).close


def by_threads(threads: int) -> Callable[[int, int], Callable[[], None]]:
    def make(fd: int, size: int) -> Callable[[], None]:
        how = Populating(threads)
        return Arena.create(fd, job="bench", rank=0, fencing_token=1, slots=1, payload_bytes=size, populating=how).close

    return make


def pages(size: int, rounds: int) -> list[dict[str, Any]]:
    ways = {"Python's calls": by_python} | {f"threads: {n}": by_threads(n) for n in _thread_counts()}
    found: list[dict[str, Any]] = []
    for turn in range(rounds):
        for way, make in ways.items():
            fd = os.memfd_create("bench", os.MFD_CLOEXEC)
            try:
                with Standstill() as others:
                    began = time.monotonic()
                    close = make(fd, size)
                    took = time.monotonic() - began
                close()
            finally:
                os.close(fd)
            gc.collect()
            found.append({"way": way, "turn": turn, "seconds": took, "others_stood_s": others.longest_s})
            print(f"pages {turn + 1}/{rounds}: {found[-1]}", file=sys.stderr)
    return found


def _thread_counts() -> list[int]:
    return [n for n in (1, 2, 4, 8) if n <= max(len(os.sched_getaffinity(0)), 2)]


def job(tree: Path, width: int, layers: int) -> dict[str, Any]:
    """In units of its own steady step, beside seconds."""
    size = ("--width", str(width), "--layers", str(layers), "--steps", "10000")
    env = {
        "PYTHONPATH": str(tree),
        "BENCH_RANKS": "1",
        "BENCH_SNAPSHOT_EVERY": "4",
        "BENCH_PAUSE_S": "0.2",
    }
    command = rackrun_command("elastic_mlp.py", *size, ranks=1, spares=1)
    with Job(command, env=env, folder=tree) as running:  # python -m looks there first
        running.wait_for(lambda marks: any(mark.step >= KILLED_AFTER for mark in marks), 120, poll_s=0.002)
        founding = list(running.marks())
        steady = statistics.median(_gaps(founding)[FIRST_STEPS:])
        time.sleep(0.3 * steady)
        pid, before = founding[-1].pid, max(mark.step for mark in running.marks())
        fault_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def newcomers(marks: list[Mark]) -> list[Mark]:
            return [mark for mark in marks if mark.pid != pid]

        running.wait_for(lambda marks: len(newcomers(marks)) > FIRST_STEPS, 120, poll_s=0.002)
        took_over = newcomers(running.marks())
    beyond = next(mark.t for mark in took_over if mark.step > before) - fault_at
    figures = {
        "founder's longest step": max(_gaps(founding)[:FIRST_STEPS]),
        "recovery": beyond,
        "newcomer's longest step": max(_gaps(took_over)[:FIRST_STEPS]),
        "until 4 steps beyond": next(mark.t for mark in took_over if mark.step > before + 3) - fault_at,
    }
    return {"steady_step_s": steady, **figures, "in_steps": {name: value / steady for name, value in figures.items()}}


def _gaps(marks: list[Mark]) -> list[float]:
    return [later.t - mark.t for mark, later in itertools.pairwise(marks)]


def summary(result: dict[str, Any]) -> str:
    ways = list(dict.fromkeys(one["way"] for one in result["pages"]))

    def of(way: str, key: str) -> list[float]:
        return [one[key] for one in result["pages"] if one["way"] == way]

    first = statistics.median(of(ways[0], "seconds"))
    lines = [f"| an arena of {result['gib']:g} GiB | s | of Python's | others stood, s |", "|---|---|---|---|"]
    lines += [
        f"| {way} | {median_range(of(way, 'seconds'))} | {statistics.median(of(way, 'seconds')) / first:.2f} "
        f"| {median_range(of(way, 'others_stood_s'), 3)} |"
        for way in ways
    ]
    trees = list(dict.fromkeys(one["tree"] for one in result["jobs"]))
    names = list(result["jobs"][0]["in_steps"]) if result["jobs"] else []
    lines += ["", f"| in steady steps | {' | '.join(trees)} |", "|---|" + "---|" * len(trees)]
    for name in names:
        each = [[one["in_steps"][name] for one in result["jobs"] if one["tree"] == tree] for tree in trees]
        lines.append(f"| {name} | {' | '.join(median_range(values, 1) for values in each)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the memory, once")
    parser.add_argument("--gib", type=float, default=2.0, help="of an arena")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another tree of this repository")
    parser.add_argument(
        "--width", type=int, default=1024, help="of the job's model; 12 MB of state for each million weights"
    )
    parser.add_argument("--layers", type=int, default=40)
    args = parser.parse_args()
    gib, rounds, layers = (args.gib / 4, 1, args.layers // 4) if args.quick else (args.gib, args.rounds, args.layers)
    result: dict[str, Any] = {"machine": machine(), "quick": args.quick, "gib": gib, "jobs": []}
    result["pages"] = pages(int(gib * 2**30), rounds)
    trees = {"this tree": ROOT} | ({"the other": args.against.resolve()} if args.against else {})
    for turn in range(rounds):
        for name, tree in trees.items():
            result["jobs"].append({"tree": name, "turn": turn, **job(tree, args.width, layers)})
            print(f"jobs {turn + 1}/{rounds}: {result['jobs'][-1]}", file=sys.stderr)
    result["table"] = summary(result)
    path = save("snapshot_memory-quick" if args.quick else "snapshot_memory", result)
    print(f"{result['table']}\n\n{result['machine']}\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
