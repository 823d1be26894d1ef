"""Seven kinds of unmodified torchrun script, under rackrun and under torchrun, which lose a rank by SIGKILL: one table.

    python benchmarks/unmodified.py [--rounds 2] [--kinds ddp trainer]

Two ranks; rackrun has one spare slot. The job is *recovered* if it ends with exit code 0 and every rank has done the last step. The time is from the
kill until every rank has finished a step in a later process, or in the same. Rounds alternate between both launchers; the rank and the step are drawn.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from typing import Any

from jobs import TORCHRUN_ENV, WORKLOADS, Job, JobFailed, Mark, machine, median_range, save

KINDS = ("ddp", "workers", "fsdp", "alone", "nothing", "accelerate", "trainer")
RANKS, STEPS, LIMIT_S = 2, 400, 120.0


def commands(kind: str) -> dict[str, list[str]]:
    script = [str(WORKLOADS / "plain.py"), "--kind", kind, "--steps", str(STEPS)]
    script += ["--marks", "{marks}", "--folder", "{folder}"]
    rackrun = ["rackrun", "--standalone", "--nproc-per-node", str(RANKS + 1), "--spares", "1"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
    return {
        "rackrun": [sys.executable, "-m", *rackrun, "--out-dir", "{folder}/out", *script],
        "torchrun": [sys.executable, "-m", *torchrun, *script],
    }


def stepped(marks: list[Mark], since: float) -> float:
    """When every rank had finished a step after ``since``; 0.0: not yet."""
    first = {rank: min((m.t for m in marks if m.rank == rank and m.t > since), default=0.0) for rank in range(RANKS)}
    return max(first.values()) if all(first.values()) else 0.0


def trial(command: list[str], rank: int, step: int) -> tuple[bool, float | None]:
    """Run one job, kill ``rank`` once it has done ``step``, and return (whether it recovered, seconds until all step)."""
    with Job(command, env=TORCHRUN_ENV) as job:
        mark: Mark = job.wait_for(
            lambda marks: next((m for m in marks if m.rank == rank and m.step >= step), None), LIMIT_S
        )
        os.kill(mark.pid, signal.SIGKILL)
        killed = max(m.t for m in job.marks() if m.rank == rank)
        seconds = None
        try:
            seconds = (
                job.wait_for(lambda marks: stepped([m for m in marks if m.pid != mark.pid], killed), LIMIT_S) - killed
            )
            code = job.finish(LIMIT_S)
        except JobFailed:
            return False, seconds
        done = {m.rank for m in job.marks() if m.step == STEPS - 1}
        return code == 0 and done == set(range(RANKS)), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    found: dict[str, dict[str, list[Any]]] = {kind: {"rackrun": [], "torchrun": []} for kind in args.kinds}
    for _ in range(args.rounds):
        for kind in args.kinds:
            rank, step = draw.randrange(RANKS), draw.randint(15, 60)
            for launcher, command in draw.sample(list(commands(kind).items()), 2):
                found[kind][launcher].append(trial(command, rank, step))
                print(f"{kind} {launcher} rank {rank} step {step}: {found[kind][launcher][-1]}", flush=True)
    print("| script | rackrun | s | torchrun | s |\n|---|---|---|---|---|")
    for kind, both in found.items():
        cells = []
        for trials in both.values():
            cells += [
                f"{sum(good for good, _ in trials)} of {len(trials)}",
                median_range([seconds for good, seconds in trials if good and seconds is not None]),
            ]
        print(f"| {kind} | {' | '.join(cells)} |")
    save("unmodified", {"machine": machine(), "ranks": RANKS, "steps": STEPS, "trials": found})
    return int(any(not good for both in found.values() for good, _ in both["rackrun"]))


if __name__ == "__main__":
    sys.exit(main())
