"""torch.compile of what uses an elastic group: dynamo traces neither the group's collectives nor their works."""

from __future__ import annotations

import functools
import inspect
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rackrun.worker.loop.run import Run
from rackrun.worker.loop.unit_runner import UnitRunner
from rackrun.worker.membership.collective_work import GuardedWork
from rackrun.worker.membership.elastic_group import ElasticGroup
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.script.script_checks import ScriptChecks
from rackrun.worker.steps.step import Step
from tests.worker.harness import TRACED, Ended
from tests.worker.integrity.test_corruption import wait_for_spares
from tests.worker.loop.test_resizing import SHRINK
from tests.worker.scripts import STEPS, Samples, Script, adam, ddp, loss_of

Train = Callable[..., Ended]

COLLECTIVES = [
    name
    for name, function in inspect.getmembers(ElasticGroup, inspect.isfunction)
    if not name.startswith(("_run", "_start", "_call", "_end"))
    and inspect.signature(function).return_annotation in ("dist.Work", dist.Work)
]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_not_traced(name: str) -> None:
    assert getattr(getattr(ElasticGroup, name), "_torchdynamo_disable", False)


@pytest.mark.parametrize("name", ["wait", "get_future", "result"])
def test_a_wait_is_not_traced(name: str) -> None:
    assert getattr(getattr(GuardedWork, name), "_torchdynamo_disable", False)


@pytest.mark.parametrize(
    "hook", [UnitRunner._before_optimizer, ScriptChecks._before_optimizer, ScriptChecks._after_optimizer]
)
def test_a_hook_of_optimizers_is_not_traced(hook: Callable[..., Any]) -> None:
    assert getattr(hook, "_torchdynamo_disable", False)


def test_all_collectives_are_looked_at() -> None:
    assert {"allreduce", "broadcast", "_allgather_base", "reduce_scatter", "batch", "barrier"} < set(COLLECTIVES)


def test_a_compiled_function_does_not_keep_a_place_that_has_changed(world: WorkerMembership) -> None:
    group = world.create_default(1, 3)

    def placed(batch: torch.Tensor) -> torch.Tensor:
        return batch * (10 * group.rank() + group.size())

    torch.compiler.reset()
    compiled = torch.compile(placed, backend="eager")
    assert compiled(torch.ones(1)).item() == 13
    group.become((0, 1), 0)
    assert compiled(torch.ones(1)).item() == 2


def test_a_collective_that_torch_calls_inside_of_a_compiled_model(world: WorkerMembership) -> None:
    """DDP's forward broadcasts the buffers of a BatchNorm so: C++ calls the group, while dynamo follows each frame."""
    group = world.create_default(1, 3)
    buffer = torch.ones(4)

    def exchange() -> None:
        dist._broadcast_coalesced(group, [buffer], 1 << 20, 0)

    leave_graph = torch.compiler.disable(exchange, recursive=False)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        leave_graph()
        return batch + buffer

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="eager")
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))


class ByRank(nn.Module):
    """A model whose forward asks for this process's rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(14))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.weight * (1.0 + 0.25 * dist.get_rank()) / dist.get_world_size()


def by_rank(*, compiled: bool = True, dies: int | None = None, spares: bool = True) -> Script:
    """``dies``: the rank that is lost, in step 4; without spares in the last step, before anybody can join again."""
    at = 4 if spares else STEPS - 1

    def main(run: Run) -> None:
        model = ddp(run, ByRank())
        optimizer = adam(model)
        called: Any = torch.compile(model, backend="eager") if compiled else model
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(called, batch))
            if (int(step), run.rank, run.generation) == (at, dies, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)
            if spares:
                wait_for_spares(run, number)

    return main


@pytest.mark.stories
def test_a_spare_that_has_compiled_as_another_rank_computes_as_the_one_that_it_replaces(train: Train) -> None:
    reference = train(by_rank())
    ended = train(by_rank(dies=2), spares=2)
    assert ended.plans
    assert not ended.differences(reference), ended


@pytest.mark.stories
def test_compiled_ranks_compute_as_those_that_are_not_when_the_world_shrinks(train: Train) -> None:
    reference = train(by_rank(compiled=False, dies=1, spares=False), **SHRINK)
    ended = train(by_rank(dies=1, spares=False), **SHRINK)
    assert [plan.world_size for plan in ended.plans] == [3]
    assert not ended.restarted
    assert not ended.differences(reference), ended


def by_size(*, fullgraph: bool = False) -> Script:
    """A compiled function reads rackrun's own size of the world, and its rank."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @functools.partial(torch.compile, backend="eager", fullgraph=fullgraph)
        def scaled(loss: torch.Tensor) -> torch.Tensor:
            return loss * (1 + run.rank) / run.world_size

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(scaled(loss_of(model, batch)))
            if (int(step), run.rank, run.generation) == (STEPS - 1, 1, 1):  # before anybody can join again
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    return main


@pytest.mark.stories
def test_a_compiled_function_reads_the_size_of_the_world_as_it_is(train: Train) -> None:
    ended = train(by_size(), **SHRINK)
    assert [plan.world_size for plan in ended.plans] == [3]
    assert ended.exit_code == 0, ended


@TRACED
def test_a_whole_graph_that_reads_the_rank_says_what_to_do(train: Train) -> None:
    ended = train(by_size(fullgraph=True), ranks=2, max_restarts=0)
    assert ended.failure is not None, ended
    assert "Remedy: read it before the compiled function is called" in ended.failure.message


def compiled_step(run: Run, function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Any = torch.compile(function, backend="eager")
    return run.step(compiled)


def compiled_call(run: Run, function: Callable[..., Any]) -> Callable[..., Any]:
    called: Callable[..., Any] = torch.compile(run.step(function), backend="eager")
    return called


def compiled_caller(run: Run, function: Callable[..., Any]) -> Callable[..., Any]:
    inner = run.step(function)

    def turn(number: int) -> None:
        inner(number)

    called: Callable[..., Any] = torch.compile(turn, backend="eager")
    return called


@TRACED
@pytest.mark.parametrize("way", [compiled_step, compiled_call, compiled_caller])
def test_a_compiled_step_function_is_refused_with_a_remedy(train: Train, way: Callable[..., Any]) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)

        def train_step(step: Step) -> None:
            step.backward(loss_of(model, torch.ones(2, 14)))
            optimizer.step()

        called = way(run, train_step)
        for number in run.steps(STEPS):
            called(number)

    ended = train(main, ranks=2, max_restarts=0)
    assert ended.failure is not None, ended
    assert ended.failure.type == "rackrun.errors.StepError"
    assert "train_step is compiled" in ended.failure.message
    assert "Remedy: compile the model" in ended.failure.message
