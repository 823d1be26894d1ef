"""either.py STEPS FOLDER [EVERY]: the same training under rackrun and under torchrun, to break both in the same way.

    rackctl chaos run examples/chaos/rank_killed.yaml -- --nproc-per-node 5 --spares 1 examples/chaos/either.py 60 {out}
    rackctl chaos run --launcher torchrun examples/chaos/rank_killed.yaml -- --standalone --nproc-per-node 4 --max-restarts 3 \\
        examples/chaos/either.py 60 {out} 10

Model, data and the order of samples are the same. Under torchrun the script does what scripts do: a checkpoint in FOLDER every EVERY steps, from which
it goes on when all ranks are started again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, default_collate

import rackrun
from rackrun.chaos import report_step
from rackrun.chaos.inprocess.step_probe import FOLDER

STEPS, FILE, EVERY = int(sys.argv[1]), Path(sys.argv[2]) / "checkpoint.pt", int((sys.argv[3:] or ["10"])[0])
WIDTH, BATCH, SEED, STEP_S = 64, 4, 3, 0.05


class Points(Dataset[tuple[Tensor, Tensor, int]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0), index


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@rackrun.elastic(global_batch_size=4 * BATCH, micro_batch_size=BATCH, seed=SEED)
def with_rackrun(run: rackrun.Run) -> None:
    model, optimizer = build()
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Points())

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y, _ in data:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        time.sleep(STEP_S)
        run.log(loss=train_step(step))


def with_torchrun() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()
    data, first = Points(), 0
    if FILE.exists():
        state = torch.load(FILE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, STEPS):
        time.sleep(STEP_S)
        begin = (step * world_size + rank) * BATCH
        x, y, ids = default_collate([data[index] for index in range(begin, begin + BATCH)])
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report_step(rank=rank, step=step, loss=loss.item(), samples=ids.tolist())
        if rank == 0 and step % EVERY == EVERY - 1:
            partial = FILE.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
            partial.replace(FILE)
    dist.barrier()  # gloo may hang where one rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    if FOLDER in os.environ:
        with_torchrun()
    else:
        with_rackrun()
