"""Small training scripts: what users write, in a few lines each."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step

WIDTH = 10
STEPS = 8


class Samples:
    """Vectors, by number. ``noisy``: augmented at random, by three generators."""

    def __init__(self, count: int = 60, noisy: bool = False) -> None:
        self.count, self.noisy = count, noisy

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        if self.noisy:
            sample += torch.randn(WIDTH) * random.random() + float(np.random.rand())  # noqa: NPY002 - the old generator is what data sets use
        return sample


def net(*extra: nn.Module, hidden: int = 14) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), *extra, nn.Tanh(), nn.Dropout(0.2), nn.Linear(hidden, WIDTH))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - batch).pow(2).mean()
    return loss


def fit(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    average: bool = False,
    before: Callable[[int], None] = lambda _: None,
    after: Callable[[int], None] = lambda _: None,
    between: Callable[[int], bool | None] = lambda _: None,
    noisy: bool = False,
    workers: int = 0,
    **tracked: Any,
) -> None:
    """The plain loop: accumulate the micro-batches, step, zero the gradients. ``average``: gradients are summed by hand where DDP
    does not do it. ``after`` is called at the end of each step, in it; ``before`` and ``between``, before and after it, outside;
    the loop is left when ``between`` says True."""
    run.track(model=model, optimizer=optimizer, **tracked)
    data = run.loader(Samples(noisy=noisy), num_workers=workers)

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        if average and not isinstance(model, DDP):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        after(int(step))

    for number in run.steps(steps):
        before(number)
        step(number)
        if between(number) is True:
            break


def ddp(run: Run, *layers: nn.Module, **options: Any) -> DDP:
    return DDP(net(*layers).to(run.device), **options)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


M = TypeVar("M", bound=nn.Module)


def fully_sharded(model: M, **options: Any) -> M:
    """torch makes a subclass of its class, and says nothing of it in its types."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, **options)
    return model


Script = Callable[[Run], None]


class Bodies:
    """Where the code after the call of the step function has run. A file holds it, so that what a process has done counts that is killed later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def ran(self, run: Run, step: int) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {run._world._slot}\n")

    def by_step(self) -> dict[int, list[str]]:
        """Step -> slots, once for each time."""
        found: dict[int, list[str]] = {}
        for line in self._path.read_text().splitlines():
            step, slot = line.split()
            found.setdefault(int(step), []).append(slot)
        return {step: sorted(slots) for step, slots in sorted(found.items())}
