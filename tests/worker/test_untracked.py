"""What is tracked is not said to be untracked, whichever part of it a step function uses."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from rackrun.worker.script_checks import _elements
from rackrun.worker.state import TrackedState
from rackrun.worker.untracked import Untracked


class Bank:
    def __init__(self) -> None:
        self.queue = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"queue": self.queue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.queue.copy_(state["queue"])


def said(*, track: bool) -> set[str]:
    state, bank = TrackedState(), Bank()
    of_torch, of_numpy, of_python, queue = torch.Generator(), np.random.default_rng(1), random.Random(2), bank.queue
    if track:
        for name, thing in {"torch": of_torch, "numpy": of_numpy, "python": of_python, "bank": bank}.items():
            state.track(name, thing)

    def step(_: int) -> None:
        torch.rand(1, generator=of_torch)
        of_numpy.random()
        of_python.random()
        queue.add_(1)

    untracked, found = Untracked(state), set()
    for number in range(4):
        step(number)
        found |= {change.name for change in untracked.after_step(step, (), {})}
    return found


def test_generators_and_tensors_of_tracked_objects_are_tracked() -> None:
    assert said(track=False) == {"of_torch", "of_numpy", "of_python", "queue"}
    assert not said(track=True)


def test_what_a_library_keeps_to_itself_is_not_looked_into() -> None:
    state, logger, found = TrackedState(), logging.getLogger("of the script"), set()

    def step(_: int) -> None:
        logger.setLevel(logger.level + 1)

    untracked = Untracked(state)
    for number in range(4):
        step(number)
        found |= {change.name for change in untracked.after_step(step, (), {})}
    assert not found


def test_of_a_sparse_gradient_those_elements_count_that_are_there() -> None:
    table = torch.nn.Embedding(100, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    assert _elements([table.weight]) == 6
