"""What it costs when the world loses a rank with no spare left, and when a rank joins again: no process starts again meanwhile.

    python benchmarks/resizing.py            25.2 M fp32 parameters, 4 ranks (about 6 minutes on 2 cores)
    python benchmarks/resizing.py --quick    a small model, two changes of each kind: does it still work

A rank is ended by SIGKILL; the three others go on with the same global batch; a worker starts in the empty slot, and joins at
a step boundary. The cost of a shrink is the time from the kill until the first step of the smaller world is committed, less that
world's usual step; of a growth, the time between the commits before and after it, less the usual step of the larger world.
That it is the same training, tests/faults/test_resizing.py shows.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jobs import Job, Mark, machine, median_range, rackrun_command, save
from recovery import FULL, QUICK, Workload

RANKS = 4
STEADY = 6
"""Steps of a world before it is changed; the first is not counted among the usual ones."""
WAIT_S = 120.0


def commits(marks: Sequence[Mark]) -> dict[int, tuple[float, int]]:
    """Step -> when its last rank had done it, and how many have."""
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for mark in marks:
        by_step[mark.step][mark.rank] = max(mark.t, by_step[mark.step].get(mark.rank, 0.0))
    return {step: (max(ranks.values()), max(ranks) + 1) for step, ranks in sorted(by_step.items())}


def usual(done: Mapping[int, tuple[float, int]], size: int) -> float:
    """The median step of a world of ``size``, its first ones left out."""
    steps = [step for step in done if all(done.get(step - back, (0, 0))[1] == size for back in range(3))]
    return statistics.median(done[step][0] - done[step - 1][0] for step in steps)


def wait_for_size(job: Job, size: int, since: int) -> int:
    """Until `STEADY` steps after ``since`` were done by so many ranks, one after another. Returns the first of them."""

    def found(marks: list[Mark]) -> int:
        done = commits(marks)
        for step in done:
            if step > since and all(done.get(step + more, (0, 0))[1] == size for more in range(STEADY)):
                return step
        return 0

    return int(job.wait_for(found, WAIT_S))


def measure(size: Workload, reduction: str, changes: int, seed: int) -> dict[str, Any]:
    rng, kills, shrunk, grown = random.Random(seed), [], [], []
    options = ["--standalone", "--nproc-per-node", str(RANKS), "--policy", "swap,shrink,wait"]
    command = rackrun_command(
        "elastic_mlp.py", "--steps", "100000", *size.size, ranks=RANKS, spares=0, launcher_args=options
    )
    with Job(command, env={"BENCH_REDUCTION": reduction}) as job:
        since = wait_for_size(job, RANKS, 0)
        for _ in range(changes):
            last = job.marks()[-1].step
            victim = rng.choice([mark.pid for mark in job.marks() if mark.step == last])
            time.sleep(rng.random() * usual(commits(job.marks()), RANKS))  # anywhere in a step
            kills.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)
            shrunk.append(wait_for_size(job, RANKS - 1, since))
            since = wait_for_size(job, RANKS, shrunk[-1])
            grown.append(since)
        done = commits(job.marks())
    steps = {n: usual(done, n) for n in (RANKS, RANKS - 1)}
    return {
        "reduction": reduction,
        "step_s": {str(n): round(s, 4) for n, s in steps.items()},
        "shrink_s": [round(done[step][0] - at - steps[RANKS - 1], 3) for step, at in zip(shrunk, kills, strict=True)],
        "grow_s": [round(done[step][0] - done[step - 1][0] - steps[RANKS], 3) for step in grown],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, two changes of each kind")
    parser.add_argument("--changes", type=int, default=10, help="of each kind")
    args = parser.parse_args()
    size, changes = (QUICK, 2) if args.quick else (FULL, args.changes)
    result = measure(size, "exact", changes, seed=1)
    print(f"usual step: {result['step_s']} s (by ranks)")
    print(f"shrink: {median_range(result['shrink_s'])} s beyond a usual step")
    print(f"grow:   {median_range(result['grow_s'])} s beyond a usual step")
    if not args.quick:
        print(save("resizing", {"machine": machine(), "ranks": RANKS, **result}))


if __name__ == "__main__":
    main()
