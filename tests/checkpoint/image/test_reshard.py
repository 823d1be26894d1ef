"""From any world to any other: every target rank gets, bit for bit, what a full gather would have given it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.base.errors import IntegrityError, LayoutMismatch
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image import reshard
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import Buffer, ImageLayout, TensorEntry, parse_image, plan_image
from rackrun.checkpoint.image.reshard import fill, plan_from, plan_reshard
from rackrun.checkpoint.image.safetensors_image import bits_of, write_image
from rackrun.checkpoint.image.tensor_entries import box_of

Read = Callable[[int, int, int], Buffer]
DTYPES = ["float32", "bfloat16", "bool", "float8_e4m3fn", "complex64", "complex128", "int64"]
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 11, 12, 13])


@dataclass(frozen=True)
class World:
    """How each tensor is placed on a mesh of so many ranks."""

    mesh: tuple[int, ...]
    placements: Mapping[str, Sequence[Placement]]

    def entries(self, full: Mapping[str, torch.Tensor]) -> list[list[TensorEntry]]:
        """Of each rank."""
        return [
            [self._entry(name, tensor, coordinate) for name, tensor in full.items()]
            for coordinate in itertools.product(*map(range, self.mesh))
        ]

    def _entry(self, name: str, tensor: torch.Tensor, coordinate: tuple[int, ...]) -> TensorEntry:
        local = tensor
        for parts, part, placement in zip(self.mesh, coordinate, self.placements[name], strict=True):
            if isinstance(placement, Shard):
                chunks = local.chunk(parts, placement.dim)
                local = chunks[part] if part < len(chunks) else local.narrow(placement.dim, 0, 0)
        shape = tuple(tensor.shape)
        box = box_of(shape, local.shape, self.mesh, coordinate, self.placements[name])
        return TensorEntry(name, str(tensor.dtype).removeprefix("torch."), shape, box)


class Shards:
    """The images of a world in memory, and what was read of them."""

    def __init__(self, full: Mapping[str, torch.Tensor], entries: Sequence[Sequence[TensorEntry]]) -> None:
        self.layouts: list[ImageLayout] = []
        self.images: list[bytearray] = []
        self.reads: list[tuple[int, int, int]] = []
        for of_rank in entries:
            layout = plan_image(of_rank, plain=3)
            image = bytearray(layout.total_bytes)
            write_image(layout, {e.name: part_of(full[e.name], e.box) for e in of_rank}, b"xyz", memoryview(image))
            self.layouts.append(parse_image(image, limit=len(image)))
            self.images.append(image)

    def read(self, shard: int, start: int, stop: int) -> memoryview:
        self.reads.append((shard, start, stop))
        return memoryview(self.images[shard])[start:stop].toreadonly()


def part_of(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


def blank(entry: TensorEntry, *, transposed: bool = False) -> torch.Tensor:
    sizes, dtype = entry.box.sizes, getattr(torch, entry.dtype)
    if transposed:
        return torch.zeros(sizes[::-1], dtype=dtype).permute(tuple(reversed(range(len(sizes)))))
    return torch.zeros(sizes, dtype=dtype)


def restored(shards: Shards, target: Sequence[TensorEntry], **how: bool) -> dict[str, torch.Tensor]:
    tensors = {entry.name: blank(entry, **how) for entry in target}
    fill(plan_reshard(shards.layouts, target), tensors, shards.read)
    return tensors


def assert_equal_to_a_gather(
    full: Mapping[str, torch.Tensor], target: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]
) -> None:
    for entry in target:
        assert torch.equal(bits_of(tensors[entry.name]), bits_of(part_of(full[entry.name], entry.box))), entry


def rows(name: str, size: int, parts: int, columns: int = 4, dtype: str = "float32") -> list[list[TensorEntry]]:
    each = -(-size // parts)
    return [
        [TensorEntry(name, dtype, (size, columns), Box((i * each, 0), (min(each, size - i * each), columns)))]
        for i in range(parts)
    ]


# -- any world to any other ------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn, full: Mapping[str, torch.Tensor]) -> World:
    size = draw(st.integers(1, 8))
    outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    placements = {}
    for name, tensor in full.items():
        kinds = [st.just(Replicate()), *(st.just(Shard(dim)) for dim in range(tensor.dim()))]
        placements[name] = [draw(st.one_of(kinds)) for _ in range(2)]
    return World((outer, size // outer), placements)


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    state = {}
    for number in range(draw(st.integers(1, 3))):
        shape, dtype = draw(st.lists(SIZES, max_size=3)), getattr(torch, draw(st.sampled_from(DTYPES)))
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        raw = raw % 2 if dtype is torch.bool else raw
        state[f"t{number}"] = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return state


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_world_fills_any_other_bit_for_bit(data: st.DataObject) -> None:
    full = data.draw(states())
    before, after = data.draw(worlds(full)), data.draw(worlds(full))
    shards = Shards(full, before.entries(full))
    gap, most = data.draw(st.sampled_from([(0, 1), (0, 2**26), (8, 64), (2**15, 2**26), (2**15, 40)]))
    with mock.patch.multiple(reshard, GAP_BYTES=gap, FETCH_BYTES=most):
        for target in after.entries(full):
            tensors = restored(shards, target, transposed=data.draw(st.booleans()))
            assert_equal_to_a_gather(full, target, tensors)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(range(1, 9), repeat=2)))
def test_rows_become_columns_from_every_world_size_to_every_other(before: int, after: int) -> None:
    full = {"w": torch.randn(13, 11), "b": torch.randn(7), "step": torch.tensor(5), "h": torch.randn(3, 5, 2)}
    saved = World((before,), {"w": [Shard(0)], "b": [Shard(0)], "step": [Replicate()], "h": [Shard(1)]})
    wanted = World((after,), {"w": [Shard(1)], "b": [Shard(0)], "step": [Replicate()], "h": [Shard(0)]})
    shards = Shards(full, saved.entries(full))
    for target in wanted.entries(full):
        assert_equal_to_a_gather(full, target, restored(shards, target))


@pytest.mark.parametrize("before", range(1, 9))
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_every_world_size_is_restored_into_every_other_from_arenas_and_from_disk(
    tier: str, before: int, tmp_path: Path
) -> None:
    """What was sealed, and verified when it is read; uneven rows and columns, and more ranks than rows."""
    full = {
        "w": torch.randn(13, 11),
        "b": torch.randn(7).bfloat16(),
        "step": torch.tensor(5),
        "h": torch.randn(3, 5, 2),
    }
    by_row: dict[str, list[Placement]] = {"w": [Shard(0)], "b": [Shard(0)], "step": [Replicate()], "h": [Shard(0)]}
    by_column: dict[str, list[Placement]] = {
        "w": [Shard(1)],
        "b": [Replicate()],
        "step": [Replicate()],
        "h": [Shard(2)],
    }
    shards = Shards(full, World((before,), by_row).entries(full))
    with contextlib.ExitStack() as kept:
        read = (in_arenas if tier == "memory" else on_disk)(shards, kept, tmp_path)
        for after in range(1, 9):
            for placed in (by_row, by_column):
                for target in World((after,), placed).entries(full):
                    tensors = {entry.name: blank(entry) for entry in target}
                    fill(plan_reshard(shards.layouts, target), tensors, read)
                    assert_equal_to_a_gather(full, target, tensors)


def in_arenas(shards: Shards, kept: contextlib.ExitStack, folder: Path) -> Read:
    readers = []
    for rank, image in enumerate(shards.images):
        arena = kept.enter_context(
            Arena.create(folder / f"{rank}", job="j", rank=rank, fencing_token=1, slots=1, payload_bytes=len(image))
        )
        writer = arena.begin(1, 1)
        writer.payload[: len(image)] = image
        writer.seal(len(image), "layout")
        readers.append(arena.reader(1))
        readers[-1].verify()
    return lambda shard, start, stop: readers[shard].payload[start:stop]


def on_disk(shards: Shards, kept: contextlib.ExitStack, folder: Path) -> Read:
    store = DurableStore(folder, "j")
    writer = store.writer(1, 1, 1, len(shards.images))
    for rank, image in enumerate(shards.images):
        assert writer.write_shard(rank, memoryview(image), "layout", chunk_crcs(memoryview(image)))
    assert writer.finish()
    return kept.enter_context(store.open(1)).read


def test_a_tensor_comes_from_the_image_that_is_named_for_it_and_no_other_is_opened() -> None:
    full = {"w": torch.randn(13, 11), "b": torch.randn(7)}
    shards = Shards(full, World((3,), {"w": [Shard(0)], "b": [Replicate()]}).entries(full))
    w, b = World((1,), {"w": [Shard(0)], "b": [Replicate()]}).entries(full)[0]
    opened: list[int] = []

    def layout(image: int) -> ImageLayout:
        opened.append(image)
        return shards.layouts[image]

    assert {*plan_from(layout, {2: [b]}, range(3))} == {*opened} == {2}
    fetches = plan_from(layout, {2: [b], None: [w]}, range(3))
    assert all(fetch.shard == image for image, of in fetches.items() for fetch in of)
    assert [copy.entry.name for image in (0, 1, 2) for fetch in fetches[image] for copy in fetch.copies].count("b") == 1
    tensors = {entry.name: blank(entry) for entry in (w, b)}
    for of in fetches.values():
        fill(of, tensors, shards.read)
    assert_equal_to_a_gather(full, [w, b], tensors)


# -- what is read ----------------------------------------------------------------------------------------------------


def test_the_same_world_reads_each_image_once_from_the_first_tensor_to_the_last() -> None:
    full = {f"t{i}": torch.randn(8, 3) for i in range(50)}
    entries = World((4,), {name: [Shard(0)] for name in full}).entries(full)
    shards = Shards(full, entries)
    for rank, target in enumerate(entries):
        assert_equal_to_a_gather(full, target, restored(shards, target))
        layout = shards.layouts[rank]
        assert shards.reads == [(rank, len(layout.header), layout.total_bytes - 3)]
        shards.reads.clear()


def test_what_is_contiguous_on_both_sides_is_read_in_place_and_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"w": torch.randn(64, 32)}
    shards = Shards(full, rows("w", 64, 2, 32))
    (entry,) = rows("w", 64, 4, 32)[1]
    target = torch.zeros(16, 32)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(torch.Tensor, "copy_", _watched(torch.Tensor.copy_, copies))
    fill(plan_reshard(shards.layouts, [entry]), {"w": target}, shards.read)
    start = shards.layouts[0].extents["w"][0] + 16 * 32 * 4
    assert shards.reads == [(0, start, start + 16 * 32 * 4)]
    ((into, of),) = copies
    image = torch.frombuffer(shards.images[0], dtype=torch.uint8)
    assert of.data_ptr() == image.data_ptr() + start  # no copy between
    assert into.data_ptr() == target.data_ptr()
    assert into.is_contiguous()
    assert of.is_contiguous()
    assert torch.equal(target, full["w"][16:32])


def _watched(
    copy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], seen: list[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def watching(into: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        seen.append((into, of))
        return copy(into, of)

    return watching


def test_small_gaps_are_read_over_and_large_ones_are_not() -> None:
    column = TensorEntry("w", "float32", (8, 10_000), Box((0, 100), (8, 50)))
    for columns, fetches in [(1_000, 1), (10_000, 8)]:
        full = {"w": torch.randn(8, columns)}
        entry = TensorEntry("w", "float32", (8, columns), column.box)
        shards = Shards(full, rows("w", 8, 1, columns))
        assert_equal_to_a_gather(full, [entry], restored(shards, [entry]))
        assert len(shards.reads) == fetches


def test_no_fetch_is_longer_than_the_bound() -> None:
    full = {"w": torch.randn(100, 64), "v": torch.randn(6_400, 1)}
    entries = [TensorEntry("w", "float32", (100, 64), Box.whole((100, 64)))]
    entries += [TensorEntry("v", "float32", (6_400, 1), Box.whole((6_400, 1)))]
    shards = Shards(full, [entries])
    with mock.patch.object(reshard, "FETCH_BYTES", 1_000):
        tensors = restored(shards, entries)
    assert_equal_to_a_gather(full, entries, tensors)
    assert max(stop - start for _, start, stop in shards.reads) <= 1_000
    assert sum(stop - start for _, start, stop in shards.reads) == 2 * 6_400 * 4


def test_equal_holders_share_the_bytes_and_the_plan_is_always_the_same() -> None:
    full = {f"t{i:03}": torch.randn(16) for i in range(120)}
    everywhere = World((4,), {name: [Replicate()] for name in full}).entries(full)
    shards = Shards(full, everywhere)
    plan = plan_reshard(shards.layouts, everywhere[0])
    assert plan == plan_reshard(shards.layouts, everywhere[3])
    copied = Counter[int]()
    for fetch in plan:
        copied[fetch.shard] += sum(copy.piece.numel for copy in fetch.copies)
    assert copied == dict.fromkeys(range(4), 30 * 16)


def test_target_ranks_that_take_turns_ask_different_holders_for_the_same_tensor() -> None:
    full = {"embedding": torch.randn(16, 4)}
    everywhere = World((4,), {"embedding": [Replicate()]}).entries(full)
    shards = Shards(full, everywhere)
    asked = [plan_reshard(shards.layouts, everywhere[0], turn=rank)[0].shard for rank in range(6)]
    assert asked == [0, 1, 2, 3, 0, 1]


def test_slices_of_a_plan_can_be_filled_one_after_another() -> None:
    full = {"w": torch.randn(64, 32)}
    shards = Shards(full, rows("w", 64, 8, 32))
    whole = rows("w", 64, 1, 32)[0]
    plan = plan_reshard(shards.layouts, whole)
    target = torch.zeros(64, 32)
    for fetch in reversed(plan):
        fill([fetch], {"w": target}, shards.read)
    assert torch.equal(target, full["w"])


@pytest.mark.soak
def test_a_hundred_thousand_tensors_are_planned_and_filled_within_seconds() -> None:
    shape = (2,)
    entries = [TensorEntry(f"layer.{i}.weight", "float32", shape, Box.whole(shape)) for i in range(100_000)]
    layout = plan_image(entries)
    image = bytearray(layout.total_bytes)
    memory = torch.zeros(100_000, 2)
    tensors = {entry.name: memory[i] for i, entry in enumerate(entries)}
    image[len(layout.header) :] = torch.arange(200_000.0).numpy().tobytes()
    began = time.process_time()
    plan = plan_reshard([layout], entries)
    fill(plan, tensors, lambda _, start, stop: memoryview(image)[start:stop])
    assert time.process_time() - began < 30  # quadratic would be minutes
    assert len(plan) == 1
    first = layout.entries[0].name
    assert tensors[first].tolist() == [0.0, 1.0]


# -- what is refused -------------------------------------------------------------------------------------------------


def layouts(*of_ranks: Sequence[TensorEntry]) -> list[ImageLayout]:
    return [plan_image(entries) for entries in of_ranks]


def test_a_gap_is_refused_with_the_tensor_and_the_box() -> None:
    saved = rows("model.w", 12, 4)
    with pytest.raises(LayoutMismatch, match=r"'model\.w'.*no part holds \[6:9, 0:4\] of \[0:12, 0:4\]"):
        plan_reshard(layouts(*saved[:2], saved[3]), rows("model.w", 12, 1)[0])


def test_a_rank_that_needs_nothing_of_the_gap_is_not_refused() -> None:
    saved = rows("w", 12, 4)
    assert plan_reshard(layouts(*saved[:2], saved[3]), rows("w", 12, 4)[0])


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        ([], "is in none of the shards"),
        (rows("w", 12, 2, dtype="bfloat16"), r"float32\[12, 4\] is wanted, shard 0 has bfloat16"),
        (rows("w", 12, 2, columns=5), r"\[12, 4\] is wanted, shard 0 has float32\[12, 5\]"),
        (rows("w", 12, 2)[:1] + rows("w", 10, 2)[1:], r"shard 1 has float32\[10, 4\]"),
    ],
)
def test_another_dtype_or_shape_or_no_such_tensor_is_refused(saved: list[list[TensorEntry]], what: str) -> None:
    for target in rows("w", 12, 3):
        with pytest.raises(LayoutMismatch, match=what):
            plan_reshard(layouts(*saved), target)


def test_parts_that_overlap_are_refused_unless_they_are_called_replicas() -> None:
    full = {"w": torch.randn(12, 4)}
    mixed = rows("w", 12, 2)[:1] + rows("w", 12, 3)[1:]
    shards, target = Shards(full, mixed), rows("w", 12, 1)[0]
    with pytest.raises(LayoutMismatch, match=r"'w': \[0:6, 0:4\] of shard 0 and \[4:8, 0:4\] of shard 1 overlap"):
        plan_reshard(shards.layouts, target)
    plan = plan_reshard(shards.layouts, target, overlaps_are_replicas=True)
    tensors = {"w": torch.zeros(12, 4)}
    fill(plan, tensors, shards.read)
    assert_equal_to_a_gather(full, target, tensors)
    assert sum(copy.piece.numel for fetch in plan for copy in fetch.copies) == 48


def test_a_gap_is_found_where_an_overlap_of_the_same_size_hides_it_in_the_sum() -> None:
    saved = [[TensorEntry("w", "float32", (12, 4), Box((start, 0), (6, 4)))] for start in (0, 3)]
    with pytest.raises(LayoutMismatch, match=r"no part holds \[9:12, 0:4\]"):
        plan_reshard(layouts(*saved), rows("w", 12, 1)[0])


def test_a_target_that_names_a_tensor_twice_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="twice"):
        plan_reshard(layouts(*rows("w", 12, 1)), rows("w", 12, 1)[0] * 2)


def test_nothing_is_read_for_a_rank_without_elements_but_its_tensors_are_checked() -> None:
    empty = [TensorEntry("w", "float32", (3, 4), Box((3, 0), (0, 4)))]
    assert plan_reshard(layouts(*rows("w", 3, 1)), empty) == []
    with pytest.raises(LayoutMismatch, match="none of the shards"):
        plan_reshard(layouts([]), empty)


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({}, "not there to be filled"),
        ({"w": torch.zeros(3, 4, dtype=torch.int32)}, "is int32"),
        ({"w": torch.zeros(4, 3)}, r"is float32\[4, 3\]"),
        ({"w": torch.zeros(3, 4, dtype=torch.complex64).conj().imag}, "lazy"),
    ],
)
def test_tensors_other_than_planned_are_refused_before_anything_is_read(
    tensors: dict[str, torch.Tensor], what: str
) -> None:
    shards = Shards({"w": torch.zeros(3, 4)}, rows("w", 3, 1))
    with pytest.raises(LayoutMismatch, match=what):
        fill(plan_reshard(shards.layouts, rows("w", 3, 1)[0]), tensors, shards.read)
    assert shards.reads == []


@pytest.mark.parametrize("by", [-1, 1])
def test_a_read_of_another_length_is_refused(by: int) -> None:
    shards = Shards({"w": torch.zeros(3, 4)}, rows("w", 3, 1))
    target = rows("w", 3, 1)[0]

    def read(_: int, start: int, stop: int) -> Buffer:
        return bytes(stop - start + by)

    with pytest.raises(IntegrityError, match="bytes when bytes"):
        fill(plan_reshard(shards.layouts, target), {"w": torch.zeros(3, 4)}, read)
