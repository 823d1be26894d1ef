"""What rackrun's adapters cost beside the stock frameworks: the step time of both, in blocks that alternate.

    python benchmarks/framework_overhead.py [--frameworks hf lightning megatron titan] [--blocks 8] [--json FILE]

For each framework two jobs of two ranks train the same transformer on CPUs, one with torchrun and the framework's own Trainer, one with rackrun and
its adapter. They take turns of some steps, in an order that changes; whoever has no turn sleeps. Reported: the median over the blocks of the ratio of
the two step times (time on the clock of rank 0), and of the processor times of both ranks. The blocks begin after step 70: before it rackrun compares
contents more often.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, WARM, RANKS = 20, 70, 2
KINDS = ("stock", "elastic")
HERE = Path(__file__).resolve().parents[1]
WORK = HERE / "benchmarks" / "workloads" / "framework_training.py"


FRAMEWORKS = ("hf", "lightning", "megatron", "titan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    found = {framework: measured(framework, args.blocks, args.layers) for framework in args.frameworks}
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def measured(framework: str, blocks: int, layers: int) -> dict[str, Any]:
    """Run both jobs of a framework, and return the ratios and their parts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    launchers = {
        "stock": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)],
        "elastic": ["-m", "rackrun", "--standalone", "--nproc-per-node", str(RANKS)],
    }
    with tempfile.TemporaryDirectory() as name, Path(name, "log.txt").open("wb") as log:
        folder = Path(name)
        sizes = [str(number) for number in (WARM, STEPS, blocks, layers)]
        jobs: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for kind in KINDS:
                command = [sys.executable, *launchers[kind], str(WORK), framework, kind, name, *sizes]
                jobs[kind] = subprocess.Popen(command, env=environment, cwd=name, stdout=log, stderr=log)
            times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for block in range(blocks):
                for kind in random.sample(KINDS, len(KINDS)):
                    (folder / f"turn-{kind}-{block}").touch()
                    times[kind].append(_taken(folder, jobs[kind], kind, block))
            for job in jobs.values():
                job.wait(timeout=60)
        finally:
            for job in jobs.values():
                job.terminate()
                job.wait()
    ratios = [[e[i] / s[i] for s, e in zip(times["stock"], times["elastic"], strict=True)] for i in (0, 1)]
    return {
        "step_time_ratio": round(statistics.median(ratios[0]), 4),
        "step_time_ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios[0], n=4)[::2]],
        "processor_time_ratio": round(statistics.median(ratios[1]), 4),
        "processor_time_ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios[1], n=4)[::2]],
        "stock_step_s": round(statistics.median(wall for wall, _ in times["stock"]), 4),
        "elastic_step_s": round(statistics.median(wall for wall, _ in times["elastic"]), 4),
        "blocks": blocks,
        "steps_per_block": STEPS,
        "layers": layers,
        "ranks": RANKS,
    }


def _taken(folder: Path, job: subprocess.Popen[bytes], kind: str, block: int) -> tuple[float, float]:
    """Wait for a block, and return the step time of rank 0 and the processor time of a step on both ranks."""
    paths = [folder / f"done-{kind}-{block}-{rank}" for rank in range(RANKS)]
    while not all(path.exists() for path in paths):
        if job.poll() is not None:
            said = (folder / "log.txt").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the {kind} job has ended with exit code {job.returncode}:\n{said}")
        time.sleep(0.02)
    rows = [json.loads(path.read_text()) for path in paths]
    return rows[0][0], sum(row[1] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
