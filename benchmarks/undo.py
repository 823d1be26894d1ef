"""What it costs that a step can be done again, whatever it changes: step times of four scripts, and of an older tree beside them.

    git worktree add /tmp/old COMMIT
    python benchmarks/undo.py --against /tmp/old

A script is one process, on one thread, and a world of one; it waits for its turn, and then does a few steps. Processor time is counted, so other
programs on the machine do not. In every round each script of each
tree has its turn, in an order that changes; the median of the rounds' ratios is reported. **plain**: AdamW. **average**: with a moving average
after the update. **momentum**: a second encoder that follows the first, by ``.data``, before the forward pass. **parts**: two models that are trained
one after the other, so that the gate of their steps stands at the end (in this tree alone).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

CASES = ("plain", "average", "momentum", "parts")
STEPS, WARM = 4, 12
HERE = Path(__file__).resolve().parents[1]


def work(case: str, layers: int, width: int, batch: int) -> None:
    """One script: as many steps as the parent asks for, a line of JSON with their seconds for each request."""
    import rackrun

    torch.set_num_threads(1)

    @rackrun.elastic(global_batch_size=batch, micro_batch_size=batch)
    def main(run: rackrun.Run) -> None:
        def make() -> nn.Module:
            return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

        model, other = make(), make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        second = torch.optim.AdamW(other.parameters(), lr=1e-4)
        average = torch.optim.swa_utils.AveragedModel(model)
        run.track(model=model, optimizer=optimizer)
        if case == "average":
            run.track(average=average)
        elif case == "momentum":
            run.track(other=other)
        elif case == "parts":
            run.track(other=other, second=second)
        data = run.loader([torch.randn(width) for _ in range(8 * batch)])

        def train(trained: nn.Module, by: Any, step: Any, samples: torch.Tensor) -> None:
            step.backward((trained(samples) - samples).pow(2).mean())
            by.step()
            by.zero_grad()

        @run.step
        def train_step(step: rackrun.Step) -> None:
            for samples in data:
                if case == "momentum":
                    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                        its.data.lerp_(mine.data, 0.01)
                train(model, optimizer, step, samples)
                if case == "parts":
                    torch.distributed.all_reduce(torch.ones(1))
                    train(other, second, step, samples)
            if case == "average":
                average.update_parameters(model)

        seconds: list[float] = []
        wanted = WARM
        for number in run.steps(10**6):
            began = time.process_time()
            train_step(number)
            seconds.append(time.process_time() - began)
            if len(seconds) == wanted:
                print(json.dumps(seconds), flush=True)
                line = sys.stdin.readline()
                if not line:
                    os._exit(0)
                wanted = int(line)
                seconds = []

    main()


class Script:
    def __init__(self, tree: Path, case: str, sizes: list[str]) -> None:
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", case, *sizes]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    def turn(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{STEPS}\n")
        self._process.stdin.flush()
        return statistics.median(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                found: list[float] = json.loads(line)
                return found
        raise SystemExit("a script has ended")


def compare(against: Path | None, sizes: list[str], turns: int) -> dict[str, Any]:
    trees = {"new": HERE, **({"old": against} if against else {})}
    scripts = {(tree, case): Script(path, case, sizes) for tree, path in trees.items() for case in CASES}
    rounds: list[dict[tuple[str, str], float]] = []
    for number in range(turns):
        order = random.Random(number).sample(sorted(scripts), len(scripts))
        rounds.append({key: scripts[key].turn() for key in order})
    for script in scripts.values():
        script.close()

    def ratio(one: tuple[str, str], other: tuple[str, str]) -> float:
        return round(statistics.median(turn[one] / turn[other] for turn in rounds), 4)

    def median(key: tuple[str, str]) -> float:
        return round(statistics.median(turn[key] for turn in rounds) * 1000, 2)

    found: dict[str, Any] = {"milliseconds": {" ".join(key): median(key) for key in scripts}}
    if against:
        found["new over old"] = {case: ratio(("new", case), ("old", case)) for case in CASES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another tree of this repository")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=800)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.layers, args.width, args.batch)
        return
    from jobs import machine, save

    sizes = ["--layers", str(args.layers), "--width", str(args.width), "--batch", str(args.batch)]
    found = {"sizes": sizes, **compare(args.against, sizes, args.rounds)}
    print(json.dumps(found, indent=1))
    save("undo", {"machine": machine(), **found})


if __name__ == "__main__":
    main()
