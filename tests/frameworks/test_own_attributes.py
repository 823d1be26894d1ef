"""What a script keeps in attributes of a framework's objects: put back for another attempt, and brought to another process."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import transformers

from rackrun.frameworks import own_attributes, plain_values
from rackrun.frameworks.own_attributes import OwnAttributes
from rackrun.frameworks.rank_texts import mark, of_rank, texts_of_ranks


def trainer(**attributes: Any) -> Any:
    """A Trainer of which only attributes are looked at."""
    metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(metrics=metrics, tokens=0, host="a", model=object(), state=7, **attributes)


def test_an_attempt_that_broke_leaves_nothing_behind() -> None:
    mine = trainer()
    own, metrics = OwnAttributes(mine), mine.metrics
    entered = own.changed()
    mine.tokens += 3
    mine.metrics["train"]["loss"].append(0.5)
    mine.created = True
    own.restore(entered)
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
    its.restore(own.changed())
    assert (other.tokens, other.host, other.created) == (3, "b", (1, 2))
    other.metrics["eval"]["loss"].append(1.0)
    assert other.metrics == {"train": {"loss": [float("inf")]}, "eval": {"loss": [1.0]}}
    mine.tokens = 0
    its.restore(own.changed())
    assert other.tokens == 0, "what is as it was built counts as changed once it has been something else"


@pytest.mark.parametrize(
    ("value", "changed"),
    [
        (None, "a"),
        ([1, [2]], [1, [3]]),
        (deque([1]), deque([2])),
        ({1, 2}, {3}),
        ({1: "a", "b": 2}, {1: "b"}),
        (Counter("aab"), Counter("b")),
        (OrderedDict(a=1), OrderedDict(b=2, a=1)),
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
    its.restore(own.changed())
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
    entered = own.changed()
    its.restore(own.changed())
    first = draw(mine.value)
    assert (draw(other.value), other.value is kept) == (first, True)
    own.restore(entered)
    assert draw(mine.value) == first


def test_what_is_not_plain_is_left_alone() -> None:
    mine = SimpleNamespace(net=torch.nn.Linear(1, 1), parameter=torch.zeros(1, requires_grad=True))
    own = OwnAttributes(mine)
    mine.net, mine.parameter = torch.nn.Linear(2, 1), torch.ones(1, requires_grad=True)
    assert own.changed() == ""


def test_what_is_large_is_named_once_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain_values, "VALUES_MAX", 10)
    mine = SimpleNamespace(vocabulary=list("abcdefghijklmn"), losses=[0.5] * 8, table=torch.zeros(20), names=["a"] * 20)
    own = OwnAttributes(mine)
    own.changed()
    assert capsys.readouterr().err == "", "what the script has built and leaves alone needs no notice"
    mine.losses += [0.25] * 8
    mine.table.add_(1)
    mine.names.append("b")
    for _ in range(2):
        assert "0.25" not in own.changed()
    said = capsys.readouterr().err
    assert [said.count(f".{name} holds more than 10 values") for name in ("losses", "table", "names")] == [1, 1, 1]


def test_what_is_plain_for_a_part_of_the_time_is_put_back() -> None:
    net = torch.nn.Linear(1, 1)
    mine = SimpleNamespace(best=net, left=3, gone=1)
    own = OwnAttributes(mine)
    entered = own.changed()
    mine.best, mine.left = 0.5, net
    del mine.gone
    own.restore(entered)
    assert vars(mine) == {"best": net, "left": 3, "gone": 1}
    del mine.gone
    other = SimpleNamespace(best=None, left=3, gone=1)
    OwnAttributes(other).restore(own.changed())
    assert not hasattr(other, "gone")


def test_losses_that_are_kept_with_their_graph_arrive_without_it() -> None:
    weight = torch.ones(1, requires_grad=True)
    mine, other = SimpleNamespace(losses=[]), SimpleNamespace(losses=[])
    own, its = OwnAttributes(mine), OwnAttributes(other)
    mine.losses.append((weight * 2).sum())
    its.restore(own.changed())
    assert torch.stack(other.losses).tolist() == [2.0]


def test_items_that_a_list_holds_are_changed_in_place() -> None:
    mine = SimpleNamespace(parts=[random.Random(1), defaultdict(list)])
    own, kept = OwnAttributes(mine), list(mine.parts)
    entered = own.changed()
    first = mine.parts[0].random()
    mine.parts[1]["loss"].append(1.0)
    own.restore(entered)
    assert all(one is other for one, other in zip(kept, mine.parts, strict=True))
    assert (mine.parts[0].random(), mine.parts[1]) == (first, {})


def test_attributes_of_a_stock_module_are_not_among_them() -> None:
    class Mine(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.outputs = 0, [0.5]
            self.register_buffer("mean", torch.zeros(1))

    assert own_attributes.own_attributes(Mine()) == {"seen": 0, "outputs": [0.5]}


def test_attributes_of_the_stock_trainer_are_not_among_them() -> None:
    stock = own_attributes._stock_names(transformers.Trainer)
    assert {"_tr_loss", "_total_loss_scalar", "state", "control", "model", "optimizer", "is_in_train"} <= stock
    assert not {"_metrics", "_total_train_tokens", "tokens"} & stock


def test_texts_that_are_alike_need_no_collective() -> None:
    run: Any = SimpleNamespace(rank=1)
    assert texts_of_ranks(run, "a", [mark("a"), mark("a")]) == ["a"]
    assert of_rank(["a"], run.rank) == "a"
    assert of_rank(["a", "b"], run.rank) == "b"
