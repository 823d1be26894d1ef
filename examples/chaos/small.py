"""small.py WRAP REDUCTION [STEPS [OUT [FLAGS]]]: a training of a second or two, for campaigns of many runs with faults.

    rackctl chaos campaign --seeds 0:20 --tally tally.jsonl -- examples/chaos/small.py {wrap} {reduction} 40 {out} {flags}

WRAP is ``ddp`` or ``fsdp``, REDUCTION ``fast`` or ``exact``. With OUT, the folder of the run, nobody goes beyond the last but one step before all that was
begun has taken effect, for half a minute at the most: some faults take longer than the training. What a recovery may lose matters here: weights, moments, a schedule, dropout, augmentation.

FLAGS, with commas between them, are what real scripts have besides:

- ``average``: an average of the weights, behind ``optimizer.step()``, which the loss of the next step depends on;
- ``random``: Python's and numpy's generators in the data and in the step, and torch's between two steps;
- ``workers``: processes that fetch the data;
- ``batchnorm``: statistics of each rank's own, which go on from step to step;
- ``early_scheduler``: the scheduler steps before the gate;
- ``two_optimizers``: one for each half of the model, one after the other in a step;
- ``skip``: every fifth step is skipped, as a guard or a scaler would: no ``optimizer.step()``, but the average goes on.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

WRAP, REDUCTION, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 40
HISTORY = Path(sys.argv[4]).parent / "history.jsonl" if len(sys.argv) > 4 else None
FLAGS = {flag for flag in (sys.argv[5] if len(sys.argv) > 5 else "").split(",") if flag}
KNOWN = {"average", "random", "workers", "batchnorm", "early_scheduler", "two_optimizers", "skip"}
PATIENCE_S = 30.0
WIDTH = 18
STEP_S = 0.04
"""Steps are seen by asking, every 20 ms."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Points whose augmentation is random."""

    def __init__(self) -> None:
        self.x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] + 0.1 * torch.randn(WIDTH)
        if "random" in FLAGS:
            x = x * random.uniform(0.9, 1.1) + float(np.random.normal(scale=0.01))  # noqa: NPY002 - as most scripts do
        return x, self.x[index].sin()


class Average:
    """Of the weights: what is published in the end, and what the loss is drawn to."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def pull(self, model: nn.Module) -> Tensor:
        return sum(((p - self.shadow[name]) ** 2).sum() for name, p in model.named_parameters())  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {name: tensor.clone() for name, tensor in self.shadow.items()}, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: tensor.clone() for name, tensor in state["shadow"].items()}
        self.updates = state["updates"]


def wait_for_faults() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while HISTORY is not None and HISTORY.exists() and time.monotonic() < deadline:
        text = HISTORY.read_text()
        if text.count('"what":"begun"') <= text.count('"what":"confirmed"'):
            break
        time.sleep(0.02)


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=3, snapshot_every=2, reduction=REDUCTION)  # type: ignore[arg-type]
def main(run: rackrun.Run) -> None:
    if FLAGS - KNOWN:
        raise SystemExit(f"small.py has no {', '.join(sorted(FLAGS - KNOWN))}; there are {', '.join(sorted(KNOWN))}")
    norm = [nn.BatchNorm1d(24)] if "batchnorm" in FLAGS else []
    blocks = nn.Sequential(nn.Linear(WIDTH, 24), *norm, nn.Dropout(0.2), nn.Linear(24, WIDTH))
    model: nn.Module = blocks
    if WRAP == "fsdp":
        fully_shard(blocks)
    else:
        model = DDP(blocks, broadcast_buffers=False)
    trained = list(model.parameters())
    first = trained[:2] if "two_optimizers" in FLAGS else trained
    optimizer = torch.optim.AdamW(first, lr=0.01)
    run.track(model=model, optimizer=optimizer)
    second = torch.optim.SGD(trained[2:], lr=0.01, momentum=0.9) if "two_optimizers" in FLAGS else None
    if second is not None:
        run.track(second=second)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)
    run.track(scheduler=scheduler)
    average = Average(model) if FLAGS & {"average", "skip"} else None
    if average is not None:
        run.track(average=average)
    data = run.loader(Noisy(), num_workers=2 if "workers" in FLAGS else 0)
    if "early_scheduler" in FLAGS:
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            loss = nn.functional.mse_loss(model(x), y)
            if (
                average is not None and WRAP != "fsdp"
            ):  # which averages shards, and has whole parameters after a forward
                loss = loss + 0.01 * average.pull(model)
            if "random" in FLAGS:
                loss = loss * (1 + 0.01 * random.random()) * float(np.random.uniform(0.99, 1.01))  # noqa: NPY002
            step.backward(loss)
        if "early_scheduler" in FLAGS:
            scheduler.step()
        if not ("skip" in FLAGS and int(step) % 5 == 4):
            optimizer.step()
            if second is not None:
                second.step()
        optimizer.zero_grad()
        if second is not None:
            second.zero_grad()
        if average is not None:
            average.update(model)
        if "early_scheduler" not in FLAGS:
            scheduler.step()
        return step.loss

    for step in run.steps(STEPS):
        time.sleep(STEP_S)
        if step == STEPS - 2:
            wait_for_faults()
        warmth = float(torch.rand(())) if "random" in FLAGS else 0.0
        run.log(loss=train_step(step), warmth=warmth)


if __name__ == "__main__":
    main()
