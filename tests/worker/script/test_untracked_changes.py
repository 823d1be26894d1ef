"""What is tracked is not said to be untracked, whichever part of it a step function uses."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from rackrun.worker.loop.run import Run
from rackrun.worker.script.gradient_checks import _elements
from rackrun.worker.script.untracked_changes import UntrackedChanges
from rackrun.worker.state.tracked_state import TrackedState
from tests.worker.harness import Ended
from tests.worker.scripts import adam, ddp, fit


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

    untracked, found = UntrackedChanges(state), set()
    for number in range(4):
        step(number)
        found |= {change.name for change in untracked.after_step(step, (), {})}
    return found


def test_generators_and_tensors_of_tracked_objects_are_tracked() -> None:
    assert said(track=False) == {"of_torch", "of_numpy", "of_python", "queue"}
    assert not said(track=True)


@pytest.mark.parametrize("loads", [True, False])
def test_what_a_tracked_object_saves_and_loads_by_a_variables_name_is_tracked(loads: bool) -> None:
    """A small class around a dictionary of `main`."""
    state, elsewhere = TrackedState(), {"n": 0}
    counters: dict[str, Any] = {"tokens": 0, "curve": []}

    class Box:
        def state_dict(self) -> dict[str, Any]:
            return dict(counters, n=elsewhere["n"])

        def load_state_dict(self, told: dict[str, Any]) -> None:
            if loads:
                counters.update(told)

    if not loads:
        Box.load_state_dict = lambda *_: None  # type: ignore[method-assign]
    state.track("box", Box())

    def step(number: int) -> None:
        counters["tokens"] += 24
        counters["curve"].append(number)
        elsewhere["n"] += 1

    untracked, found = UntrackedChanges(state), set()
    for number in range(4):
        step(number)
        found |= {change.name for change in untracked.after_step(step, (), {})}
    assert found == ({"elsewhere['n']"} if loads else {"elsewhere['n']", "counters['tokens']"})


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), 1.0


class AsFSDP2Does:
    __module__ = "torch.distributed.fsdp"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_number_on_a_tracked_module_is_named_in_the_step_after_it_was_first_seen_to_change(wrapped: bool) -> None:
    state, model = TrackedState(), Scaled()
    if wrapped:  # fully_shard puts a class of torch's before the script's own
        model.__class__ = type("FSDPScaled", (AsFSDP2Does, Scaled), {"__module__": "torch.distributed.fsdp"})
    state.track("model", model)

    def step(number: int) -> None:
        if number >= 7:
            model.scale *= 0.9

    untracked, found = UntrackedChanges(state), dict[int, list[str]]()
    for number in range(12):
        step(number)
        if changes := untracked.after_step(step, (), {}):
            found[number] = [change.name for change in changes]
    assert found == {8: ["model.scale"]}


def test_what_a_library_keeps_to_itself_is_not_looked_into() -> None:
    state, logger, found = TrackedState(), logging.getLogger("of the script"), set()

    def step(_: int) -> None:
        logger.setLevel(logger.level + 1)

    untracked = UntrackedChanges(state)
    for number in range(4):
        step(number)
        found |= {change.name for change in untracked.after_step(step, (), {})}
    assert not found


def test_variables_of_one_name_in_two_modules_are_two() -> None:
    def of(module: str, size: int) -> Callable[..., Any]:
        there: dict[str, Any] = {"__name__": module, "SIZE": size}
        exec("def used():\n    return SIZE, __name__", there)
        return cast("Callable[..., Any]", there["used"])

    one, other, untracked = of("scripts.one", 1), of("scripts.other", 2), UntrackedChanges(TrackedState())

    def step(_: int) -> None:
        one(), other()

    assert not [change for _ in range(4) for change in untracked.after_step(step, (), {})]


def test_a_module_may_call_something_else_its_buffers() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.BatchNorm1d(2)
            self.buffers: Any = []

    wrapper, untracked = Wrapper(), UntrackedChanges(TrackedState())

    def step(_: int) -> None:
        wrapper.net(torch.randn(4, 2))

    found = []
    for number in range(4):
        step(number)
        found += untracked.after_step(step, (), {})
    assert [(change.name, change.meant_to_be_kept) for change in found] == [("wrapper", True)]


def test_of_a_sparse_gradient_those_elements_count_that_are_there() -> None:
    table = torch.nn.Embedding(100, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    assert _elements([table.weight]) == 6


def test_what_a_hook_of_ddp_feeds_back_is_untracked_unless_it_is_tracked(
    train: Callable[..., Ended], capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's own PowerSGD, too: a process that takes over would compress nothing while the others do, and feed back no error."""

    class Kept(powerSGD_hook.PowerSGDState):
        def state_dict(self) -> dict[str, Any]:
            return {"iter": self.iter, "errors": self.error_dict}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.iter, self.error_dict = state["iter"], state["errors"]

    def compressed(state_class: type[powerSGD_hook.PowerSGDState], **tracked: Any) -> Callable[[Run], None]:
        def main(run: Run) -> None:
            model = ddp(run)
            state = state_class(None, start_powerSGD_iter=100)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            more: dict[str, Any] = dict.fromkeys(tracked, state)
            fit(run, model, adam(model), **more)

        return main

    ended = train(compressed(powerSGD_hook.PowerSGDState), ranks=2, batch=(4, 2))
    assert ended.exit_code == 0, ended
    assert "the step function changes PowerSGDState.iter" in capfd.readouterr().err
    ended = train(compressed(Kept, compression=True), ranks=2, batch=(4, 2))
    assert ended.exit_code == 0, ended
    assert "which run.track was not given" not in capfd.readouterr().err
