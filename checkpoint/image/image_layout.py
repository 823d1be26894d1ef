"""The layout of one rank's image: a safetensors header, planned from entries or parsed without trust.

::

    u64 length | JSON header, padded with spaces to 4 KiB | tensors without holes, itemsize descending, then by name

Any safetensors reader opens an image. What that format cannot express is canonical JSON in ``__metadata__["rackrun"]``:
boxes that are not the whole tensor, and the dtypes of tensors stored as bytes (U8, with one more dim). State that is
not tensors is stored as the U8 tensor `PLAIN`, last.

A header may come from anywhere. `parse_image` bounds every length before it uses it, and allocates no more than the
header itself takes. This module does not import torch, so that agents read layouts without it.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, IntegrityError, LayoutMismatch
from rackrun.checkpoint.image.boxes import Box

__all__ = [
    "HEADER_BYTES_MAX",
    "PLAIN",
    "Buffer",
    "ImageLayout",
    "TensorEntry",
    "header_bytes",
    "itemsize_of",
    "layout_in",
    "parse_image",
    "plan_image",
    "read_layout",
]

Buffer = memoryview | bytes | bytearray
PLAIN = "rackrun.plain"
HEADER_BYTES_MAX = 100_000_000
"""The longest header that safetensors readers accept."""
FORMAT = 1

_LENGTH = struct.Struct("<Q")
_ALIGN = 4096
_DIMS_MAX = 64
_METADATA = "__metadata__"
_TAG = {
    "float64": "F64", "int64": "I64", "uint64": "U64",
    "float32": "F32", "int32": "I32", "uint32": "U32",
    "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""torch's dtype name -> safetensors' tag.

Only tags that readers have known for long; other dtypes are stored as bytes.
"""
_BY_TAG = {tag: name for name, tag in _TAG.items()}
_ITEMSIZE = {
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of one rank. ``box`` is this rank's part of it: its sizes are the local shape."""

    name: str
    dtype: str
    """torch's dtype name without ``torch.``."""
    global_shape: tuple[int, ...]
    box: Box

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.global_shape)}{self.box}"


@dataclass(frozen=True)
class ImageLayout:
    """Where each tensor of one rank lies in its image. Two layouts are equal when their headers are."""

    entries: tuple[TensorEntry, ...] = field(compare=False)
    """The tensors in the order of the image, without `PLAIN`."""
    header: bytes
    extents: Mapping[str, tuple[int, int]] = field(compare=False)
    """Name -> (start, stop) in bytes of the image; includes `PLAIN` when the image has one."""
    total_bytes: int
    layout_hash: str
    """BLAKE2b-256 of the header, as hex. The header has names, dtypes, shapes, boxes and the size of the plain part."""

    @functools.cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        return {entry.name: entry for entry in self.entries}


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_DIMS_MAX + 1)]


class _Info(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Size, _Size]


class _Extra(msgspec.Struct, frozen=True):
    """The content of ``__metadata__["rackrun"]``. Fields that a later version adds without a new format are ignored."""

    format: int
    boxes: dict[str, tuple[_Shape, _Shape]] = {}
    """Name -> (global shape, offsets), where the box is not the whole tensor."""
    dtypes: dict[str, str] = {}
    """Name -> torch's dtype name, where the tensor is stored as U8."""


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element. Raises `LayoutMismatch` for a dtype that images do not hold."""
    if dtype not in _ITEMSIZE:
        raise LayoutMismatch(
            f"tensors of dtype {dtype!r:.100} cannot be stored.",
            remedy=f"store its parts (codes, scales) as tensors of one of {', '.join(sorted(_ITEMSIZE))}.",
        )
    return _ITEMSIZE[dtype]


def plan_image(entries: Sequence[TensorEntry], plain: int = 0) -> ImageLayout:
    """Return the layout of an image of ``entries``, in any order, and of ``plain`` bytes of other state.

    Raises `LayoutMismatch` for names that occur twice or are reserved, boxes outside their tensor, and unknown dtypes;
    `CheckpointError` when the header is longer than safetensors readers accept.
    """
    ordered = sorted(entries, key=lambda entry: (-itemsize_of(entry.dtype), entry.name))
    infos: dict[str, Any] = {_METADATA: None}
    relative: dict[str, tuple[int, int]] = {}
    extra = _Extra(FORMAT, {}, {})
    at = 0
    for entry in ordered:
        _check(entry)
        if entry.name in relative:
            raise LayoutMismatch(f"two tensors are named {entry.name!r:.200}.", remedy="give each its own name.")
        shape, tag, itemsize = entry.box.sizes, _TAG.get(entry.dtype), itemsize_of(entry.dtype)
        if tag is None:
            tag, shape = "U8", (*shape, itemsize)
            extra.dtypes[entry.name] = entry.dtype
        if not _is_whole(entry):
            extra.boxes[entry.name] = (entry.global_shape, entry.box.offsets)
        relative[entry.name] = (at, at + entry.box.numel * itemsize)
        infos[entry.name] = _Info(tag, shape, relative[entry.name])
        at = relative[entry.name][1]
    if plain:
        relative[PLAIN] = (at, at + plain)
        infos[PLAIN] = _Info("U8", (plain,), relative[PLAIN])
        at += plain
    header = _encode(infos, extra)
    return _layout(tuple(ordered), header, relative, at)


def header_bytes(prefix: Buffer, *, limit: int) -> int:
    """Return how many bytes of an image `parse_image` needs, from its first 8.

    Raises `IntegrityError` above ``limit``.
    """
    if len(prefix) < _LENGTH.size:
        raise IntegrityError(f"an image begins with 8 bytes; there are {len(prefix)}.", remedy="use another copy.")
    length: int = _LENGTH.unpack_from(prefix)[0]
    if length > HEADER_BYTES_MAX or _LENGTH.size + length > limit:
        raise IntegrityError(
            f"the image claims a header of {length} bytes, of at most {min(HEADER_BYTES_MAX, max(limit - 8, 0))}.",
            remedy="this is no image, or a damaged one: use another copy.",
        )
    return _LENGTH.size + length


def read_layout(read: Callable[[int, int], Buffer], size: int) -> ImageLayout:
    """Return the layout of an image of ``size`` bytes whose header ``read(start, stop)`` returns.

    Raises what `header_bytes` and `parse_image` raise.
    """
    length = header_bytes(read(0, min(8, size)), limit=size)
    return parse_image(read(0, length), limit=size)


def layout_in(payload: memoryview) -> ImageLayout:
    """Return the layout of the image in ``payload``. Raises what `read_layout` raises."""
    return read_layout(lambda start, stop: payload[start:stop], len(payload))


def parse_image(header: Buffer, *, limit: int) -> ImageLayout:
    """Return the layout that the first bytes of an image describe. ``limit``: the most bytes that the image can have.

    Raises `IntegrityError` for a header that no writer writes (wrong lengths, holes, overlaps, a name twice), and
    `FormatVersionError` for an image of another program or of a newer version.
    """
    end = header_bytes(header, limit=limit)
    if len(header) < end:
        raise IntegrityError(f"the header has {end} bytes; only {len(header)} are there.", remedy="use another copy.")
    encoded = bytes(memoryview(header)[:end])
    document = _decode(encoded[_LENGTH.size :].decode, dict[str, Any])
    metadata = document.pop(_METADATA, None)
    extra = _parse_extra(metadata)
    infos = _convert(document, dict[str, _Info])
    _check_names(infos)
    ordered = sorted(infos.items(), key=lambda item: item[1].data_offsets)
    entries, relative, at = [], {}, 0
    for name, info in ordered:
        start, stop = info.data_offsets
        if start != at or stop < start:
            what = "a hole" if start > at else "an overlap"
            raise _damaged(f"there is {what} before tensor {name!r:.200}: bytes {start} to {stop} after {at}")
        if name == PLAIN:
            if info.dtype != "U8" or info.shape != (stop - start,):
                raise _damaged(f"{PLAIN} is not {stop - start} plain bytes")
        else:
            entries.append(_parse_entry(name, info, extra))
            if (needed := entries[-1].box.numel * itemsize_of(entries[-1].dtype)) != stop - start:
                raise _damaged(f"tensor {entries[-1]!s:.300} has {stop - start} bytes, and needs {needed}")
        relative[name] = (start, stop)
        at = stop
    if end + at > limit:
        raise _damaged(f"it describes an image of {end + at} bytes; at most {limit} are there")
    if unknown := (extra.boxes.keys() | extra.dtypes.keys()) - relative.keys():
        raise _damaged(f"it describes tensors that it does not hold, such as {min(unknown)!r:.200}")
    return _layout(tuple(entries), encoded, relative, at)


def _layout(
    entries: tuple[TensorEntry, ...], header: bytes, relative: Mapping[str, tuple[int, int]], data_bytes: int
) -> ImageLayout:
    base = len(header)
    extents = {name: (base + start, base + stop) for name, (start, stop) in relative.items()}
    return ImageLayout(entries, header, extents, base + data_bytes, hashlib.blake2b(header, digest_size=32).hexdigest())


def _check(entry: TensorEntry) -> None:
    if entry.name in (PLAIN, _METADATA):
        raise LayoutMismatch(f"the name {entry.name!r} is reserved.", remedy="rename the tensor.")
    dims = len(entry.global_shape)
    if dims > _DIMS_MAX or len(entry.box.sizes) != dims or not _is_within(entry):
        raise LayoutMismatch(f"the box of {entry!s:.300} is not within its tensor.", remedy="check how it is sharded.")


def _is_whole(entry: TensorEntry) -> bool:
    return entry.box.sizes == entry.global_shape and not any(entry.box.offsets)


def _is_within(entry: TensorEntry) -> bool:
    return _is_whole(entry) or Box.whole(entry.global_shape).contains(entry.box)


def _encode(infos: dict[str, Any], extra: _Extra) -> bytes:
    try:
        infos[_METADATA] = {"format": "pt", "rackrun": msgspec.json.encode(extra, order="sorted").decode()}
        encoded = msgspec.json.encode(infos)
    except UnicodeEncodeError as error:
        raise LayoutMismatch(f"a tensor's name is not text: {error}.", remedy="rename it.") from error
    length = -(-(_LENGTH.size + len(encoded)) // _ALIGN) * _ALIGN - _LENGTH.size
    if length > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"the header of {len(infos) - 1} tensors has {length} bytes; safetensors allows {HEADER_BYTES_MAX}.",
            remedy="use fewer tensors or shorter names, or save the state in parts.",
        )
    return _LENGTH.pack(length) + encoded.ljust(length)


C = TypeVar("C")


def _decode(text: Callable[[], str], kind: type[C]) -> C:
    """Decode ``text()`` as JSON in which no object has a key twice. Raises `IntegrityError`."""
    try:
        return _convert(json.loads(text(), object_pairs_hook=_unique), kind)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"it is not JSON: {error!s:.200}") from error


def _convert(document: Any, kind: type[C]) -> C:
    try:
        return msgspec.convert(document, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _damaged(f"{error!s:.300}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _damaged(f"the name {twice!r:.200} occurs twice")
    return found


def _parse_extra(metadata: Any) -> _Extra:
    written = metadata.get("rackrun") if isinstance(metadata, dict) else None
    if not isinstance(written, str):
        raise FormatVersionError(
            "this is not an image of rackrun: __metadata__ says nothing of it.", remedy="import it."
        )
    document = _decode(lambda: written, dict[str, Any])
    version = document.get("format")
    if type(version) is int and version > FORMAT:
        raise FormatVersionError(
            f"the image has format {version}; this rackrun reads {FORMAT}.", remedy="use the version that wrote it."
        )
    extra = _convert(document, _Extra)
    if extra.format != FORMAT:
        raise _damaged(f"there is no format {extra.format}")
    return extra


def _check_names(infos: Mapping[str, object]) -> None:
    try:
        "".join(infos).encode()
    except UnicodeEncodeError as error:
        raise _damaged(f"a tensor's name is not text: {error!s:.200}") from error


def _parse_entry(name: str, info: _Info, extra: _Extra) -> TensorEntry:
    shape, dtype = info.shape, _BY_TAG.get(info.dtype)
    logical = extra.dtypes.get(name)
    if dtype is None or (logical is not None and logical not in _ITEMSIZE):
        raise FormatVersionError(
            f"tensor {name!r:.200} has dtype {logical or info.dtype!r:.100}, which this version does not know.",
            remedy="use the versions of rackrun and torch that wrote it.",
        )
    if logical is not None:
        if dtype != "uint8" or logical in _TAG or shape[-1:] != (itemsize_of(logical),):
            raise _damaged(f"tensor {name!r:.200} is {info.dtype}{list(shape)} and cannot be {logical}")
        dtype, shape = logical, shape[:-1]
    global_shape, offsets = extra.boxes.get(name) or (shape, (0,) * len(shape))
    if not len(shape) == len(global_shape) == len(offsets) <= _DIMS_MAX:
        raise _damaged(f"tensor {name!r:.200} has {len(shape)} dims, its box others")
    entry = TensorEntry(name, dtype, global_shape, Box(offsets, shape))
    if not _is_within(entry):
        raise _damaged(f"the box of {entry!s:.300} is not within its tensor")
    return entry


def _damaged(what: str) -> IntegrityError:
    return IntegrityError(f"the image's header is damaged: {what}.", remedy="use another copy.")
