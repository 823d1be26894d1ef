"""An export is what other tools open: every tensor whole, bit for bit, whatever the world size was."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, LayoutMismatch
from rackrun.checkpoint.durable.durable_manifest import shard_name
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.safetensors_image import TensorEntry, plan_image, write_image
from rackrun.checkpoint.offline.export import INDEX, Exported, export
from rackrun.protocol import crash_points
from tests.checkpoint.storage import CHUNK, JOB, Failing, calls_of, killed_at, store_at

POINTS = [name for name in crash_points.CRASH_POINTS if name.startswith("export.")]

State = dict[str, torch.Tensor]
Part = tuple[TensorEntry, torch.Tensor]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def part(name: str, tensor: torch.Tensor, box: Box) -> Part:
    index = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), box), tensor[index].contiguous()


def rows(tensor: torch.Tensor, rank: int, world: int, dim: int = 0) -> Box:
    """As torch.chunk splits: the last ranks may have nothing."""
    size = tensor.shape[dim]
    step = math.ceil(size / world)
    start, stop = min(rank * step, size), min((rank + 1) * step, size)
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    offsets[dim], sizes[dim] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))


def saved(root: Path, ranks: list[list[Part]], number: int = 1) -> DurableStore:
    store = store_at(root)
    writer = store.writer(number, 10, 1, len(ranks))
    for rank, parts in enumerate(ranks):
        layout = plan_image([entry for entry, _ in parts], plain=3)
        image = memoryview(bytearray(layout.total_bytes))
        write_image(layout, {entry.name: tensor for entry, tensor in parts}, b"abc", image)
        assert writer.write_shard(rank, image, layout.layout_hash, chunk_crcs(image, CHUNK), chunk_bytes=CHUNK)
    assert writer.finish()
    return store


def exported(store: DurableStore, into: Path, **given: object) -> Exported:
    with store.open(1) as reader:
        return export(reader, into, **given)  # type: ignore[arg-type]


def opened(into: Path) -> State:
    """By the index, as other tools do."""
    index = json.loads((into / INDEX).read_text())
    found: State = {}
    for name, file in index["weight_map"].items():
        with safe_open(into / file, framework="pt") as tensors:
            assert name in tensors.keys()  # noqa: SIM118 - not a mapping
            found[name] = tensors.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def state() -> State:
    torch.manual_seed(7)
    return {
        "layers.0.weight": torch.randn(5, 6),
        "layers.0.bias": torch.randn(5).to(torch.bfloat16),
        "norm": torch.tensor([float("nan"), -0.0, float("inf")]),
        "step": torch.tensor(41, dtype=torch.int64),
        "nothing": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
        "fp8": torch.randn(4, 3).to(torch.float8_e4m3fn),
    }


def replicated(tensors: State) -> list[Part]:
    return [part(name, tensor, Box.whole(tensor.shape)) for name, tensor in tensors.items()]


def sharded(tensors: State, world: int, dim: int = 0) -> list[list[Part]]:
    return [
        [
            part(name, tensor, rows(tensor, rank, world, min(dim, tensor.dim() - 1)) if tensor.dim() else Box((), ()))
            for name, tensor in tensors.items()
        ]
        for rank in range(world)
    ]


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(
        (found[name].dtype, found[name].shape, bits(found[name])) == (tensor.dtype, tensor.shape, bits(tensor))
        for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_shards_of_any_world_size_become_whole_tensors(tmp_path: Path, world: int) -> None:
    for dim in (0, 1):
        root = tmp_path / f"{dim}"
        root.mkdir()
        done = exported(saved(root, sharded(state(), world, dim)), root / "out")
        assert same(opened(root / "out"), state())
        assert done.tensors == len(state())


def test_what_every_rank_has_is_written_once(tmp_path: Path) -> None:
    done = exported(saved(tmp_path, [replicated(state())] * 3), tmp_path / "out")
    assert same(opened(tmp_path / "out"), state())
    assert done.bytes == sum(tensor.nbytes for tensor in state().values())
    assert done.files == ("model-00001-of-00001.safetensors",)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), min_size=0, max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8]),
)
def test_any_cut_of_a_tensor_is_put_together_again(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], cuts: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    root = tmp_path_factory.mktemp("cuts")
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    boxes = [Box.whole(shape)]
    for dim, at in cuts:  # each cut splits every box that it goes through
        boxes = [half for box in boxes for half in _cut(box, dim, at)]
    exported(saved(root, [[part("t", tensor, box)] for box in boxes]), root / "out")
    assert same(opened(root / "out"), {"t": tensor})
    shutil.rmtree(root)


def _cut(box: Box, dim: int, at: int) -> list[Box]:
    if dim >= len(box.sizes) or not box.offsets[dim] < at < box.offsets[dim] + box.sizes[dim]:
        return [box]
    left, right, begin = list(box.sizes), list(box.sizes), list(box.offsets)
    left[dim] = at - box.offsets[dim]
    right[dim] -= left[dim]
    begin[dim] = at
    return [Box(box.offsets, tuple(left)), Box(tuple(begin), tuple(right))]


def test_a_shard_on_disk_is_itself_a_safetensors_file(tmp_path: Path) -> None:
    store = saved(tmp_path, sharded(state(), 2))
    with safe_open(store.path(1) / shard_name(1, 2), framework="pt") as tensors:
        assert bits(tensors.get_tensor("layers.0.weight")) == bits(state()["layers.0.weight"][3:])


def test_large_sets_are_split_and_no_tensor_is(tmp_path: Path) -> None:
    done = exported(saved(tmp_path, sharded(state(), 2)), tmp_path / "out", file_bytes_max=64)
    assert len(done.files) > 2
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*done.files, INDEX])
    assert same(opened(tmp_path / "out"), state())


def test_tensors_are_renamed_and_left_out_as_asked(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in state().items()} | {"optimizer.m": torch.ones(3)}
    exported(
        saved(tmp_path, [replicated(tensors)]),
        tmp_path / "out",
        name_of=lambda name: name.removeprefix("model.") if name.startswith("model.") else None,
    )
    assert same(opened(tmp_path / "out"), state())


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="would both be named 'x'"):
        exported(saved(tmp_path, [replicated(state())]), tmp_path / "out", name_of=lambda _: "x")


def test_a_type_that_other_tools_do_not_know_is_refused_by_name(tmp_path: Path) -> None:
    store = saved(tmp_path, [replicated({"c": torch.ones(2, dtype=torch.complex64), "w": torch.ones(2)})])
    with pytest.raises(CheckpointError, match="'c' is complex64"):
        exported(store, tmp_path / "out")
    exported(store, tmp_path / "out", name_of=lambda name: None if name == "c" else name)
    assert same(opened(tmp_path / "out"), {"w": torch.ones(2)})


def test_a_tensor_that_no_rank_has_whole_names_what_is_missing(tmp_path: Path) -> None:
    tensor = torch.ones(4, 2)
    store = saved(tmp_path, [[part("t", tensor, rows(tensor, rank, 4))] for rank in (0, 1, 3)])
    with pytest.raises(LayoutMismatch, match="'t' is not whole"):
        exported(store, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [JOB]


def test_ranks_that_disagree_about_a_tensor_are_refused(tmp_path: Path) -> None:
    store = saved(tmp_path, [replicated({"t": torch.ones(4)}), replicated({"t": torch.ones(5)})])
    with pytest.raises(LayoutMismatch, match="rank 1 holds 't'"):
        exported(store, tmp_path / "out")


def test_a_flipped_bit_in_what_is_read_stops_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    store = saved(tmp_path, sharded(state(), 2))
    path = store.path(1) / shard_name(1, 2)
    data = bytearray(path.read_bytes())
    for at in (0, 100, len(data) - 20):
        data[at] ^= 4
        path.write_bytes(data)
        with pytest.raises(IntegrityError):
            exported(store, tmp_path / "out")
        data[at] ^= 4
    assert sorted(os.listdir(tmp_path)) == [JOB]


def test_a_shard_that_is_no_image_is_refused(tmp_path: Path) -> None:
    for number, junk in enumerate((b"", b"x", b"\xff" * 100, bytes(100))):
        root = tmp_path / f"{number}"
        root.mkdir()
        store = store_at(root)
        writer = store.writer(1, 10, 1, 1)
        assert writer.write_shard(0, memoryview(junk), "h", chunk_crcs(memoryview(junk), CHUNK), chunk_bytes=CHUNK)
        assert writer.finish()
        with pytest.raises(CheckpointError):
            exported(store, root / "out")
        assert os.listdir(root) == [JOB]


def test_a_place_that_is_taken_is_refused_and_left_alone(tmp_path: Path) -> None:
    store = saved(tmp_path, [replicated(state())])
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="is there already"):
        exported(store, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    done = exported(
        saved(tmp_path, sharded(state(), 2)), tmp_path / "out", progress=lambda *now: told.append((now[0], now[1]))
    )
    assert told[-1] == (done.bytes, done.bytes)


@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC], ids=str)
def test_whichever_call_fails_it_is_there_whole_or_not_at_all(tmp_path: Path, how: int) -> None:
    store = saved(tmp_path, sharded(state(), 2))

    def work(files: Files, into: Path) -> None:
        exported(store, into, files=files, file_bytes_max=64)

    calls = calls_of(lambda files: work(files, tmp_path / "counted"))
    for at in range(1, len(calls) + 1):
        into = tmp_path / "out" / f"{at}"
        into.parent.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="cannot be written"):
            work(Failing(at, how, tmp_path / "none"), into)
        if into.exists():
            assert same(opened(into), state())
        assert [name for name in os.listdir(into.parent) if name.startswith(".")] == []
        shutil.rmtree(into.parent)


@pytest.mark.parametrize("name", POINTS)
def test_killed_at_a_named_point_it_is_there_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    store = saved(tmp_path, sharded(state(), 2))
    assert killed_at(name, lambda: exported(store, tmp_path / "out"))
    assert (tmp_path / "out").exists() == (name == "export.renamed")
    if not (tmp_path / "out").exists():
        exported(store, tmp_path / "out")
    assert same(opened(tmp_path / "out"), state())
