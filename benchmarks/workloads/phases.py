"""A small training with phases of any length: 0.1 to 100 steps, on one rank or on all, that compute, write, sleep, or let a child work.

phases.py FOLDER PHASES SEED STEP_SECONDS: each rank writes a line to ``FOLDER/phases-RANK`` when it begins a phase, and one when it has ended it.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

FOLDER, PHASES, SEED, STEP_S = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
WAYS = ("compute", "write", "child", "sleep")
ONE, ALL = "one", "all"


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def spend(way: str, seconds: float) -> None:
    """So much of this rank's own time."""
    if way == "sleep":
        time.sleep(seconds)
    elif way == "child":
        subprocess.run(
            [sys.executable, "-S", "-c", f"import time\nwhile time.process_time() < {seconds}: pass"], check=True
        )
    elif way == "write":
        block, until = os.urandom(1 << 20), time.thread_time() + seconds / 4
        with open(FOLDER / f"save-{os.getpid()}", "wb") as file:
            while time.thread_time() < until:
                file.seek(0)
                file.write(block)
                file.flush()
    else:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            torch.randn(64, 64).matmul(torch.randn(64, 64))


@rackrun.elastic(global_batch_size=16, micro_batch_size=2)
def main(run: rackrun.Run) -> None:
    model = DDP(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Points())
    now = -1

    @run.step
    def train(step: rackrun.Step) -> None:
        for batch in data:
            step.backward((model(batch) - batch).square().mean())
        time.sleep(STEP_S)
        optimizer.step()
        optimizer.zero_grad()

    def phase(number: int, who: str) -> None:
        """``who``: all ranks, or one that is drawn."""
        rng = random.Random(f"{SEED} {now} {number}")
        seconds, way, one = (
            STEP_S * math.exp(rng.uniform(math.log(0.1), math.log(100.0))),
            rng.choice(WAYS),
            rng.randrange(run.world_size),
        )
        told = FOLDER / f"phases-{run.rank}"
        with told.open("a") as file:
            file.write(f"begin {now} {number} {way} {seconds:.3f}\n")
        if who == ALL or run.rank == one:
            spend(way, seconds)
        with told.open("a") as file:
            file.write(f"end {now} {number} {way} {seconds:.3f}\n")

    run.every(1, lambda: phase(0, ALL))
    run.every(1, lambda: phase(1, ONE))
    for step in run.steps(PHASES // 2):
        now = int(step)
        train(step)


main()
