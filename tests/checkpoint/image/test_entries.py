"""Boxes from placements: they name the elements that the local tensor really holds, or nothing at all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import TensorEntry
from rackrun.checkpoint.image.tensor_entries import box_of, entries_of, locals_of

UNSURE = "two different parts"


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of many: nothing here communicates. What torch remembers of the rank before is dropped."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        _clear_sharding_prop_cache()
        _clear_fast_path_sharding_prop_cache()
        dist.destroy_process_group()


def part_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


def chunk(rows: Sequence[int], parts: int, part: int) -> list[int]:
    each = -(-len(rows) // parts)
    return list(rows[part * each : (part + 1) * each])


# -- what torch defines ----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_shards_and_replicas_on_any_mesh_are_where_torch_puts_them(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    placements = [data.draw(st.one_of(st.just(Replicate()), dims.map(Shard))) for _ in mesh]
    for coordinate in itertools.product(*map(range, mesh)):
        local, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        box = box_of(shape, local, mesh, coordinate, placements)
        assert box.sizes == local
        assert box.numel == 0 or box.offsets == offsets


@pytest.mark.parametrize("rows", range(41))
def test_fsdp_over_tp_on_one_dim_names_the_rows_that_fsdp_holds_or_refuses(rows: int) -> None:
    refused = []
    for tp, dp in itertools.product(range(1, 5), repeat=2):
        placements = [_StridedShard(0, split_factor=tp), Shard(0)] if tp > 1 else [Shard(0), Shard(0)]
        for d, t in itertools.product(range(dp), range(tp)):
            held = chunk(chunk(range(rows), tp, t), dp, d)
            try:
                box = box_of([rows], [len(held)], [dp, tp], [d, t], placements)
            except LayoutMismatch as error:
                refused.append(str(error))
            else:
                assert list(range(box.offsets[0], box.offsets[0] + box.sizes[0])) == held or not held
    assert all(UNSURE in message for message in refused)
    assert len(refused) == {27: 1, 38: 1}.get(rows, 0)  # so rare that nobody would look for it


def test_where_torch_and_fsdp_mean_different_rows_of_one_shape_neither_is_believed() -> None:
    with pytest.raises(LayoutMismatch, match=UNSURE):
        box_of([27], [1], [3, 4], [2, 2], [_StridedShard(0, split_factor=4), Shard(0)])


def test_several_strided_axes_over_tp_are_split_from_right_to_left() -> None:
    rows, (a, b, tp) = 64, (2, 2, 4)
    placements = [_StridedShard(0, split_factor=8), _StridedShard(0, split_factor=4), Shard(0)]
    for i, j, t in itertools.product(range(a), range(b), range(tp)):
        held = chunk(chunk(chunk(range(rows), tp, t), b, j), a, i)
        assert box_of([rows], [4], [a, b, tp], [i, j, t], placements) == Box((held[0],), (4,))


@pytest.mark.parametrize(
    ("local", "placements", "what"),
    [
        ([4], [_StridedShard(0, split_factor=2), Replicate()], "more than one box"),
        ([8], [Replicate(), Partial()], "not a part of a tensor"),
        ([5], [Shard(0), Replicate()], "is not that of"),
    ],
)
def test_what_is_not_one_box_is_refused(local: list[int], placements: list[Placement], what: str) -> None:
    with pytest.raises(LayoutMismatch, match=what):
        box_of([8], local, [2, 2], [0, 1], placements)


def test_one_dim_in_two_runs_is_enough_to_be_more_than_one_box() -> None:
    with pytest.raises(LayoutMismatch, match="more than one box"):
        box_of([8, 3], [4, 3], [2, 2], [0, 1], [_StridedShard(0, split_factor=2), Replicate()])


# -- real tensors ----------------------------------------------------------------------------------------------------


def test_a_plain_tensor_is_the_whole_of_itself_and_a_parameter_is_plain() -> None:
    state = {"w": torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)), "step": torch.tensor(1)}
    assert entries_of(state) == [
        TensorEntry("w", "bfloat16", (2, 3), Box((0, 0), (2, 3))),
        TensorEntry("step", "int64", (), Box((), ())),
    ]
    assert locals_of(state)["w"].data_ptr() == state["w"].data_ptr()
    assert not locals_of(state)["w"].requires_grad


def tp_module(full: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.nn.Linear:
    """A linear layer whose weight is ``full``, sharded over the mesh as a TP plan does."""
    local = full.chunk(mesh.size(), dim)
    mine = local[mesh.get_local_rank()] if mesh.get_local_rank() < len(local) else full.narrow(dim, 0, 0)
    module = torch.nn.Linear(full.shape[1], full.shape[0], bias=False, device="meta")
    weight = DTensor.from_local(
        mine.clone(), mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride()
    )
    module.weight = torch.nn.Parameter(weight)
    return module


@pytest.mark.parametrize(
    ("rows", "dp", "tp", "dim"), [(8, 2, 2, 0), (7, 3, 2, 0), (13, 4, 3, 0), (5, 2, 4, 0), (7, 3, 2, 1)]
)
def test_what_fully_shard_leaves_on_each_rank_over_tp_is_what_its_entry_says(
    rows: int, dp: int, tp: int, dim: int
) -> None:
    full = torch.arange(rows * 6.0).view(rows, 6)
    held = 0
    for rank in range(dp * tp):
        with world(rank, dp * tp):
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
            module = tp_module(full, mesh["tp"], dim)
            fully_shard(module, mesh=mesh["dp"])
            state = module.state_dict()
            (entry,), local = entries_of(state), locals_of(state)["weight"]
            assert entry.global_shape == (rows, 6)
            assert entry.box.sizes == tuple(local.shape)
            assert torch.equal(local, part_of(full, entry.box))
            held += local.numel()
    assert held == full.numel()


def test_hsdp_gives_each_replica_the_same_boxes_uneven_ones_and_empty_ones_too() -> None:
    full = torch.arange(10.0).view(5, 2)
    boxes = []
    for rank in range(8):
        with world(rank, 8):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            module = torch.nn.Linear(2, 5, bias=False)
            module.weight = torch.nn.Parameter(full.clone())
            fully_shard(module, mesh=mesh)
            state = module.state_dict()
            (entry,) = entries_of(state)
            assert torch.equal(locals_of(state)["weight"], part_of(full, entry.box))
            boxes.append(entry.box)
    assert boxes[:4] == boxes[4:]
    assert [math.prod(box.sizes) for box in boxes[:4]] == [4, 4, 2, 0]


def test_a_rank_outside_the_mesh_has_no_entry() -> None:
    with world(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        outside = DTensor.from_local(
            torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=torch.Size((4,)), stride=(1,)
        )
        assert entries_of({"w": outside}) == []
        assert locals_of({"w": outside}) == {}


def test_the_tensor_is_named_when_its_placement_is_refused() -> None:
    with world(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        pending = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        with pytest.raises(LayoutMismatch, match=r"tensor 'grad'.*not a part of a tensor"):
            entries_of({"grad": pending})
