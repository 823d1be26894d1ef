"""What a step function reaches: by name, and the same text for the same bits."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rackrun.chaos.inprocess.untracked_state import LOOKED_AT_MAX, described, frames_of_script, reached

COUNTER = {"steps": 3}


class Mean:
    def __init__(self) -> None:
        self.value, self.history = 0.5, deque([1.0, 2.0])


class Slotted:
    __slots__ = ("held", "never")

    def __init__(self) -> None:
        self.held = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.running = 0.25


def helper() -> int:
    return COUNTER["steps"]


def step_with(**variables: Any) -> Callable[[], Any]:
    """A step function whose closure holds them."""
    mean, other = variables.get("mean"), variables.get("other")

    def step() -> tuple[Any, Any, int]:
        return mean, other, helper()

    return step


def test_closures_globals_and_what_is_called_are_looked_at() -> None:
    found = reached(step_with(mean=Mean()), {}, ())
    assert found["mean.value"] == "0.5"
    assert found["mean.history[1]"] == "2.0"
    assert found["COUNTER['steps']"] == "3"


def test_plain_attributes_of_a_tracked_module_are_seen_and_its_tracked_tensors_are_not() -> None:
    net = Net()
    found = reached(step_with(mean=net), {}, net.parameters())
    assert found["mean.running"] == "0.25"
    assert not [name for name in found if "weight" in name or "bias" in name]
    assert "mean.inner.weight" in reached(step_with(mean=net), {}, ())


def test_a_scheduler_is_told_without_its_optimizer() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = reached(step_with(mean=scheduler), {}, ())
    assert found["mean.last_epoch"] == "0"
    assert not [name for name in found if "optimizer" in name]


def test_generators_are_told_by_their_state() -> None:
    for make in (random.Random, np.random.default_rng, np.random.RandomState):
        drawn = make(3)
        before = reached(step_with(mean=drawn), {}, ())["mean"]
        drawn.random()
        assert reached(step_with(mean=drawn), {}, ())["mean"] != before
        assert reached(step_with(mean=make(3)), {}, ())["mean"] == before
    assert "mean" in reached(step_with(mean=torch.Generator()), {}, ())


def test_what_a_step_function_is_given_is_looked_at() -> None:
    assert reached(None, {"step(mean)": Mean()}, ())["step(mean).value"] == "0.5"


def test_slots_sets_and_long_lists() -> None:
    found = reached(step_with(mean=Slotted(), other={"b", "a"}), {}, ())
    assert found["mean.held"] == "7"
    assert found["other"] == reached(step_with(other={"a", "b"}), {}, ())["other"]
    long = reached(step_with(mean=list(range(100))), {}, ())["mean"]
    assert long.startswith("100 things")
    assert long != reached(step_with(mean=[*range(99), 0]), {}, ())["mean"]


def test_what_refers_to_itself_comes_to_an_end_and_so_does_what_is_large() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert reached(step_with(mean=loop), {}, ()) == reached(step_with(mean=loop), {}, ())
    large = [[float(i + j) for i in range(10)] for j in range(2000)]
    assert len(reached(step_with(mean=large), {}, ())) <= LOOKED_AT_MAX


def test_equal_bits_are_told_alike_and_others_are_not() -> None:
    one = torch.arange(8.0)
    assert described(one) == described(one.clone())
    assert described(one) != described(one.view(2, 4))
    flipped = one.clone()
    flipped.view(torch.uint8)[0] ^= 1
    assert described(flipped) != described(one)
    assert described(torch.tensor(0.5)) == "0.5"
    turned = torch.randn(3, dtype=torch.complex64)
    assert described(turned) == described(turned.clone()) != described(turned.conj())
    assert described(torch.eye(3).to_sparse()).startswith("float32[3, 3] torch.sparse")
    assert described(torch.empty(3, device="meta")).startswith("float32[3]")
    assert len(described("x" * 1000)) < 100
    assert described("x" * 1000) != described("x" * 1001)


class Counted:
    """What is of all of them stands in the class."""

    made = 0

    def __init__(self) -> None:
        Counted.made += 1

    def look(self) -> int:
        return COUNTER["steps"]


def numbers() -> Iterator[int]:
    total = 0
    while True:
        total += 1
        yield total


def test_the_variables_around_the_loop_are_looked_at_and_what_they_hold() -> None:
    """Main's own, and those of the methods that stand between it and the loop."""

    class Trainer:
        def __init__(self) -> None:
            self.best = 0.25

        def fit(self) -> dict[str, str]:
            seen = ["a"]
            return reached(None, {}, (), frames_of_script(sys._getframe())) if seen else {}

    average = 0.5
    found = Trainer().fit()
    assert found["self.best"] == "0.25"
    assert found["seen[0]"] == "'a'"
    assert found["average"] == repr(average)


def test_where_a_framework_owns_the_loop_the_variables_of_the_script_are_looked_at() -> None:
    """Those of its module's body, and what it has given to the framework; not what the framework keeps itself."""

    class OfFramework:
        def __init__(self) -> None:
            self.position, self.given = 3, Mean()

        def rackrun_scripts_own(self) -> dict[str, Any]:
            return {"given": self.given}

        def fit(self) -> dict[str, str]:
            return reached(None, {}, (), frames_of_script(sys._getframe().f_back))

    OfFramework.__module__ = "transformers.trainer"
    script: dict[str, Any] = {"__name__": "__main__", "Trainer": OfFramework}
    exec(compile("best = 0.25\ntrainer = Trainer()\nfound = trainer.fit()", "script.py", "exec"), script)
    found = script["found"]
    assert found["best"] == "0.25"
    assert found["trainer.given.value"] == "0.5"
    assert not [name for name in found if "position" in name]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: types.SimpleNamespace(mean=0.5), lambda it: setattr(it, "mean", 0.6)),
        (lambda: partial(dict, {"mean": [0.5]}), lambda it: it.args[0]["mean"].append(1)),
        (lambda: iter([1, 2, 3]), next),
        (numbers, next),
        (bytearray(b"ab").copy, lambda it: it.append(1)),
        (Counted, lambda _: setattr(Counted, "made", Counted.made + 1)),
        (Counted, lambda _: COUNTER.update(steps=COUNTER["steps"] + 1)),
        (lambda: torch.optim.SGD(Net().parameters(), lr=0.1), lambda it: it.param_groups[0].update(lr=0.2)),
        (lambda: torch.amp.GradScaler("cpu", init_scale=4.0), lambda it: setattr(it, "_init_scale", 2.0)),
    ],
)
def test_whatever_holds_state_of_a_script_is_looked_into(
    make: Callable[[], Any], change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COUNTER, "steps", COUNTER["steps"])
    held = make()
    before = reached(step_with(mean=held), {}, ())
    assert reached(step_with(mean=held), {}, ()) == before
    change(held)
    assert reached(step_with(mean=held), {}, ()) != before


def test_attributes_of_functions_are_looked_at() -> None:
    step = step_with()
    step.calls = 3  # type: ignore[attr-defined]
    assert reached(step, {}, ())["step.calls"] == "3"


def test_a_tracked_optimizer_is_known_as_a_whole() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    assert not [name for name in reached(step_with(mean=optimizer), {}, [optimizer]) if name.startswith("mean.")]


def test_the_folder_of_a_run_is_named_alike_in_all_runs() -> None:
    texts = [
        reached(step_with(mean=kind(f"/tmp/{run}/" + "x" * 80)), {}, (), folder=f"/tmp/{run}")["mean"]
        for kind in (str, Path)
        for run in ("reference", "faulted")
    ]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
