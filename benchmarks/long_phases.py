"""Phases of random length, 0.1 to 100 steps, on one rank or on all, beside busy processes: is a healthy rank killed, is one done twice?

    python benchmarks/long_phases.py                 2,000 phases in 8 jobs, 4 at once, beside four busy loops (half an hour on 2 cores)
    python benchmarks/long_phases.py --phases 200 --jobs 2

Phases compute, write, sleep, or wait for a child that computes. There are no faults: whoever is replaced was healthy.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from jobs import WORKLOADS, Job, machine, save

RANKS = 3


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(phases: int, seed: int, step_s: float, limit_s: float) -> dict[str, Any]:
    placement = ["--standalone", "--nproc-per-node", str(RANKS + 1), "--spares", "1"]
    command = [
        *(sys.executable, "-m", "rackrun", *placement, "--out-dir", "{folder}/out"),
        *(str(WORKLOADS / "phases.py"), "{folder}", str(phases), str(seed), str(step_s)),
    ]
    with Job(command) as job:
        began = time.monotonic()
        code = job.finish(limit_s)
        seconds = time.monotonic() - began
        begun: collections.Counter[tuple[str, ...]] = collections.Counter()
        ended: collections.Counter[tuple[str, ...]] = collections.Counter()
        longest = 0.0
        for path in sorted(job.folder.glob("phases-*")):
            for line in path.read_text().splitlines():
                what, *where, _, length = line.split()
                (begun if what == "begin" else ended)[path.name, *where] += 1
                longest = max(longest, float(length))
        told = [line for line in job.output().splitlines() if line.startswith("rackrun:")]
        return {
            "seed": seed,
            "exit_code": code,
            "seconds": round(seconds, 1),
            "phases": len({key[1:] for key in ended}),
            "longest_s": longest,
            "done_twice": sum(count > 1 for count in begun.values()),
            "not_done": phases * RANKS - len(ended),
            "killed": sum(" lost on " in line for line in told),
            "told": told[-20:],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", type=int, default=2000, help="in all")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=4, help="jobs beside each other")
    parser.add_argument("--busy", type=int, default=4, help="processes that loop beside them")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of a job")
    parser.add_argument("--name", default="long_phases")
    arguments = parser.parse_args()
    jobs = []
    phases = arguments.phases // arguments.jobs
    with busy(arguments.busy), ThreadPoolExecutor(arguments.at_once) as pool:
        seeds = range(arguments.seed, arguments.seed + arguments.jobs)
        running = [pool.submit(measure, phases, seed, arguments.step, arguments.limit) for seed in seeds]
        for done in as_completed(running):
            jobs.append(done.result())
            print({key: value for key, value in jobs[-1].items() if key != "told"}, flush=True)
            for line in jobs[-1]["told"]:
                print(f"    {line}", flush=True)
    total = {name: sum(job[name] for job in jobs) for name in ("phases", "killed", "done_twice", "not_done")}
    print(total)
    save(
        arguments.name,
        {
            "machine": machine(),
            "busy": arguments.busy,
            "at_once": arguments.at_once,
            "step_s": arguments.step,
            "total": total,
            "jobs": jobs,
        },
    )
    bad = total["killed"] or total["done_twice"] or total["not_done"] or any(job["exit_code"] for job in jobs)
    sys.exit(os.EX_SOFTWARE if bad else 0)


if __name__ == "__main__":
    main()
