"""What a subclass of the Trainer keeps in attributes: put back for another attempt, and brought to another process."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rackrun.frameworks.hf import own_attributes
from rackrun.frameworks.hf.own_attributes import OwnAttributes
from rackrun.frameworks.rank_texts import mark, of_rank, texts_of_ranks


def trainer(**attributes: Any) -> Any:
    """A Trainer of which only attributes are looked at."""
    metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(metrics=metrics, tokens=0, host="a", model=object(), state=7, **attributes)


def test_an_attempt_that_broke_leaves_nothing_behind() -> None:
    mine = trainer()
    own, metrics = OwnAttributes(mine), mine.metrics
    entered = own.captured()
    mine.tokens += 3
    mine.metrics["train"]["loss"].append(0.5)
    mine.created = True
    own.put_back(entered)
    assert vars(mine).keys() == vars(trainer()).keys()
    assert mine.tokens == 0
    assert mine.metrics is metrics
    assert metrics == {"train": {}, "eval": {}}
    assert isinstance(metrics["train"], defaultdict)


def test_another_process_gets_what_training_has_changed_and_nothing_else() -> None:
    mine, other = trainer(), trainer()
    other.host = "b"
    own, its = OwnAttributes(mine), OwnAttributes(other)
    assert own.changed() == ""
    mine.tokens, mine.created = 3, (1, 2)
    mine.metrics["train"]["loss"].append(float("inf"))
    its.take_over(own.changed())
    assert (other.tokens, other.host, other.created) == (3, "b", (1, 2))
    other.metrics["eval"]["loss"].append(1.0)
    assert other.metrics == {"train": {"loss": [float("inf")]}, "eval": {"loss": [1.0]}}
    mine.tokens = 0
    its.take_over(own.changed())
    assert other.tokens == 0, "what is as it was built counts as changed once it has been something else"


@pytest.mark.parametrize(
    ("value", "changed"),
    [
        (None, "a"),
        ([1, [2]], [1, [3]]),
        (deque([1]), deque([2])),
        ({1, 2}, {3}),
        ({1: "a", "b": 2}, {1: "b"}),
        (np.float32(0.5), np.float32(0.25)),
        (np.zeros(3), np.ones(3)),
        (torch.tensor(0.1), torch.tensor(0.3)),
        (torch.zeros(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16)),
        (torch.zeros(0), torch.zeros(0, 2)),
    ],
)
def test_plain_values_arrive_as_they_were(value: Any, changed: Any) -> None:
    mine, other = SimpleNamespace(value=value), SimpleNamespace(value=value)
    own, its = OwnAttributes(mine), OwnAttributes(other)
    mine.value = changed
    its.take_over(own.changed())
    assert type(other.value) is type(changed)
    if isinstance(changed, torch.Tensor | np.ndarray):
        assert other.value.dtype == changed.dtype
        assert other.value.tolist() == changed.tolist()
        assert other.value.shape == changed.shape
    else:
        assert other.value == changed


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(1), lambda one: one.random()),
        (lambda: np.random.default_rng(1), lambda one: one.random()),
        (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand((), generator=one).item()),
    ],
)
def test_generators_go_on_where_they_stood(make: Any, draw: Any) -> None:
    mine, other = SimpleNamespace(value=make()), SimpleNamespace(value=make())
    own, its, kept = OwnAttributes(mine), OwnAttributes(other), other.value
    draw(mine.value)
    entered = own.captured()
    its.take_over(own.changed())
    first = draw(mine.value)
    assert (draw(other.value), other.value is kept) == (first, True)
    own.put_back(entered)
    assert draw(mine.value) == first


def test_what_is_not_plain_is_left_alone_and_what_is_large_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_attributes, "VALUES_MAX", 10)
    mine = SimpleNamespace(net=torch.nn.Linear(1, 1), losses=[0.5] * 8, graph=torch.zeros(1, requires_grad=True))
    own = OwnAttributes(mine)
    mine.losses += [0.25] * 8
    assert own.changed() == ""
    own.captured()
    assert capsys.readouterr().err.count("SimpleNamespace.losses holds more than 10 values") == 1


def test_attributes_of_the_stock_trainer_are_not_among_them() -> None:
    stock = own_attributes._stock_names()
    assert {"_tr_loss", "_total_loss_scalar", "state", "control", "model", "optimizer", "is_in_train"} <= stock
    assert not {"_metrics", "_total_train_tokens", "tokens"} & stock


def test_texts_that_are_alike_need_no_collective() -> None:
    run: Any = SimpleNamespace(rank=1)
    assert texts_of_ranks(run, "a", [mark("a"), mark("a")]) == ["a"]
    assert of_rank(["a"], run.rank) == "a"
    assert of_rank(["a", "b"], run.rank) == "b"
