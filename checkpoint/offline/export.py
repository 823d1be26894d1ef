"""Export a checkpoint as one set of safetensors files with ``model.safetensors.index.json``, which other tools open.

It runs offline, never during training. Every tensor is assembled once from the boxes of all ranks, whatever the world
size was. Every byte read is checked against its CRC32C; bits are copied, never values. The set is built beside its
place, synced, and renamed, so it is there whole or not at all.

It needs memory for the largest tensor that is in parts, and for one of its parts. A dtype that other tools do not have
(complex numbers and rarer ones) is refused by name; `export`'s ``name_of`` can leave such a tensor out. State that is
not tensors is not exported.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, LayoutMismatch
from rackrun.checkpoint.durable.durable_reader import CheckpointReader
from rackrun.checkpoint.durable.storage.files import Files, delete_tree, sync_directory, write_new
from rackrun.checkpoint.image.boxes import Box, cover
from rackrun.checkpoint.image.image_layout import ImageLayout, parse_image
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["FILE_BYTES_MAX", "INDEX", "Exported", "export", "tensor_names"]

INDEX = "model.safetensors.index.json"
FILE_BYTES_MAX = 5 * 10**9
_HEADER_BYTES_MAX = 100_000_000
_READ_BYTES = 64 * 2**20
_TYPES = {
    "float64": ("F64", 8), "int64": ("I64", 8), "uint64": ("U64", 8),
    "float32": ("F32", 4), "int32": ("I32", 4), "uint32": ("U32", 4),
    "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int16": ("I16", 2), "uint16": ("U16", 2),
    "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip
"""torch's dtype name -> (safetensors' name, bytes of an element)."""

register("export.file_written", "export.index_written", "export.synced", "export.renamed")


@dataclass(frozen=True)
class Exported:
    """What was exported. ``files``: their names in order, without the index. ``bytes``: of tensors."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int


@dataclass
class _Tensor:
    name: str
    """The tensor's name in the set."""
    source: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[Box, tuple[int, Box, int]]] = field(default_factory=list)
    """(box, (rank, the same box, where it begins in the rank's image))."""

    @property
    def itemsize(self) -> int:
        return _TYPES[self.dtype][1]

    @property
    def bytes(self) -> int:
        return Box.whole(self.shape).numel * self.itemsize


def export(
    checkpoint: CheckpointReader,
    into: Path | str,
    *,
    name_of: Callable[[str], str | None] = lambda name: name,
    file_bytes_max: int = FILE_BYTES_MAX,
    progress: Callable[[int, int], None] | None = None,
    files: Files | None = None,
) -> Exported:
    """Write the set into the new directory ``into``, in files with at most ``file_bytes_max`` bytes of tensors each.

    A larger tensor gets a file of its own. ``name_of``: returns a tensor's name in the set; None leaves it out.
    ``progress`` gets (bytes done, bytes in all).

    Raises IntegrityError when bytes are not what was saved, LayoutMismatch when the ranks' parts are not whole tensors,
    and CheckpointError when ``into`` exists or cannot be written. Nothing is left behind.
    """
    into, files = Path(into), files or Files()
    tensors = _collect(checkpoint, name_of)
    groups = _split(tensors, file_bytes_max)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    total, done = sum(tensor.bytes for tensor in tensors), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    temporary = into.with_name(f".{into.name}-{secrets.token_hex(4)}.part")
    try:
        _refuse_existing(files, into)
        files.mkdir(temporary)
        for name, group in zip(names, groups, strict=True):
            write_new(files, temporary / name, _file(checkpoint, group, advance))
            crash_point("export.file_written")
        write_new(files, temporary / INDEX, [memoryview(_index(names, groups, total))])
        crash_point("export.index_written")
        sync_directory(files, temporary)
        crash_point("export.synced")
        files.rename(temporary, into)
        crash_point("export.renamed")
        sync_directory(files, into.parent)
    except OSError as error:
        _forget(files, temporary)
        raise CheckpointError(
            f"the set {into} cannot be written: {error.strerror or error}.",
            remedy="make room, or choose another place.",
        ) from error
    except BaseException:  # an interrupt too
        _forget(files, temporary)
        raise
    return Exported(into, tuple(names), len(tensors), total)


def tensor_names(checkpoint: CheckpointReader) -> list[str]:
    """Return the names of all tensors that any rank holds, each once. Raises as `export` does."""
    names: dict[str, None] = {}
    for rank in range(checkpoint.world_size):
        names |= dict.fromkeys(entry.name for entry in _layout(checkpoint, rank).entries)
    return list(names)


def _collect(checkpoint: CheckpointReader, name_of: Callable[[str], str | None]) -> list[_Tensor]:
    """Return the tensors of all ranks with their parts, sorted by name in the set."""
    by_source: dict[str, _Tensor | None] = {}
    taken: dict[str, str] = {}
    for rank in range(checkpoint.world_size):
        layout = _layout(checkpoint, rank)
        for entry in layout.entries:
            if entry.name not in by_source:
                name = name_of(entry.name)
                found = _Tensor(name, entry.name, entry.dtype, tuple(entry.global_shape)) if name else None
                by_source[entry.name] = found
                if name and taken.setdefault(name, entry.name) != entry.name:
                    raise CheckpointError(
                        f"{taken[name]!r} and {entry.name!r} would both be named {name!r}.",
                        remedy="give each its own name.",
                    )
            tensor = by_source[entry.name]
            if tensor is None:
                continue
            _check(tensor, entry.dtype, tuple(entry.global_shape), rank)
            if entry.box.numel:
                start = layout.extents[entry.name][0]
                tensor.parts.append((entry.box, (rank, entry.box, start)))
    return sorted((tensor for tensor in by_source.values() if tensor is not None), key=lambda tensor: tensor.name)


def _layout(checkpoint: CheckpointReader, rank: int) -> ImageLayout:
    size = checkpoint.reader(rank).size
    length = struct.unpack("<Q", checkpoint.read(rank, 0, 8))[0] if size >= 8 else size
    if length > min(size - 8, _HEADER_BYTES_MAX):
        raise IntegrityError(
            f"the shard of rank {rank} of checkpoint {checkpoint.number} is no image: it claims a header of "
            f"{length} bytes.",
            remedy="export another checkpoint.",
        )
    return parse_image(checkpoint.read(rank, 0, 8 + length), limit=size)


def _check(tensor: _Tensor, dtype: str, shape: tuple[int, ...], rank: int) -> None:
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise LayoutMismatch(
            f"rank {rank} holds {tensor.source!r} as {dtype}{list(shape)}, another as {tensor.dtype}{list(tensor.shape)}.",
            remedy="these shards are not of one state: export another checkpoint.",
        )
    if dtype not in _TYPES:
        raise CheckpointError(
            f"{tensor.source!r} is {dtype}, which other tools have no type for.",
            remedy="leave it out: name_of answers None for it.",
        )


def _split(tensors: Sequence[_Tensor], file_bytes_max: int) -> list[list[_Tensor]]:
    """Divide tensors among files. In a file they are sorted by itemsize, so that each is aligned."""
    groups: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > file_bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    for group in groups:
        group.sort(key=lambda tensor: (-tensor.itemsize, tensor.name))  # so that every tensor is aligned
    return groups


def _index(names: Sequence[str], groups: Sequence[Sequence[_Tensor]], total: int) -> bytes:
    where = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


def _file(
    checkpoint: CheckpointReader, tensors: Sequence[_Tensor], advance: Callable[[int], None]
) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _TYPES[tensor.dtype][0],
            "shape": tensor.shape,
            "data_offsets": (at, at + tensor.bytes),
        }
        at += tensor.bytes
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _HEADER_BYTES_MAX:
        raise CheckpointError(
            f"{len(tensors)} tensors make a header of {len(encoded)} bytes, more than readers accept.",
            remedy="choose a smaller file_bytes_max.",
        )
    yield memoryview(struct.pack("<Q", len(encoded)) + encoded)
    for tensor in tensors:
        for piece in _bytes_of(checkpoint, tensor):
            yield piece
            advance(len(piece))


def _bytes_of(checkpoint: CheckpointReader, tensor: _Tensor) -> Iterator[memoryview]:
    """Yield the bytes of one whole tensor. Raises LayoutMismatch when parts are missing."""
    whole = Box.whole(tensor.shape)
    if whole.numel == 0:
        return
    try:
        pieces = cover(whole, tensor.parts)
    except LayoutMismatch as error:
        raise LayoutMismatch(f"{tensor.source!r} is not whole: {error.what}", remedy=error.remedy) from error
    if len(pieces) == 1 and pieces[0][1][1] == whole:  # one rank has all of it
        rank, _, start = pieces[0][1]
        for low in range(start, start + tensor.bytes, _READ_BYTES):
            yield checkpoint.read(rank, low, min(low + _READ_BYTES, start + tensor.bytes))
        return
    kind = np.dtype(f"u{tensor.itemsize}")
    out = np.empty(tensor.shape, kind)
    for piece, (rank, box, start) in pieces:
        part = np.frombuffer(checkpoint.read(rank, start, start + box.numel * tensor.itemsize), kind).reshape(box.sizes)
        out[_index_of(piece, whole)] = part[_index_of(piece, box)]
    yield out.reshape(-1).view(np.uint8).data


def _index_of(piece: Box, inside: Box) -> tuple[slice, ...]:
    return tuple(
        slice(offset - start, offset - start + size)
        for offset, start, size in zip(piece.offsets, inside.offsets, piece.sizes, strict=True)
    )


def _refuse_existing(files: Files, into: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.stat(into)
        raise CheckpointError(f"{into} is there already.", remedy="choose a new directory, or remove it.")


def _forget(files: Files, temporary: Path) -> None:
    with contextlib.suppress(OSError):
        for _ in delete_tree(files, temporary):
            pass
