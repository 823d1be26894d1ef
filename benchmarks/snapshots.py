"""What snapshots of sharded state cost, and what they buy: FSDP2 under rackrun, with and without them.

    python benchmarks/snapshots.py            the numbers of docs/measured.md (about 20 minutes on 2 cores)
    python benchmarks/snapshots.py --quick    one of each with a small model

The workload is that of ``recovery.py``, sharded: 25.2 M parameters, fused AdamW, 4 ranks and a spare. **Cost** compares the mean step
time and the CPU seconds (of all processes) of blocks of steps in one job: each block with snapshots, after every step or at the
automatic interval, with the blocks without any before and after it. For this the model has a quarter of the parameters: more blocks
in the same time, and the same ratio of copying to computing. **Recovery** is the time from the SIGKILL of a rank to the moment at
which all 4 ranks have finished a step that nobody had finished before. A rank that is lost takes a shard with it, so everybody goes
back to a snapshot.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobs import Job, bootstrap_median, machine, median_range, rackrun_command, save
from recovery import FULL, QUICK, WARM_UP, Workload, all_ranks_at, fault_free_losses, recovery

RANKS = 4
EVERY = {"none": "1000000000", "every step": "1", "automatic": "0"}
CYCLE = ("none", "automatic", "none", "every step")
BLOCK_STEPS = 64
"""The automatic interval is a power of two, and a half of this at most in this job: every block has its snapshots."""


@dataclass(frozen=True)
class Sharded(Workload):
    def job(self, system: str, steps: int, *, checkpoint: bool) -> Job:
        del checkpoint
        arguments = ("--steps", str(steps), *self.size)
        command = rackrun_command("elastic_mlp.py", *arguments, ranks=RANKS, spares=1)
        return Job(
            command, env={"BENCH_SHARDED": "1", "BENCH_SNAPSHOT_EVERY": "" if system == "automatic" else EVERY[system]}
        )


def cost_blocks(size: tuple[str, ...], cycles: int, step_timeout_s: float) -> list[dict[str, float | str]]:
    """System, seconds and CPU seconds a step of every block, the first ones (which warm up) left out."""
    blocks = len(CYCLE) * (cycles + 1) + 1
    env = {
        "BENCH_SHARDED": "1",
        "BENCH_BLOCK_STEPS": str(BLOCK_STEPS),
        "BENCH_SNAPSHOT_BLOCKS": " ".join(EVERY[system] for system in CYCLE),
    }
    steps = ("--steps", str(blocks * BLOCK_STEPS + 2))
    found: list[dict[str, float | str]] = []
    with Job(rackrun_command("elastic_mlp.py", *steps, *size, ranks=RANKS, spares=1), env=env) as job:
        before: tuple[float, float] | None = None
        for block in range(len(CYCLE) - 1, blocks):
            end = (block + 1) * BLOCK_STEPS - 1
            job.wait_for(
                partial(all_ranks_at, step=end),
                (block + 1) * BLOCK_STEPS * step_timeout_s,
                poll_s=0.005,
            )
            now = time.monotonic(), job.cpu_seconds()
            if before is not None:
                seconds, cpu = ((after - at) / BLOCK_STEPS for at, after in zip(before, now, strict=True))
                found.append({"system": CYCLE[block % len(CYCLE)], "mean_step_s": seconds, "cpu_s_per_step": cpu})
                print(f"block {block + 1}/{blocks}: {found[-1]}", file=sys.stderr)
            before = now
    return found


def cost_ratios(blocks: list[dict[str, Any]], system: str, key: str) -> list[float]:
    """Of every block of ``system`` to the mean of its neighbours, which are without snapshots."""
    return [
        here[key] / statistics.mean((before[key], after[key]))
        for before, here, after in zip(blocks, blocks[1:], blocks[2:], strict=False)
        if here["system"] == system
    ]


def summary(result: dict[str, Any]) -> str:
    lines = [
        "| snapshots | step time against none | 95 % interval | CPU seconds a step | blocks |",
        "|---|---|---|---|---|",
    ]
    for system in ("automatic", "every step"):
        steps, cpu = (cost_ratios(result["cost"], system, key) for key in ("mean_step_s", "cpu_s_per_step"))
        low, high = bootstrap_median(steps)
        lines.append(
            f"| {system} | {statistics.median(steps):.3f} | {low:.3f} to {high:.3f} | {statistics.median(cpu):.3f} | {len(steps)} |"
        )
    lines += [
        "",
        "| snapshots | n | recovery, s | steps redone | steady step, s | loss against the run without fault |",
        "|---|---|---|---|---|---|",
    ]
    for system in dict.fromkeys(run["system"] for run in result["recoveries"]):
        runs = [run for run in result["recoveries"] if run["system"] == system]
        done = [run for run in runs if run["beyond_s"] is not None]
        differs = max((run["loss_differs_by_max"] for run in done), default=0.0)
        lines.append(
            f"| {system} | {len(runs)} | {median_range([run['beyond_s'] for run in done])} "
            f"| {median_range([run['steps_redone'] for run in done], 0)} "
            f"| {median_range([run['steady_step_s'] for run in runs], 3)} "
            f"| {'bit-equal' if done and not differs else f'differs by up to {differs:.1e}'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one of each, with a small model")
    parser.add_argument("--runs", type=int, default=8, help="faults with each interval")
    parser.add_argument("--cycles", type=int, default=10, help="rounds of blocks without a fault")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    base, runs, cycles = (QUICK, 1, 1) if args.quick else (FULL, args.runs, args.cycles)
    workload = Sharded(base.size, base.start_timeout_s, base.step_timeout_s)
    steps = WARM_UP + 40
    result: dict[str, Any] = {"machine": machine(), "quick": args.quick, "seed": args.seed, "recoveries": []}
    expected = fault_free_losses(workload, "none", steps)
    for system in ("every step", "automatic"):
        rng = random.Random(args.seed)
        for number in range(runs if system == "every step" else -(-runs // 2)):
            run = recovery(workload, system, "kill", rng, expected, steps)
            result["recoveries"].append(run)
            print(f"{system} {number + 1}/{runs}: {run['beyond_s']}", file=sys.stderr)
    size = base.size if args.quick else ("--width", "512")
    result["cost"] = cost_blocks(size, cycles, base.step_timeout_s)
    result["table"] = summary(result)
    path = save("snapshots-quick" if args.quick else "snapshots", result)
    print(f"{result['table']}\n\n{result['machine']}\n{path}")
    return 1 if any(run["beyond_s"] is None for run in result["recoveries"]) else 0


if __name__ == "__main__":
    sys.exit(main())
