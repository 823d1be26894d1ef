"""What snapshots of sharded state cost, and what they buy: FSDP2 under rackrun, with and without them.

    python benchmarks/snapshots.py            the numbers of the README (about 12 minutes on 2 cores)
    python benchmarks/snapshots.py --quick    one of each with a small model

The workload is that of ``recovery.py``, sharded: 25.2 M parameters, fused AdamW, 4 ranks and a spare. **Cost** compares step
times and CPU seconds with snapshots after every step, and at the automatic interval, with those of the same job without any,
in blocks that alternate. **Recovery** is the time from the SIGKILL of a rank to the moment at which all 4 ranks have finished
a step that nobody had finished before. A rank that is lost takes a shard with it, so everybody goes back to a snapshot.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from jobs import Job, bootstrap_median, machine, median_range, rackrun_command, save
from recovery import FULL, QUICK, WARM_UP, Workload, fault_free_losses, overhead_blocks, recovery

RANKS = 4
EVERY = {"none": "1000000000", "every step": "1", "automatic": ""}


@dataclass(frozen=True)
class Sharded(Workload):
    def job(self, system: str, steps: int, *, checkpoint: bool) -> Job:
        del checkpoint
        arguments = ("--steps", str(steps), *self.size)
        command = rackrun_command("elastic_mlp.py", *arguments, ranks=RANKS, spares=1)
        return Job(command, env={"BENCH_SHARDED": "1", "BENCH_SNAPSHOT_EVERY": EVERY[system]})


def summary(result: dict[str, Any]) -> str:
    lines = [
        "| snapshots | step time against none | 95 % interval | CPU seconds a step | pairs |",
        "|---|---|---|---|---|",
    ]
    for system in ("automatic", "every step"):
        ratios = {
            key: [pair[system][key] / pair["none"][key] for pair in result["overhead"]]
            for key in ("mean_step_s", "cpu_s_per_step")
        }
        low, high = bootstrap_median(ratios["mean_step_s"])
        lines.append(
            f"| {system} | {statistics.median(ratios['mean_step_s']):.3f} | {low:.3f} to {high:.3f} "
            f"| {statistics.median(ratios['cpu_s_per_step']):.3f} | {len(result['overhead'])} |"
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
    parser.add_argument("--pairs", type=int, default=12, help="rounds of blocks without a fault")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    base, runs, pairs = (QUICK, 1, 1) if args.quick else (FULL, args.runs, args.pairs)
    workload = Sharded(base.size, base.start_timeout_s, base.step_timeout_s)
    steps = WARM_UP + 40
    result: dict[str, Any] = {"machine": machine(), "quick": args.quick, "seed": args.seed, "recoveries": []}
    expected = fault_free_losses(workload, "none", steps)
    for system in ("every step", "automatic"):
        rng = random.Random(args.seed)
        for number in range(runs):
            run = recovery(workload, system, "kill", rng, expected, steps)
            result["recoveries"].append(run)
            print(f"{system} {number + 1}/{runs}: {run['beyond_s']}", file=sys.stderr)
    result["overhead"] = overhead_blocks(workload, tuple(EVERY), pairs)
    result["table"] = summary(result)
    path = save("snapshots-quick" if args.quick else "snapshots", result)
    print(f"{result['table']}\n\n{result['machine']}\n{path}")
    return 1 if any(run["beyond_s"] is None for run in result["recoveries"]) else 0


if __name__ == "__main__":
    sys.exit(main())
