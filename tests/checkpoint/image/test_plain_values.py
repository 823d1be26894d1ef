"""State dicts without their tensors: what cannot be encoded is refused before anything is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.plain_values import DEPTH_MAX, leaves, with_tensors, without_tensors
from rackrun.checkpoint.manager.user_state import Contents
from rackrun.errors import UsageError


def test_tensors_come_back_to_their_places() -> None:
    state = {"a": [torch.ones(2), {"b": torch.zeros(1)}], "step": 3}
    found = dict(leaves("model", state))
    assert [*found] == ["model/a/0", "model/a/1/b"]
    back = with_tensors(without_tensors("model", state), found)
    assert back["a"][0] is state["a"][0]  # type: ignore[index]
    assert back["step"] == 3


@pytest.mark.parametrize("function", [leaves, without_tensors], ids=lambda function: function.__name__)
def test_a_container_that_contains_itself_is_refused(function: Callable[[str, Any], object]) -> None:
    ring: list[Any] = []
    ring += [ring, ring]
    with pytest.raises(UsageError, match=r"model/state/.* contains itself"):
        function("model", {"state": ring})


@pytest.mark.parametrize("function", [leaves, without_tensors], ids=lambda function: function.__name__)
def test_deep_state_is_no_ring(function: Callable[[str, Any], object]) -> None:
    state: Any = torch.ones(1)
    for _ in range(DEPTH_MAX + 1):
        state = [state]
    function("model", state)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("made", [lambda ring: ring, Holder], ids=["a value", "what an object holds"])
def test_a_manager_refuses_state_that_contains_itself(made: Callable[[Any], Any]) -> None:
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    with pytest.raises(LayoutMismatch):
        Contents({"thing": made(ring)}).describe()
