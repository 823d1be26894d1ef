"""Losses, samples, parameters, buffers and optimizer state are the same, bit for bit, with and without two deaths.

Each script runs once undisturbed, and once more while rank 0 and another rank die at moments drawn from a seed.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker.integrity.unshared_buffers import ROW_BYTES_MAX
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.variants import in_stories
from tests.worker.harness import Ended, moments, say
from tests.worker.scripts import STEPS, Samples, Script, adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]


# -- what DDP can be told ----------------------------------------------------------------------------------------------
def accumulation(run: Run) -> None:
    model = ddp(run)
    fit(run, model, adam(model))


def bucket_views(run: Run) -> None:
    model = ddp(run, gradient_as_bucket_view=True)
    fit(run, model, adam(model))


def bucket_views_cleared_in_place(run: Run) -> None:
    """Its gradients stay the views that they are, from step to step; those of a process that takes over are None."""
    model = ddp(run, gradient_as_bucket_view=True)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for number in run.steps(STEPS):
        step(number)


def compiled(run: Run) -> None:
    model = ddp(run)
    fit(run, torch.compile(model, backend="aot_eager"), adam(model))  # type: ignore[arg-type]


def compiled_batch_norm(run: Run) -> None:
    """The compiled forward broadcasts the buffers."""
    model = ddp(run, nn.BatchNorm1d(14))
    fit(run, torch.compile(model, backend="aot_eager"), adam(model))  # type: ignore[arg-type]


def compiled_inside(run: Run) -> None:
    """The model is compiled, DDP around it is not."""
    inner = net(nn.BatchNorm1d(14)).to(run.device)
    inner.compile(backend="aot_eager")
    model = DDP(inner)
    fit(run, model, adam(model))


def compiled_optimizer(run: Run) -> None:
    model = ddp(run)
    optimizer = adam(model)
    update = torch.compile(optimizer.step, backend="aot_eager")
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        update()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def by_closure(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Script:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = make(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> float:
            def closure() -> Any:
                optimizer.zero_grad()
                total = torch.zeros(())
                for batch in data:
                    loss = loss_of(model, batch)
                    step.backward(loss)
                    total += loss.detach() * step.weight
                dist.all_reduce(total)  # LBFGS decides by it how to go on: the same on every rank
                return total

            optimizer.step(closure)
            return step.loss

        for number in run.steps(STEPS):
            step(number)

    return main


def bfgs(model: nn.Module, evaluations: int = 1) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=evaluations, history_size=3)


def lbfgs(run: Run) -> None:
    """Lists of tensors, that grow with every step."""
    by_closure(bfgs)(run)


def lbfgs_of_several_evaluations(run: Run) -> None:
    """Backward passes after the first update: a step of several parts."""
    by_closure(lambda model: bfgs(model, evaluations=4))(run)


def adam_with_closure(run: Run) -> None:
    by_closure(adam)(run)


class SometimesUnused(nn.Module):
    """Which half is used depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([net(), net()])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        half: torch.Tensor = self.halves[int(batch[0, 0] > 0)](batch)
        return half


def unused_parameters(run: Run) -> None:
    model = DDP(SometimesUnused(), find_unused_parameters=True)
    fit(run, model, adam(model))


def batch_norm(run: Run) -> None:
    model = ddp(run, nn.BatchNorm1d(14))
    fit(run, model, adam(model))


def batch_norm_of_each_rank(run: Run) -> None:
    model = ddp(run, nn.BatchNorm1d(14), broadcast_buffers=False)
    fit(run, model, adam(model))


def tied_weights(run: Run) -> None:
    inner = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))
    inner[2].weight = inner[0].weight
    model = DDP(inner)
    fit(run, model, adam(model))


class Counting(nn.Module):
    """Its buffer is not in its state_dict, and matters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.seen: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += batch.abs().sum()
        out: torch.Tensor = self.inner(batch) * (1 + self.seen / 1000)
        return out


def non_persistent_buffer(run: Run) -> None:
    model = DDP(Counting())
    fit(run, model, adam(model))


def random_augmentation(run: Run) -> None:
    model = ddp(run)
    fit(run, model, adam(model), noisy=True)


# -- optimizers and what belongs to them -------------------------------------------------------------------------------
def sgd_momentum(run: Run) -> None:
    model = ddp(run)
    fit(run, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True))


def adam_fused(run: Run) -> None:
    model = ddp(run)
    fit(run, model, adam(model, fused=True))


def adam_foreach_amsgrad(run: Run) -> None:
    model = ddp(run)
    fit(run, model, adam(model, foreach=True, amsgrad=True))


class Ema:
    """A custom object, with tensors and plain values."""

    def __init__(self, model: nn.Module) -> None:
        self.mean = [p.detach().clone() for p in model.parameters()]
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for mean, parameter in zip(self.mean, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 / (1 + self.updates))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mean, given in zip(self.mean, state["mean"], strict=True):
            mean.copy_(given)
        self.updates = state["updates"]


def everything_beside_the_model(run: Run) -> None:
    """Schedulers, an EMA module, a custom object, clipping."""
    model = ddp(run)
    optimizer = adam(model)
    shadow = torch.optim.swa_utils.AveragedModel(model.module, avg_fn=lambda a, b, _: 0.9 * a + 0.1 * b)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    ema = Ema(model)
    run.track(model=model, optimizer=optimizer, shadow=shadow, warm=warm, plateau=plateau, ema=ema)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        warm.step()
        plateau.step(step.loss)
        shadow.update_parameters(model.module)
        ema.update(model)
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def batch_norm_and_its_average(run: Run) -> None:
    """The average's buffers change after the first update: the gate comes behind that."""
    model = ddp(run, nn.BatchNorm1d(14))
    optimizer = adam(model)
    shadow = torch.optim.swa_utils.AveragedModel(model.module)
    run.track(model=model, optimizer=optimizer, shadow=shadow)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        shadow.update_parameters(model.module)
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


class AverageByHand:
    """Of all that the model holds, and no module: where each rank has statistics of its own, so have their averages."""

    def __init__(self, model: nn.Module) -> None:
        self.held = {key: value.detach().clone() for key, value in model.state_dict().items()}

    def update(self, model: nn.Module) -> None:
        state = model.state_dict()
        for key, held in self.held.items():
            held.lerp_(state[key], 0.1) if held.is_floating_point() else held.copy_(state[key])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for key, value in state.items():
            self.held[key].copy_(value)


class Held:
    """Tracked, in no module."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def batch_norm_averaged_by_hand(run: Run, *, statistics: bool = True) -> None:
    model = ddp(run, nn.BatchNorm1d(14))
    average = AverageByHand(model.module)
    if not statistics:
        average.held = {key: average.held[key] for key, _ in model.module.named_parameters()}
    fit(run, model, adam(model), after=lambda _: average.update(model.module), shadow=average)


class Queue(nn.Module):
    """What each rank has seen of late, in a buffer too large to be exchanged with each gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("seen", torch.zeros(ROW_BYTES_MAX // 4 // 10 + 1, 10))
        self.seen: torch.Tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        seen = self.seen[:8].mean()
        if self.training:
            self.seen.data.copy_(self.seen.roll(len(batch), 0))
            self.seen.data[: len(batch)] = batch
        out: torch.Tensor = self.inner(batch) * (1 + seen)
        return out


def large_queue_of_each_rank(run: Run) -> None:
    model = DDP(Queue(), broadcast_buffers=False)
    fit(run, model, adam(model))


def one_cycle_and_scaler(run: Run) -> None:
    """A GradScaler that meets an infinite gradient in step 3, and skips that step's optimizer."""
    model = ddp(run)
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
    run.track(model=model, optimizer=optimizer, scaler=scaler, cycle=cycle)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            if int(step) == 3:
                loss = loss * float("inf")
            scaler.scale(step.scale(loss)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        cycle.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def two_optimizers(run: Run) -> None:
    """As a GAN is trained: the gate stands before the first of both."""
    maker, judge = ddp(run), ddp(run)
    for_maker, for_judge = adam(maker), torch.optim.SGD(judge.parameters(), lr=0.01, momentum=0.5)
    run.track(maker=maker, judge=judge, for_maker=for_maker, for_judge=for_judge)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            fake = maker(batch)
            step.backward(judge(fake.detach()).pow(2).mean() + (judge(batch) - 1).pow(2).mean())
            (step.gradient_scale * (fake - batch).abs().mean()).backward()
        for_judge.step()
        for_maker.step()
        for_judge.zero_grad()
        for_maker.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def plain_averaging(run: Run) -> None:
    """No wrapper: the script averages gradients itself."""
    model = net()
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            (loss_of(model, batch) * step.weight).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def phases(run: Run) -> None:
    model = ddp(run, nn.BatchNorm1d(14))
    optimizer = adam(model)
    best = copy.deepcopy(model.module)

    def evaluate() -> None:
        total = torch.tensor([float(sum(p.detach().sum() for p in model.parameters()))])
        dist.all_reduce(total)
        run.log(total=total.item())
        best.load_state_dict(model.module.state_dict())

    run.every(2, evaluate)
    run.at_end(evaluate)
    fit(run, model, optimizer, best=best)


EXACT: list[Script] = [
    accumulation,
    unused_parameters,
    everything_beside_the_model,
    batch_norm_and_its_average,
    phases,
    lbfgs,
]


ALSO_EXACT: list[Script] = [
    batch_norm_of_each_rank,
    tied_weights,
    random_augmentation,
    adam_fused,
    one_cycle_and_scaler,
    adam_with_closure,
    lbfgs_of_several_evaluations,
    compiled,
    compiled_batch_norm,
    compiled_inside,
    compiled_optimizer,
    bucket_views,
    non_persistent_buffer,
    sgd_momentum,
    adam_foreach_amsgrad,
    two_optimizers,
    plain_averaging,
    batch_norm,
]


@pytest.mark.parametrize(
    "main",
    [*EXACT, *in_stories(*ALSO_EXACT)],
    ids=lambda main: main.__name__,
)
def test_deaths_of_rank_0_and_of_another_do_not_change_a_bit(main: Script, train: Train) -> None:
    reference = train(main)
    assert reference.exit_code == 0, reference
    deaths = {0: moments(reference, 0, main.__name__)[0], 2: moments(reference, 2, main.__name__)[0]}
    ended = train(main, kill=deaths)
    assert not ended.differences(reference), f"{ended.differences(reference)}\n{deaths}\n{ended}"
    assert ended.plans, f"nobody died\n{ended}"


@pytest.mark.stories
@pytest.mark.parametrize("moment", range(1, 5))
def test_a_death_in_a_compiled_forward_or_backward_does_not_change_a_bit(moment: int, train: Train) -> None:
    """The forward broadcasts the buffers, and the last backward of a step reduces the gradients."""
    reference = train(compiled_batch_norm)
    lived = reference.moments[1]
    begins = next(index for index, what in enumerate(lived) if what.startswith("committed Position(step=3,"))
    ended = train(compiled_batch_norm, kill={1: begins + moment})
    assert not ended.differences(reference), f"{lived[begins + moment]}\n{ended}"
    assert ended.plans, f"nobody died\n{ended}"


@pytest.mark.parametrize("main", [bucket_views, bucket_views_cleared_in_place], ids=lambda main: main.__name__)
def test_the_mean_over_three_ranks_is_rounded_alike_by_who_takes_over(main: Script, train: Train) -> None:
    """torch divides a gradient that is the bucket's view by 3, and multiplies one that was None by a third, which is rounded otherwise."""
    reference = train(main, ranks=3)
    lived = reference.moments[1]
    dies_at = next(index for index, what in enumerate(lived) if what.startswith("committed Position(step=3,"))
    ended = train(main, ranks=3, kill={1: dies_at + 1})
    assert not ended.differences(reference), f"{lived[dies_at + 1]}\n{ended}"
    assert ended.plans, f"nobody died\n{ended}"


def test_gradients_cleared_in_place_are_not_taken_for_those_of_the_step_before(train: Train) -> None:
    """A step that is lost at its gate has not cleared them yet, and is done again with the same tensors, which are zeros."""
    reference = train(bucket_views_cleared_in_place, ranks=3)
    lived = reference.moments[1]
    gate = next(index for index, what in enumerate(lived) if what.startswith("passed the gate of Position(step=4,"))
    ended = train(bucket_views_cleared_in_place, ranks=3, kill={1: gate - 1})
    assert not ended.differences(reference), f"{lived[gate - 1]}\n{ended}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(1, 5))])
def test_batch_norm_is_exact_wherever_two_die_one_after_the_other(seed: int, train: Train) -> None:
    reference = train(batch_norm)
    deaths = {rank: moments(reference, rank, seed)[0] for rank in (0, 1)}
    ended = train(batch_norm, kill=deaths)
    assert not ended.differences(reference), f"{deaths}\n{ended}"
    assert not ended.rolled_back
    assert not ended.restarted


@pytest.mark.parametrize(
    "main", [batch_norm_and_its_average, *in_stories(batch_norm_of_each_rank, large_queue_of_each_rank)]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(1, 12))])
def test_buffers_of_each_rank_are_its_own_from_the_first_step_on(main: Script, seed: int, train: Train) -> None:
    """Also before ranks have been compared, which they are in the second step."""
    reference = train(main)
    lived = reference.moments[2]
    known = next(index for index, what in enumerate(lived) if what.startswith("committed Position(step=1,"))
    moment = random.Random(seed).randrange(known + 1)
    ended = train(main, kill={2: moment})
    assert not ended.differences(reference), f"{lived[moment]}\n{ended}"
    assert ended.plans, f"nobody died\n{ended}"


def test_samples_that_a_closure_reads_again_count_once(train: Train) -> None:
    once, often = train(lbfgs, ranks=2), train(by_closure(lambda model: bfgs(model, evaluations=4)), ranks=2)
    assert often.exit_code == 0, often
    assert often.counts == once.counts
    assert [often.samples(at) for at in often.gates] == [once.samples(at) for at in once.gates]
    assert often.losses[0] == once.losses[0]
    assert often.losses[STEPS - 1] < once.losses[STEPS - 1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(1, 12))])
def test_nobody_goes_back_for_an_average_of_each_ranks_own_statistics(seed: int, train: Train) -> None:
    reference = train(batch_norm_and_its_average)
    lived = reference.moments[1]
    known = next(index for index, what in enumerate(lived) if what.startswith("committed Position(step=3,"))
    moment = random.Random(seed).randrange(known, len(lived))
    ended = train(batch_norm_and_its_average, kill={1: moment})
    assert not ended.differences(reference), f"{lived[moment]}\n{ended}"
    assert not ended.rolled_back, f"{lived[moment]}\n{ended}"
    assert not ended.restarted, f"{lived[moment]}\n{ended}"


def test_an_object_that_parts_the_ranks_is_named(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """It is in no module, so each rank's own of it is not exchanged as buffers are: the bits are right, and steps are done again."""
    reference = train(batch_norm_averaged_by_hand, ranks=3)
    said = capfd.readouterr().err
    assert said.count("what shadow holds differs between ranks 0, 1 and 2") == 1, said
    lived = reference.moments[1]
    moment = next(index for index, what in enumerate(lived) if what.startswith("committed Position(step=6,"))
    ended = train(batch_norm_averaged_by_hand, ranks=3, snapshot_every=4, kill={1: moment})
    assert not ended.differences(reference), ended
    assert ended.rolled_back
    capfd.readouterr()
    assert train(functools.partial(batch_norm_averaged_by_hand, statistics=False), ranks=3).exit_code == 0
    assert "differs between" not in capfd.readouterr().err


@pytest.mark.parametrize("parted", [False, True])
def test_buffers_are_exchanged_for_replicas_alone(parted: bool, train: Train) -> None:
    """Whose other state differs from everybody's is nobody's replica: once ranks have been compared, its buffers are of use to nobody."""

    def main(run: Run) -> None:
        exchanged: list[bool] = []

        def looks(step: int) -> None:
            exchanged.append(run._units._replicas.unique.exchanges)

        model = ddp(run, nn.BatchNorm1d(14))
        fit(run, model, adam(model), between=looks, own=Held(run.rank if parted else 0))
        say(exchanged=exchanged)

    ended = train(main, ranks=2)
    assert ended.exit_code == 0, ended
    for said in ended.said.values():
        assert said["exchanged"][0], "nobody knows yet"
        assert said["exchanged"][3:] == [not parted] * (STEPS - 3)


def test_uneven_micro_batches_are_evened_out_by_ghosts(train: Train) -> None:
    """3 ranks share 8 micro-batches: one has only two of its own, and computes a third that does not count."""
    reference = train(accumulation, batch=(16, 2))
    ended = train(accumulation, batch=(16, 2), kill={rank: moments(reference, rank, "ghosts")[0] for rank in (0, 2)})
    assert not ended.differences(reference), ended
    at = min(reference.ids)
    assert sorted(len(ids) for ids in reference.ids[at].values()) == [4, 6, 6]


def test_processes_that_load_data_deliver_the_same_bits(train: Train) -> None:
    def alone(run: Run) -> None:
        model = ddp(run)
        fit(run, model, adam(model), noisy=True)

    def with_workers(run: Run) -> None:
        model = ddp(run)
        fit(run, model, adam(model), noisy=True, workers=1)

    reference = train(alone, ranks=2)
    assert not train(with_workers, ranks=2).differences(reference)
    ended = train(with_workers, ranks=2, kill={1: moments(reference, 1, "workers")[0]})
    assert not ended.differences(reference), ended
