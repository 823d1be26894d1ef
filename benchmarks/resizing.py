"""What it costs when the world loses a rank with no spare left, and when a rank joins again: no process starts again meanwhile.

    python benchmarks/resizing.py            25.2 M fp32 parameters, 4 ranks (about 12 minutes on 2 cores)
    python benchmarks/resizing.py --quick    a small model, two changes of each kind: does it still work

A rank is ended by SIGKILL; the three others go on with the same global batch; a worker starts in the empty slot, and joins at
a step boundary. The cost of a shrink is the time from the kill until all of the smaller world have done a step that nobody had done
before, less that world's usual step; of a growth, the time between the commits before and after it, less the usual step of the larger world.
Usual steps are those of jobs of as many ranks, with the same global batch, in which nothing happens: a worker that starts takes
processors from those that train. That it is the same training, tests/faults/test_resizing.py shows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jobs import Job, Mark, machine, median_range, rackrun_command, save
from recovery import FULL, QUICK, Workload

RANKS = 4
MODES = {"DDP": {}, "FSDP2, a snapshot every step": {"BENCH_SHARDED": "1", "BENCH_SNAPSHOT_EVERY": "1"}}
STEADY = 6
"""Steps of a world before it is changed."""
FIRST, USUAL = 3, 12
"""Steps that are not counted among the usual ones, and those that are."""
WAIT_S = 120.0


def steps_of(marks: Sequence[Mark]) -> dict[int, dict[int, float]]:
    """Step -> process -> when it had done it; of a step that was done again, the last time."""
    done: dict[int, dict[int, float]] = defaultdict(dict)
    for mark in marks:
        done[mark.step][mark.pid] = mark.t
    return done


def usual(size: Workload, env: dict[str, str], ranks: int) -> float:
    """The median step of a job of ``ranks`` in which nothing happens, the first ones left out."""
    with Job(command_of(size, env, ranks), env={"BENCH_REDUCTION": "exact", **env}) as job:
        done = job.wait_for(lambda marks: finished(marks, ranks, FIRST + USUAL), WAIT_S)
    return float(statistics.median(after - before for before, after in itertools.pairwise(done[FIRST:])))


def finished(marks: Sequence[Mark], ranks: int, steps: int) -> list[float]:
    """When all ``ranks`` had done each step; empty as long as there are not ``steps``."""
    done = [max(at.values()) for _, at in sorted(steps_of(marks).items()) if len(at) == ranks]
    return done if len(done) >= steps else []


def command_of(size: Workload, env: dict[str, str], ranks: int) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(ranks), "--policy", "swap,shrink,wait"]
    if "BENCH_SHARDED" in env:
        options += ["--preload", "torch.distributed.fsdp,torch.distributed.tensor"]
    arguments = ("--steps", "100000", *size.size)
    return rackrun_command("elastic_mlp.py", *arguments, ranks=RANKS, spares=0, launcher_args=options)


def wait_for_size(job: Job, size: int, since: int, steady: int = STEADY) -> int:
    """The first of ``steady`` steps after ``since`` that the same ``size`` processes have done, one after another."""

    def found(marks: list[Mark]) -> int:
        done = steps_of(marks)
        for step in sorted(done):
            then = [done.get(step + more, {}) for more in range(steady)]
            if step > since and len(then[0]) == size and all(one.keys() == then[0].keys() for one in then):
                return step
        return 0

    return int(job.wait_for(found, WAIT_S))


def new_work(marks: Sequence[Mark], since: float) -> float:
    """From ``since`` until everybody who lives has done a step that nobody had done before."""
    newest = max(mark.step for mark in marks if mark.t <= since)
    done = steps_of([mark for mark in marks if mark.t > since])
    step = next(step for step, at in sorted(done.items()) if step > newest and len(at) == RANKS - 1)
    return max(done[step].values()) - since


def measure(size: Workload, name: str, env: dict[str, str], changes: int, seed: int) -> dict[str, Any]:
    rng, kills, grown = random.Random(seed), [], []
    steps = {ranks: usual(size, env, ranks) for ranks in (RANKS, RANKS - 1)}
    with Job(command_of(size, env, RANKS), env={"BENCH_REDUCTION": "exact", **env}) as job:
        since = wait_for_size(job, RANKS, 0)
        for _ in range(changes):
            last = job.marks()[-1].step
            victim = rng.choice([mark.pid for mark in job.marks() if mark.step == last])
            time.sleep(rng.random() * steps[RANKS])  # anywhere in a step
            kills.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)
            smaller = wait_for_size(job, RANKS - 1, since, steady=1)  # the worker in the empty slot may be quick
            since = wait_for_size(job, RANKS, smaller)
            grown.append(since)
        marks = list(job.marks())
    done = steps_of(marks)
    joins = [max(done[step].values()) - max(done[step - 1].values()) - steps[RANKS] for step in grown]
    result = {
        "step_s": {str(size): round(seconds, 4) for size, seconds in steps.items()},
        "shrink_s": [round(new_work(marks, kill) - steps[RANKS - 1], 3) for kill in kills],
        "grow_s": [round(seconds, 3) for seconds in joins],
    }
    print(f"{name}: usual step {steps[RANKS]:.3f} s with {RANKS} ranks, {steps[RANKS - 1]:.3f} s with {RANKS - 1}")
    for change in ("shrink", "grow"):
        print(f"  {change}: {median_range(result[f'{change}_s'])} s beyond a usual step", flush=True)  # type: ignore[arg-type]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, two changes of each kind")
    parser.add_argument("--changes", type=int, default=10, help="of each kind")
    args = parser.parse_args()
    size, changes = (QUICK, 2) if args.quick else (FULL, args.changes)
    here = machine()
    found = {name: measure(size, name, env, changes, seed=1) for name, env in MODES.items()}
    if not args.quick:
        print(save("resizing", {"machine": here, "ranks": RANKS, "reduction": "exact", **found}))


if __name__ == "__main__":
    main()
