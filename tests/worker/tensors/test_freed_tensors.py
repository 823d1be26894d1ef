"""Tracked tensors whose memory is gone: the script's own exception is told, or the tensor is named. No process ends by SIGSEGV."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from rackrun.errors import StepError
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from rackrun.worker.tensors.freed_tensors import is_freed, refuse_freed
from rackrun.worker.tensors.tensor_bytes import digests_by_path
from rackrun.worker.tensors.undo_copies import UndoCopies, same_bits
from tests.worker.harness import HOSTS_ONLY, Ended, say
from tests.worker.scripts import WIDTH, Samples, adam, fully_sharded, loss_of, net

Train = Callable[..., Ended]


def freed(tensor: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """Its storage has ``keep`` bytes."""
    tensor.untyped_storage().resize_(keep)
    return tensor


# -- one tensor --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3),
        torch.ones(2, 3).t(),
        torch.ones(1).expand(1000),
        torch.ones(4, 4)[1:, 2:],
        torch.ones(8)[::3],
        torch.ones(()),
        torch.empty(0, 3),
        freed(torch.ones(4)[4:]),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        TwoTensor(torch.ones(3), torch.ones(3)),
        nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
)
def test_what_has_its_memory_is_not_taken_for_freed(tensor: torch.Tensor) -> None:
    assert not is_freed(tensor)
    refuse_freed({"model/param/it": tensor})


@pytest.mark.parametrize(
    "tensor",
    [
        freed(torch.ones(2)),
        freed(torch.ones(2), keep=7),
        freed(torch.ones(4, 4)[3:]),
        freed(torch.ones(4, 4)[3:], keep=48),
        freed(torch.ones(4, 4).t()),
        freed(torch.ones(1).expand(5)),
        nn.Parameter(freed(torch.ones(3), keep=8)),
    ],
)
def test_a_storage_that_is_too_small_is_found(tensor: torch.Tensor) -> None:
    assert is_freed(tensor)
    with pytest.raises(
        StepError, match=r"the memory of model\.a\.weight, which is tracked, was freed.*Remedy: .*copy_\(b\)"
    ):
        digests_by_path({"model/param/whole": torch.ones(2), "model/param/a.weight": tensor})


def test_what_was_freed_is_not_copied() -> None:
    copies, tensor = UndoCopies(), torch.ones(3)
    with pytest.raises(StepError, match=r"the memory of model\.gone"):
        copies.take(
            {
                "model/buffer/there": tensor,
                "model/buffer/empty": torch.ones(0),
                "model/buffer/gone": freed(torch.ones(3)),
            }
        )
    assert list(copies) == []
    copies.take({"it": tensor, "empty": torch.ones(0)})
    tensor.untyped_storage().resize_(0)
    assert not copies.equals("it", tensor)
    assert not same_bits(tensor, torch.ones(3))
    with pytest.raises(StepError, match="the memory of it"):
        copies.put_back("it", tensor)


# -- a job -------------------------------------------------------------------------------------------------------------------
def fails_in_forward(run: Run) -> nn.Sequential:
    """FSDP2 keeps the whole parameters between forward and backward, and so believes to be in a forward when one is left by an exception."""
    model = net(hidden=WIDTH)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=False)
    return fully_sharded(model)


def exchanges_data(model: nn.Sequential) -> None:
    one, other = model[0].weight, model[-1].weight
    one.data, other.data = other.data, one.data


def trains(
    run: Run,
    model: Any,
    *,
    steps: int = 5,
    between: Callable[[], None] = lambda: None,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """``between``: forward and backward of the second step; ``after``: each optimizer step, in the step."""
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            loss = loss_of(model, batch)
            if int(step) == 1:
                between()
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        after(int(step))

    for number in run.steps(steps):
        step(number)


def exchanged(run: Run) -> None:
    model = fails_in_forward(run)
    trains(run, model, between=lambda: exchanges_data(model))


def buffered(run: Run) -> nn.Module:
    model = net()
    model.register_buffer("mask", torch.ones(3))
    model.to(run.device)
    return DistributedDataParallel(model)


def loses_mask(model: Any) -> None:
    model.module.mask.data = freed(torch.ones(3)).to(model.module.mask.device)


def quietly(run: Run) -> None:
    model = buffered(run)
    trains(run, model, after=lambda number: loses_mask(model) if number == 0 else None)


def in_the_last_step(run: Run) -> None:
    model = buffered(run)
    trains(run, model, after=lambda number: loses_mask(model) if number == 4 else None)


def and_raises(run: Run) -> None:
    model = buffered(run)

    def after(number: int) -> None:
        if number == 3:
            loses_mask(model)
            raise ZeroDivisionError("the script's own")

    trains(run, model, after=after)


def and_catches(run: Run) -> None:
    """Its own exception, and there is none when ``main`` is over."""
    try:
        and_raises(run)
    except ZeroDivisionError:
        say(caught=True)


@HOSTS_ONLY
@pytest.mark.parametrize(
    ("main", "kind", "words"),
    [
        (exchanged, "RuntimeError", "out of bounds for storage of size 0"),
        (quietly, "StepError", "the memory of model.module.mask"),
        (in_the_last_step, "StepError", "the memory of model.module.mask"),
        (and_raises, "ZeroDivisionError", "the script's own"),
        (and_catches, "StepError", "the memory of model.module.mask"),
    ],
)
def test_a_script_that_frees_tracked_memory_ends_with_a_reason(
    main: Callable[[Run], None], kind: str, words: str, train: Train
) -> None:
    ended = train(main, ranks=2, max_restarts=0)
    assert ended.exit_code == 1, ended
    assert ended.failure is not None, ended
    assert ended.failure.type.endswith(kind), ended
    assert words in ended.failure.message.replace("model/", "model."), ended


def test_the_end_of_the_loop_is_of_shards_where_an_exception_has_left_a_forward(train: Train) -> None:
    """The script catches it, and goes on."""

    def main(run: Run) -> None:
        model = fails_in_forward(run)

        due: list[int] = []

        def fails(*_: Any) -> None:
            if due:
                raise ZeroDivisionError(due.pop())  # once

        model[0].register_forward_pre_hook(fails)
        with contextlib.suppress(ZeroDivisionError):
            trains(run, model, after=lambda number: due.append(number) if number == 2 else None)
        parameters: dict[str, Any] = dict(model.named_parameters())
        shards = {path: tuple(one.to_local().shape) for path, one in parameters.items()}
        kept = run._units._rejoin.loop_end._manifest
        assert kept is not None
        found = {info.path.partition("/param/")[2]: info.shape for info in kept.tensors if "/param/" in info.path}
        say(same=found == shards, count=len(shards))

    ended = train(main, ranks=2, max_restarts=0)
    assert ended.exit_code == 0, ended
    assert ended.said[0] == ended.said[1] == {"same": True, "count": 4}
