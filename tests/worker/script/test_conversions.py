"""A script converted halfway trains something else: it is refused in its first steps, with its own line. What is right is let be."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.variants import in_stories
from tests.worker.harness import Ended
from tests.worker.scripts import STEPS, WIDTH, Samples, adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]
HERE = "test_conversions.py"


class Script:
    """The plain loop, whose parts a test replaces."""

    def __init__(self, run: Run, *, wrapped: bool = True, **tracked: Any) -> None:
        self.run = run
        self.model: Any = ddp(run) if wrapped else net()
        self.optimizer = adam(self.model)
        run.track(model=self.model, optimizer=self.optimizer, **tracked)
        self.data = run.loader(Samples())

    def loop(self, train_step: Callable[..., Any], steps: int = STEPS) -> None:
        step = self.run.step(train_step)
        for number in self.run.steps(steps):
            step(number)


# -- refused
def backward_of_the_loss(run: Run) -> None:
    script = Script(run)

    def train_step(step: Step) -> float:
        total = 0.0
        for batch in script.data:
            loss = loss_of(script.model, batch)
            loss.backward()  # here: backward
            total += step.weight * loss.item()
        script.optimizer.step()
        script.optimizer.zero_grad()
        return total

    script.loop(train_step)


def backward_of_a_second_loss(run: Run) -> None:
    """Of two, one is weighted."""
    script = Script(run)

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
            script.model(batch).abs().mean().backward()  # here: backward
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def half_of_a_sum(run: Run) -> None:
    script = Script(run)

    def train_step(step: Step) -> None:
        for batch in script.data:
            (step.scale(loss_of(script.model, batch)) + script.model(batch).abs().mean()).backward()  # here: backward
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def gradients_by_hand(run: Run) -> None:
    """`autograd.grad` in place of a backward."""
    script = Script(run, wrapped=False)

    def train_step(_: Step) -> None:
        parameters = list(script.model.parameters())
        for batch in script.data:
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss_of(script.model, batch), parameters), strict=True
            ):
                parameter.grad = gradient
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
        script.optimizer.step()  # here: backward
        script.optimizer.zero_grad()

    script.loop(train_step)


def the_second_optimizer(run: Run) -> None:
    script = Script(run)
    other = ddp(run)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    run.track(other=other, other_optimizer=optimizer)

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
            loss_of(other, script.model(batch).detach()).backward()  # here: backward
        script.optimizer.step()
        script.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    script.loop(train_step)


def a_scheduler(run: Run) -> None:
    script = Script(run)
    scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 100)

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()
        script.optimizer.zero_grad()
        scheduler.step()  # here: track

    script.loop(train_step)


def a_plateau_between_steps(run: Run) -> None:
    script = Script(run)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(script.optimizer)

    @run.step
    def train_step(step: Step) -> float:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()
        script.optimizer.zero_grad()
        return step.loss

    for number in run.steps(STEPS):
        loss = train_step(number)
        scheduler.step(loss)  # here: track


def a_scaler(run: Run) -> None:
    script = Script(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train_step(step: Step) -> None:
        for batch in script.data:
            scaler.scale(step.scale(loss_of(script.model, batch))).backward()
        scaler.step(script.optimizer)
        scaler.update()  # here: track
        script.optimizer.zero_grad()

    script.loop(train_step)


def torchs_average(run: Run) -> None:
    script = Script(run)
    average = AveragedModel(script.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()
        script.optimizer.zero_grad()
        average.update_parameters(script.model)  # here: track

    script.loop(train_step)


def an_average_of_its_own(run: Run) -> None:
    script = Script(run)
    average: Any = copy.deepcopy(script.model.module)

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()
        script.optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), script.model.parameters(), strict=True):  # here: track
                mine.data.lerp_(theirs.data, 0.1)

    script.loop(train_step)


class Curriculum:
    def __init__(self) -> None:
        self.level = 0

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


def something_that_can_be_kept(run: Run) -> None:
    script = Script(run)
    held = {"curriculum": Curriculum()}

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
        held["curriculum"].level += 1  # here: track
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def an_own_data_loader(run: Run) -> None:
    script = Script(run)
    batches = iter(DataLoader(cast("Any", Samples()), batch_size=2, shuffle=True))

    def train_step(step: Step) -> None:
        step.backward(loss_of(script.model, next(batches)))  # here: loader
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def a_data_loader_beside_the_steps(run: Run) -> None:
    script = Script(run)

    @run.step
    def train_step(step: Step, batch: torch.Tensor) -> None:
        step.backward(loss_of(script.model, batch))
        script.optimizer.step()
        script.optimizer.zero_grad()

    samples: Any = Samples()
    for number, batch in zip(run.steps(STEPS), DataLoader(samples, batch_size=2), strict=False):  # here: loader
        train_step(number, batch)


def a_data_loader_in_the_step(run: Run) -> None:
    script = Script(run)

    def train_step(step: Step) -> None:
        for batch in DataLoader(cast("Any", Samples()), batch_size=20):  # here: loader
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def part_of_the_batch(run: Run) -> None:
    script = Script(run)

    def train_step(step: Step) -> None:
        step.backward(loss_of(script.model, next(iter(script.data))))  # here: loader
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def an_update_for_each_micro_batch(run: Run) -> None:
    script = Script(run)

    def train_step(step: Step) -> None:
        for batch in script.data:  # here: loader
            step.backward(loss_of(script.model, batch))
            script.optimizer.step()
            script.optimizer.zero_grad()

    script.loop(train_step)


def nobody_reduces(run: Run) -> None:
    script = Script(run, wrapped=False)

    def train_step(step: Step) -> None:
        for batch in script.data:
            loss = loss_of(script.model, batch)
            step.backward(loss)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        script.optimizer.step()  # here: reduce
        script.optimizer.zero_grad()

    script.loop(train_step)


def a_head_outside_of_the_wrapper(run: Run) -> None:
    head = nn.Linear(WIDTH, WIDTH)
    script = Script(run, head=head)
    script.optimizer.add_param_group({"params": list(head.parameters())})

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(nn.Sequential(script.model, head), batch))
        script.optimizer.step()  # here: outside
        script.optimizer.zero_grad()

    script.loop(train_step)


def frozen_when_it_was_wrapped(run: Run) -> None:
    model = net()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    optimizer = adam(model)
    run.track(model=wrapped, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def train_step(step: Step) -> None:
        first.requires_grad_(int(step) > 0)
        for batch in data:
            step.backward(loss_of(wrapped, batch))
        optimizer.step()  # here: outside
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        train_step(number)


def frozen_after_it_was_wrapped(run: Run) -> None:
    script = Script(run)
    next(iter(script.model.parameters())).requires_grad_(False)

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()  # here: frozen
        script.optimizer.zero_grad()

    script.loop(train_step)


def a_bad_batch_is_skipped(run: Run) -> None:
    script = Script(run)

    def train_step(step: Step) -> None:
        for number, batch in enumerate(script.data):
            if number == len(script.data) - 1 and run.rank == 1:
                continue
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()  # here: skip
        script.optimizer.zero_grad()

    script.loop(train_step)


WORDS = {
    "backward": "step.backward",
    "track": "run.track",
    "loader": "run.loader|micro-batch",
    "reduce": "reduced.*wrap the model",
    "outside": "gradients of [12] parameters? of AdamW were not reduced.*before a part of it is frozen",
    "frozen": "waits for that of .*, which was frozen after it was made.*before DistributedDataParallel is made",
    "skip": "reduces them in the backward pass of the last micro-batch.*a loss of 0",
}


def marked(main: Callable[[Run], None]) -> tuple[int, str]:
    """The line of ``main`` that is to be named, and what is to be said of it."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = main.__code__.co_firstlineno
    for number in range(first, len(lines)):
        if match := re.search(r"# here: (\w+)", lines[number]):
            return number + 1, WORDS[match[1]]
    raise AssertionError(main)


@pytest.mark.parametrize(
    "main",
    [
        backward_of_the_loss,
        backward_of_a_second_loss,
        half_of_a_sum,
        gradients_by_hand,
        the_second_optimizer,
        a_scheduler,
        a_scaler,
        an_average_of_its_own,
        something_that_can_be_kept,
        an_own_data_loader,
        a_data_loader_in_the_step,
        an_update_for_each_micro_batch,
        nobody_reduces,
        a_bad_batch_is_skipped,
        a_head_outside_of_the_wrapper,
        frozen_after_it_was_wrapped,
        *in_stories(
            a_plateau_between_steps,
            torchs_average,
            part_of_the_batch,
            a_data_loader_beside_the_steps,
            frozen_when_it_was_wrapped,
        ),
    ],
)
def test_what_trains_something_else_is_refused_with_its_line(main: Callable[[Run], None], train: Train) -> None:
    ended = train(main, ranks=2, spares=0, max_restarts=0)
    assert ended.exit_code == 1, ended
    assert ended.failure is not None
    line, words = marked(main)
    assert f"{HERE}:{line}" in ended.failure.message, ended.failure.message
    assert re.search(words, ended.failure.message), ended.failure.message
    assert "Remedy: " in ended.failure.message


# -- let be
def a_gan_with_a_penalty(run: Run) -> None:
    """Two losses in one step, gradients by `autograd.grad` inside one of them, the maker's loss through the judge."""
    maker, judge = ddp(run), ddp(run)
    for_maker, for_judge = adam(maker), torch.optim.SGD(judge.parameters(), lr=0.01)
    run.track(maker=maker, judge=judge, for_maker=for_maker, for_judge=for_judge)
    data = run.loader(Samples())

    @run.step
    def train_step(step: Step) -> None:
        for batch in data:
            fake = maker(batch)
            mixed = (batch + fake.detach()).requires_grad_()
            slope = torch.autograd.grad(judge.module(mixed).sum(), mixed, create_graph=True)[0]
            step.backward(judge(fake.detach()).pow(2).mean() + slope.pow(2).mean())
            (step.scale((fake - batch).abs().mean()) + step.scale(fake.pow(2).mean())).backward()
        for_judge.step()
        for_maker.step()
        for_judge.zero_grad()
        for_maker.zero_grad()

    for number in run.steps(STEPS):
        train_step(number)


def weighted_by_hand(run: Run) -> None:
    script = Script(run)

    def train_step(step: Step) -> None:
        for batch in script.data:
            (loss_of(script.model, batch) * step.gradient_scale).backward()
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def gradients_weighted_by_hand(run: Run) -> None:
    script = Script(run, wrapped=False)

    def train_step(step: Step) -> None:
        for batch in script.data:
            loss_of(script.model, batch).backward()
        for parameter in script.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= step.weight
            dist.all_reduce(parameter.grad)
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def a_head_reduced_by_hand(run: Run) -> None:
    """Beside a model that DDP reduces."""
    head = nn.Linear(WIDTH, WIDTH)
    script = Script(run, head=head)
    script.optimizer.add_param_group({"params": list(head.parameters())})

    def train_step(step: Step) -> None:
        for batch in script.data:
            step.backward(loss_of(nn.Sequential(script.model, head), batch))
        for parameter in head.parameters():
            dist.all_reduce(parameter.grad)
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step)


def an_attack_first(run: Run) -> None:
    """A gradient of the input, whose part for the weights is thrown away."""
    script = Script(run)

    def train_step(step: Step) -> None:
        for batch in script.data:
            moved = batch.clone().requires_grad_()
            loss_of(script.model.module, moved).backward()
            script.optimizer.zero_grad(set_to_none=int(step) % 2 == 0)
            step.backward(loss_of(script.model, batch + 0.1 * moved.grad.sign()))
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step, 3)


def all_tracked(run: Run) -> None:
    """Scaler, schedulers inside another, an average, a thing that holds one more; a scheduler as a function of the step."""
    script = Script(run)
    schedulers = torch.optim.lr_scheduler
    warm = schedulers.SequentialLR(
        script.optimizer,
        [schedulers.ConstantLR(script.optimizer), schedulers.StepLR(script.optimizer, 2)],
        milestones=[2],
    )
    average = AveragedModel(script.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    class Holder(Curriculum):
        def __init__(self) -> None:
            super().__init__()
            self.inside = [schedulers.ExponentialLR(script.optimizer, 0.9)]

        def state_dict(self) -> dict[str, Any]:
            return {"inside": self.inside[0].state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inside[0].load_state_dict(state["inside"])

    holder = Holder()
    run.track(warm=warm, average=average, scaler=scaler, holder=holder)
    seen: list[float] = []

    def train_step(step: Step) -> None:
        for batch in script.data:
            scaler.scale(step.scale(loss_of(script.model, batch))).backward()
        scaler.unscale_(script.optimizer)
        nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        warm.step()
        holder.inside[0].step()
        average.update_parameters(script.model)
        seen.append(step.loss)

    script.loop(train_step)


class Wrapped(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer: torch sees the step of the one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def a_wrapped_optimizer(run: Run) -> None:
    model = ddp(run)
    optimizer = Wrapped(adam(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    assert run._state.optimizers["optimizer"] is optimizer.optimizer
    data = run.loader(Samples())

    @run.step
    def train_step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    for number in run.steps(STEPS):
        train_step(number)


def data_read_beside(run: Run) -> None:
    """A DataLoader where it is right: before the steps, in a phase, for an evaluation between steps; and two sets in one step."""
    script = Script(run)
    more = run.loader(Samples(count=30))
    held_out = DataLoader(cast("Any", Samples()), batch_size=6)
    next(iter(held_out))

    def evaluate() -> None:
        with torch.no_grad():
            sum(float(loss_of(script.model.module, batch)) for batch in held_out)

    run.every(2, evaluate)

    @run.step
    def train_step(step: Step) -> None:
        for batch, other in zip(script.data, more, strict=False):
            step.backward(loss_of(script.model, batch) + loss_of(script.model, other))
        script.optimizer.step()
        script.optimizer.zero_grad()

    for number in run.steps(STEPS):
        train_step(number)
        evaluate()


def a_step_that_is_skipped(run: Run) -> None:
    """A guard leaves the loader and updates nothing."""
    script = Script(run)

    def train_step(step: Step) -> None:
        for batch in script.data:
            if int(step) == 1:
                return
            step.backward(loss_of(script.model, batch))
        script.optimizer.step()
        script.optimizer.zero_grad()

    script.loop(train_step, 3)


@pytest.mark.parametrize(
    "main",
    [
        a_gan_with_a_penalty,
        weighted_by_hand,
        gradients_weighted_by_hand,
        a_head_reduced_by_hand,
        an_attack_first,
        all_tracked,
        a_wrapped_optimizer,
        data_read_beside,
        a_step_that_is_skipped,
    ],
)
def test_what_is_right_is_let_be(main: Callable[[Run], None], train: Train) -> None:
    ended = train(main, ranks=2, spares=0, max_restarts=0)
    assert ended.exit_code == 0, ended


# -- said
def test_a_name_that_only_the_loop_binds_is_told_before_a_newcomer_lacks_it(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def train_step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            train_step(number)
        print("done after", number)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    told = capfd.readouterr().err
    assert told.count("reads `number`, which only the loop over run.steps() binds") == 1, told


def test_what_cannot_be_known_is_said_once(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        batches = iter([torch.ones(2, 10)] * 100)
        seen = {"mean": torch.zeros(10)}
        count = 0

        @run.step
        def train_step(step: Step) -> None:
            nonlocal count
            count += 1
            batch = next(batches)
            seen["mean"] += batch.mean(0)
            step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            train_step(number)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    told = capfd.readouterr().err
    assert told.count("no micro-batch of run.loader") == 1, told
    assert told.count("seen['mean']") == told.count("changes count") == 1, told
    assert told.count(HERE) == 2, told


def test_what_begins_to_change_later_is_said_as_well(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """A counter that is only shown must not hide a loss scale."""

    def main(run: Run) -> None:
        script, meter, scale = Script(run), {"shown": 0}, {"value": 1.0}

        def train_step(step: Step) -> None:
            meter["shown"] += 1
            scale["value"] *= 2 if int(step) > 4 else 1
            for batch in script.data:
                step.backward(loss_of(script.model, batch))
            script.optimizer.step()
            script.optimizer.zero_grad()

        script.loop(train_step, 17)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    told = capfd.readouterr().err
    assert told.count("meter['shown']") == told.count("scale['value']") == 1, told


class Drawing(Samples):
    """Of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(self.rng.uniform())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tracked", [False, True])
def test_a_generator_of_the_data_sets_own_is_said_once_unless_it_comes_along(
    workers: int, tracked: bool, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(run: Run) -> None:
        dataset = Drawing()
        more: dict[str, Any] = {"rng": dataset.rng} if tracked else {}
        script = Script(run, **more)
        script.data = run.loader(dataset, num_workers=workers)

        def train_step(step: Step) -> None:
            for batch in script.data:
                step.backward(loss_of(script.model, batch))
            script.optimizer.step()
            script.optimizer.zero_grad()

        script.loop(train_step)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    told = capfd.readouterr().err
    assert told.count("draws from rng, a Generator of its own") == (0 if tracked and not workers else 1), told


def test_the_ids_of_two_data_sets_are_told_apart_and_a_second_pass_counts_once(train: Train) -> None:
    def main(run: Run) -> None:
        script = Script(run)
        more = run.loader(Samples(count=30))

        def train_step(step: Step) -> None:
            for batch, other in zip(script.data, more, strict=True):
                step.backward(loss_of(script.model, batch) + loss_of(script.model, other))
            script.optimizer.zero_grad()
            for batch, other in zip(script.data, more, strict=True):
                step.backward(loss_of(script.model, batch) + loss_of(script.model, other))
            script.optimizer.step()
            script.optimizer.zero_grad()

        script.loop(train_step, 2)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    for at in ended.ids:
        assert len(set(ended.samples(at))) == len(ended.samples(at)) == 24, ended.ids


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_loaders_processes_leave_a_schedulers_signals_alone(train: Train) -> None:
    """They come from somebody else than their parent."""

    def main(run: Run) -> None:
        def signalled(number: int) -> None:
            stream = run._data._loaders[0]._workers._stream  # type: ignore[union-attr]
            for process in stream._workers:  # type: ignore[union-attr]
                for name in ("TERM", "HUP", "USR1", "USR2"):
                    subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)

        model = ddp(run)
        fit(run, model, adam(model), workers=1, between=signalled)

    ended = train(main, ranks=1, spares=0)
    assert ended.exit_code == 0, ended
