"""Parity of snapshots over several trays, which takes a third or a seventh of a shard's memory where a copy takes a
whole one.

The owner's agent sends the stripes of a snapshot to the keepers of its set
(`rackrun.checkpoint.redundancy.stripe_set`), each followed by its CRC32C. A keeper mixes a stripe into its row as it
arrives, without staging. An incomplete or damaged stripe spoils the row, which could not have become complete any more,
because a push is not repeated. A row can be read when every stripe is in it.

As for copies, the rows of two steps are kept: the newest, and the newest that every rank of the world has in its
keepers' rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import aiohttp

from rackrun.agent.snapshots.memory_limit import OverMemoryLimit, check_room
from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.redundancy.erasure_code import Row
from rackrun.checkpoint.redundancy.stripe_set import ParityError, Part, StripeSet, encode_header
from rackrun.protocol.commands import Keeper

__all__ = ["TRAILER", "RowKey", "KeptParityRows", "RankParitySet", "SnapshotSource", "give_stripes"]

TRAILER = struct.Struct("<I")
"""Format of the stripe's CRC32C, which follows its bytes."""
_CHUNK_BYTES = 4 << 20
_allocating = threading.Lock()

T = TypeVar("T")


class _RowMemory:
    """Memory for a row and its header, which grows."""

    def __init__(self, header_bytes: int) -> None:
        self.fd = -1
        self._header_bytes, self._size = header_bytes, 0
        self._map: mmap.mmap | None = None

    def room(self, size: int) -> memoryview:
        """Return a view of ``size`` bytes of the row, growing it if needed. Raises `OverMemoryLimit`."""
        size += self._header_bytes
        if size > self._size:
            with _allocating:  # another thread may take the free memory
                self._grow(size)
        assert self._map is not None
        return memoryview(self._map)[self._header_bytes :]

    def _grow(self, size: int) -> None:
        check_room(size - self._size)
        if self.fd < 0:
            self.fd = os.memfd_create("rackrun-parity", os.MFD_CLOEXEC)
            os.fchmod(self.fd, 0o600)
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise OverMemoryLimit(f"no memory for a parity row of {size} bytes: {error.strerror}") from error
        self._map, self._size = mmap.mmap(self.fd, size), size

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a thread still uses it: it is freed when that is done
                self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._map, self._size = -1, None, 0


class _StoredRow:
    """One row, and what is needed to fill it."""

    def __init__(self, step: int, stripe_set: StripeSet, part: Part) -> None:
        self.memory = _RowMemory(stripe_set.header_bytes)
        self.row = Row(step, stripe_set, part, self.memory.room)
        self.whole = False
        self._turn = asyncio.Lock()

    async def use(self, act: Callable[[], T]) -> T:
        """Run ``act`` in a thread, one call at a time."""
        async with self._turn:
            return await asyncio.to_thread(act)

    def finish(self) -> None:
        """Mark the row as whole and write its header, once no member's stripe is missing."""
        if not self.row.missing:
            os.pwrite(self.memory.fd, encode_header(self.row.header()), 0)
            self.whole = True

    async def close(self) -> None:
        async with self._turn:
            self.whole = False
            self.memory.close()


@dataclass(frozen=True)
class RowKey:
    """Identifies a row."""

    generation: int
    part: Part
    step: int


class KeptParityRows:
    """Parity rows that this tray keeps for the members of its ranks' sets."""

    def __init__(self) -> None:
        self._rows: dict[RowKey, _StoredRow] = {}

    def find(self, key: RowKey) -> int | None:
        """Return the descriptor of a row if it is complete."""
        kept = self._rows.get(key)
        return kept.memory.fd if kept is not None and kept.whole else None

    async def add_stripe(
        self,
        key: RowKey,
        stripe_set: StripeSet,
        owner: int,
        length: int,
        body: AsyncIterator[bytes],
    ) -> None:
        """Mix ``owner``'s stripe of its snapshot of ``length`` bytes, followed by a trailer, into the row of ``key``.

        Returns when the stripe is in the row and verified. Raises `OverMemoryLimit` if there is no memory, and
        `rackrun.checkpoint.base.errors.CheckpointError` if the stripe is invalid.
        """
        kept = self._rows.get(key)
        if kept is None:
            kept = self._rows[key] = _StoredRow(key.step, stripe_set, key.part)
        elif kept.row.stripe_set != stripe_set:
            raise ParityError(f"this row is of {kept.row.stripe_set}, not of {stripe_set}.")
        try:
            incoming = await kept.use(lambda: kept.row.begin(owner, length))
            try:
                held = bytearray()
                async for piece in body:
                    held += piece
                    if len(held) > _CHUNK_BYTES:
                        full, held = memoryview(held)[: -TRAILER.size], held[-TRAILER.size :]
                        await kept.use(partial(incoming.add, full))
                rest, trailer = memoryview(held)[: -TRAILER.size], held[-TRAILER.size :]
                await kept.use(partial(incoming.add, rest))
                incoming.end(*TRAILER.unpack(trailer.rjust(TRAILER.size, b"\0")))
            finally:
                incoming.broke_off()
            await kept.use(kept.finish)
        except OverMemoryLimit as refused:
            kept.row.spoiled = kept.row.spoiled or str(refused)
            raise
        finally:
            if kept.row.spoiled:
                await kept.close()

    async def prune(self, everywhere: int) -> None:
        """For each of the ranks' parts, keep the row of the step ``everywhere`` and the latest one, if it is newer.
        Drop the others."""
        last = {key.part: key for key in self._rows}
        for key in list(self._rows):
            if key.step != everywhere and (key != last[key.part] or key.step < everywhere):
                kept = self._rows.pop(key)
                kept.row.spoiled = "a newer one has taken its place"
                await kept.close()

    def close(self) -> None:
        for kept in self._rows.values():
            kept.memory.close()
        self._rows.clear()


# -- the owner's side --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RankParitySet:
    """The set of one rank in one generation. Any ``parity`` of its members may be lost."""

    generation: int
    rank: int
    members: tuple[Keeper, ...]
    parity: int = 1

    def others(self) -> tuple[Keeper, ...]:
        """The other members, beginning after this rank, so that not all ranks begin with the same keeper."""
        at = [keeper.rank for keeper in self.members].index(self.rank)  # type: ignore[arg-type]
        return (*self.members[at + 1 :], *self.members[:at])


@dataclass(frozen=True)
class SnapshotSource:
    """A sealed snapshot to read from."""

    fd: int
    step: int
    size: int
    valid: Callable[[], bool]
    """Returns whether the snapshot has not been overwritten."""
    moves: Callable[[], None] = lambda: None
    """Called with every chunk that has been sent."""

    async def read(self, start: int, stop: int) -> AsyncIterator[bytes]:
        at = start
        while at < stop:
            chunk = await asyncio.to_thread(os.pread, self.fd, min(_CHUNK_BYTES, stop - at), at)
            if not chunk or not self.valid():
                raise ConnectionResetError("it was overwritten")
            yield chunk
            self.moves()
            at += len(chunk)


async def give_stripes(session: aiohttp.ClientSession, of: RankParitySet, source: SnapshotSource, besides: int) -> None:
    """Send each keeper its stripes. Returns when all have verified theirs; raises `OverMemoryLimit` if one does not accept its
    stripe."""
    stripe_set = StripeSet(tuple(int(keeper.rank) for keeper in of.members), of.parity)
    for keeper in of.others():
        for part in stripe_set.parts(keeper.rank):
            if of.rank not in stripe_set.owners(part):
                continue
            start, stop = stripe_set.stripe(of.rank, part, source.size)
            async with session.put(
                f"http://{keeper.address}/parity/{of.generation}/{keeper.rank}/{part.number}/{source.step}",
                params={
                    "owner": str(of.rank),
                    "length": str(source.size),
                    "members": ",".join(map(str, stripe_set.members)),
                    "parity": str(of.parity),
                    "besides": str(besides),
                },
                headers={"Content-Length": str(stop - start + TRAILER.size)},
                data=_with_trailer(source, start, stop),
            ) as answer:
                if answer.status != 200:
                    raise OverMemoryLimit(f"{keeper.tray} does not take it: {(await answer.text()).strip()}")


async def _with_trailer(source: SnapshotSource, start: int, stop: int) -> AsyncIterator[bytes]:
    digest = 0
    async for chunk in source.read(start, stop):
        digest = crc(memoryview(chunk), digest)
        yield chunk
    yield TRAILER.pack(digest)
