"""Whether a model that was trained with ``reduction="exact"`` is as good as with ``"fast"``.

    python benchmarks/exact_quality.py           5 seeds, 120 steps (about 5 minutes on 2 cores)
    python benchmarks/exact_quality.py --quick   2 seeds, 4 steps: does it still work

The small GPT of examples/train_gpt.py on its text, trained twice with each seed: with ``fast`` and with ``exact``. They begin with
the same weights and see the same samples, so they differ by rounding alone. Runs of ``fast`` with different seeds differ by what
chance does. Ends with exit code 1 when the median of the first differences is above that of the second.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jobs import WORKLOADS, Job, JobFailed, machine, median_range, save

REDUCTIONS = ("fast", "exact")
RUN_S_MAX = 1800.0


def validation_loss(reduction: str, seed: int, steps: int, folder: Path) -> float:
    into = folder / f"{reduction}-{seed}.json"
    command = [sys.executable, str(WORKLOADS / "quality.py"), "--reduction", reduction, "--seed", str(seed)]
    with Job([*command, "--steps", str(steps), "--into", str(into)]) as job:
        job.process.wait(RUN_S_MAX)
        if not into.exists():
            raise JobFailed(job.output())
    found: float = json.loads(into.read_text())["validation"]
    return found


def train_all(seeds: list[int], steps: int) -> dict[str, list[float]]:
    """Reduction -> validation loss, by seed. As many runs at a time as there are processors."""
    with tempfile.TemporaryDirectory(prefix="rackrun-quality-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {
            (reduction, seed): pool.submit(validation_loss, reduction, seed, steps, Path(folder))
            for seed in seeds
            for reduction in REDUCTIONS
        }
        with contextlib.ExitStack() as stack:
            stack.callback(pool.shutdown, cancel_futures=True)
            return {reduction: [runs[reduction, seed].result() for seed in seeds] for reduction in REDUCTIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    seeds, steps = (2, 4) if arguments.quick else (arguments.seeds, arguments.steps)
    losses = train_all(list(range(seeds)), steps)
    rounding = [abs(exact - fast) for fast, exact in zip(losses["fast"], losses["exact"], strict=True)]
    chance = [abs(one - other) for one, other in itertools.combinations(losses["fast"], 2)]
    signed = [exact - fast for fast, exact in zip(losses["fast"], losses["exact"], strict=True)]
    result = {
        "machine": machine(),
        "steps": steps,
        "validation": losses,
        "exact_minus_fast": signed,
        "between_seeds_of_fast": chance,
    }
    print("| validation loss | median [least to most] | n |\n|---|---|---|")
    for reduction in REDUCTIONS:
        print(f"| `{reduction}` | {median_range(losses[reduction], digits=4)} | {seeds} |")
    for name, found in (("exact and fast, same seed", rounding), ("two seeds of fast", chance)):
        print(
            f"| between {name} | {statistics.median(found):.5f} [{min(found):.5f} to {max(found):.5f}] | {len(found)} |"
        )
    print(f"-> {save('exact_quality-quick' if arguments.quick else 'exact_quality', result)}")
    if not arguments.quick and statistics.median(rounding) > statistics.median(chance):
        sys.exit("exact differs from fast by more than two seeds of fast do")


if __name__ == "__main__":
    main()
