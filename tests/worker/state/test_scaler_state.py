"""A tracked GradScaler: its state travels and is put back without being read in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from rackrun.worker.state.objects.scaler_state import ScalerState
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from tests.worker.state.test_state import carried


class Scaled:
    """A model, its optimizer and a scaler that has done so many steps; of these, ``infinite`` ones were skipped."""

    def __init__(self, steps: int = 0, *, infinite: int = 0) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.state = TrackedState()
        self.state.track("model", self.model)
        self.state.track("optimizer", self.optimizer)
        self.state.track("scaler", self.scaler)
        for number in range(steps):
            self.step(float("inf") if number < infinite else 1.0)

    def step(self, factor: float = 1.0) -> None:
        self.scaler.scale(self.model(torch.full((1, 2), factor)).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("held", [0, 2])
@pytest.mark.parametrize("given", [0, 4])
def test_a_newcomers_scaler_goes_on_as_its_sources(given: int, held: int) -> None:
    source, newcomer = Scaled(given, infinite=1), Scaled(held)
    carried(source.state, newcomer.state)
    assert newcomer.scaler.state_dict() == source.scaler.state_dict()
    assert newcomer.state.content() == source.state.content(), "also while one has not scaled yet"
    for one in (source, newcomer):
        one.step()
    assert newcomer.scaler.state_dict() == source.scaler.state_dict()


@pytest.mark.parametrize("before", [0, 2])
def test_a_step_that_does_not_count_leaves_the_scaler_as_it_was(before: int) -> None:
    it = Scaled(before)
    was = it.scaler.state_dict()
    undo = UnitUndo(it.state)
    for _ in range(2):
        undo.begin()
        it.scaler.scale(it.model(torch.full((1, 2), float("inf"))).sum()).backward()
        it.scaler.unscale_(it.optimizer)
        it.scaler.update()
        assert it.scaler.state_dict() != was
        assert undo.discard(backward_open=False) == []
        assert it.scaler.state_dict() == was
        assert not it.scaler._per_optimizer_states


def test_a_checkpoint_of_before_has_numbers() -> None:
    it = Scaled(2)
    it.state.others["scaler"].load_state_dict({**it.scaler.state_dict(), "scale": 8.0, "_growth_tracker": 1})
    assert it.scaler.get_scale() == 8.0
    assert it.scaler.state_dict()["_growth_tracker"] == 1


@pytest.mark.parametrize("change", [GradScaler.update, lambda scaler: scaler.update(2.0)])
def test_an_update_between_two_steps_is_seen(change: Callable[[Any], None]) -> None:
    it = Scaled(2)
    undo = UnitUndo(it.state)
    undo.begin()
    it.step()
    undo.ended()
    undo.committed()
    assert undo.changed_since() == ""
    it.scaler.scale(torch.ones(1))
    it.scaler._per_optimizer_states[1]["found_inf_per_device"] = {torch.device("cpu"): torch.ones(())}
    change(it.scaler)
    assert undo.changed_since().startswith("tracked state")


def test_a_step_reads_no_number_of_the_scalers(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scaled(2)
    undo = UnitUndo(it.state)

    def refused(_: torch.Tensor) -> Any:
        raise AssertionError("read")

    undo.begin()
    it.step()
    monkeypatch.setattr(torch.Tensor, "item", refused)
    monkeypatch.setattr(torch.Tensor, "__float__", refused)
    undo.before_update()
    undo.ended()
    undo.committed()
    undo.check_stands()
    undo.begin()


def test_a_scaler_that_is_off_or_tells_its_state_itself_is_left_alone() -> None:
    class Own(GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return {"own": 1}

    state = TrackedState()
    state.track("own", Own("cpu"))
    state.track("off", GradScaler("cpu", enabled=False))
    assert not isinstance(state.others["own"], ScalerState)
    assert state.others["off"].state_dict() == {}
    state.others["off"].load_state_dict({})
