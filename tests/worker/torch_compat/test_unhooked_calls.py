"""Which calls of torch's the listener of a run is told of, and which leaves a backward reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, Dataset

from rackrun.worker.torch_compat import unhooked_calls


class Listening:
    attempt = 7

    def __init__(self) -> None:
        self.heard: list[object] = []

    def backward(self, roots: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        self.heard.append(("backward", len(roots)))
        return lambda: self.heard.append("over")

    def record_batch_read(self, begun_in: Any) -> None:
        self.heard.append(("reads", begun_in))

    def record_change(self, thing: Any, call: str) -> None:
        self.heard.append((type(thing).__name__, call))


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    unhooked_calls.install()
    listener = Listening()
    unhooked_calls.listen(listener)
    yield listener
    unhooked_calls.listen(None)


def test_a_backward_of_whole_losses_is_told_when_it_begins_and_is_over(listening: Listening) -> None:
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    torch.autograd.backward([weight.sum(), weight.prod()])
    assert listening.heard == [("backward", 1), "over", ("backward", 2), "over"]
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0]


def test_a_backward_of_a_part_is_none(listening: Listening) -> None:
    """Into chosen inputs only, or of what is no loss: a part of a larger one."""
    weight = torch.ones(2, requires_grad=True)
    torch.autograd.backward(weight.sum(), inputs=[weight])
    torch.autograd.backward(weight * 2, torch.ones(2))
    torch.autograd.backward([weight * 2], [torch.ones(2)])
    assert not listening.heard
    torch.autograd.backward([weight.sum()], [None])
    assert listening.heard == [("backward", 1), "over"]


def test_a_batch_is_told_with_what_the_attempt_was_when_its_iteration_began(listening: Listening) -> None:
    batches = iter(DataLoader(cast("Dataset[float]", [1.0, 2.0])))
    listening.attempt = 8
    assert [float(batch) for batch in batches] == [1.0, 2.0]
    assert listening.heard == [("reads", 7)] * 3, "the third finds the end"


def test_a_scheduler_is_told_once_though_it_steps_others(listening: Listening) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    both = lr_scheduler.SequentialLR(optimizer, parts, [2])
    listening.heard.clear()
    optimizer.step()
    both.step()
    assert listening.heard == [("SequentialLR", "step")]


def test_without_a_listener_they_are_torchs_own(listening: Listening) -> None:
    unhooked_calls.listen(None)
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    assert list(map(float, DataLoader(cast("Dataset[float]", [1.0])))) == [1.0]
    assert not listening.heard


def reached(*losses: torch.Tensor) -> set[int]:
    return {id(leaf) for leaf in unhooked_calls.leaves(losses)}


def test_leaves_are_those_behind_the_losses_but_not_behind_what_is_weighted() -> None:
    one, two, three = (torch.ones(1, requires_grad=True) for _ in range(3))
    held = torch.ones(1)
    assert reached((one * two * held).sum()) == {id(one), id(two)}
    assert len(unhooked_calls.leaves([one * one, one * two])) == 2, "each once"
    assert reached(three, held) == {id(three)}
    weighted = two * 3
    unhooked_calls.mark_weighted(weighted)
    unhooked_calls.mark_weighted(held)
    assert reached(one.sum() + weighted.sum()) == {id(one)}
