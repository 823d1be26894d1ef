"""torch.compile of what uses an elastic group: dynamo traces neither the group's collectives nor their works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.worker.loop.unit_runner import UnitRunner
from rackrun.worker.membership.collective_work import GuardedWork
from rackrun.worker.membership.elastic_group import ElasticGroup
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.script.script_checks import ScriptChecks

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
