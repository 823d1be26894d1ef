"""Parity of snapshots over several trays: a third or a seventh of a shard more memory where a copy takes a whole one.

The owner's agent sends one stripe of a snapshot to each keeper of its XOR set (`rackrun.checkpoint.xor_set`), with its CRC32C behind it; a keeper mixes
it into its row as it comes in. Nothing is staged: a stripe that breaks off or is damaged spoils the row, which could not have
become whole any more, because a push is not repeated. A row can be read once every stripe is in it.

Kept, as of copies: rows of the newest step, and of the newest that every rank of the world has in its keepers' rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import aiohttp

from rackrun.agent.room import Refused, check_room
from rackrun.checkpoint.digest import crc
from rackrun.checkpoint.parity import Row
from rackrun.checkpoint.xor_set import ParityError, XorSet, encode_header
from rackrun.core.commands import Keeper

__all__ = ["TRAILER", "Rows", "Set", "Source", "give_stripes"]

TRAILER = struct.Struct("<I")
"""The stripe's CRC32C, behind its bytes."""
_CHUNK_BYTES = 4 << 20

T = TypeVar("T")


class _Memory:
    """A header's place and a row behind it, which grows."""

    def __init__(self, header_bytes: int) -> None:
        self.fd = -1
        self._header_bytes, self._size = header_bytes, 0
        self._map: mmap.mmap | None = None

    def room(self, size: int) -> memoryview:
        """Raises `Refused`."""
        size += self._header_bytes
        if size > self._size:
            check_room(size - self._size)
            if self.fd < 0:
                self.fd = os.memfd_create("rackrun-parity", os.MFD_CLOEXEC)
                os.fchmod(self.fd, 0o600)
            try:
                os.posix_fallocate(self.fd, 0, size)
            except OSError as error:
                raise Refused(f"no memory for {size} bytes: {error.strerror}") from error
            self._map, self._size = mmap.mmap(self.fd, size), size
        assert self._map is not None
        return memoryview(self._map)[self._header_bytes :]

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a thread is still at it: it goes when that is done
                self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._map, self._size = -1, None, 0


class _Kept:
    def __init__(self, step: int, members: tuple[int, ...], keeper: int) -> None:
        xor_set = XorSet(members)
        self.memory = _Memory(xor_set.header_bytes)
        self.row = Row(step, xor_set, keeper, self.memory.room)
        self.whole = False
        self._turn = asyncio.Lock()

    async def use(self, act: Callable[[], T]) -> T:
        """In a thread, one at a time."""
        async with self._turn:
            return await asyncio.to_thread(act)

    def finish(self) -> None:
        if not self.row.missing:
            os.pwrite(self.memory.fd, encode_header(self.row.header()), 0)
            self.whole = True

    async def close(self) -> None:
        async with self._turn:
            self.whole = False
            self.memory.close()


@dataclass(frozen=True)
class _Key:
    generation: int
    keeper: int
    step: int


class Rows:
    """What this tray keeps for the members of its ranks' XOR sets."""

    def __init__(self) -> None:
        self._rows: dict[_Key, _Kept] = {}

    def find(self, generation: int, keeper: int, step: int) -> int | None:
        """A descriptor of a row that is whole."""
        kept = self._rows.get(_Key(generation, keeper, step))
        return kept.memory.fd if kept is not None and kept.whole else None

    async def take(
        self,
        key: tuple[int, int, int],
        members: tuple[int, ...],
        owner: int,
        length: int,
        body: AsyncIterator[bytes],
    ) -> None:
        """``owner``'s stripe of its snapshot of ``length`` bytes, for the row of ``key`` (generation, keeper, step), with a trailer. Returns when it is in
        the row, verified. `Refused`: there is no memory; `rackrun.checkpoint.errors.CheckpointError`: it is not what it should be."""
        at = _Key(*key)
        kept = self._rows.get(at)
        if kept is None:
            kept = self._rows[at] = _Kept(at.step, members, at.keeper)
        elif kept.row.xor_set.members != members:
            raise ParityError(f"this row is of {list(kept.row.xor_set.members)}, not of {list(members)}.")
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
        except Refused as refused:
            kept.row.spoiled = kept.row.spoiled or str(refused)
            raise
        finally:
            if kept.row.spoiled:
                await kept.close()

    async def prune(self, everywhere: int) -> None:
        """Of each rank's rows that of the step that is ``everywhere`` stays, and the last that was begun, if it is newer."""
        last = {key.keeper: key for key in self._rows}
        for key in list(self._rows):
            if key.step != everywhere and (key != last[key.keeper] or key.step < everywhere):
                kept = self._rows.pop(key)
                kept.row.spoiled = "a newer one has taken its place"
                await kept.close()

    def close(self) -> None:
        for kept in self._rows.values():
            kept.memory.close()
        self._rows.clear()


# -- the owner's side --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Set:
    """The XOR set of one rank, in one generation."""

    generation: int
    rank: int
    members: tuple[Keeper, ...]

    def others(self) -> tuple[Keeper, ...]:
        """Beginning behind this rank: not all begin with the same."""
        at = [keeper.rank for keeper in self.members].index(self.rank)  # type: ignore[arg-type]
        return (*self.members[at + 1 :], *self.members[:at])


@dataclass(frozen=True)
class Source:
    """A sealed snapshot."""

    fd: int
    step: int
    size: int
    valid: Callable[[], bool]
    """It has not been written over."""
    moves: Callable[[], None] = lambda: None
    """Told with every chunk that has been sent."""

    async def read(self, start: int, stop: int) -> AsyncIterator[bytes]:
        at = start
        while at < stop:
            chunk = await asyncio.to_thread(os.pread, self.fd, min(_CHUNK_BYTES, stop - at), at)
            if not chunk or not self.valid():
                raise ConnectionResetError("it was overwritten")
            yield chunk
            self.moves()
            at += len(chunk)


async def give_stripes(session: aiohttp.ClientSession, of: Set, source: Source, besides: int) -> None:
    """To each keeper its stripe. Returns when all have verified theirs; raises `Refused` when one does not take it."""
    xor_set = XorSet(tuple(int(keeper.rank) for keeper in of.members))
    for keeper in of.others():
        start, stop = xor_set.stripe(of.rank, keeper.rank, source.size)
        async with session.put(
            f"http://{keeper.address}/parity/{of.generation}/{keeper.rank}/{source.step}",
            params={
                "owner": str(of.rank),
                "length": str(source.size),
                "members": ",".join(map(str, xor_set.members)),
                "besides": str(besides),
            },
            headers={"Content-Length": str(stop - start + TRAILER.size)},
            data=_with_trailer(source, start, stop),
        ) as answer:
            if answer.status != 200:
                raise Refused(f"{keeper.tray} does not take it: {(await answer.text()).strip()}")


async def _with_trailer(source: Source, start: int, stop: int) -> AsyncIterator[bytes]:
    digest = 0
    async for chunk in source.read(start, stop):
        digest = crc(memoryview(chunk), digest)
        yield chunk
    yield TRAILER.pack(digest)
