"""A small training with two things that are easily forgotten: a running mean of its inputs, and a scheduler. `test_train.py` tests it.

rackrun --standalone --nproc-per-node 3 --spares 1 examples/testing/train.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

WIDTH = 8


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Noisy points on a curve. The noise comes from torch's generator, which rackrun seeds for every sample."""

    def __init__(self) -> None:
        self.x = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.x[index].sin()


class RunningMean:
    """Divides by a running mean of magnitudes. It is state: it goes into ``run.track``, and so has these two."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(x.abs().mean())
        return x / self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=12)
    return parser.parse_args()


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=3)
def main(run: rackrun.Run) -> None:
    args = arguments()
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scale = RunningMean()
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, scale=scale)
    data = run.loader(Points())

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(nn.functional.mse_loss(model(scale(x)), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(args.steps):
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
