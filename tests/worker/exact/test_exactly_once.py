"""Under ``reduction="exact"`` the gradient of every micro-batch is added alone, and once; a script that does otherwise is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.errors import StepError
from rackrun.worker.data.loader import Loader
from rackrun.worker.exact.exact_checks import check_module, check_optimizer, check_parameter
from rackrun.worker.exact.exactly_once import ExactlyOnce, ParameterSum
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.exact.test_exact import BATCH, Train, computed, loop, run_on, show_state
from tests.worker.harness import Ended
from tests.worker.scripts import STEPS, Samples, Script, adam, ddp, fully_sharded, loss_of, net


def trained(run: Run, model: nn.Module, backward: Callable[[Step, Loader], object]) -> None:
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        backward(step, data)
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


# -- refused


def one_backward_for_all(run: Run) -> None:
    model = ddp(run)
    trained(run, model, lambda step, data: sum(step.scale(loss_of(model, batch)) for batch in data).backward())  # type: ignore[union-attr]


def one_backward_for_all_shards_of(run: Run) -> None:
    model = fully_sharded(net())
    trained(run, model, lambda step, data: sum(step.scale(loss_of(model, batch)) for batch in data).backward())  # type: ignore[union-attr]


def never_synchronised(run: Run) -> None:
    model = ddp(run)

    def backward(step: Step, data: Loader) -> None:
        for batch in data:
            with model.no_sync():
                step.backward(loss_of(model, batch))

    trained(run, model, backward)


def never_synchronised_shards(run: Run) -> None:
    model = fully_sharded(net())
    shards: Any = model

    def backward(step: Step, data: Loader) -> None:
        for batch in data:
            shards.set_requires_gradient_sync(False)
            step.backward(loss_of(model, batch))

    trained(run, model, backward)


def two_passes(run: Run) -> None:
    """Each would train a model of its own."""
    first, second = ddp(run), ddp(run)
    run.track(other=second)

    def backward(step: Step, data: Loader) -> None:
        for model in (first, second):
            for batch in data:
                step.backward(loss_of(model, batch))

    trained(run, first, backward)


def not_in_the_last(run: Run) -> None:
    """A second model that sees the first micro-batch of each rank only."""
    first, second = ddp(run), ddp(run)
    run.track(other=second)

    def backward(step: Step, data: Loader) -> None:
        for turn, batch in enumerate(data):
            step.backward(loss_of(first, batch) + (0.0 if turn else loss_of(second, batch)))

    trained(run, first, backward)


def one_ahead(loader: Loader) -> Iterator[Any]:
    batches = iter(loader)
    taken = next(batches)
    for batch in batches:
        yield taken
        taken = batch
    yield taken


def taken_one_ahead(run: Run) -> None:
    model = ddp(run)
    trained(run, model, lambda step, data: [step.backward(loss_of(model, batch)) for batch in one_ahead(data)])  # type: ignore[func-returns-value]


def all_taken_first_shards(run: Run) -> None:
    model = fully_sharded(net())
    trained(run, model, lambda step, data: [step.backward(loss_of(model, batch)) for batch in list(data)])  # type: ignore[func-returns-value]


def shared_by_two(run: Run) -> None:
    layer = nn.Linear(10, 10)
    first, second = DDP(nn.Sequential(layer, nn.Tanh())), DDP(nn.Sequential(layer, nn.Linear(10, 10)))
    run.track(second=second)
    trained(run, first, lambda *_: None)


def over_too_few(run: Run) -> None:
    model = DDP(net(), process_group=run.mesh["shard"].get_group())
    trained(run, model, lambda step, data: [step.backward(loss_of(model, batch)) for batch in data])  # type: ignore[func-returns-value]


def twice_in_a_forward(run: Run) -> None:
    """A sharded layer is reduced after each use."""
    layer = fully_sharded(nn.Linear(10, 10))
    model = fully_sharded(nn.Sequential(layer, nn.Tanh(), layer))
    trained(run, model, lambda step, data: [step.backward(loss_of(model, batch)) for batch in data])  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("main", "ranks", "because"),
    [
        (one_backward_for_all, 2, "has a loss, but no gradient"),
        (never_synchronised, 1, "not reduced"),
        (two_passes, 2, "delivered twice"),
        (taken_one_ahead, 2, "before the backward pass of micro-batch "),
        (all_taken_first_shards, 2, "before the backward pass of micro-batch "),
        (not_in_the_last, 1, "not reduced"),
        pytest.param(one_backward_for_all_shards_of, 2, "has a loss, but no gradient", marks=pytest.mark.stories),
        pytest.param(never_synchronised, 8, "not reduced", marks=pytest.mark.stories),
        pytest.param(never_synchronised_shards, 2, "not reduced", marks=pytest.mark.stories),
        pytest.param(two_passes, 8, "delivered twice", marks=pytest.mark.stories),
        pytest.param(twice_in_a_forward, 1, "reduced twice", marks=pytest.mark.stories),
        (shared_by_two, 1, "reduced by 2 wrappers"),
    ],
)
def test_what_would_not_be_added_exactly_once_is_refused(main: Script, ranks: int, because: str, train: Train) -> None:
    refused(train(main, ranks=ranks, spares=0, max_restarts=0, batch=BATCH, reduction="exact"), because)


def test_a_sum_over_some_of_the_data_ranks_is_refused(train: Train) -> None:
    mesh = {"replicate": 2, "shard": 2}
    ended = train(over_too_few, ranks=4, spares=0, max_restarts=0, batch=BATCH, reduction="exact", mesh=mesh)
    refused(ended, "over 2 ranks, but 4 share")


def refused(ended: Ended, because: str) -> None:
    assert ended.failure is not None, ended
    assert because in ended.failure.message
    assert "Remedy" in ended.failure.message


def test_what_could_not_be_exact_is_seen_before_the_first_step() -> None:
    with pytest.raises(StepError, match="SyncBatchNorm"):
        check_module("model", nn.Sequential(nn.SyncBatchNorm(4)))
    check_module("model", nn.Sequential(nn.BatchNorm1d(4)))
    check_parameter("model.weight", torch.zeros(2), 1)
    with pytest.raises(StepError, match="complex64"):
        check_parameter("model.weight", torch.zeros(2, dtype=torch.complex64), 1)
    check_optimizer("optimizer", torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))]))


def test_an_optimizer_that_adds_up_over_elements_is_refused_for_shards(train: Train) -> None:
    def main(run: Run) -> None:
        model = fully_sharded(net())
        run.track(model=model, optimizer=torch.optim.Adafactor(model.parameters()))
        next(iter(run.steps(STEPS)))

    refused(train(main, ranks=1, spares=0, max_restarts=0, batch=BATCH, reduction="exact"), "Adafactor")


def slot_of(index: int, *, added: bool, reduced: bool = False, trained: bool = True) -> ParameterSum:
    slot = ParameterSum(index, f"p{index}", nn.Parameter(torch.zeros(1), requires_grad=trained))
    slot.fresh, slot.reduced = not added, reduced
    return slot


def check(
    once: ExactlyOnce, slots: list[ParameterSum], seen: list[float], alone: list[tuple[ParameterSum, torch.Tensor]]
) -> None:
    once.check_complete(slots, torch.tensor(seen), alone)


def test_at_the_gate_what_was_added_has_been_reduced_unless_it_was_zero() -> None:
    once = ExactlyOnce()
    check(once, [slot_of(0, added=True, reduced=True), slot_of(1, added=False)], [1.0, 9.0], [])
    check(once, [slot_of(0, added=True)], [0.0], [])
    with pytest.raises(StepError, match="gradient of p1 was computed, but not reduced"):
        check(once, [slot_of(0, added=False), slot_of(1, added=True)], [1.0, 0.5], [])


def test_a_gradient_that_lies_there_since_the_step_began_is_not_of_its_backward() -> None:
    once, slot, gradient = ExactlyOnce(), slot_of(0, added=False), torch.zeros(1)
    once.leave([(slot, gradient)])
    check(once, [slot], [0.0], [(slot, gradient)])
    other = slot_of(1, added=False)
    for told, new in [(slot, torch.zeros(1)), (other, torch.zeros(1)), (slot, gradient.add_(1))]:
        with pytest.raises(StepError, match=f"gradient of {told.name} was computed"):
            check(once, [slot, other], [0.0, 0.0], [(told, new)])
    for quiet in (slot_of(0, added=True, reduced=True), slot_of(0, added=False, trained=False)):
        check(once, [quiet], [1.0], [(quiet, torch.zeros(1))])


# -- taken


@pytest.mark.stories
def test_gradients_of_a_model_that_is_not_trained_in_a_step_are_left_alone(train: Train) -> None:
    """They lie there until it is, and are not those of a micro-batch."""

    def main(run: Run) -> None:
        often, seldom = ddp(run), ddp(run)
        first, second = adam(often), adam(seldom)
        both: Any = _Both(first, second)
        show_state(run, nn.ModuleList([often, seldom]), both)
        run.track(often=often, seldom=seldom, first=first, second=second)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            both = int(step) % 2 == 0
            first.zero_grad()
            if both:
                second.zero_grad()
            for batch in data:
                step.backward(loss_of(often, batch) + (loss_of(seldom, batch) if both else 0.0))
            first.step()
            if both:
                second.step()

        for number in run.steps(STEPS):
            step(number)

    assert computed(run_on(train, main, 8)) == computed(run_on(train, main, 2)) == computed(run_on(train, main, 1))


class _Both:
    """The state of two optimizers."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        return {parameter: held for optimizer in self._optimizers for parameter, held in optimizer.state.items()}


class Odd(nn.Module):
    """Parameters without elements, without dims, and whose memory is in another order, or has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(10, 10).t())
        self.with_gaps = nn.Parameter(torch.randn(10, 20)[:, :10].t())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(batch) @ self.turned @ self.with_gaps * self.scalar + self.empty.sum()
        return out


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}])
@pytest.mark.stories
def test_parameters_of_any_shape_and_layout_are_added_exactly(options: dict[str, bool], train: Train) -> None:
    def main(run: Run) -> None:
        model = DDP(Odd(), **options)  # type: ignore[arg-type]
        loop(run, model, adam(model), lambda _, batch: loss_of(model, batch))

    assert computed(run_on(train, main, 3)) == computed(run_on(train, main, 1))


def test_a_phase_may_use_the_loader(train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        others = run.loader(Samples())

        def look() -> None:
            with torch.no_grad():
                for batch in others:
                    model(batch)

        run.every(2, look)
        loop(run, model, adam(model), lambda _, batch: loss_of(model, batch))

    assert computed(run_on(train, main, 2)) == computed(run_on(train, main, 1))
