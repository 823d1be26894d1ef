"""Compute which part of each tensor this rank holds, from DTensor placements.

The order of several splits on one dim is ambiguous. Placements are read left to right. FSDP2 over TP on the same dim
splits TP's axis first, though it comes last, and marks this with ``_StridedShard(split_factor=...)``. Read as torch
defines it, that names other rows than FSDP2 holds when a dim does not divide evenly (7 rows over dp 3, tp 2). So both
readings are computed, and the local shape decides between them. A tensor is refused when neither reading fits, when
both fit with different rows, or when its part is more than one box: wrong offsets in a checkpoint would be noticed only
by the loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import TensorEntry

__all__ = ["box_of", "entries_of", "locals_of"]

Ranges = list[tuple[int, int]]
"""Indices along one dim, as (start, stop), in the order in which the local tensor has them."""
Split = tuple[int, int, int]
"""(parts, which part, split factor): one placement on one axis of the mesh."""


def entries_of(state: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    """Return an entry for each tensor that this rank has a part of. A plain tensor is one whole box.

    A DTensor whose mesh does not include this rank is left out. Raises `LayoutMismatch`, naming the tensor, for
    placements that are no box: pending sums (Partial), unknown placements, and the cases in this module's docstring.
    """
    return [entry for name, tensor in state.items() if (entry := _entry_of(name, tensor)) is not None]


def locals_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the local tensors that `entries_of` describes, by name: the memory itself, not a copy."""
    return {
        name: (tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach())
        for name, tensor in state.items()
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None
    }


def box_of(
    global_shape: Sequence[int],
    local_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """Return the box that the rank at ``coordinate`` holds.

    Raises `LayoutMismatch` when there is none, or it is ambiguous.
    """
    splits: dict[int, list[Split]] = {}
    for parts, part, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            splits.setdefault(placement.dim, []).append((parts, part, factor))
        elif not placement.is_replicate():
            raise LayoutMismatch(
                f"{placement} is not a part of a tensor.", remedy="redistribute it to Shard or Replicate."
            )
    readings = []
    for read in (_left_to_right, _strided_last):
        ranges = [read(size, splits.get(dim, [])) for dim, size in enumerate(global_shape)]
        if [_length(of_dim) for of_dim in ranges] == list(local_shape) and ranges not in readings:
            readings.append(ranges)
    placed = f"{list(placements)} on a mesh of {list(mesh_shape)}"
    if not readings:
        raise LayoutMismatch(
            f"the local shape {list(local_shape)} at {list(coordinate)} is not that of {list(global_shape)} as {placed}.",
            remedy="padding and parts of unequal choice cannot be stored: use torch's own sharding.",
        )
    if math.prod(local_shape) and len(readings) > 1:
        raise LayoutMismatch(
            f"{list(global_shape)} as {placed} can be two different parts at {list(coordinate)}: torch reads the placements one way, FSDP2 splits the other.",
            remedy="pad the dim to a multiple of the ranks that share it.",
        )
    if max((len(of_dim) for of_dim in readings[0]), default=1) > 1:
        raise LayoutMismatch(
            f"{list(global_shape)} as {placed} is more than one box at {list(coordinate)}.",
            remedy="redistribute it to plain Shard placements before it is saved.",
        )
    offsets = [of_dim[0][0] if of_dim else size for of_dim, size in zip(readings[0], global_shape, strict=True)]
    return Box(tuple(offsets), tuple(local_shape))


_box_of = functools.lru_cache(maxsize=4096)(box_of)
"""Cached, because blocks of a model repeat, and so do saves."""


def _entry_of(name: str, tensor: torch.Tensor) -> TensorEntry | None:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorEntry(name, dtype, shape, Box.whole(shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    local_shape = tuple(tensor.to_local().shape)
    try:
        box = _box_of(shape, local_shape, tuple(tensor.device_mesh.shape), tuple(coordinate), tuple(tensor.placements))
    except LayoutMismatch as error:
        raise LayoutMismatch(f"tensor {name!r:.200}: {error.what}", remedy=error.remedy) from error
    return TensorEntry(name, dtype, shape, box)


def _left_to_right(size: int, splits: Sequence[Split]) -> Ranges:
    """Return the ranges by torch's definition: each split divides what the split before has left."""
    ranges = [(0, size)]
    for parts, part, factor in splits:
        ranges = _merged([of for chunk in _chunks(ranges, factor) for of in _chunks(chunk, parts)[part]])
    return _merged(ranges)


def _strided_last(size: int, splits: Sequence[Split]) -> Ranges:
    """Return the ranges by FSDP2's order: strided axes divide what the others left, where their factors say so."""
    plain = [split for split in splits if split[2] == 1]
    strided = [split for split in reversed(splits) if split[2] != 1]
    done = math.prod(parts for parts, _, _ in plain)
    for parts, _, factor in strided:
        if factor != done:
            return _left_to_right(size, splits)
        done *= parts
    return _left_to_right(size, [(parts, part, 1) for parts, part, _ in plain + strided])


def _chunks(ranges: Ranges, parts: int) -> list[Ranges]:
    """Split like torch.chunk: equal parts, then a smaller one, then empty ones."""
    each = -(-_length(ranges) // parts)
    return [_part(ranges, index * each, (index + 1) * each) for index in range(parts)]


def _part(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the ranges of the elements ``start`` to ``stop``, counted along ``ranges``."""
    found, at = [], 0
    for first, last in ranges:
        begin, end = max(first, first + start - at), min(last, first + stop - at)
        if begin < end:
            found.append((begin, end))
        at += last - first
    return found


def _merged(ranges: Ranges) -> Ranges:
    merged: Ranges = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
