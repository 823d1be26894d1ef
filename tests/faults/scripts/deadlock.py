"""A small training of four ranks in two pairs, in which ranks wait for each other: deadlock.py FOLDER WHAT, where ``FOLDER`` is shared by all ranks.

Rank 1 is killed after step 3, and the rank that takes its place is a newcomer: its first step may take minutes. In that step, ``WHAT``:
``calls one more``: it calls one collective more with its pair, once, and all others are at the gate; ``calls one more late``: it sleeps for
12 s before it waits for that;
``computes``: a collective of its pair is in flight while it sleeps for 20 s, before it waits for it, and all others wait meanwhile;
``all wait``: so do ranks 2 and 3, with theirs, and ranks 0 and 1 wait for them at the gate.

Each process writes a line to ``FOLDER/times`` when a step of it begins: the time, its rank and the step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
STEPS, AT, SECONDS = 12, 3, 20.0


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def once(name: str) -> bool:
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(rank: int, step: int) -> None:
    with (FOLDER / "times").open("a") as file:
        file.write(f"{time.time()} {rank} {step}\n")
    (FOLDER / f"{os.getpid()} in {step}").touch()


def has_done(step: int) -> bool:
    """This process."""
    return (FOLDER / f"{os.getpid()} in {step}").exists()


@rackrun.elastic(global_batch_size=16, micro_batch_size=2)
def main(run: rackrun.Run) -> None:
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "pair"))["pair"].get_group()
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Points())

    @run.step
    def train(step: rackrun.Step) -> None:
        for batch in data:
            step.backward((model(batch) - batch).square().mean())
        count = torch.ones(1)
        work = dist.all_reduce(count, group=pair, async_op=True)
        first = int(step) > AT and not has_done(int(step) - 1)
        if WHAT == "computes" and first and once("slept"):
            time.sleep(SECONDS)
        if WHAT == "all wait" and int(step) == AT + 1 and run.rank >= 2 and once(f"slept {run.rank}"):
            time.sleep(SECONDS)
        work.wait()
        if WHAT.startswith("calls one more") and first and once("called"):
            work = dist.all_reduce(count, group=pair, async_op=True)
            time.sleep(12.0 if WHAT.endswith("late") else 0.0)
            work.wait()
        optimizer.step()
        optimizer.zero_grad()

    for step in run.steps(STEPS):
        note(run.rank, int(step))
        if int(step) == AT + 1 and run.rank == 1 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        train(step)


main()
