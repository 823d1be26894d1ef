"""Read a sealed image from an arena on another host, in byte ranges of the arena's file, with every byte verified.

Reads ask for whole chunks, whose CRCs are in the chunk table; the slot's header holds the table's digest. Neighbouring
chunks that will be needed are requested together, up to a *window*, and kept until the window moves. So memory is
bounded, and reads in the order of bytes request most chunks once. Use it from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from rackrun.checkpoint.arena.arena_format import PAGE, SlotHeader, Superblock, manifest_digest
from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.base.errors import IntegrityError, NoUsableCheckpoint

__all__ = ["HEAD_BYTES", "RemoteSlot"]

HEAD_BYTES = 4 * PAGE
"""Size of the part of an arena's file that holds its superblock and the header of its first slot."""

_R = TypeVar("_R", Superblock, SlotHeader)
Ask = Callable[[int, memoryview], None]
"""(start, into): fill ``into`` with the bytes of the arena's file from ``start`` on. Raises when there are fewer."""


class RemoteSlot:
    """The sealed image in the first slot of a remote arena."""

    def __init__(self, ask: Ask, number: int, window_bytes: int) -> None:
        """Read and check the records and the chunk table.

        ``ask`` reads the arena's file; ``window_bytes`` bounds one request.

        Raises `NoUsableCheckpoint` when the slot does not hold ``number``, and `IntegrityError` when its records or
        its chunk table are damaged.
        """
        self._ask, self._window_bytes = ask, window_bytes
        self._buffer: np.ndarray[Any, Any] = np.empty(0, dtype=np.uint8)
        self.head = self._bytes(0, HEAD_BYTES)
        superblock = _newest([Superblock.decode(self.head[at : at + PAGE]) for at in (0, PAGE)])
        header = _newest([SlotHeader.decode(self.head[at : at + PAGE]) for at in (2 * PAGE, 3 * PAGE)])
        if superblock is None or header is None or not header.fits(superblock, 0):
            raise IntegrityError("the records of an arena are damaged.", remedy="take another copy.")
        if header.number != number or not header.whole:
            raise NoUsableCheckpoint(
                f"the slot holds checkpoint {header.number} ({header.state.name}), not {number}.",
                remedy="take another copy.",
            )
        geometry = superblock.geometry
        self._chunk_bytes, self._at = geometry.chunk_bytes, geometry.payload_at(0)
        count, table_at = geometry.chunks(header.payload_bytes), geometry.table_at(0)
        table = self._bytes(table_at, 4 * count)
        if manifest_digest(header, geometry.chunk_bytes, table) != header.digest:
            raise IntegrityError("the chunk table is damaged.", remedy="take another copy.")
        self._crcs = np.frombuffer(table, dtype="<u4")
        self.size, self.layout_hash = header.payload_bytes, header.layout_hash
        self._wanted: set[int] = set()
        self._window = 0, 0
        """The first chunk in the buffer, and how many bytes the buffer holds."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce byte ranges that will be read. Only announced chunks are requested ahead."""
        for start, stop in ranges:
            self._wanted.update(self._chunks(start, stop))

    def peek(self, start: int, stop: int) -> bytes:
        """Return bytes that are not verified, for a caller that checks them by another digest."""
        return self._bytes(self._at + start, min(stop, self.size) - start)

    def read(self, start: int, stop: int) -> memoryview:
        """Return verified bytes of the image, valid until the next call.

        Raises `IntegrityError` when they are damaged.
        """
        if not 0 <= start <= stop <= self.size:
            raise IntegrityError(f"bytes {start} to {stop} of an image of {self.size}.", remedy="take another copy.")
        first, count = self._window
        if not (first * self._chunk_bytes <= start and stop <= first * self._chunk_bytes + count):
            self._move(start, stop)
        begin = self._window[0] * self._chunk_bytes
        return self._buffer.data[start - begin : stop - begin]

    def _bytes(self, start: int, count: int) -> bytes:
        into = bytearray(count)
        if count:
            self._ask(start, memoryview(into))
        return bytes(into)

    def _chunks(self, start: int, stop: int) -> range:
        return range(start // self._chunk_bytes, -(-stop // self._chunk_bytes))

    def _move(self, start: int, stop: int) -> None:
        """Move the window so that it covers the bytes, and verify its chunks."""
        chunks = self._chunks(start, stop)
        first, last = chunks.start, max(chunks.stop, chunks.start + 1)
        while last in self._wanted and (last + 1 - first) * self._chunk_bytes <= self._window_bytes:
            last += 1
        begin, end = first * self._chunk_bytes, min(last * self._chunk_bytes, self.size)
        self._window = 0, 0
        if len(self._buffer) < end - begin:
            self._buffer = np.empty(min(max(end - begin, self._window_bytes), self.size), dtype=np.uint8)
        held = self._buffer.data[: end - begin]
        if held:
            self._ask(self._at + begin, held)
        for index in range(first, last):
            at = index * self._chunk_bytes - begin
            if crc(held[at : at + self._chunk_bytes]) != self._crcs[index]:
                raise IntegrityError(f"chunk {index} is not what was sealed.", remedy="take another copy.")
        self._window = first, end - begin


def _newest(found: list[_R | None]) -> _R | None:
    return max((one for one in found if one is not None), key=lambda one: one.seq, default=None)
