"""tiny.py STEPS HOLD OUT STRIKES: a training of STEPS steps. In a run with faults everybody stands before step HOLD until STRIKES have begun."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

STEPS, HOLD, OUT, STRIKES = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
WIDTH = 8


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.x[index].sin()


def hold() -> None:
    history = OUT.parent / "history.jsonl"
    while OUT.name == "faulted" and history.read_text().count('"begun"') < STRIKES:
        time.sleep(0.01)


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=3)
def main(run: rackrun.Run) -> None:
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Points())

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        if step == HOLD:
            hold()
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
