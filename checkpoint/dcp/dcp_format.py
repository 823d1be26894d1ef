"""How torch's distributed checkpoints are stored on the durable tier, and how they are found again.

A ``checkpoint_id`` is a directory with checkpoints, or one checkpoint. A rank's plain part is `Plain` after `MAGIC`. A
plain part that begins otherwise was written by another part of rackrun, and only the tensors of its image are read.
`rackrun.checkpoint.dcp.dcp_storage` has torch's interfaces.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from rackrun.checkpoint.base.errors import (
    CheckpointError,
    FormatVersionError,
    IntegrityError,
    LayoutMismatch,
    NoUsableCheckpoint,
)
from rackrun.checkpoint.base.location import absolute, is_remote
from rackrun.checkpoint.durable.durable_manifest import Manifest, TemporaryName, checkpoint_number
from rackrun.checkpoint.durable.durable_reader import ShardReader
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.boxes import Box, cover
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, TensorEntry, read_layout

__all__ = [
    "VerifiedCheckpoint",
    "Id",
    "Paths",
    "find",
    "foreign_planner_data",
    "numbers_in",
    "merged",
    "next_number",
    "packed",
    "paths_in",
    "place_of",
    "torch_dtype",
]

MAGIC = b"rackrun.dcp 1\n"

Id = str | os.PathLike[str]
Paths = dict[str, tuple[str | int, ...]]
"""Flat name -> keys of the nested state dict, as torch's planners flatten it."""


class _Plain(msgspec.Struct, frozen=True):
    """A rank's plain part: the items that torch has pickled, by name, and its share of the names' paths."""

    items: dict[str, bytes]
    paths: Paths | None


def packed(items: dict[str, bytes], paths: Paths | None) -> bytes:
    """Encode a rank's plain part: the items that torch has pickled, by name, and this rank's share of ``paths``."""
    return MAGIC + msgspec.msgpack.encode(_Plain(items, paths))


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A whole checkpoint, with its headers and plain parts read and verified."""

    store: DurableStore
    manifest: Manifest
    digest: str
    """Digest of the manifest."""
    layouts: list[ImageLayout]
    items: dict[str, bytes]
    paths: Paths | None
    entries: dict[str, TensorEntry]
    """Name -> one of the entries of that tensor."""
    passed_over: dict[int, str]
    """Number of a newer checkpoint -> why it was not taken."""

    def describe(self) -> dict[str, Any]:
        """Return the metadata that torch plans with: name -> storage metadata.

        Raises `LayoutMismatch` unless the boxes of each tensor cover all of it, without overlap.
        """
        boxes: dict[str, set[Box]] = {name: set() for name in self.entries}
        for layout in self.layouts:
            for entry in layout.entries:
                first = self.entries[entry.name]
                if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
                    raise LayoutMismatch(f"{entry!s:.300} is {first!s:.300} elsewhere.", remedy="save it again.")
                boxes[entry.name].add(entry.box)
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in self.items}
        for name, held in boxes.items():
            first = self.entries[name]
            parts = sorted(box for box in held if box.numel) or [min(held)]
            whole = Box.whole(first.global_shape)
            try:
                cover(whole, [(box, box) for box in parts])
            except LayoutMismatch as error:
                raise LayoutMismatch(f"tensor {name!r:.200}: {error.what}", remedy=error.remedy) from error
            if sum(box.numel for box in parts) != whole.numel:
                raise LayoutMismatch(f"parts of tensor {name!r:.200} overlap.", remedy="save it again.")
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=torch_dtype(first)),
                torch.Size(first.global_shape),
                [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in parts],
            )
        return described


def find(path: Id | None) -> VerifiedCheckpoint:
    """Read the headers and plain parts of a checkpoint: the one that ``path`` names, else the newest whole one.

    Raises `NoUsableCheckpoint` when there is none, `IntegrityError` when it is damaged.
    """
    store, named = place_of(path)
    manifest, digest, passed_over = (*store.whole(named), {}) if named is not None else _newest(store)
    layouts, items, paths, entries = [], {}, [], {}
    for record in manifest.shards:
        directory = store.data(manifest)
        with contextlib.closing(ShardReader(store.files, directory, manifest, record)) as shard:
            layouts.append(read_layout(shard.read, shard.size))
            plain = bytes(shard.read(*layouts[-1].extents.get(PLAIN, (0, 0))))
        if plain.startswith(MAGIC):  # otherwise another part of rackrun wrote the image, with a plain part of its own
            try:
                decoded = msgspec.msgpack.decode(memoryview(plain)[len(MAGIC) :], type=_Plain)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise IntegrityError(
                    f"the plain part of {shard.path} is none: {error}.", remedy="save again."
                ) from error
            items.update(decoded.items)
            paths.append(decoded.paths)
        entries.update({entry.name: entry for entry in layouts[-1].entries})
    return VerifiedCheckpoint(store, manifest, digest, layouts, items, merged(paths), entries, passed_over)


def place_of(path: Id | None) -> tuple[DurableStore, int | None]:
    """Return the store of a checkpoint_id, and the checkpoint's number when it names one."""
    if not path:
        raise CheckpointError("no directory was given.", remedy="give checkpoint_id=..., or a path to the constructor.")
    directory = absolute(path)
    if not is_remote(directory):
        directory = Path(os.path.abspath(directory))  # without `..`
    number = checkpoint_number(directory.name)
    if number is not None:
        directory = directory.parent
    return DurableStore(directory.parent, directory.name), number


def _names(store: DurableStore) -> list[str]:
    try:
        return store.files.listdir(store.directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{store.directory} cannot be listed: {error.strerror or error}.", remedy="mount it, or check its rights."
        ) from error


def numbers_in(store: DurableStore) -> list[int]:
    """Return the numbers of all checkpoints that are listed, whole or not, newest first."""
    return sorted((found for name in _names(store) if (found := checkpoint_number(name)) is not None), reverse=True)


def next_number(store: DurableStore) -> int:
    """Return the number after the newest checkpoint, published or begun.

    What has a checkpoint's name and is none of that number does not count; its number is left out.
    """
    begun = [temporary.number for name in _names(store) if (temporary := TemporaryName.parse(name))]
    listed = numbers_in(store)
    published = next((number for number in listed if not store.is_foreign(number)), -1)
    number = max([published, *begun]) + 1
    while number in listed:
        number += 1
    return number


def _newest(store: DurableStore) -> tuple[Manifest, str, dict[int, str]]:
    """Return the newest whole checkpoint's manifest, its digest, and checkpoint number -> why a newer one was passed over.

    Raises `NoUsableCheckpoint` when there is none.
    """
    passed_over: dict[int, str] = {}
    for number in numbers_in(store):
        try:
            return *store.whole(number), passed_over
        except NoUsableCheckpoint:
            continue  # it was deleted meanwhile, or is not published
        except IntegrityError as error:
            passed_over[number] = str(error)
    story = " ".join(passed_over.values())
    raise NoUsableCheckpoint(
        f"{store.directory} has no complete checkpoint. {story}".rstrip(),
        remedy="name the directory that was saved into.",
    )


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """Return the entry's dtype. Raises `FormatVersionError` when this torch does not have it."""
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatVersionError(f"this torch has no {entry.dtype}, as {entry!s:.300} is.", remedy="use a newer torch.")
    return dtype


def paths_in(plan: SavePlan) -> Paths | None:
    """Return the paths in a plan; None when it has none. Raises `CheckpointError` for another planner's data."""
    try:
        return None if plan.planner_data is None else msgspec.convert(plan.planner_data, Paths)
    except msgspec.ValidationError as error:
        raise foreign_planner_data(plan.planner_data) from error


def merged(paths: Sequence[Paths | None]) -> Paths | None:
    """Merge the paths of all ranks.

    For a name that occurs twice the lower rank's path counts, as in torch's planner.
    """
    found = [of for of in paths if of is not None]
    return {name: path for of in reversed(found) for name, path in of.items()} if found else None


def foreign_planner_data(data: object) -> CheckpointError:
    """Return the error for planner data that cannot be stored."""
    return CheckpointError(
        f"the planner's data are a {type(data).__name__} that only pickle could store.",
        remedy="use a planner that keeps nothing but torch's own paths of names in planner_data.",
    )
