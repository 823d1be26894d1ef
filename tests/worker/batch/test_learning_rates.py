"""Learning rates are scaled while an optimizer's ``step()`` runs: what reads or writes them before and after sees the script's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rackrun.errors import StepError
from rackrun.worker.batch.learning_rates import LearningRates
from tests.worker import harness  # noqa: F401 - sets the number of threads before torch is imported

FACTOR = 0.75


@pytest.fixture
def rates() -> Iterator[LearningRates]:
    rates = LearningRates()
    before = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.scale(optimizer, FACTOR))
    after = register_optimizer_step_post_hook(lambda optimizer, *_: rates.restore(optimizer))
    yield rates
    before.remove()
    after.remove()


def weights() -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(4.0))
    parameter.grad = torch.ones(4)
    return parameter


def moved(make: Any, **options: Any) -> torch.Tensor:
    parameter = weights()
    make([parameter], **options).step()
    return parameter.detach()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_the_step_is_that_of_the_scaled_rate(
    make: Any, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    expected = moved(make, lr=0.1 * FACTOR, **options)
    request.getfixturevalue("rates")
    assert torch.equal(moved(make, lr=0.1, **options), expected)


def test_fused_too(request: pytest.FixtureRequest) -> None:
    expected = moved(torch.optim.AdamW, lr=0.1 * FACTOR, fused=True)
    request.getfixturevalue("rates")
    assert torch.equal(moved(torch.optim.AdamW, lr=0.1, fused=True), expected)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor_bit_for_bit(rates: LearningRates) -> None:
    rate = torch.tensor(0.1)
    one, other = weights(), weights()
    optimizer = torch.optim.AdamW([{"params": [one]}, {"params": [other]}], lr=rate)
    for group in optimizer.param_groups:
        group["lr"] = rate  # one for all groups
    optimizer.step()
    assert torch.equal(one, other)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate.item() == torch.tensor(0.1).item()


def test_schedulers_see_the_scripts_own_rates(rates: LearningRates) -> None:
    """Whether they multiply what is there or compute it anew."""
    parameter = weights()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for scheduler in (
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ):
        before = optimizer.param_groups[0]["lr"]
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == before
        scheduler.step()
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_a_scaler_that_skips_a_step_leaves_them_alone(rates: LearningRates) -> None:
    parameter = weights()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameter.grad = None
    scaler.scale((parameter * torch.tensor([float("inf"), 1, 1, 1])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.arange(4.0))
    assert optimizer.param_groups[0]["lr"] == 0.1
    parameter.grad = None
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(parameter.detach(), torch.arange(4.0) - 0.1 * FACTOR)


class Wrapper(torch.optim.SGD):
    """Shares the groups of another, whose step it calls in its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr=1.0)
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)


def test_a_wrapper_around_an_optimizer_scales_once(rates: LearningRates) -> None:
    parameter = weights()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    Wrapper(optimizer).step()
    assert torch.equal(parameter.detach(), torch.arange(4.0) - 0.1 * FACTOR)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_a_hook_of_the_scripts_writes_meanwhile_stays(rates: LearningRates) -> None:
    optimizer = torch.optim.SGD([weights()], lr=0.1)
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.3))
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_step_that_raises_leaves_nothing_scaled_once_the_unit_is_over(rates: LearningRates) -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("in the middle")

    optimizer = Raises([weights()], lr=torch.tensor(0.1))
    with pytest.raises(RuntimeError, match="in the middle"):
        optimizer.step()
    rates.restore_all()
    assert optimizer.param_groups[0]["lr"].item() == torch.tensor(0.1).item()


@pytest.mark.parametrize("rate", [None, "0.1", torch.tensor(1)])
def test_an_optimizer_without_a_rate_is_refused(rate: Any) -> None:
    optimizer = torch.optim.SGD([weights()], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(StepError, match="no learning rate"):
        LearningRates().check("optimizer", optimizer)
