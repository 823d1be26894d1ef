"""Images: any safetensors reader opens them, every bit comes back, and no header is believed."""

from __future__ import annotations

import json
import mmap
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, IntegrityError, LayoutMismatch
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.safetensors_image import (
    PLAIN,
    ImageLayout,
    TensorEntry,
    header_bytes,
    parse_image,
    plan_image,
    read_plain,
    read_tensor,
    read_tensors,
    write_head,
    write_image,
    write_tensor,
    write_tensors,
)
from rackrun.checkpoint.image.tensor_entries import entries_of

KNOWN = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
]
OPAQUE = [
    "complex128",
    "complex64",
    "complex32",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]
LIMIT = 2**40


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits, NaNs of every kind among them; a bool is 0 or 1."""
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).view(torch.bool)
    raw = torch.randint(0, 256, (max(count, 1) * kind.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype == "complex32":
        return torch.view_as_complex(raw.view(torch.float16).view(-1, 2))[:count].view(shape)
    return raw.view(kind)[:count].view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.resolve_conj().resolve_neg()
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def image_of(tensors: Mapping[str, torch.Tensor], plain: bytes = b"") -> tuple[ImageLayout, bytearray]:
    layout = plan_image(entries_of(tensors), len(plain))
    image = bytearray(layout.total_bytes)
    write_image(layout, tensors, plain, memoryview(image))
    return layout, image


def assert_comes_back(tensors: Mapping[str, torch.Tensor], plain: bytes = b"") -> None:
    layout, image = image_of(tensors, plain)
    assert parse_image(image, limit=len(image)) == layout
    assert parse_image(bytes(image[: len(layout.header)]), limit=len(image)).entries == layout.entries
    for payload in (image, bytes(image)):
        assert read_plain(layout, payload) == plain
        for name, tensor in tensors.items():
            read = read_tensor(layout, name, payload)
            assert (read.dtype, read.shape, raw(read)) == (tensor.dtype, tensor.shape, raw(tensor)), name


# -- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KNOWN + OPAQUE)
def test_every_dtype_comes_back_bit_for_bit_in_every_shape_and_stride(dtype: str) -> None:
    block = random_bits(dtype, (4, 6, 5))
    assert_comes_back(
        {
            "contiguous": block,
            "transposed": block.permute(2, 0, 1),
            "strided": block[::2, 1:, ::3],
            "expanded": block[:1, :1].expand(3, 2, 5),
            "scalar": block[1, 2, 3],
            "empty": block[:, :0],
            "no elements at all": block[:0, 0, 0],
        },
        plain=b"\x00plain\xff",
    )


def test_lazy_conjugates_and_negatives_are_stored_as_what_they_mean() -> None:
    block = random_bits("complex64", (3, 4)).nan_to_num()
    assert_comes_back({"conj": block.conj(), "conj.t": block.conj().t(), "negative": block.conj().imag})


def test_tensors_that_share_storage_are_stored_each_on_its_own() -> None:
    base = torch.arange(12.0)
    tensors = {"all": base, "part": base[3:9], "again": base, "parameter": torch.nn.Parameter(base.view(3, 4))}
    layout, image = image_of(tensors)
    assert layout.total_bytes - len(layout.header) == (12 + 6 + 12 + 12) * 4
    read_tensor(layout, "all", image).zero_()
    assert torch.equal(read_tensor(layout, "part", image), base[3:9])
    assert torch.equal(read_tensor(layout, "again", image), base)


@pytest.mark.parametrize("access", [mmap.ACCESS_WRITE, mmap.ACCESS_READ])
def test_a_read_tensor_is_a_view_and_its_memory_cannot_be_unmapped_under_it(access: int, tmp_path: Path) -> None:
    layout, image = image_of({"a": torch.ones(4)})
    path = tmp_path / "image"
    path.write_bytes(image)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=access)
    with memoryview(mapped) as payload:
        view = read_tensor(layout, "a", payload)
        if access == mmap.ACCESS_WRITE:
            view.fill_(2.0)
            assert torch.equal(read_tensor(layout, "a", payload), torch.full((4,), 2.0))
    with pytest.raises(BufferError):
        mapped.close()
    assert torch.equal(view, torch.full((4,), 2.0 if access == mmap.ACCESS_WRITE else 1.0))
    del view
    mapped.close()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != PLAIN)
TENSORS = st.dictionaries(
    NAMES,
    st.tuples(st.sampled_from(KNOWN + OPAQUE), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.binary(max_size=9))
def test_any_names_dtypes_and_shapes_come_back(kinds: dict[str, tuple[str, tuple[int, ...]]], plain: bytes) -> None:
    assert_comes_back({name: random_bits(*kind) for name, kind in kinds.items()}, plain)


# -- what others see -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.binary(max_size=9))
def test_safetensors_opens_every_image(kinds: dict[str, tuple[str, tuple[int, ...]]], plain: bytes) -> None:
    tensors = {name: random_bits(*kind) for name, kind in kinds.items()}
    _, image = image_of(tensors, plain)
    seen = safetensors.torch.load(bytes(image))
    assert seen.keys() == tensors.keys() | ({PLAIN} if plain else set())
    for name, tensor in tensors.items():
        assert raw(seen[name]) == raw(tensor)
        if kinds[name][0] in KNOWN:
            assert (seen[name].dtype, seen[name].shape) == (tensor.dtype, tensor.shape)
        else:
            assert seen[name].dtype == torch.uint8
            assert seen[name].shape == (*tensor.shape, tensor.dtype.itemsize)


def test_safe_open_finds_tensors_slices_and_metadata_in_a_file(tmp_path: Path) -> None:
    weights = torch.randn(6, 4)
    entries = [TensorEntry("w", "float32", (12, 4), Box((6, 0), (6, 4)))]
    layout = plan_image(entries, plain=3)
    image = bytearray(layout.total_bytes)
    write_image(layout, {"w": weights}, b"abc", memoryview(image))
    path = tmp_path / "rank.safetensors"
    path.write_bytes(image)
    with safetensors.safe_open(path, framework="pt") as opened:
        assert set(opened.keys()) == {"w", PLAIN}
        assert torch.equal(opened.get_tensor("w"), weights)
        assert torch.equal(opened.get_slice("w")[2:4], weights[2:4])
        assert bytes(opened.get_tensor(PLAIN).numpy()) == b"abc"
        assert opened.metadata() == {
            "format": "pt",
            "rackrun": '{"boxes":{"w":[[12,4],[6,0]]},"dtypes":{},"format":1}',
        }


def test_the_data_begin_at_a_page_without_holes_large_elements_first_then_names_plain_last() -> None:
    layout, _ = image_of(
        {
            "b": torch.zeros(3, dtype=torch.int8),
            "a": torch.zeros(2, dtype=torch.int8),
            "d": torch.zeros(1),
            "c": torch.zeros(1, dtype=torch.complex128),
        },
        plain=b"12345",
    )
    assert len(layout.header) % 4096 == 0
    starts = {
        name: (start - len(layout.header), stop - len(layout.header)) for name, (start, stop) in layout.extents.items()
    }
    assert starts == {"c": (0, 16), "d": (16, 20), "a": (20, 22), "b": (22, 25), PLAIN: (25, 30)}
    assert layout.total_bytes == len(layout.header) + 30


@given(st.permutations(range(5)))
def test_the_same_entries_in_any_order_give_the_same_bytes(order: list[int]) -> None:
    entries = [TensorEntry(f"t{i}", KNOWN[i], (i, 2), Box((0, 0), (i, 1))) for i in range(5)]
    assert plan_image([entries[i] for i in order]).header == plan_image(entries).header


def test_the_hash_tells_names_dtypes_shapes_boxes_and_the_size_of_plain_apart() -> None:
    hashes = {
        plan_image([TensorEntry(name, dtype, shape, Box(offsets, (2,)))], plain).layout_hash
        for name, dtype, shape, offsets, plain in [
            ("a", "float32", (2,), (0,), 0),
            ("b", "float32", (2,), (0,), 0),
            ("a", "int32", (2,), (0,), 0),
            ("a", "complex32", (2,), (0,), 0),
            ("a", "float32", (4,), (0,), 0),
            ("a", "float32", (4,), (2,), 0),
            ("a", "float32", (2,), (0,), 1),
        ]
    }
    assert len(hashes) == 7


@pytest.mark.soak
def test_a_hundred_thousand_names_take_seconds() -> None:
    value = torch.tensor([1.0, 2.0])
    tensors = {f"model.layers.{i // 100}.experts.{i % 100}.weight": value for i in range(100_000)}
    began = time.process_time()
    layout, image = image_of(tensors)
    assert parse_image(image, limit=len(image)) == layout
    assert time.process_time() - began < 30  # quadratic would be minutes
    assert torch.equal(read_tensor(layout, "model.layers.999.experts.99.weight", image), value)
    assert image[len(layout.header) :] == value.numpy().tobytes() * 100_000


# -- what is refused before it is written ----------------------------------------------------------------------------


def entry(name: str = "a", dtype: str = "float32", size: int = 2) -> TensorEntry:
    return TensorEntry(name, dtype, (size,), Box((0,), (size,)))


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([entry(), entry(dtype="int8")], "two tensors are named 'a'"),
        ([entry(PLAIN)], "reserved"),
        ([entry("__metadata__")], "reserved"),
        ([entry("\ud800")], "not text"),
        ([entry(dtype="qint8")], "'qint8' cannot be stored"),
        ([entry(dtype="no such")], "cannot be stored"),
        ([TensorEntry("a", "int8", (4,), Box((3,), (2,)))], "not within its tensor"),
        ([TensorEntry("a", "int8", (4, 4), Box((3,), (1,)))], "not within its tensor"),
    ],
)
def test_entries_that_no_image_can_hold_are_refused(entries: list[TensorEntry], what: str) -> None:
    with pytest.raises(LayoutMismatch, match=what):
        plan_image(entries)


def test_a_header_longer_than_readers_accept_is_refused() -> None:
    name = "n" * 1_000_000
    with pytest.raises(CheckpointError, match="safetensors allows 100000000"):
        plan_image([entry(f"{name}{i}") for i in range(101)])


@pytest.mark.parametrize(
    ("tensors", "plain", "what"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(2)}, b"xy", "'b' is not in the layout"),
        ({}, b"xy", "'a' is missing"),
        ({"a": torch.zeros(3)}, b"xy", r"planned as float32\[2\] and is float32\[3\]"),
        ({"a": torch.zeros(2, dtype=torch.int32)}, b"xy", "is int32"),
        ({"a": torch.zeros(2)}, b"xyz", "2 plain bytes"),
        ({"a": torch.zeros(2).to_sparse()}, b"xy", "not plain memory"),
        ({"a": torch.zeros(2, device="meta")}, b"xy", "not plain memory"),
    ],
)
def test_a_structure_that_has_changed_is_refused_before_anything_is_written(
    tensors: dict[str, torch.Tensor], plain: bytes, what: str
) -> None:
    layout = plan_image([entry()], plain=2)
    image = bytearray(layout.total_bytes)
    with pytest.raises(LayoutMismatch, match=what):
        write_image(layout, tensors, plain, memoryview(image))
    assert not any(image)


def test_a_slot_that_is_too_small_is_refused_and_a_larger_one_is_written_at_its_start() -> None:
    layout = plan_image([entry()])
    with pytest.raises(LayoutMismatch, match="memory of"):
        write_image(layout, {"a": torch.ones(2)}, b"", memoryview(bytearray(layout.total_bytes - 1)))
    slot = bytearray(b"\xaa" * (layout.total_bytes + 5))
    write_image(layout, {"a": torch.ones(2)}, b"", memoryview(slot))
    assert slot[layout.total_bytes :] == b"\xaa" * 5
    with pytest.raises(IntegrityError, match="only"):
        read_tensor(layout, "a", slot[: layout.total_bytes - 1])
    with pytest.raises(LayoutMismatch, match="no tensor 'b'"):
        read_tensor(layout, "b", slot)


# -- hostile headers -------------------------------------------------------------------------------------------------


def packed(document: Any, length: int | None = None) -> bytes:
    encoded = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded


def header(changed: Callable[[dict[str, Any]], object] = dict, **extra: Any) -> bytes:
    """That of a small valid image, changed."""
    document: dict[str, Any] = {
        "__metadata__": {"rackrun": json.dumps({"format": 1, "boxes": {}, "dtypes": {}} | extra)},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
    }
    changed(document)
    return packed(document)


def with_b(**changes: Any) -> bytes:
    return header(lambda document: document["b"].update(changes))


def test_the_small_image_that_is_changed_below_is_accepted_as_it_is() -> None:
    assert [str(e) for e in parse_image(header(), limit=LIMIT).entries] == ["'a' float32[2][0:2]", "'b' uint8[3][0:3]"]


VALID = header().partition(b'"a"')
HOSTILE = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "a length past the end": packed(header()[8:], len(header()) - 7),
    "the largest length": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a length beyond what safetensors allows": struct.pack("<Q", 100_000_001) + b"{}",
    "no JSON": packed(b"\x00" * 64),
    "no UTF-8": packed(b'{"\xff": 1}'),
    "an empty header": packed(b""),
    "a list": packed([]),
    "more after the JSON": packed(header()[8:] + b"{}"),
    "deep lists": packed(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": packed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "deep metadata": header(lambda d: d["__metadata__"].update(rackrun="[" * 100_000)),
    "a number of a million digits": packed(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "a name twice": VALID[0] + b'"b":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' + b"".join(VALID[1:]),
    "a key twice": packed(header()[8:].replace(b'"shape": [3],', b'"shape": [3], "shape": [3],')),
    "metadata twice": packed(b'{"__metadata__":{},' + header()[9:]),
    "a hole": with_b(data_offsets=[9, 12]),
    "a hole at the start": header(lambda d: d.pop("a")),
    "an overlap": with_b(data_offsets=[7, 10]),
    "equal extents": with_b(shape=[8], data_offsets=[0, 8]),
    "an end before the start": with_b(shape=[0], data_offsets=[8, 7]),
    "a negative offset": with_b(data_offsets=[-3, 0]),
    "a negative size": with_b(shape=[-3]),
    "a fraction": with_b(shape=[3.5]),
    "infinity": packed(header()[8:].replace(b"[3]", b"[Infinity]")),
    "a bool for a size": with_b(shape=[True, 3]),
    "text for a shape": with_b(shape="3"),
    "three offsets": with_b(data_offsets=[8, 9, 11]),
    "more elements than bytes": with_b(shape=[4]),
    "fewer elements than bytes": with_b(shape=[2]),
    "a product beyond 64 bits": with_b(shape=[2**62, 2**62, 3]),
    "a size beyond 64 bits": with_b(shape=[2**64]),
    "a million dims": with_b(shape=[1] * 1_000_000),
    "an unknown field": with_b(stride=[1]),
    "no dtype": header(lambda d: d["b"].pop("dtype")),
    "an end beyond the limit": with_b(shape=[2**40], data_offsets=[8, 8 + 2**40]),
    "a box outside its tensor": header(boxes={"b": [[4], [2]]}),
    "a box of other dims": header(boxes={"b": [[4, 4], [0, 0]]}),
    "a box of unequal dims": header(boxes={"b": [[4], []]}),
    "a box of a tensor that is not there": header(boxes={"c": [[4], [0]]}),
    "a negative box": header(boxes={"b": [[4], [-1]]}),
    "a logical dtype of another size": header(dtypes={"b": "complex64"}),
    "a logical dtype of what is no bytes": header(dtypes={"a": "complex64"}),
    "a logical dtype that needs none": header(dtypes={"b": "int8"}),
    "plain that is no bytes": header(lambda d: d.update({PLAIN: {"dtype": "I8", "shape": [1], "data_offsets": [11, 12]}})),
    "plain with dims": header(lambda d: d.update({PLAIN: {"dtype": "U8", "shape": [1, 1], "data_offsets": [11, 12]}})),
    "a name that is no text": header(lambda d: d.update({"\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})),
    "rackrun's own part is no JSON": header(lambda d: d["__metadata__"].update(rackrun="{")),
    "a name twice in rackrun's own part": header(
        lambda d: d["__metadata__"].update(rackrun='{"format":1,"boxes":{"b":[[3],[0]],"b":[[4],[0]]}}')
    ),
    "format 0": header(format=0),
    "format true": header(format=True),
    "no format": header(lambda d: d["__metadata__"].update(rackrun="{}")),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_no_writer_writes_is_damaged(case: str) -> None:
    with pytest.raises(IntegrityError):
        parse_image(HOSTILE[case], limit=LIMIT)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        (with_b(dtype="F6_E2M3"), "'F6_E2M3', which this version does not know"),
        (header(dtypes={"b": "float3"}), "'float3'|float3"),
        (header(format=2), "has format 2; this rackrun reads 1"),
        (header(lambda d: d.pop("__metadata__")), "not an image of rackrun"),
        (header(lambda d: d.update(__metadata__={"format": "pt"})), "not an image of rackrun"),
        (header(lambda d: d.update(__metadata__=[1])), "not an image of rackrun"),
    ],
)
def test_what_others_or_newer_versions_wrote_is_called_that(case: bytes, what: str) -> None:
    with pytest.raises(FormatVersionError, match=what):
        parse_image(case, limit=LIMIT)


def test_additions_within_the_format_are_ignored() -> None:
    assert len(parse_image(header(added=[1]), limit=LIMIT).entries) == 2


def test_a_foreign_safetensors_file_is_refused_as_such() -> None:
    with pytest.raises(FormatVersionError):
        parse_image(safetensors.torch.save({"a": torch.zeros(2)}), limit=LIMIT)


def test_a_lie_about_lengths_allocates_nothing() -> None:
    lies = [with_b(shape=[2**50], data_offsets=[8, 8 + 2**50]), struct.pack("<Q", 90_000_000) + b"{}"]
    tracemalloc.start()
    try:
        for lie in lies:
            with pytest.raises(IntegrityError):
                parse_image(lie, limit=LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_or_cut_header_is_parsed_as_something_valid_or_refused_with_a_type(data: st.DataObject) -> None:
    small = header(boxes={"b": [[4], [1]]})
    at = data.draw(st.integers(0, len(small) - 1))
    flipped = bytearray(small)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    cut = flipped[: data.draw(st.integers(0, len(small)))]
    for damaged in (flipped, cut):
        try:
            layout = parse_image(damaged, limit=100_000)
        except (IntegrityError, FormatVersionError):
            continue
        assert layout.total_bytes <= 100_000


def test_the_first_eight_bytes_say_how_many_to_read() -> None:
    layout = plan_image([entry()])
    assert header_bytes(layout.header[:8], limit=LIMIT) == len(layout.header)
    with pytest.raises(IntegrityError, match="claims a header"):
        header_bytes(layout.header[:8], limit=len(layout.header) - 1)


# -- telling what is there
def test_bytes_that_are_told_to_be_filled_are_final(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 1024
    monkeypatch.setattr("rackrun.checkpoint.image.safetensors_image.PIECE_BYTES", piece)
    tensors = {
        "large": torch.arange(5 * piece // 8 + 3),
        "strided": torch.arange(2 * piece // 4, dtype=torch.int32).view(2, -1).t(),
        **{f"small-{i}": torch.full((piece // 20,), i, dtype=torch.int16) for i in range(30)},
        "early": torch.ones(3, dtype=torch.int8),
    }
    layout = plan_image(entries_of(tensors), plain=4)
    payload = memoryview(bytearray(b"x" * layout.total_bytes))
    told: list[tuple[int, bytes]] = []
    write_head(layout, b"tail", payload)
    write_tensor(layout, "early", tensors.pop("early"), payload)
    write_tensors(layout, tensors, payload, lambda upto: told.append((upto, bytes(payload[:upto]))))
    ends = [upto for upto, _ in told]
    assert ends == sorted(ends)
    assert all(data == payload[:upto] for upto, data in told)
    assert max(b - a for a, b in zip([0, *ends], [*ends, layout.total_bytes], strict=True)) <= 2 * piece + len(
        layout.header
    )


def a_written_image() -> tuple[dict[str, torch.Tensor], ImageLayout, bytearray]:
    wanted = {
        "a": torch.arange(100, dtype=torch.float64),
        "b": torch.arange(60, dtype=torch.int16).view(6, 10),
        "c": torch.complex(torch.randn(5), torch.randn(5)),
        "d": torch.tensor(True),
        "e": torch.zeros(0, 3),
    }
    layout = plan_image(entries_of(wanted), plain=4)
    image = bytearray(layout.total_bytes)
    write_image(layout, wanted, b"tail", memoryview(image))
    return wanted, layout, image


def places_for(wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One of them is not contiguous."""
    return {name: torch.zeros_like(tensor) for name, tensor in wanted.items()} | {
        "b": torch.zeros(10, 6, dtype=torch.int16).t()
    }


@pytest.mark.parametrize("threads", [1, 3])
def test_all_tensors_are_filled_or_none(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackrun.checkpoint.image.safetensors_image.PIECE_BYTES", 37)
    wanted, layout, image = a_written_image()
    found = places_for(wanted)
    with pytest.raises(LayoutMismatch, match="'b'"):
        read_tensors(layout, {**found, "b": torch.zeros(99)}, image, threads)
    assert not found["a"].any()
    read_tensors(layout, found, image, threads)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_what_is_read_from_memory_in_pieces_is_copied_piece_by_piece() -> None:
    """A GPU's driver refuses a copy from memory that was registered with it in two pieces ("invalid argument", an H200 said). Here each address that is a
    multiple of 24 begins a piece, and a copy that is not cut there is seen by the sizes that were asked for."""
    wanted, layout, image = a_written_image()
    base = torch.frombuffer(image, dtype=torch.uint8).data_ptr()
    asked: list[tuple[int, int]] = []

    def cuts(address: int, size: int) -> list[int]:
        asked.append((address - base, size))
        return list(range(24 - (address - base) % 24, size, 24))

    found = places_for(wanted)
    read_tensors(layout, found, image, cuts=cuts)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    extents = [(start, stop - start) for name, (start, stop) in layout.extents.items() if name in "abcd"]
    assert sorted(asked) == sorted(extents)
