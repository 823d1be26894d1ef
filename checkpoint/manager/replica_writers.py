"""Decide which rank writes which tensor of a checkpoint to disk: a tensor that several ranks hold is written once.

Two ranks hold the same tensor when name, dtype, shape, box and bytes are equal. The sealed images are compared anew for
every checkpoint that goes to disk: replicas are never assumed equal, and a rank with other bytes writes its own. The
caller names the tensors that may be shared (parameters and optimizer state); each rank writes all others itself.

A rank's file is then an image with part of the tensors. Its plain part says which shards have the others. The image is
assembled from the sealed image while it is written, and takes no extra memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rackrun.checkpoint.arena.arena_slot import SlotReader
from rackrun.checkpoint.base.digest import CHUNK_BYTES, content_digest, crc
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, itemsize_of, plan_image
from rackrun.checkpoint.image.plain_part import with_elsewhere

if TYPE_CHECKING:
    from rackrun.checkpoint.commit.peers import Peers

__all__ = ["SharedTensors", "Share", "Writers", "agree", "assign", "held_in"]


class SharedTensors(msgspec.Struct, frozen=True):
    """The tensors of a rank's sealed image that other ranks may hold too, one list entry each.

    Empty when the rank failed.
    """

    boxes: list[str] = []
    """Digests of name, dtype, shape and box: equal for equal boxes of the same tensor."""
    digests: list[int] = []
    sizes: list[int] = []
    """Size of each, in bytes."""


class Writers(msgspec.Struct, frozen=True):
    """Which rank writes each tensor of a rank's `SharedTensors`, in the same order."""

    ranks: list[int] = []
    """The rank that writes each tensor."""
    apart: list[int] = []
    """Indices of the tensors whose bytes differ from those of most other ranks."""


def held_in(
    reader: SlotReader, layout: ImageLayout, names: Collection[str], chunk_bytes: int
) -> tuple[list[str], SharedTensors]:
    """Return the names of the non-empty tensors among ``names``, and their `SharedTensors` record.

    Raises `IntegrityError` when the sealed image is damaged.
    """
    entries = [entry for entry in layout.entries if entry.name in names and entry.box.numel]
    sealed, digests = _Verified(reader, chunk_bytes), []
    for entry in entries:
        value = 0
        for piece in sealed.pieces(*layout.extents[entry.name]):
            value = crc(piece, value)
        digests.append(value)
    boxes = [content_digest(msgspec.json.encode(entry))[:32] for entry in entries]
    sizes = [entry.box.numel * itemsize_of(entry.dtype) for entry in entries]
    return [entry.name for entry in entries], SharedTensors(boxes, digests, sizes)


def agree(peers: Peers, number: int, mine: SharedTensors, *, seconds: float) -> Writers:
    """Exchange `SharedTensors` records with all ranks through rank 0, and return this rank's `Writers`. Collective.

    ``seconds``: how long to wait for other ranks. Raises `PeersGone` when one does not answer.
    """
    if peers.rank == 0:
        keys = [f"held/{number}/{rank}" for rank in range(1, peers.world_size)]
        answers = assign([mine, *(peers.hear(keys, SharedTensors, seconds=seconds) if keys else ())])
        peers.forget(keys)
        for rank, answer in enumerate(answers[1:], start=1):
            peers.say(f"writers/{number}/{rank}", answer)
        return answers[0]
    peers.say(f"held/{number}/{peers.rank}", mine)
    key = f"writers/{number}/{peers.rank}"
    (answer,) = peers.hear([key], Writers, seconds=seconds)
    peers.forget([key])
    return answer


def assign(everyone: Sequence[SharedTensors]) -> list[Writers]:
    """Assign a writer to every tensor of every rank. Pure.

    Tensors held by one rank are assigned first. The others follow from the largest down, each to the holder with the
    fewest bytes to write so far.
    """
    copies: dict[str, dict[int, list[tuple[int, int]]]] = {}
    sizes: dict[str, int] = {}
    for rank, held in enumerate(everyone):
        for index, (box, digest, size) in enumerate(zip(held.boxes, held.digests, held.sizes, strict=True)):
            copies.setdefault(box, {}).setdefault(digest, []).append((rank, index))
            sizes[box] = size
    writers = [[0] * len(held.boxes) for held in everyone]
    apart: list[list[int]] = [[] for _ in everyone]
    loads = [0] * len(everyone)
    groups = [(sizes[box], box, places) for box, by_digest in copies.items() for places in by_digest.values()]
    # tensors that only one rank can write come first
    groups.sort(key=lambda group: (len(group[2]) > 1, -group[0], group[1], group[2]))
    for size, _, places in groups:
        writer = min((rank for rank, _ in places), key=lambda rank: (loads[rank], rank))
        loads[writer] += size
        for rank, index in places:
            writers[rank][index] = writer
    for by_digest in copies.values():
        most = max(by_digest.values(), key=lambda places: (len(places), -places[0][0]))
        for rank, index in (place for places in by_digest.values() if places is not most for place in places):
            apart[rank].append(index)
    return [Writers(ranks, sorted(indices)) for ranks, indices in zip(writers, apart, strict=True)]


class Share:
    """A sealed image without the tensors that are ``elsewhere`` (name -> rank), as an image that is read by slices."""

    def __init__(self, reader: SlotReader, whole: ImageLayout, elsewhere: Mapping[str, int], chunk_bytes: int) -> None:
        plain = with_elsewhere(bytes(reader.payload[slice(*whole.extents[PLAIN])]), elsewhere)
        kept = [entry for entry in whole.entries if entry.name not in elsewhere]
        self.layout = plan_image(kept, len(plain))
        self.nbytes = self.layout.total_bytes
        self._reader, self._sealed = reader, _Verified(reader, chunk_bytes)
        made = {0: self.layout.header, self.layout.extents[PLAIN][0]: plain}
        self._made = {start: memoryview(data) for start, data in made.items()}
        """Offset in this image -> bytes that are not in the sealed image: the header and the plain part."""
        self._from = {self.layout.extents[entry.name][0]: whole.extents[entry.name][0] for entry in kept}
        """Offset of a tensor in this image -> its offset in the sealed image."""
        stops = {0: len(self.layout.header)} | dict(self.layout.extents.values())
        self._extents = sorted((start, stop) for start, stop in stops.items() if stop > start)
        self._starts = [start for start, _ in self._extents]

    @property
    def payload(self) -> Share:
        return self

    def crcs(self) -> np.ndarray:
        """Return the CRC32C of every `CHUNK_BYTES` of this image (uint32).

        Raises `IntegrityError` when bytes differ from those that were sealed.
        """
        found = []
        for start in range(0, self.nbytes, CHUNK_BYTES):
            value = 0
            for piece in self._pieces(start, min(start + CHUNK_BYTES, self.nbytes), verified=True):
                value = crc(piece, value)
            found.append(value)
        return np.array(found, dtype=np.uint32)

    def __getitem__(self, wanted: slice) -> memoryview:
        """Return a copy of the bytes, not verified."""
        start, stop, _ = wanted.indices(self.nbytes)
        return memoryview(b"".join(self._pieces(start, stop, verified=False)))

    def _pieces(self, start: int, stop: int, *, verified: bool) -> Iterator[memoryview]:
        for first, end in self._extents[max(bisect.bisect_right(self._starts, start) - 1, 0) :]:
            if first >= stop:
                break
            low, high = max(start, first), min(stop, end)
            if low >= high:
                continue
            if first in self._made:
                yield self._made[first][low - first : high - first]
                continue
            apart = self._from[first] - first
            if verified:
                yield from self._sealed.pieces(low + apart, high + apart)
            else:
                yield self._reader.payload[low + apart : high + apart]


class _Verified:
    """Reads bytes of a sealed image, and compares each chunk with its CRC32C when the chunk is first read."""

    def __init__(self, reader: SlotReader, chunk_bytes: int) -> None:
        self._reader, self._chunk_bytes = reader, chunk_bytes
        self._last: tuple[int, memoryview] = (-1, memoryview(b""))

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from ``start`` to ``stop``, verified, in pieces. Raises IntegrityError."""
        size = self._chunk_bytes
        while start < stop:
            index = start // size
            if self._last[0] != index:
                self._last = index, self._reader.chunk(index)
            end = min((index + 1) * size, stop)
            yield self._last[1][start - index * size : end - index * size]
            start = end
