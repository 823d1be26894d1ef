"""Copy the shards of one world into the tensors of another: planned as boxes, read as few byte ranges, copied once.

`plan_reshard` is pure, so every rank computes the same plan. Where a box has several holders (replicas), the bytes are
spread evenly over them. A `Fetch` is one range of one shard's image. Neighbouring parts, of one tensor or of several,
are read together across gaps of up to `GAP_BYTES`, because a request costs more than reading that many bytes; the gap
itself is not copied. No fetch is longer than `FETCH_BYTES`, which bounds the memory of a remote read. `fill` copies
each part once, from the bytes that ``read`` returned straight into the tensor, of any strides.

Parts that overlap without being the same box contradict each other on the shared elements. They are refused, unless the
caller knows that they are replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rackrun.checkpoint.base.errors import IntegrityError, LayoutMismatch
from rackrun.checkpoint.image.boxes import Box, cover, overlap_of
from rackrun.checkpoint.image.image_layout import Buffer, ImageLayout, TensorEntry, itemsize_of
from rackrun.checkpoint.image.safetensors_image import bits_of, check_local, memory_of
from rackrun.checkpoint.image.tensor_entries import entries_of, locals_of

__all__ = ["BoxCopy", "Fetch", "Read", "entries_of", "fill", "locals_of", "plan_from", "plan_reshard"]

GAP_BYTES = 32 * 2**10
FETCH_BYTES = 64 * 2**20

Read = Callable[[int, int, int], Buffer]
"""(shard, start, stop) -> those bytes of the shard's image, verified."""


@dataclass(frozen=True)
class BoxCopy:
    """A box of a target tensor, and where its elements lie in the fetched bytes."""

    entry: TensorEntry
    """The target tensor."""
    piece: Box
    offset: int
    """Where the box begins, in bytes from the start of the fetch."""
    strides: tuple[int, ...]
    """Strides of the box in the fetched bytes, in elements."""


@dataclass(frozen=True)
class Fetch:
    """Bytes ``start`` to ``stop`` of one image, and the copies from them. ``shard``: an index into the sources."""

    shard: int
    start: int
    stop: int
    copies: tuple[BoxCopy, ...]


_Holder = tuple[int, TensorEntry]


class _Part(NamedTuple):
    shard: int
    start: int
    stop: int
    entry: TensorEntry
    piece: Box
    strides: tuple[int, ...]


def plan_reshard(
    sources: Sequence[ImageLayout],
    target: Sequence[TensorEntry],
    *,
    turn: int = 0,
    overlaps_are_replicas: bool = False,
) -> list[Fetch]:
    """Return what to read to fill one rank's ``target`` tensors, in the order of shards and bytes.

    ``turn``: where the choice among equal holders begins. Ranks that pass their own number do not all read from the
    same holder. ``overlaps_are_replicas``: parts that overlap hold the same bits. Raises `LayoutMismatch`, naming
    tensor and box, for gaps, for other overlaps, and where dtype or shape differ.
    """
    held: dict[str, list[_Holder]] = {entry.name: [] for entry in target}
    if len(held) != len(target):
        raise LayoutMismatch("the target names a tensor twice.", remedy="give each tensor of a rank its own name.")
    for shard, layout in enumerate(sources):
        for entry in layout.entries:
            if entry.name in held:
                held[entry.name].append((shard, entry))
    load = [0] * len(sources)
    parts: list[_Part] = []
    for entry in target:
        itemsize = itemsize_of(entry.dtype)
        for piece, holders in _pieces(entry, held[entry.name], overlaps_are_replicas):
            shard, source = min(holders, key=lambda held_by: (load[held_by[0]], (held_by[0] - turn) % len(sources)))
            load[shard] += piece.numel * itemsize
            strides, base = _strides(source.box.sizes), sources[shard].extents[entry.name][0]
            for box in _cut(piece, strides, itemsize):
                apart = zip(box.offsets, source.box.offsets, strides, strict=True)
                start = base + sum((a - b) * stride for a, b, stride in apart) * itemsize
                stop = start + _span(box.sizes, strides) * itemsize
                parts.append(_Part(shard, start, stop, entry, box, strides))
    parts.sort(key=lambda part: part[:3])
    return list(_coalesced(parts))


def plan_from(
    layout: Callable[[int], ImageLayout],
    wanted: Mapping[int | None, Sequence[TensorEntry]],
    holders: Sequence[int],
    *,
    turn: int = 0,
) -> dict[int, list[Fetch]]:
    """Return what to read from each image, in the order of its bytes: image -> fetches, whose ``shard`` is the image.

    ``layout(image)``: the image's layout, called for the images in use only. ``wanted``: image -> the tensors to be
    read from it; None: from any of ``holders``. ``turn`` and what is raised: see `plan_reshard`.
    """
    found: dict[int, list[Fetch]] = {}
    for one, targets in wanted.items():
        among = holders if one is None else [one]
        for fetch in plan_reshard([layout(image) for image in among], targets, turn=turn):
            image = among[fetch.shard]
            found.setdefault(image, []).append(replace(fetch, shard=image))
    for fetches in found.values():
        fetches.sort(key=lambda fetch: fetch.start)
    return found


def fill(plan: Sequence[Fetch], tensors: Mapping[str, torch.Tensor], read: Read) -> None:
    """Read all of ``plan`` and copy it into ``tensors``, which are local ones as `locals_of` returns them.

    Several threads may fill slices of one plan: no two copies write the same element.

    Raises `LayoutMismatch`, before anything is read, when a tensor is not as planned, and `IntegrityError` when
    ``read`` returns fewer bytes than asked for. After any error the tensors may be partly overwritten.
    """
    places = _places(plan, tensors)
    with torch.no_grad():
        for fetch in plan:
            got = read(fetch.shard, fetch.start, fetch.stop)
            if memoryview(got).nbytes != fetch.stop - fetch.start:
                raise IntegrityError(
                    f"shard {fetch.shard} gave {memoryview(got).nbytes} bytes when bytes {fetch.start} to {fetch.stop} were read.",
                    remedy="use another copy.",
                )
            memory = memory_of(got)
            for copy in fetch.copies:
                _copy(copy, memory, places[copy.entry.name])


def _pieces(
    entry: TensorEntry, holders: Sequence[_Holder], overlaps_are_replicas: bool
) -> list[tuple[Box, list[_Holder]]]:
    """Return the pieces that cover ``entry``'s box, each with its holders. Raises `LayoutMismatch`."""
    for shard, source in holders:
        if (source.dtype, source.global_shape) != (entry.dtype, entry.global_shape):
            raise LayoutMismatch(
                f"tensor {entry.name!r:.200}: {entry.dtype}{list(entry.global_shape)} is wanted, shard {shard} has {source.dtype}{list(source.global_shape)}.",
                remedy="restore into the model that was saved; dtypes are not converted here.",
            )
    if not holders:
        raise LayoutMismatch(
            f"tensor {entry!s:.300} is in none of the shards.",
            remedy="it was saved by another model, or shards are missing.",
        )
    by_box: dict[Box, list[_Holder]] = {}
    for shard, source in holders:
        by_box.setdefault(source.box, []).append((shard, source))
    parts = [(common, of) for box, of in by_box.items() if (common := box.intersect(entry.box)) is not None]
    held_numel = sum(common.numel for common, _ in parts)
    if held_numel > entry.box.numel and not overlaps_are_replicas:
        held = [of[0] for _, of in parts]
        pair = overlap_of([source.box for _, source in held])
        assert pair is not None
        ranks = [by_box[box][0][0] for box in pair]
        raise LayoutMismatch(
            f"tensor {entry.name!r:.200}: {pair[0]} of shard {ranks[0]} and {pair[1]} of shard {ranks[1]} overlap.",
            remedy="use the shards of one world; if both hold the same bits, say that overlaps are replicas.",
        )
    try:
        return cover(entry.box, parts)
    except LayoutMismatch as error:
        raise LayoutMismatch(f"tensor {entry.name!r:.200}: {error.what}", remedy=error.remedy) from error


def _cut(piece: Box, strides: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Yield boxes of ``piece`` that can each be read at once.

    Gaps only shrink from outer dims to inner ones, so outer dims are cut.
    """
    dim = next((dim for dim, size in enumerate(piece.sizes) if size > 1), None)
    if dim is None:
        yield piece
        return
    size, step = piece.sizes[dim], strides[dim] * itemsize
    inner = _span(piece.sizes[dim + 1 :], strides[dim + 1 :]) * itemsize
    if step - inner > GAP_BYTES:
        each = 1
    elif (size - 1) * step + inner <= FETCH_BYTES:
        each = size
    else:
        each = max(1, FETCH_BYTES // step)
    for at in range(0, size, each):
        offsets = (*piece.offsets[:dim], piece.offsets[dim] + at, *piece.offsets[dim + 1 :])
        box = Box(offsets, (*piece.sizes[:dim], min(each, size - at), *piece.sizes[dim + 1 :]))
        if each == 1:
            yield from _cut(box, strides, itemsize)
        else:
            yield box


def _coalesced(parts: Sequence[_Part]) -> Iterator[Fetch]:
    """Yield fetches of ``parts``, which are in the order of their bytes. Neighbours are read together."""
    first, stop = 0, 0
    for index, part in enumerate(parts):
        begin = parts[first]
        apart = part.shard != begin.shard or part.start - stop > GAP_BYTES
        if apart or max(stop, part.stop) - begin.start > FETCH_BYTES:
            if index:
                yield _fetch(parts[first:index], stop)
            first, stop = index, part.stop
        stop = max(stop, part.stop)
    if parts:
        yield _fetch(parts[first:], stop)


def _fetch(parts: Sequence[_Part], stop: int) -> Fetch:
    start = parts[0].start
    copies = tuple(BoxCopy(part.entry, part.piece, part.start - start, part.strides) for part in parts)
    return Fetch(parts[0].shard, start, stop, copies)


def _places(plan: Sequence[Fetch], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each tensor's memory as a tensor of integers. Raises `LayoutMismatch` when a tensor is not as planned."""
    places: dict[str, torch.Tensor] = {}
    for entry in {copy.entry.name: copy.entry for fetch in plan for copy in fetch.copies}.values():
        tensor = tensors.get(entry.name)
        if tensor is None:
            raise LayoutMismatch(f"tensor {entry.name!r:.200} is not there to be filled.", remedy="plan again.")
        check_local(entry, tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise LayoutMismatch(
                f"tensor {entry.name!r:.200} is a lazy conjugate or negative.", remedy="give the tensor that it is of."
            )
        places[entry.name] = bits_of(tensor)
    return places


def _copy(copy: BoxCopy, memory: Any, place: torch.Tensor) -> None:
    for dim, (start, size) in enumerate(zip(copy.piece.offsets, copy.piece.sizes, strict=True)):
        if size != place.shape[dim]:
            place = place.narrow(dim, start - copy.entry.box.offsets[dim], size)
    strides = copy.strides
    if place.dim() > len(strides):  # a complex tensor, viewed as pairs of reals
        strides = (*(2 * stride for stride in strides), 1)
    held = torch.frombuffer(memory, dtype=place.dtype, count=_span(place.shape, strides), offset=copy.offset)
    place.copy_(held.as_strided(place.shape, strides))


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
