"""What is told of tensors is told again only when one of them is another: and whatever makes it another is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from rackrun.worker.state.state_image import StateImages
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.readback import Readback
from rackrun.worker.torch_compat.data_parallel import fsdp
from tests.worker.forked import forked


def tracked() -> tuple[TrackedState, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = TrackedState()
    state.track("model", model)
    state.track("optimizer", optimizer)
    return state, model, optimizer


def test_as_long_as_nothing_changes_it_is_told_once() -> None:
    state, model, optimizer = tracked()
    first = state.infos(state.parts())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert state.infos(state.parts()) is first


def transposed(model: Any, _: torch.optim.Optimizer) -> None:
    model[2].weight.data = model[2].weight.data.t().contiguous().t()


def other_dtype(model: Any, _: torch.optim.Optimizer) -> None:
    model[0].double()


def a_gradient(model: Any, _: torch.optim.Optimizer) -> None:
    model[0].weight.grad = torch.zeros_like(model[0].weight)


def no_state(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def tensor_rate(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)


def another_buffer(model: Any, _: torch.optim.Optimizer) -> None:
    model[1].register_buffer("more", torch.zeros(3))


@pytest.mark.parametrize(
    "change", [transposed, other_dtype, a_gradient, no_state, tensor_rate, another_buffer], ids=lambda one: one.__name__
)
def test_what_is_another_is_told_anew(change: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    state, model, optimizer = tracked()
    images = StateImages(state)
    first, before = state.infos(state.parts()), images.describe("")
    change(model, optimizer)
    now = state.infos(state.parts())
    assert now != first
    again = TrackedState()
    again.track("model", model)
    again.track("optimizer", optimizer)
    assert now == again.infos(again.parts())
    fresh, kept = StateImages(again).describe(""), images.describe("")
    assert kept.layout.extents == fresh.layout.extents
    assert kept.plain == fresh.plain != before.plain


def test_a_promoted_spare_has_the_part_of_the_rank_that_it_has_become() -> None:
    """The mesh is the same object, and equal to what it was; the tensor and its memory are the same as well."""

    def work() -> list[list[int]]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=mesh)
        state = TrackedState()
        state.track("model", model)
        state.track("optimizer", torch.optim.SGD(model.parameters(), 0.1))
        images = StateImages(state)
        model(torch.ones(1, 4)).sum().backward()
        before = images.describe("")
        fsdp.promote_sharded([model], 1, [mesh])
        return [list(one.layout.entries[0].box.offsets) for one in (before, images.describe(""))]

    assert forked(work) == [[0, 0], [2, 0]]


def test_a_loss_of_loss_parallel_is_read() -> None:
    def work() -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        return Readback(DTensor.from_local(torch.tensor(1.5), mesh, [Replicate()], run_check=False)).value()

    assert forked(work) == 1.5
    assert Readback(torch.tensor(0.1, dtype=torch.bfloat16)).value() == float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert Readback(None).value() == 0.0
