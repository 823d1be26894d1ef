"""planted.py BUG [STEPS]: a training with one mistake of those that people make, or with none."""

from __future__ import annotations

import copy
import os
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

BUG, STEPS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8
WIDTH = 8


class Points(Dataset[tuple[Tensor, Tensor]]):
    """In an order of its own."""

    def __init__(self, seed: int) -> None:
        self.x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(5))
        self.order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[self.order[index]]
        if BUG == "urandom" and index % 2:
            x = x + os.urandom(1)[0] / 255
        return x, x.sin()


class Normaliser:
    """Divides by a running mean of magnitudes."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(x.abs().mean())
        return x / self.mean


class Average:
    """Of the weights; it goes into no loss, and is what would be published at the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.updates = copy.deepcopy(model), 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


class Decay:
    """A schedule of its own: one of torch's that nobody tracks is refused before a fault strikes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.last_epoch, self.rate = 0, 0.01

    def step(self) -> None:
        self.last_epoch += 1
        self.rate = 0.01 / (1 + 0.1 * self.last_epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate


class KeptDecay(Decay):
    def state_dict(self) -> dict[str, float]:
        return {"last_epoch": self.last_epoch, "rate": self.rate}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.last_epoch, self.rate = int(state["last_epoch"]), state["rate"]


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=3)
def main(run: rackrun.Run) -> None:
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = Decay(optimizer) if BUG == "scheduler" else KeptDecay(optimizer)
    run.track(model=model, optimizer=optimizer)
    if isinstance(scheduler, KeptDecay):
        run.track(scheduler=scheduler)
    normalise = Normaliser()
    average, shown, began_s = Average(model.module), [], time.monotonic()
    points = Points({"clock": time.time_ns() % 2**31, "rank": run.rank}.get(BUG, 7))
    data = run.loader(points)

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(nn.functional.mse_loss(model(normalise(x) if BUG == "normaliser" else x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        if BUG == "average":
            average.update(model.module)
        if BUG == "plot":
            shown.append((step, loss))
        run.log(loss=loss, seconds=time.monotonic() - began_s)


if __name__ == "__main__":
    main()
