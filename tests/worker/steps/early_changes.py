"""Training scripts in the manner of real ones whose steps change state before they count: averages, codebooks, GANs.

What they change is put back before a step is done again, or its bits are other ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import say
from tests.worker.scripts import STEPS, Samples, adam, ddp, fit, fully_sharded, loss_of, net

LARGE = 300_000
"""Elements of more than 1 MiB."""


class Average:
    """An EMA that is a plain object, and writes through ``.data``."""

    def __init__(self, model: nn.Module) -> None:
        self.of = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, parameter in model.named_parameters():
            self.of[name].data.lerp_(parameter.data, 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.of, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["of"].items():
            self.of[name].copy_(value)
        self.updates = state["updates"]


def scaler_skips_and_ema(run: Run) -> None:
    model = ddp(run)
    optimizer = adam(model)
    average, module = Average(model), torch.optim.swa_utils.AveragedModel(model.module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    run.track(model=model, optimizer=optimizer, scaler=scaler, average=average, module=module)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            loss = loss_of(model, batch) * (float("inf") if int(step) == 4 else 1.0)
            scaler.scale(step.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update(model)
        module.update_parameters(model.module)

    for number in run.steps(STEPS):
        step(number)


def guard_skips_and_ema(run: Run) -> None:
    """And its scheduler counts skipped steps, too."""
    model = ddp(run)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    average = Average(model)
    run.track(model=model, optimizer=optimizer, average=average, schedule=schedule)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm) and int(step) != 4:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update(model)

    for number in run.steps(STEPS):
        step(number)


def scheduler_before_the_gate(run: Run) -> None:
    model = ddp(run)
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        schedule.step()
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


class Momentum(nn.Module):
    """A momentum encoder and a queue, as in MoCo: both change in forward, through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = net(), net()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.zeros(LARGE // 10, 10))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.queue: torch.Tensor
        self.place: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for mine, its in zip(self.query.parameters(), self.key.parameters(), strict=True):
            its.data = its.data * 0.9 + mine.data * 0.1
        with torch.no_grad():
            key = self.key(batch)
            at = int(self.place)
            self.queue.data[at : at + len(key)] = key
            self.place += len(key)
        out: torch.Tensor = self.query(batch) + key * 0.1 + self.queue.sum(0) * 1e-3
        return out


def momentum_encoder(run: Run) -> None:
    model = DDP(Momentum(), broadcast_buffers=False)
    fit(run, model, torch.optim.SGD(model.module.query.parameters(), lr=0.05, momentum=0.9))


class Quantised(nn.Module):
    """A large codebook that forward moves, through ``.data``: the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("codes", torch.randn(LARGE // 10, 10))
        self.codes: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(batch)
        if self.training:
            self.codes.data.mul_(0.99).add_(0.01)
        return out + self.codes[:3].mean()


def codebook(run: Run) -> None:
    model = DDP(Quantised(), broadcast_buffers=False)
    fit(run, model, adam(model))


def clamped(
    run: Run,
    *,
    first: Callable[[Step, nn.Module], None] = lambda step, model: None,
    before_update: Callable[[Step, nn.Module], None] = lambda step, model: None,
) -> None:
    """Train a model that ``first`` changes when a step begins, and ``before_update`` right before the update."""
    model = ddp(run)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        first(step, model)
        for batch in data:
            step.backward(loss_of(model, batch))
        before_update(step, model)
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def clamped_weights(run: Run) -> None:
    """As in WGAN: at the beginning of a step, through ``.data``; not idempotent, so that once too often shows."""

    def clamp(_: Step, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2).mul_(0.98)

    clamped(run, first=clamp)


def clamped_later(run: Run) -> None:
    """For the first time in the sixth step, right before the update, and so that once more changes nothing."""

    def clamp(step: Step, model: nn.Module) -> None:
        if int(step) >= 5:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.2, 0.2)

    clamped(run, before_update=clamp)


def target_network(run: Run) -> None:
    """Copied now and then, at the beginning of a step, for the first time in the fifth."""
    model, target = ddp(run), net()
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer, target=target)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        if int(step) in (4, 6):
            with torch.no_grad():
                for its, mine in zip(target.parameters(), model.module.parameters(), strict=True):
                    its.mul_(0.5).add_(mine, alpha=0.5)
        for batch in data:
            step.backward((model(batch) - target(batch).detach()).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def adversaries(run: Run) -> None:
    """The ordinary loop of a GAN: the judge steps twice, then comes the maker's backward; a moving average and a loss that is shown."""
    maker, judge = ddp(run), ddp(run)
    for_maker, for_judge = adam(maker), torch.optim.SGD(judge.parameters(), lr=0.01, momentum=0.5)
    average = Average(maker)
    schedule = torch.optim.lr_scheduler.StepLR(for_maker, 2, 0.7)
    run.track(maker=maker, judge=judge, for_maker=for_maker, for_judge=for_judge, average=average, schedule=schedule)
    data = run.loader(Samples())
    losses: dict[int, float] = {}

    @run.step
    def step(step: Step) -> None:
        batches = list(data)
        for _ in range(2):
            for_judge.zero_grad()
            for index, batch in enumerate(batches):
                judge.require_backward_grad_sync = index == len(batches) - 1
                fake = maker(batch).detach()
                step.backward(judge(fake).pow(2).mean() + (judge(batch) - 1).pow(2).mean())
            for_judge.step()
            losses[int(step)] = step.loss
        for_maker.zero_grad()
        for index, batch in enumerate(batches):
            maker.require_backward_grad_sync = judge.require_backward_grad_sync = index == len(batches) - 1
            fake = maker(batch)
            (step.gradient_scale * (fake - batch).abs().mean()).backward()
        for_maker.step()
        average.update(maker)
        schedule.step()

    for number in run.steps(STEPS):
        step(number)
    say(loss=losses[STEPS - 1])


def reduced_loss_and_plateau(run: Run) -> None:
    """A loss is reduced after the update, and decides over the learning rate."""
    model = ddp(run)
    optimizer = adam(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    average = Average(model)
    run.track(model=model, optimizer=optimizer, plateau=plateau, average=average)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        total = torch.zeros(())
        for batch in data:
            loss = loss_of(model, batch)
            step.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        plateau.step(total.item())
        average.update(model)

    for number in run.steps(STEPS):
        step(number)


def random_choices_between_steps(run: Run) -> None:
    """A curriculum and an augmentation that the loop's body draws, by three generators."""
    model = ddp(run)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())
    random.random(), np.random.rand(run.rank + 1), torch.rand(run.rank + 1)  # noqa: NPY002

    @run.step
    def step(step: Step, scale: float, flip: bool, noise: torch.Tensor) -> None:
        for batch in data:
            step.backward(loss_of(model, (-batch if flip else batch) * scale + noise))
        optimizer.step()
        optimizer.zero_grad()

    drawn: list[float] = []
    for number in run.steps(STEPS):
        step(number, 1 + float(np.random.rand()), random.random() < 0.5, torch.randn(10) * 0.1)  # noqa: NPY002
        drawn.append(random.random() + float(np.random.rand()) + torch.rand(()).item())  # noqa: NPY002
    say(drawn=drawn[-1])


def weights_averaged_in_a_phase(run: Run) -> None:
    """SWA, and batch norm's statistics made anew by forward passes, with collectives in between."""
    model = ddp(run, nn.BatchNorm1d(14))
    optimizer = adam(model)
    average = torch.optim.swa_utils.AveragedModel(model.module)

    def swa() -> None:
        average.update_parameters(model.module)
        dist.all_reduce(torch.ones(1))
        for module in average.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()
        average.train()
        with torch.no_grad():
            for index in range(4):
                average(torch.randn(8, 10, generator=torch.Generator().manual_seed(index)))
        average.eval()
        dist.all_reduce(torch.ones(1))
        with torch.no_grad():
            for mine, its in zip(model.parameters(), average.module.parameters(), strict=True):
                mine.data.lerp_(its, 0.5)
        dist.all_reduce(torch.ones(1))

    run.every(2, swa)
    fit(run, model, optimizer, swa=average)


def sharded_adversaries(run: Run, between: Callable[[Step], None] = lambda _: None) -> None:
    """A GAN of FSDP2 models: every forward and backward has collectives, and nobody has a replica."""
    maker, judge = fully_sharded(net()), fully_sharded(net())
    for_maker, for_judge = adam(maker), adam(judge)
    run.track(maker=maker, judge=judge, for_maker=for_maker, for_judge=for_judge)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        batches = list(data)
        for batch in batches:
            with torch.no_grad():
                fake = maker(batch)
            step.backward(judge(fake).pow(2).mean() + (judge(batch) - 1).pow(2).mean())
        for_judge.step()
        for_judge.zero_grad()
        between(step)
        for batch in batches:
            (step.gradient_scale * ((maker(batch) - batch).abs().mean() + judge(maker(batch)).mean())).backward()
        for_maker.step()
        for_maker.zero_grad()
        for_judge.zero_grad()

    for number in run.steps(STEPS):
        step(number)
