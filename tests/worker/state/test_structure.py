"""The lists of what a tracked module is made of are made anew whenever it is made of something else, whichever way that came about."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.errors import StepError
from rackrun.worker.state.objects.module_structure import ModuleStructure
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.undo.unit_undo import UnitUndo


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))


def replace_by_attribute(root: Any) -> None:
    root[0].weight = nn.Parameter(torch.zeros(3, 3))


def replace_in_the_dictionary(root: Any) -> None:
    root[0]._parameters["weight"] = nn.Parameter(torch.zeros(3, 3))


def add(root: Any) -> None:
    root[2].register_parameter("more", nn.Parameter(torch.zeros(1)))


def drop(root: Any) -> None:
    root[0].bias = None


def tie(root: Any) -> None:
    root[3].weight = root[0].weight


def rename(root: Any) -> None:
    root[0]._parameters["kernel"] = root[0]._parameters.pop("weight")
    root[0]._parameters["bias"] = root[0]._parameters.pop("bias")


def change_places(root: Any) -> None:
    """The same names and objects in the same order, in other modules."""
    root[2][0]._parameters["bias"], root[3]._parameters["weight"] = (
        root[3]._parameters["weight"],
        root[2][0]._parameters["bias"],
    )


def move_on(root: Any) -> None:
    """The last of one module becomes the first of the next."""
    bias = root[2][0]._parameters.pop("bias")
    root[3]._parameters = {"bias": bias, "weight": root[3]._parameters["weight"]}


def replace_a_buffer(root: Any) -> None:
    root[1]._buffers["running_mean"] = torch.zeros(3)


def replace_a_module(root: Any) -> None:
    root[2] = nn.Linear(3, 3)


def add_a_module(root: Any) -> None:
    root[2].append(nn.Tanh())


def change_the_class(root: Any) -> None:
    class WithExtraState(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    root[0].__class__ = WithExtraState


CHANGES = [
    *(replace_by_attribute, replace_in_the_dictionary, add, drop, tie, rename, change_places, move_on),
    *(replace_a_buffer, replace_a_module, add_a_module, change_the_class),
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_exchanged_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    state, root = TrackedState(), net()
    state.track("model", root)
    before = state.structure()
    assert state.structure() is before
    change(root)
    now = state.structure()
    assert now is not before
    assert [(path, id(one)) for path, one in zip(now.parameter_paths, now.parameters, strict=True)] == [
        (f"model/param/{path}", id(one)) for path, one in root.named_parameters()
    ]
    assert [(path, id(one)) for path, one in zip(now.buffer_paths, now.buffers, strict=True)] == [
        (f"model/{path}", id(one)) for path, one in root.named_buffers()
    ]
    assert list(map(id, now.modules)) == list(map(id, root.modules()))
    assert [path for _, path, _ in now.with_extra_state] == (["0"] if change is change_the_class else [])


@pytest.mark.parametrize("change", [one for one in CHANGES if one not in (rename, change_the_class)])
def test_a_glance_sees_whatever_is_another_object_or_elsewhere(change: Callable[[nn.Sequential], None]) -> None:
    root: Any = net()
    structure = ModuleStructure({"model": root})
    assert structure.seems_to_stand()
    change(root)
    assert not structure.seems_to_stand()


def replace_a_layer(root: Any) -> None:
    root[3] = nn.Linear(3, 3)


OF_THE_SAME_KIND = [replace_by_attribute, replace_in_the_dictionary, replace_a_buffer, replace_a_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_step_has_exchanged_was_not_exchanged_after_it(change: Callable[[nn.Sequential], None]) -> None:
    undo = begun(root := net())
    change(root)
    undo.ended()
    undo.committed()
    undo.check_stands()


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_exchanged_between_two_steps_is_seen_by_a_glance_or_by_the_next_look(
    change: Callable[[nn.Sequential], None],
) -> None:
    undo = begun(root := net())
    undo.ended()
    undo.committed()
    change(root)

    def next_steps() -> None:
        for glance in (True, False):
            undo.check_stands(glance=glance)
            undo.begin()

    with pytest.raises(StepError):
        next_steps()


@pytest.mark.parametrize("change", OF_THE_SAME_KIND)
def test_a_step_may_exchange_tensors_and_modules_for_others_of_their_kind(
    change: Callable[[nn.Sequential], None],
) -> None:
    undo = begun(root := net())
    change(root)
    undo.ended()
    undo.committed()
    undo.begin()


def new_activation(root: Any) -> None:
    root[2] = nn.GELU()


def change_order(root: Any) -> None:
    root[0], root[3] = root[3], root[0]


def late_buffer(root: Any) -> None:
    root.register_buffer("late", torch.zeros(1))


def grow_a_buffer(root: Any) -> None:
    root[1].running_mean = torch.zeros(4)


def widen_a_buffer(root: Any) -> None:
    root[1].double()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (new_activation, "model.2 was a Sequential, and is a GELU"),
        (change_order, "model.0.weight is what model.3.weight was"),
        (add, "model.2.more is new, or gone"),
        (drop, "is new, or gone"),
        (rename, "model.0.kernel is what model.0.weight was"),
        (change_places, "is what model."),
        (add_a_module, r"model.2.1 \(Tanh\) is new"),
        (change_the_class, "model.0 was a Linear, and is a WithExtraState"),
        (late_buffer, "the buffer model.late is new"),
        (grow_a_buffer, "the buffer model.1.running_mean is new, or gone, or has another shape"),
        (widen_a_buffer, "the buffer model.1.running_"),
    ],
)
def test_a_step_that_changes_what_modules_are_made_of_is_refused(
    change: Callable[[nn.Sequential], None], what: str
) -> None:
    undo = begun(root := net())
    change(root)
    undo.ended()
    undo.committed()
    with pytest.raises(StepError, match=f"has changed what tracked modules are made of: .*{what}"):
        undo.begin()


def test_a_cache_that_is_not_kept_may_come_and_grow() -> None:
    undo = begun(root := net())
    root.register_buffer("cached", torch.zeros(4), persistent=False)
    undo.ended()
    undo.committed()
    undo.begin()
    root.cached = torch.zeros(8)
    undo.ended()
    undo.committed()
    undo.begin()


def test_what_is_tracked_twice_has_not_moved() -> None:
    root: Any = net()
    undo = begun(root, head=root[3])
    root[1].running_mean = torch.zeros(3)
    undo.ended()
    undo.committed()
    undo.begin()


def begun(root: nn.Module, **others: nn.Module) -> UnitUndo:
    state = TrackedState()
    for name, module in {"model": root, **others}.items():
        state.track(name, module)
    undo = UnitUndo(state)
    undo.begin()
    return undo


def test_what_is_written_into_it_leaves_a_structure_as_it_is() -> None:
    root: Any = net()
    structure = ModuleStructure({"model": root})
    with torch.no_grad():
        root[0].weight.add_(1)
    root[1](torch.ones(2, 3))
    root.requires_grad_(False)
    root[0].weight.data = torch.zeros(3, 3)
    root.eval()
    assert structure.stands({"model": root})
    assert not structure.stands({"model": net()})
    assert not structure.stands({"model": root, "other": net()})


def test_a_scripted_module_has_a_structure() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said to be of the past, in a kind of warning that changes with torch
        root = torch.jit.script(net())
    structure = ModuleStructure({"model": root})
    assert structure.stands({"model": root})
    assert list(map(id, structure.parameters)) == list(map(id, root.parameters()))


def test_a_parameter_that_was_exchanged_between_two_steps_is_put_back_where_it_is_now() -> None:
    """No optimizer trains it: what a step does to the new one is undone, though nobody has said that there is a new one."""
    state = TrackedState()
    root: Any = nn.ModuleDict({"average": nn.Linear(2, 2)})
    state.track("model", root)
    undo = UnitUndo(state)
    undo.begin(audit=True)
    undo.ended()
    root["average"]._parameters["weight"] = nn.Parameter(torch.full((2, 2), 5.0))
    undo.begin()
    with torch.no_grad():
        root["average"].weight.add_(1)
    assert undo.discard(backward_open=True) == []
    assert root["average"].weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]


def test_a_group_that_trains_another_parameter_of_the_same_number_is_seen() -> None:
    state = TrackedState()
    root: Any = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
    optimizer = torch.optim.SGD([root[0].weight], lr=1.0)
    state.track("model", root)
    state.track("optimizer", optimizer)
    undo = UnitUndo(state)
    undo.begin()
    undo.ended()
    optimizer.param_groups[0]["params"][0] = root[1].weight
    undo.begin()
    with torch.no_grad():
        root[1].weight.add_(1)
    undo.before_update()
    assert state.lineage.changes.early == ("model/param/1.weight",)
