"""Read a set of safetensors files written by other tools: ``model.safetensors.index.json`` with its files, or one file.

Lengths, offsets and file names are checked before they are used. File names must be names in the same folder.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch

from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, IntegrityError

__all__ = ["INDEX_SUFFIX", "is_set", "read_set"]

INDEX_SUFFIX = ".safetensors.index.json"
_HEADER_BYTES_MAX = 100_000_000
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip

T = TypeVar("T")
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True)
class _File:
    path: Path
    base: int
    tensors: dict[str, _Tensor]


def is_set(folder: Path) -> bool:
    """Whether the folder has safetensors files or an index of them."""
    names = os.listdir(folder)
    return any(name.endswith((INDEX_SUFFIX, ".safetensors")) for name in names)


def read_set(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors by name.

    Raises `IntegrityError` for what is damaged or missing, `FormatVersionError` for an unknown dtype, and
    `CheckpointError` when the folder has several sets.
    """
    try:
        names = sorted(os.listdir(folder))
        indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
        if len(indices) > 1:
            raise CheckpointError(
                f"{folder} has several sets: {', '.join(indices)}.", remedy="give each its own folder."
            )
        if not indices:
            wanted = None
            files = [name for name in names if name.endswith(".safetensors")]
        else:
            wanted = _decode((folder / indices[0]).read_bytes(), _Index, folder / indices[0]).weight_map
            files = sorted(set(wanted.values()))
        found: dict[str, torch.Tensor] = {}
        for name in files:
            if name != os.path.basename(name) or name in (".", ".."):
                raise _damaged(folder / indices[0], f"{name!r:.200} is no file of this folder")
            for tensor, value in _read(folder / name):
                if tensor in found:
                    raise _damaged(folder / name, f"{tensor!r:.200} is in two files")
                found[tensor] = value
    except OSError as error:
        raise IntegrityError(
            f"{folder} cannot be read: {error}.",
            remedy="make the folder readable, and see that every file of its index is in it.",
        ) from error
    if wanted is not None and wanted.keys() != found.keys():
        missing = sorted(wanted.keys() ^ found.keys())
        raise IntegrityError(
            f"{folder}: its index and its files differ on {missing[0]!r:.200} and {len(missing) - 1} more.",
            remedy="get the set anew.",
        )
    return found


def _read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of everything in one file. Raises `IntegrityError` or `FormatVersionError`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if length > min(size - 8, _HEADER_BYTES_MAX):
            raise _damaged(path, f"it claims a header of {length} bytes")
        raw = _decode(file.read(length), dict[str, msgspec.Raw], path)
        tensors = {name: _decode(bytes(one), _Tensor, path) for name, one in raw.items() if name != "__metadata__"}
        at = 0
        for name, one in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
            dtype = _TYPES.get(one.dtype)
            if dtype is None:
                raise FormatVersionError(f"{path}: {name!r:.200} is {one.dtype!r:.50}.", remedy="use a newer rackrun.")
            kind: torch.dtype = getattr(torch, dtype)
            count = 1
            for extent in one.shape:
                count *= extent
            start, stop = one.data_offsets
            if start != at or stop - start != count * kind.itemsize or 8 + length + stop > size:
                raise _damaged(path, f"{name!r:.200} is bytes {start} to {stop}")
            at = stop
            data = bytearray(file.read(stop - start))
            if len(data) != stop - start:
                raise _damaged(path, "it is cut short")
            yield name, (torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)).reshape(one.shape)


def _decode(data: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"{error!s:.200}") from error


def _damaged(path: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{path} is no part of a set: {what}.", remedy="get it anew.")
