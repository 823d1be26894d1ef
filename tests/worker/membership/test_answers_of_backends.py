"""What a backend answers when it is called: NCCL gives nothing for a synchronous call, and not every error is a lost peer's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.protocol.ids import Generation
from rackrun.worker.communicators.deferred_collective import DeferredWork
from rackrun.worker.membership.elastic_group import ElasticGroup
from rackrun.worker.membership.worker_membership import WorkerMembership


@pytest.fixture
def group(world: WorkerMembership) -> ElasticGroup:
    """Of two ranks, in generation 1."""
    group = world.create_default(0, 2)
    world.machine.start_alone(Generation(1))
    return group


def answers(group: ElasticGroup, answer: Callable[..., Any]) -> None:
    """To every collective."""

    group.communicator = SimpleNamespace(call=answer, break_=lambda: None, drop=lambda: None)


def raises(error: Exception) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        raise error

    return answer


def test_of_a_synchronous_call_that_gives_nothing_there_is_a_work_all_the_same(
    group: ElasticGroup, world: WorkerMembership
) -> None:
    """c10d takes whatever it is given for a work, and would end the process. The call stands in the order of the stream."""
    answers(group, lambda *_, **__: None)
    tensor = torch.ones(3)
    work = group.allreduce([tensor])
    assert isinstance(work, dist.Work)
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait() == [tensor]
    assert not world.broken


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("Backend nccl does not support recvAnysource"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("Tensors must be CUDA and dense"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_error_of_the_transport_is_the_callers(
    group: ElasticGroup, world: WorkerMembership, error: Exception
) -> None:
    """To take it for a lost peer would break a healthy generation, and the next, for the same call."""
    answers(group, raises(error))
    with pytest.raises(type(error)):
        group.allreduce([torch.ones(3)])
    assert not world.broken


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:555] Connection closed by peer"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        dist.DistNetworkError("connection reset"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_transport_breaks_the_generation(
    group: ElasticGroup, world: WorkerMembership, error: Exception
) -> None:
    answers(group, raises(error))
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert world.broken
    assert torch.equal(tensor, torch.full((3,), 2.0)), "every peer equals this one"


# -- calls that begin later than they are made
def late(group: ElasticGroup, error: Exception) -> DeferredWork:
    """What a collective of ``group`` returns that has been called before there is a communicator; ``error`` is what its call raises then."""

    def call() -> list[dist.Work]:
        raise error

    work = DeferredWork(call, contextlib.nullcontext(), has_future=False)
    answers(group, lambda *_, **__: work)
    return work


def test_wrong_arguments_of_a_call_that_begins_late_are_the_scripts_error(
    group: ElasticGroup, world: WorkerMembership
) -> None:
    begun = late(group, RuntimeError("ProcessGroupGloo::allreduce: invalid tensor type"))
    work = group.allreduce([torch.ones(3)])
    begun.begin()
    begun.wake_waiters()
    with pytest.raises(RuntimeError, match="invalid tensor type"):
        work.wait()
    assert not world.broken


def test_a_communicator_that_is_broken_before_a_call_could_begin_breaks_the_generation(
    group: ElasticGroup, world: WorkerMembership
) -> None:
    begun = late(group, AssertionError("it never begins"))
    tensor = torch.ones(3)
    work = group.allreduce([tensor])
    begun.fail(RuntimeError("the communicator was broken"))
    begun.begin()
    assert work.wait()
    assert world.broken
    assert tensor.tolist() == [2.0, 2.0, 2.0], "a loopback"
