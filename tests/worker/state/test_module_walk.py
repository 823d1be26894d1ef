"""What a module is made of: the same as torch says, in the same order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.worker.state.objects.module_structure import ModuleStructure
from rackrun.worker.tensors import module_walk


def tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second, first, nn.ModuleDict({"again": nn.Sequential(second, nn.ReLU())}))


def with_buffers() -> nn.Module:
    whole = nn.Sequential(
        nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, track_running_stats=False)
    )
    one: Any = whole
    one[1].register_buffer("shared", one[0].running_mean)
    one[1].register_buffer("none", None)
    one.register_module("nobody", None)
    one.register_parameter("nothing", None)
    return whole


def attention() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said to be of the past, in a kind of warning that changes with torch
        return torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def compiled() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch imports for it
        return torch.compile(tied())  # type: ignore[return-value]


@pytest.mark.parametrize("build", [tied, with_buffers, attention, scripted, compiled, lambda: nn.Linear(2, 2)])
def test_modules_parameters_and_buffers_are_those_of_torch(build: Callable[[], nn.Module]) -> None:
    root = build()
    assert [(path, id(one)) for path, one in module_walk.modules(root)] == [
        (path, id(one)) for path, one in root.named_modules()
    ]
    structure = ModuleStructure({"m": root})
    assert structure.stands({"m": root})
    assert [id(one) for one in structure.parameters] == [id(one) for one in root.parameters()]
    assert [f"m/param/{path}" for path, _ in root.named_parameters()] == structure.parameter_paths
    assert [id(one) for one in structure.buffers] == [id(one) for one in root.buffers()]
    assert [f"m/{path}" for path, _ in root.named_buffers()] == structure.buffer_paths
