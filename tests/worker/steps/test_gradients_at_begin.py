"""Gradients when a unit began: an older step's are refused, and an abandoned unit's are cleared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rackrun.errors import StepError
from rackrun.worker.steps.undo.gradients_at_begin import GradientsAtBegin
from rackrun.worker.torch_compat import zero_grad


def parameters() -> list[nn.Parameter]:
    found = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    found[0].grad = torch.ones(2)
    zero_grad.backward_begins()
    return found


def test_gradients_of_an_older_step_are_refused_while_they_are_in_the_sum() -> None:
    held, gradients = parameters(), GradientsAtBegin()
    gradients.begin(held)
    with pytest.raises(StepError, match="gradients of an older step were not cleared"):
        gradients.check_cleared()
    held[0].grad = None
    gradients.check_cleared()


def test_an_abandoned_unit_leaves_zeros_where_there_were_gradients_and_none_elsewhere() -> None:
    held, gradients = parameters(), GradientsAtBegin()
    gradients.begin(held)
    first = held[0].grad
    held[0].grad.add_(1)  # type: ignore[union-attr]
    held[1].grad = torch.ones(2)
    with torch.no_grad():
        gradients.clear(held)
    assert held[0].grad is first
    assert first is not None
    assert not first.any()
    assert held[1].grad is None
    assert held[2].grad is None


def test_parameters_require_gradients_again_as_they_did() -> None:
    held, gradients = parameters(), GradientsAtBegin()
    held[1].requires_grad_(False)
    gradients.begin(held)
    held[0].requires_grad_(False)
    held[1].requires_grad_(True)
    gradients.require_again()
    assert [one.requires_grad for one in held] == [True, False, True]


# -- parameters that join an optimizer -----------------------------------------------------------------------------------
REFUSED = "gradients of an older step were not cleared: a parameter that was added"


def two() -> tuple[list[nn.Parameter], GradientsAtBegin]:
    """An optimizer trains the first, and the second, with a gradient, later."""
    held = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    held[1].grad = torch.ones(2)
    zero_grad.nothing_is_left()
    return held, GradientsAtBegin()


def test_a_gradient_from_before_the_unit_is_refused_when_its_parameter_joins() -> None:
    held, gradients = two()
    gradients.begin(held, held[1:])
    gradients.check_cleared(lambda: held[:1])
    with pytest.raises(StepError, match=REFUSED):
        gradients.check_cleared(lambda: held)
    held[1].grad = torch.ones(2)  # cleared, and a backward pass
    gradients.check_cleared(lambda: held)


def test_zeros_of_a_frozen_parameter_are_no_gradient_of_an_older_step() -> None:
    held, gradients = two()
    held[1].grad.zero_()  # type: ignore[union-attr]
    for _ in range(2):
        gradients.begin(held, held[1:])
    held[1].grad.add_(1)  # type: ignore[union-attr]
    gradients.check_cleared(lambda: held)
    with torch.no_grad():
        gradients.clear(held)
    gradients.begin(held, held[1:])
    gradients.check_cleared(lambda: held)


def test_what_an_abandoned_attempt_has_cleared_is_refused_as_before() -> None:
    held, gradients = two()
    for _ in range(4):
        gradients.begin(held, held[1:])
        with torch.no_grad():
            gradients.clear(held)
    with pytest.raises(StepError, match=REFUSED):
        gradients.check_cleared(lambda: held)


def test_a_gradient_left_by_the_unit_before_is_refused_after_attempts_and_phases_until_it_is_cleared() -> None:
    held, gradients = two()
    gradients.begin(held, (), held[1:])
    with torch.no_grad():
        gradients.clear(held)
    gradients.begin(held)
    with pytest.raises(StepError, match=REFUSED):
        gradients.check_cleared(lambda: held)
    held[1].grad = None
    gradients.check_cleared(lambda: held)


class Optimizer(torch.optim.SGD):
    def __init__(self, *trained: nn.Parameter) -> None:
        super().__init__(trained, lr=0.1)


@pytest.fixture
def counted() -> None:
    zero_grad.install()


@pytest.mark.usefixtures("counted")
def test_a_gradient_that_the_unit_clears_in_place_is_not_of_an_older_step() -> None:
    held, gradients = two()
    gradients.begin(held, held[1:])
    Optimizer(held[0]).zero_grad(set_to_none=False)  # not this one's
    with pytest.raises(StepError, match=REFUSED):
        gradients.check_cleared(lambda: held)
    Optimizer(*held).zero_grad(set_to_none=False)
    held[1].grad.add_(1)  # type: ignore[union-attr]
    gradients.check_cleared(lambda: held)
    with torch.no_grad():
        gradients.clear(held)
    gradients.begin(held, held[1:])  # the next attempt, which does not clear it
    with pytest.raises(StepError, match=REFUSED):
        gradients.check_cleared(lambda: held)


@pytest.mark.usefixtures("counted")
def test_a_gradient_that_the_unit_before_has_cleared_in_place_at_its_end_is_not_of_an_older_step() -> None:
    held, gradients = two()
    gradients.begin(held, held[1:])
    held[1].grad.add_(1)  # type: ignore[union-attr]
    Optimizer(*held).zero_grad(set_to_none=False)
    for _ in range(2):  # attempts
        gradients.begin(held, held[1:])
        held[1].grad.add_(1)  # type: ignore[union-attr]
        gradients.check_cleared(lambda: held)
        with torch.no_grad():
            gradients.clear(held)


@pytest.mark.usefixtures("counted")
def test_only_clearing_the_gradient_that_was_left_counts() -> None:
    held, gradients = two()
    gradients.begin(held, (), held[1:])
    Optimizer(held[0]).zero_grad(set_to_none=False)
    with pytest.raises(StepError, match=REFUSED):
        gradients.check_cleared(lambda: held)
    nn.ParameterList(held).zero_grad(set_to_none=False)
    gradients.check_cleared(lambda: held)


@pytest.mark.usefixtures("counted")
def test_zeros_that_an_abandoned_unit_has_replaced_are_no_gradient_of_an_older_step() -> None:
    """As views of DDP's buckets are, when it is reset."""
    held, gradients = two()
    gradients.begin(held, held[1:])
    Optimizer(*held).zero_grad(set_to_none=False)
    gradients.begin(held, held[1:])
    held[1].grad = torch.ones(2)
    with torch.no_grad():
        gradients.clear(held)
    gradients.begin(held, held[1:])
    held[1].grad.add_(1)
    gradients.check_cleared(lambda: held)
