"""What a step changes before it counts is put back exactly, whatever changes it, and however: or nobody goes on with it.

The scripts are in the manner of real ones. Each is killed at places of a step that are told by the moments of a run without a fault.
"""

from __future__ import annotations

import copy
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.protocol.ids import Position
from rackrun.worker.loop.run import Run
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from tests.worker.harness import Ended, Swap, say
from tests.worker.scripts import STEPS, Samples, Script, adam, ddp, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]
LARGE = 300_000
"""Elements of more than 1 MiB."""


# -- alone: what is put back ---------------------------------------------------------------------------------------------
class ByValue:
    """Its state_dict returns copies."""

    def __init__(self, size: int) -> None:
        self.mean, self.updates = torch.zeros(size), 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.updates = state["mean"].clone(), state["updates"]


class Codebook(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(size))
        self.codes: torch.Tensor


def undone(state: TrackedState, change: Callable[[], Any], *, learns: bool = True) -> list[str]:
    """``change`` is done in a step that counts, which shows it, and in one that does not. Returns what was not put back."""
    undo = UnitUndo(state)
    undo.begin(whole=True, audit=True)
    if learns:
        change()
    undo.before_update()
    undo.ended()
    undo.begin()
    undo.before_update()
    undo.ended()
    undo.begin()
    change()
    return undo.discard(backward_open=True)


def bits(state: TrackedState) -> dict[str, bytes]:
    tensors = {path: tensor.contiguous().numpy().tobytes() for path, tensor in state.tensors().items()}
    return {**tensors, "plain": state.encode_plain()}


def tracked(**things: Any) -> TrackedState:
    state = TrackedState()
    for name, thing in things.items():
        state.track(name, thing)
    return state


def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("size", [3, LARGE])
def test_an_object_whose_state_dict_returns_copies_is_put_back(size: int) -> None:
    meter = ByValue(size)
    state = tracked(model=trained()[0], meter=meter)

    def change() -> None:
        meter.mean += 1
        meter.updates += 1

    for learns in (False, True):
        assert not undone(state, change, learns=learns)
        assert (meter.mean.max().item(), meter.updates) == (float(learns), int(learns))


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("unseen", [False, True])
def test_what_no_optimizer_trains_is_put_back(size: int, unseen: bool) -> None:
    model, optimizer = trained()
    codebook, shadow, frozen = Codebook(size), copy.deepcopy(model), nn.Linear(size, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    state = tracked(model=model, optimizer=optimizer, codebook=codebook, shadow=shadow, frozen=frozen, average=average)

    def change() -> None:
        for tensor in (codebook.codes, *shadow.parameters(), *average.parameters()):
            if unseen:
                tensor.data.add_(1)
            else:
                with torch.no_grad():
                    tensor.add_(1)

    before = bits(state)
    assert not undone(state, change, learns=False) or unseen
    before = bits(state) if unseen else before
    assert not undone(state, change)
    change()
    after = bits(state)
    assert not undone(state, change)
    assert bits(state) != after
    assert before != after


def test_what_a_step_has_not_changed_is_not_written_to() -> None:
    """A snapshot of the step before may be in the making, and would be taken for torn."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin(whole=True)
    with torch.no_grad():
        model.bias.add_(1)
    before = {path: tensor._version for path, tensor in state.tensors().items()}
    assert not undo.discard(backward_open=True)
    after = {path: tensor._version for path, tensor in state.tensors().items()}
    assert {path for path in after if after[path] != before[path]} == {"model/param/bias"}


@pytest.mark.parametrize("unseen", [False, True])
def test_what_an_optimizer_trains_is_put_back_once_it_was_seen_to_change_early(unseen: bool) -> None:
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)

    def change() -> None:
        for tensor in (model.weight, optimizer.state[model.weight]["exp_avg"]):
            if unseen:
                tensor.data.mul_(1.5)
            else:
                with torch.no_grad():
                    tensor.mul_(1.5)

    change()
    undo = UnitUndo(state)
    undo.begin(whole=True, audit=True)
    change()
    undo.before_update()
    undo.ended()
    assert state.lineage.changes.early == ("model/param/weight", "optimizer/state/0/0/exp_avg")
    before = bits(state)
    undo.begin()
    change()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before


def test_a_first_step_is_put_back_as_a_whole_with_what_the_optimizer_has_made() -> None:
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    state = tracked(model=model, optimizer=optimizer)
    before, undo = bits(state), UnitUndo(state)
    undo.begin(whole=True, audit=True)
    model(torch.ones(1, 600)).sum().backward()
    undo.before_update()
    optimizer.step()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before
    assert not optimizer.state


def test_a_change_that_nobody_has_seen_in_time_is_found_when_the_step_is_done_again() -> None:
    """By ``.data``, before optimizer.step(), for the first time in a step that is abandoned: this state is of no use."""
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    model.weight.data.mul_(1.5)
    assert not undo.discard(backward_open=True), "nothing shows it yet"
    undo.begin()
    model.weight.data.mul_(1.5)
    undo.before_update()
    assert undo.not_put_back() == ["model/param/weight"]


def test_digests_from_before_a_rollback_do_not_judge_a_later_step() -> None:
    """They were served to a newcomer after the state was filled anew, and nothing was audited since."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin()
    assert not undo.discard(backward_open=True)
    assert undo.digests_ahead()
    state.load_plain(state.manifest("r"), state.tensors())
    assert not undo.digests_ahead(), "the step that was abandoned is not done again from this state"
    undo.begin()
    undo.before_update()
    optimizer.step()
    undo.ended()
    undo.begin()
    assert not undo.discard(backward_open=True)
    undo.digests_ahead()
    undo.begin()
    undo.before_update()
    assert undo.not_put_back() == []


def test_weights_that_are_exchanged_for_a_while_are_found_where_the_step_was_left() -> None:
    """Through ``.data``, and put back before the gate: there is nothing to see there. Known from the first step, they are put back."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin()
    undo.at_place()
    model.weight.data.mul_(2)
    undo.at_place()
    undo.discard(backward_open=True)
    undo.begin()
    undo.at_place()
    model.weight.data.mul_(2)
    undo.at_place()
    model.weight.data.mul_(0.5)
    undo.at_place()
    undo.before_update()
    assert undo.not_put_back() == ["model/param/weight"]

    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin(whole=True, audit=True, everywhere=True)
    model.weight.data.mul_(2)
    undo.at_place()
    model.weight.data.mul_(0.5)
    undo.at_place()
    undo.before_update()
    undo.ended()
    before = bits(state)
    undo.begin()
    model.weight.data.mul_(2)
    undo.at_place()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before


def test_a_phase_is_not_left_while_it_has_other_weights_in_the_model() -> None:
    """It has put them back at its end as often as it has run, so nothing shows that it exchanges them, and no version does."""
    model, optimizer = trained()
    frozen, norm = nn.Linear(LARGE, 1), nn.BatchNorm1d(3)
    state = tracked(model=model, optimizer=optimizer, frozen=frozen, norm=norm)
    undo = UnitUndo(state)
    for exchanged in (model.weight, frozen.weight, optimizer.state[model.weight]["exp_avg"]):
        for _ in range(9):
            undo.begin(phase="every 1")
            assert undo.may_be_left()
            backup = exchanged.data.clone()
            exchanged.data.mul_(0.9)
            left, torn = undo.may_be_left(), exchanged.data.clone()
            exchanged.data.copy_(backup)
            assert undo.may_be_left()
            undo.ended()
        assert not left
        undo.begin(phase="every 1")
        exchanged.data.copy_(torn)
        exchanged.data.copy_(backup)
        assert not undo.discard(backward_open=False)
        assert torch.equal(exchanged, backup)


def test_parameters_that_were_frozen_for_a_while_are_trained_again() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    model.weight.requires_grad_(False)
    undo.discard(backward_open=True)
    assert model.weight.requires_grad


def test_a_step_that_is_done_again_and_changes_nothing_early_is_good() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    undo.discard(backward_open=True)
    undo.begin()
    undo.before_update()
    assert not undo.not_put_back()


def test_a_version_that_moves_before_the_update_shows_at_once_what_cannot_be_put_back() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    with torch.no_grad():
        model.weight.mul_(1.5)
    assert undo.discard(backward_open=True) == ["model/param/weight"]


def test_what_a_step_changes_early_for_the_first_time_the_next_one_has_copied() -> None:
    """In any step, not in those alone that are audited: without a copy, a loss in the next one would cost every rank."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)

    def change() -> None:
        with torch.no_grad():
            model.weight.mul_(1.5)

    undo.begin()
    change()
    undo.before_update()
    undo.ended()
    undo.begin()
    before = bits(state)
    change()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before


def test_a_large_frozen_model_is_not_copied_and_a_change_of_it_is_found() -> None:
    model, optimizer = trained()
    base = nn.Linear(5000, 4000, bias=False)
    state = tracked(model=model, optimizer=optimizer, base=base)
    undo = UnitUndo(state)
    for _ in range(3):
        undo.begin()
        undo.before_update()
        undo.ended()
    assert "base/param/weight" not in undo._copies
    undo.begin()
    assert not undo.discard(backward_open=True)
    undo.begin()
    base.weight.data[7, 7] += 1
    assert undo.discard(backward_open=True) == ["base/param/weight"]


def test_a_change_between_two_steps_that_no_version_shows_is_refused() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin(audit=True)
    undo.before_update()
    undo.ended()
    undo.committed()
    model.weight.data.mul_(1.5)
    undo.check_stands()
    undo.begin()
    assert undo.changed_between == "model/param/weight"


def test_a_frozen_parameter_that_each_step_exchanges_for_another_has_not_changed_between_steps() -> None:
    model, optimizer = trained()
    model.gate = nn.Parameter(torch.ones(3), requires_grad=False)
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    for _ in range(3):
        undo.begin(audit=True)
        undo.before_update()
        model.gate = nn.Parameter(model.gate * 0.9, requires_grad=False)
        undo.ended()
        undo.committed()
        undo.check_stands()
        assert not undo.changed_between


# -- whole jobs ------------------------------------------------------------------------------------------------------------
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


def clamped_weights(run: Run) -> None:
    """As in WGAN: at the beginning of a step, through ``.data``; not idempotent, so that once too often shows."""
    model = ddp(run)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2).mul_(0.98)
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


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


def committed(step: int) -> str:
    return f"passed the gate of Position(step={step}, phase=0)"


def places(reference: Ended, rank: int, step: int, phase: int = 0) -> list[int]:
    """The moments of one unit: from the commit before it to its own."""
    lived = reference.moments[rank]
    ends = next(i for i, what in enumerate(lived) if what == f"committed Position(step={step}, phase={phase})")
    begins = max(i for i, what in enumerate(lived[:ends]) if what.startswith("committed"))
    return list(range(begins + 1, ends + 1))


def spread(all_of_them: Sequence[int], count: int) -> list[int]:
    """``count`` of them, the last two among them."""
    return sorted(
        {all_of_them[round(i * (len(all_of_them) - 1) / (count - 1))] for i in range(count)} | {*all_of_them[-3:]}
    )


def killed_in(train: Train, main: Script, step: int, *, phase: int = 0, count: int = 4, rank: int = 1) -> None:
    reference = train(main, ranks=2)
    assert reference.exit_code == 0, reference
    for at in spread(places(reference, rank, step, phase), count):
        ended = train(main, ranks=2, kill={rank: at}, start_over=True)
        what = f"{reference.moments[rank][at]}\n{ended}"
        assert not ended.differences(reference), f"{ended.differences(reference)}\n{what}"
        assert ended.said == reference.said, what
        assert not ended.restarted, what
        assert ended.plans, what


@pytest.mark.parametrize(
    ("main", "step"),
    [
        (scaler_skips_and_ema, 4),
        (guard_skips_and_ema, 4),
        (scheduler_before_the_gate, 4),
        (momentum_encoder, 5),
        (codebook, 5),
        (clamped_weights, 5),
        (target_network, 4),
        (adversaries, 5),
        (reduced_loss_and_plateau, 5),
        (random_choices_between_steps, 5),
    ],
    ids=lambda one: one.__name__ if callable(one) else str(one),
)
@pytest.mark.stories
def test_a_step_that_is_killed_anywhere_is_done_again_with_the_same_bits(main: Script, step: int, train: Train) -> None:
    killed_in(train, main, step)


@pytest.mark.stories
def test_a_phase_that_changes_parameters_is_done_again_with_the_same_bits(train: Train) -> None:
    killed_in(train, weights_averaged_in_a_phase, 5, phase=1)


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


@pytest.mark.stories
def test_a_sharded_step_of_parts_is_done_again_with_the_same_bits(train: Train) -> None:
    reference = train(sharded_adversaries, ranks=2, snapshot_every=1)
    assert reference.exit_code == 0, reference
    for at in spread(places(reference, 1, 5), 5):
        ended = train(sharded_adversaries, ranks=2, kill={1: at}, snapshot_every=1, start_over=True)
        assert not ended.differences(reference), f"{reference.moments[1][at]}\n{ended}"
        assert not ended.restarted, ended


def test_who_takes_over_from_one_that_had_taken_over_knows_what_a_step_is_like(train: Train, tmp_path: Path) -> None:
    """Shards come from the snapshot that the lost one had made of what it was given."""

    def main(run: Run) -> None:
        def dies(step: Step) -> None:
            marks = [tmp_path / "first", tmp_path / "second"]
            if run.rank == 1 and int(step) == 5 and (due := [mark for mark in marks if not mark.exists()]):
                due[0].touch()
                os.kill(os.getpid(), signal.SIGKILL)

        sharded_adversaries(run, between=dies)

    reference = train(sharded_adversaries, ranks=2, snapshot_every=4)
    ended = train(main, ranks=2, spares=2, snapshot_every=4, deadline_s=60.0)
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 2, ended


@pytest.mark.parametrize(
    "main", [adversaries, scaler_skips_and_ema, reduced_loss_and_plateau], ids=lambda main: main.__name__
)
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.stories
def test_a_kill_before_a_script_is_known_changes_no_bit(main: Script, step: int, train: Train) -> None:
    """What its first steps show is not known yet: at the worst everything begins again."""
    reference = train(main, ranks=2)
    for at in spread(places(reference, 1, step)[1:] if step else list(range(1, places(reference, 1, 1)[0])), 5):
        ended = train(main, ranks=2, kill={1: at}, start_over=True)
        assert not ended.differences(reference), f"{reference.moments[1][at]}\n{ended}"
        assert not (step > 1 and ended.restarted), f"{reference.moments[1][at]}\n{ended}"


@pytest.mark.stories
def test_two_deaths_one_after_the_other_in_a_step_of_parts(train: Train) -> None:
    reference = train(adversaries)
    first, second = places(reference, 0, 4), places(reference, 2, 6)
    for at, later in ((first[-2], second[-4]), (first[len(first) // 2], second[-1])):
        ended = train(adversaries, kill={0: at, 2: later}, spares=2)
        assert not ended.differences(reference), ended
        assert not ended.restarted


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_change_between_two_steps_through_data_is_refused_or_costs_the_one_rank_that_has_it(
    everywhere: bool, train: Train
) -> None:
    """On all ranks it is the script; on one it may be a GPU's memory, and another takes its place."""

    def main(run: Run) -> None:
        model = ddp(run)

        def between(step: int) -> None:
            if step == 1 and (everywhere or (run.rank, run.generation) == (1, 1)):
                next(model.parameters()).data.mul_(1.5)

        fit(run, model, adam(model), between=between)

    ended = train(main, ranks=2)
    if everywhere:
        assert ended.exit_code == 1, ended
        assert ended.failure is not None
        assert "model/param/module.0.weight was changed between two steps" in ended.failure.message
    else:
        assert len(ended.plans) == 1, ended
        assert not ended.differences(train(lambda run: fit(run, model := ddp(run), adam(model)), ranks=2))


@pytest.mark.parametrize(
    ("variables", "how"),
    [
        ({"RACKRUN_CHECK_REPLICAS": "2"}, {}),
        ({"RACKRUN_NAN_PROBATION": "1"}, {}),
        ({}, {"swap": Swap(Position(4), lost=1)}),
        ({}, {"min_ranks": 1, "spares": 0, "reduction": "fast"}),
    ],
    ids=["replicas are compared", "a loss that is not finite", "a planned swap", "a shrink"],
)
@pytest.mark.stories
def test_a_step_of_parts_with_what_else_there_is(
    variables: dict[str, str], how: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reference = train(adversaries, **{key: value for key, value in how.items() if key != "swap"})
    assert reference.exit_code == 0, reference
    kill = {} if "swap" in how else {1: places(reference, 1, 5)[-4]}
    ended = train(adversaries, kill=kill, **how)
    assert ended.exit_code == 0, ended
    assert not ended.restarted, ended
    assert ended.plans, ended
    if "min_ranks" not in how:
        assert not ended.differences(reference), ended


def stages_with_other_buffers_and_averages(run: Run) -> None:
    stage = run.mesh["pp"].get_local_rank()
    extra = [nn.BatchNorm1d(14), *([nn.BatchNorm1d(14, affine=False)] if stage else [])]
    model = ddp(run, nn.Sequential(*extra), process_group=run.mesh["dp"].get_group())
    optimizer, average = adam(model), torch.optim.swa_utils.AveragedModel(model.module, use_buffers=True)
    run.track(model=model, optimizer=optimizer, average=average)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        average.update_parameters(model.module)
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def test_ranks_whose_buffers_are_not_of_one_size_exchange_them_too(train: Train) -> None:
    ended = train(stages_with_other_buffers_and_averages, ranks=4, spares=0, mesh={"dp": 2, "pp": 2})
    assert ended.exit_code == 0, ended


@pytest.mark.stories
def test_a_loss_that_is_made_up_in_a_step_of_parts_is_computed_again(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(run: Run, made_up: bool) -> None:
        model, other = ddp(run), ddp(run)
        first, second = adam(model), adam(other)
        run.track(model=model, other=other, first=first, second=second)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            batches = list(data)
            bad = made_up and (int(step), step.attempt, run.rank) == (4, 0, 1)
            for model_, optimizer in ((model, first), (other, second)):
                for index, batch in enumerate(batches):
                    model_.require_backward_grad_sync = index == len(batches) - 1
                    step.backward(loss_of(model_, batch) * (float("nan") if bad and model_ is other else 1.0))
                optimizer.step()
                optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    monkeypatch.setenv("RACKRUN_NAN_PROBATION", "1")
    reference = train(lambda run: main(run, False), ranks=2)
    assert not train(lambda run: main(run, True), ranks=2).differences(reference)


# -- a generator of the script's own around the loader
def endless(loader: Any) -> Any:
    while True:
        yield from loader


@pytest.mark.parametrize("read", [1, 3], ids=["between two micro-batches", "after the last one"])
def test_an_endless_generator_around_the_loader_goes_on_where_a_step_is_done_again(
    read: int, train: Train, tmp_path: Path
) -> None:
    """The script keeps it from step to step. An error that left the step through it would be its end."""

    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = endless(data)

        @run.step
        def step(step: Step) -> None:
            for number in range(len(data)):
                step.backward(loss_of(model, next(batches)))
                if fault and (int(step), number + 1) == (3, read):
                    lose_rank_1(run, step)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    def lose_rank_1(run: Run, step: Step) -> None:
        if run.rank == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif run.rank == 0 and run.generation == 1:
            run._world.wait_broken()

    reference = train(lambda run: main(run, False), ranks=2)
    ended = train(lambda run: main(run, True), ranks=2)
    assert (tmp_path / "died").exists()
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended


def counted(loader: Any) -> Iterator[Any]:
    number = 0
    while True:
        for batch in loader:
            number += 1
            yield batch * (1 + 0.1 * (number % 5))


def ahead(loader: Any) -> Iterator[Any]:
    """One micro-batch ahead of the step."""
    while True:
        batches = iter(loader)
        ready = next(batches)
        for batch in batches:
            yield ready
            ready = batch
        yield ready


@pytest.mark.parametrize(("around", "read"), [(counted, 1), (counted, 3), (ahead, 1)])
def test_a_generator_that_keeps_values_from_step_to_step_is_named_and_ends_a_job_that_would_train_otherwise(
    around: Callable[[Any], Iterator[Any]], read: int, train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 dies when rank 0 has read as far: a rank 0 that was not in the step yet would leave nothing in its
    generator."""
    os.mkfifo(tmp_path / "rank 0 has read")

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = around(data)

        @run.step
        def step(step: Step) -> None:
            for number in range(len(data)):
                step.backward(loss_of(model, next(batches)))
                if (int(step), number + 1, run.generation) == (3, read, 1):
                    with (tmp_path / "rank 0 has read").open(
                        "rb" if run.rank == 1 else "wb"
                    ):  # both wait for the other
                        pass
                    if run.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    run._world.wait_broken()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    ended = train(main, ranks=2)
    assert ended.exit_code == 1, ended
    assert "StepError" in str(ended), ended
    kept = "number" if around is counted else "ready"
    assert re.search(
        f"a generator around run.loader, kept from step to step, holds [^.]*{kept}", capfd.readouterr().err
    )


def test_an_iterator_that_is_kept_from_an_attempt_that_does_not_count_is_no_step_without_data(train: Train) -> None:
    """Nobody is lost: the generation breaks, and the step is done again."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data, kept = run.loader(Samples()), list[Iterator[Any]]()

        @run.step
        def step(step: Step) -> None:
            if not kept:
                kept.append(iter(data))
            for number, batch in enumerate(kept[0]):
                step.backward(loss_of(model, batch))
                if (int(step), number, run.generation) == (3, 0, 1):
                    if run.rank == 1:
                        run._world.collective_failed(run._world.generation, RuntimeError("a link broke"))
                    run._world.wait_broken()
            kept.clear()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    ended = train(main, ranks=2)
    assert ended.exit_code == 1, ended
    assert "begins no iteration over run.loader" in str(ended), ended


def test_a_generator_that_a_failed_trial_step_has_left_goes_on_when_the_spare_takes_a_rank(
    train: Train, tmp_path: Path
) -> None:
    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = endless(data)

        @run.step
        def step(step: Step) -> None:
            for number in range(len(data)):
                step.backward(loss_of(model, next(batches)))
                if run.generation == 0:
                    raise ValueError("what a trial step computes is of no use")
                if fault and (int(step), number, run.generation) == (3, 2, 1):
                    if run.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    run._world.wait_broken()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    reference = train(lambda run: main(run, False), ranks=2)
    ended = train(lambda run: main(run, True), ranks=2)
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended
