"""What a unit has changed before it counts is put back exactly, or is named: `UnitUndo` alone, without a job."""

from __future__ import annotations

import collections
import copy
import gc
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.worker.state.objects.optimizer_state import held_objects, put_held_objects
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from tests.worker.steps.early_changes import LARGE


class ByValue:
    """Its state_dict returns copies."""

    def __init__(self, size: int) -> None:
        self.mean, self.updates = torch.zeros(size), 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.updates = state["mean"].clone(), state["updates"]


class Codebook(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(size))
        self.codes: torch.Tensor


def undone(state: TrackedState, change: Callable[[], Any], *, learns: bool = True) -> list[str]:
    """``change`` is done in a step that counts, which shows it, and in one that does not. Returns what was not put back."""
    undo = UnitUndo(state)
    undo.begin(whole=True, audit=True)
    if learns:
        change()
    undo.before_update()
    undo.ended()
    undo.begin()
    undo.before_update()
    undo.ended()
    undo.begin()
    change()
    return undo.discard(backward_open=True)


def bits(state: TrackedState) -> dict[str, bytes]:
    tensors = {path: tensor.contiguous().numpy().tobytes() for path, tensor in state.tensors().items()}
    return {**tensors, "plain": state.encode_plain()}


def tracked(**things: Any) -> TrackedState:
    state = TrackedState()
    for name, thing in things.items():
        state.track(name, thing)
    return state


def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("size", [3, LARGE])
def test_an_object_whose_state_dict_returns_copies_is_put_back(size: int) -> None:
    meter = ByValue(size)
    state = tracked(model=trained()[0], meter=meter)

    def change() -> None:
        meter.mean += 1
        meter.updates += 1

    for learns in (False, True):
        assert not undone(state, change, learns=learns)
        assert (meter.mean.max().item(), meter.updates) == (float(learns), int(learns))


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("unseen", [False, True])
def test_what_no_optimizer_trains_is_put_back(size: int, unseen: bool) -> None:
    model, optimizer = trained()
    codebook, shadow, frozen = Codebook(size), copy.deepcopy(model), nn.Linear(size, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    state = tracked(model=model, optimizer=optimizer, codebook=codebook, shadow=shadow, frozen=frozen, average=average)

    def change() -> None:
        for tensor in (codebook.codes, *shadow.parameters(), *average.parameters()):
            if unseen:
                tensor.data.add_(1)
            else:
                with torch.no_grad():
                    tensor.add_(1)

    before = bits(state)
    assert not undone(state, change, learns=False) or unseen
    before = bits(state) if unseen else before
    assert not undone(state, change)
    change()
    after = bits(state)
    assert not undone(state, change)
    assert bits(state) != after
    assert before != after


def test_what_a_step_has_not_changed_is_not_written_to() -> None:
    """A snapshot of the step before may be in the making, and would be taken for torn."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin(whole=True)
    with torch.no_grad():
        model.bias.add_(1)
    before = {path: tensor._version for path, tensor in state.tensors().items()}
    assert not undo.discard(backward_open=True)
    after = {path: tensor._version for path, tensor in state.tensors().items()}
    assert {path for path in after if after[path] != before[path]} == {"model/param/bias"}


@pytest.mark.parametrize("unseen", [False, True])
def test_what_an_optimizer_trains_is_put_back_once_it_was_seen_to_change_early(unseen: bool) -> None:
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)

    def change() -> None:
        for tensor in (model.weight, optimizer.state[model.weight]["exp_avg"]):
            if unseen:
                tensor.data.mul_(1.5)
            else:
                with torch.no_grad():
                    tensor.mul_(1.5)

    change()
    undo = UnitUndo(state)
    undo.begin(whole=True, audit=True)
    change()
    undo.before_update()
    undo.ended()
    assert state.lineage.changes.early == ("model/param/weight", "optimizer/state/0/0/exp_avg")
    before = bits(state)
    undo.begin()
    change()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before


def test_a_first_step_is_put_back_as_a_whole_with_what_the_optimizer_has_made() -> None:
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    state = tracked(model=model, optimizer=optimizer)
    before, undo = bits(state), UnitUndo(state)
    undo.begin(whole=True, audit=True)
    model(torch.ones(1, 600)).sum().backward()
    undo.before_update()
    optimizer.step()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before
    assert not optimizer.state


def test_a_change_that_nobody_has_seen_in_time_is_found_when_the_step_is_done_again() -> None:
    """By ``.data``, before optimizer.step(), for the first time in a step that is abandoned: this state is of no use."""
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    model.weight.data.mul_(1.5)
    assert not undo.discard(backward_open=True), "nothing shows it yet"
    undo.begin()
    model.weight.data.mul_(1.5)
    undo.before_update()
    assert undo.not_put_back() == ["model/param/weight"]


@pytest.mark.parametrize("late", [True, False])
def test_state_of_an_optimizer_that_an_abandoned_step_has_replaced_costs_nothing(late: bool) -> None:
    """For the first time: the tensors of the beginning are put back, so that they are what they were."""
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))

    def replace() -> None:
        held = optimizer.state[model.weight]
        held["exp_avg"] = held["exp_avg"] * 0.5

    undo.begin()
    replace()
    if late:
        undo.before_update()
    assert not undo.discard(backward_open=True)
    undo.begin()
    replace()
    undo.before_update()
    assert not undo.not_put_back()


def test_state_that_an_abandoned_step_has_changed_and_then_replaced_is_of_no_use() -> None:
    """By ``.data``: what is put back is the changed tensor."""
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))

    def change_and_replace() -> None:
        held = optimizer.state[model.weight]
        held["exp_avg"].data.mul_(0.5)
        held["exp_avg"] = held["exp_avg"].clone()

    undo.begin()
    change_and_replace()
    undo.discard(backward_open=True)
    undo.begin()
    change_and_replace()
    undo.before_update()
    assert undo.not_put_back() == ["optimizer/state/0/0/exp_avg"]


def steps_that_count(undo: UnitUndo, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        undo.begin()
        undo.before_update()
        optimizer.step()
        undo.ended()


def replaces(of: dict[str, Any]) -> None:
    of["exp_avg"] = of["exp_avg"].clone()


def renames(of: dict[str, Any]) -> None:
    held = list(of.items())
    of.clear()
    of.update({f"{key} now": value for key, value in held})


def adds(of: dict[str, Any]) -> None:
    of["own"] = torch.ones(2)


def removes(of: dict[str, Any]) -> None:
    del of["exp_avg_sq"]


@pytest.mark.parametrize("change", [replaces, renames, adds, removes])
def test_what_an_optimizer_holds_is_put_back_as_it_was_when_this_unit_began(change: Callable[[Any], None]) -> None:
    """And not as it was when one before it began: what is the same from unit to unit is remembered once."""
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    steps_that_count(undo, optimizer)
    change(optimizer.state[model.bias])
    undo.accept()
    undo.begin()
    held = {id(of): list(of.items()) for of in optimizer.state.values()}
    optimizer.state[model.bias]["exp_avg"] = torch.zeros(1)
    optimizer.state[model.weight].clear()
    assert not undo.discard(backward_open=True)
    for of in optimizer.state.values():
        then = held[id(of)]
        assert list(of) == [key for key, _ in then]
        assert all(map(is_, of.values(), [value for _, value in then]))


class TakesMappings(dict[Any, Any]):
    def update(self, other: Any) -> None:  # type: ignore[override]
        super().update({key: other[key] for key in other})


@pytest.mark.parametrize("kind", [dict, TakesMappings, collections.OrderedDict, collections.Counter])
def test_dictionaries_of_any_kind_are_put_back_with_all_that_optimizers_held_in_them(kind: Any) -> None:
    model, optimizer = trained()
    optimizer.state[model.weight] = kind(optimizer.state[model.weight])
    optimizer.state[model.bias] = kind({7: torch.ones(1), **optimizer.state[model.bias]})
    optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight].pop("exp_avg")
    then = {id(of): list(of.items()) for of in optimizer.state.values()}
    order = list(optimizer.state)
    objects = held_objects(optimizer)
    optimizer.state[model.bias].clear()
    optimizer.state[model.weight]["exp_avg_sq"] = torch.zeros(1)
    optimizer.state.clear()
    put_held_objects(optimizer, objects)
    assert all(map(is_, optimizer.state, order))
    for of in optimizer.state.values():
        assert type(of) is kind
        assert [key for key, _ in then[id(of)]] == list(of)
        assert all(map(is_, of.values(), [value for _, value in then[id(of)]]))


class TwoValues:
    def __init__(self, first: str, second: str) -> None:
        for name, value in ((first, 0.0), (second, 1.0)):
            setattr(self, name, torch.full((1,), value))


def test_a_dictionary_of_attributes_set_in_another_order_is_put_back_as_it_was() -> None:
    """Instances of a class share the keys of their dictionaries, in the order of the first of them."""
    model, optimizer = trained()
    TwoValues("a", "b")
    own = optimizer.state[model.bias] = vars(TwoValues("b", "a"))
    objects = held_objects(optimizer)
    own.clear()
    put_held_objects(optimizer, objects)
    assert {key: value.item() for key, value in own.items()} == {"b": 0.0, "a": 1.0}


def test_what_a_unit_has_removed_from_an_optimizer_is_freed_at_its_end() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    steps_that_count(undo, optimizer)
    undo.begin(phase="drops")
    removed = weakref.ref(optimizer.state[model.weight].pop("exp_avg"))
    undo.ended()
    gc.collect()
    assert removed() is None


@pytest.mark.parametrize("audit", [False, True])
def test_what_a_recovery_replaces_in_an_optimizer_is_freed(audit: bool) -> None:
    """Else a device would have to hold the old state beside the new one."""
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    steps_that_count(undo, optimizer)
    undo.begin(audit=audit)
    undo.discard(backward_open=True)
    undo.let_go()
    replaced = weakref.ref(optimizer.state[model.weight].pop("exp_avg"))
    gc.collect()
    assert replaced() is None
    undo.accept()
    undo.check_stands()
    undo.let_go()
    replaced = weakref.ref(optimizer.state[model.bias].pop("exp_avg"))
    gc.collect()
    assert replaced() is None


def test_digests_from_before_a_rollback_do_not_judge_a_later_step() -> None:
    """They were served to a newcomer after the state was filled anew, and nothing was audited since."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin()
    assert not undo.discard(backward_open=True)
    assert undo.digests_ahead()
    state.load_plain(state.manifest("r"), state.tensors())
    assert not undo.digests_ahead(), "the step that was abandoned is not done again from this state"
    undo.begin()
    undo.before_update()
    optimizer.step()
    undo.ended()
    undo.begin()
    assert not undo.discard(backward_open=True)
    undo.digests_ahead()
    undo.begin()
    undo.before_update()
    assert undo.not_put_back() == []


def test_weights_that_are_exchanged_for_a_while_are_found_where_the_step_was_left() -> None:
    """Through ``.data``, and put back before the gate: there is nothing to see there. Known from the first step, they are put back."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin()
    undo.at_place()
    model.weight.data.mul_(2)
    undo.at_place()
    undo.discard(backward_open=True)
    undo.begin()
    undo.at_place()
    model.weight.data.mul_(2)
    undo.at_place()
    model.weight.data.mul_(0.5)
    undo.at_place()
    undo.before_update()
    assert undo.not_put_back() == ["model/param/weight"]

    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)
    undo.begin(whole=True, audit=True, everywhere=True)
    model.weight.data.mul_(2)
    undo.at_place()
    model.weight.data.mul_(0.5)
    undo.at_place()
    undo.before_update()
    undo.ended()
    before = bits(state)
    undo.begin()
    model.weight.data.mul_(2)
    undo.at_place()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before


def test_a_phase_is_not_left_while_it_has_other_weights_in_the_model() -> None:
    """It has put them back at its end as often as it has run, so nothing shows that it exchanges them, and no version does."""
    model, optimizer = trained()
    frozen, norm = nn.Linear(LARGE, 1), nn.BatchNorm1d(3)
    state = tracked(model=model, optimizer=optimizer, frozen=frozen, norm=norm)
    undo = UnitUndo(state)
    for exchanged in (model.weight, frozen.weight, optimizer.state[model.weight]["exp_avg"]):
        for _ in range(9):
            undo.begin(phase="every 1")
            assert undo.may_be_left()
            backup = exchanged.data.clone()
            exchanged.data.mul_(0.9)
            left, torn = undo.may_be_left(), exchanged.data.clone()
            exchanged.data.copy_(backup)
            assert undo.may_be_left()
            undo.ended()
        assert not left
        undo.begin(phase="every 1")
        exchanged.data.copy_(torn)
        exchanged.data.copy_(backup)
        assert not undo.discard(backward_open=False)
        assert torch.equal(exchanged, backup)


def test_parameters_that_were_frozen_for_a_while_are_trained_again() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    model.weight.requires_grad_(False)
    undo.discard(backward_open=True)
    assert model.weight.requires_grad


def test_a_step_that_is_done_again_and_changes_nothing_early_is_good() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    undo.discard(backward_open=True)
    undo.begin()
    undo.before_update()
    assert not undo.not_put_back()


def test_a_version_that_moves_before_the_update_shows_at_once_what_cannot_be_put_back() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin()
    with torch.no_grad():
        model.weight.mul_(1.5)
    assert undo.discard(backward_open=True) == ["model/param/weight"]


def test_what_a_step_changes_early_for_the_first_time_the_next_one_has_copied() -> None:
    """In any step, not in those alone that are audited: without a copy, a loss in the next one would cost every rank."""
    model, optimizer = trained()
    state = tracked(model=model, optimizer=optimizer)
    undo = UnitUndo(state)

    def change() -> None:
        with torch.no_grad():
            model.weight.mul_(1.5)

    undo.begin()
    change()
    undo.before_update()
    undo.ended()
    undo.begin()
    before = bits(state)
    change()
    assert not undo.discard(backward_open=True)
    assert bits(state) == before


def test_of_many_parameters_one_that_a_late_step_changes_early_is_found_at_once() -> None:
    """A gate that read a share of the versions, to cost less, would leave the next such step without a copy."""
    layers = [nn.Linear(1, 1) for _ in range(160)]
    model = nn.Sequential(*layers)
    state = tracked(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    undo = UnitUndo(state)
    for _ in range(20):
        undo.begin()
        undo.before_update()
        undo.ended()
    undo.begin()
    with torch.no_grad():
        layers[77].weight.mul_(1.5)
    undo.before_update()
    assert state.lineage.changes.early == ("model/param/77.weight",)


def test_a_large_frozen_model_is_not_copied_and_a_change_of_it_is_found() -> None:
    model, optimizer = trained()
    base = nn.Linear(5000, 4000, bias=False)
    state = tracked(model=model, optimizer=optimizer, base=base)
    undo = UnitUndo(state)
    for _ in range(3):
        undo.begin()
        undo.before_update()
        undo.ended()
    assert "base/param/weight" not in undo._copies
    undo.begin()
    assert not undo.discard(backward_open=True)
    undo.begin()
    base.weight.data[7, 7] += 1
    assert undo.discard(backward_open=True) == ["base/param/weight"]


def test_a_change_between_two_steps_that_no_version_shows_is_refused() -> None:
    model, optimizer = trained()
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    undo.begin(audit=True)
    undo.before_update()
    undo.ended()
    undo.committed()
    model.weight.data.mul_(1.5)
    undo.check_stands()
    undo.begin()
    assert undo.changed_between == "model/param/weight"


def test_a_frozen_parameter_that_each_step_exchanges_for_another_has_not_changed_between_steps() -> None:
    model, optimizer = trained()
    model.gate = nn.Parameter(torch.ones(3), requires_grad=False)
    undo = UnitUndo(tracked(model=model, optimizer=optimizer))
    for _ in range(3):
        undo.begin(audit=True)
        undo.before_update()
        model.gate = nn.Parameter(model.gate * 0.9, requires_grad=False)
        undo.ended()
        undo.committed()
        undo.check_stands()
        assert not undo.changed_between
