"""One slot of an arena: its description, and the objects that write and read its payload.

The writer's ``payload`` is the mapped memory itself. A view kept after `SlotWriter.seal` can still be stored into;
readers notice that by the checksums. The reader's payload is mapped memory too: bytes that were verified stay so only
under `Arena.lease`.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rackrun.checkpoint.arena.arena_file import change_points
from rackrun.checkpoint.arena.arena_format import Kind, SlotHeader, SlotState, manifest_digest, table_bytes
from rackrun.checkpoint.base.digest import ChunkDigests, chunk_crcs, crc
from rackrun.checkpoint.base.errors import CheckpointError, DuplicateOwner, IntegrityError, StaleFencingToken
from rackrun.protocol.crash_points import crash_point, register

if TYPE_CHECKING:
    from rackrun.checkpoint.arena.arena import Arena

__all__ = ["SlotInfo", "SlotReader", "SlotWriter"]

register("arena.seal.digested", "arena.seal.tabled")
change_points("arena.seal")


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one slot holds, as of the moment it was read."""

    index: int
    state: SlotState
    number: int
    step: int
    fencing_token: int
    kind: Kind
    owner: int
    """Whose image it is: the arena's own rank, another rank (a mirror), or a parity set."""
    payload_bytes: int
    layout_hash: str
    manifest_digest: str
    """blake2b, hex, of the image's identity and its chunk table: equal for all copies of one image."""
    reason: str

    @classmethod
    def of(cls, header: SlotHeader) -> SlotInfo:
        """Return the description of a slot's header."""
        return cls(
            index=header.slot,
            state=header.state,
            number=header.number,
            step=header.step,
            fencing_token=header.fencing_token,
            kind=header.kind,
            owner=header.owner,
            payload_bytes=header.payload_bytes,
            layout_hash=header.layout_hash,
            manifest_digest=header.digest.hex() if header.whole else "",
            reason=header.reason,
        )


class SlotWriter:
    """Writes one image: fill `payload`, then call `seal`.

    As a context manager it abandons a slot that was not sealed.
    """

    def __init__(self, arena: Arena, header: SlotHeader) -> None:
        self._arena, self._header = arena, header
        geometry = arena._superblock.geometry
        self.payload = arena._file.view(geometry.payload_at(header.slot), geometry.payload_bytes)
        """All room of the slot, writable. Only the bytes given to `seal` belong to the image."""

        self._crcs: list[int] = []
        self._digested = 0
        """How many bytes from the start are digested or being digested.

        The last item of `_crcs` may cover a part of its chunk.
        """
        self._digesting: ChunkDigests | None = None
        """Computes items of `_crcs`, which are 0 until then."""

    @property
    def index(self) -> int:
        return self._header.slot

    def filled(self, upto: int, threads: int = 0) -> None:
        """Digest the bytes before ``upto``, which are final, while they are in the cache.

        `seal` has less to do then.

        Call it from one thread at a time. A byte that changes afterwards shows as damage. ``threads``: when not 0, that
        many other threads digest, and this returns at once.
        """
        self._check_open()
        self._arena._file.check()
        upto = min(upto, len(self.payload))
        if threads:
            self._begin_digests(upto, threads)
        else:
            self._digest(upto)

    def seal(self, payload_bytes: int, layout_hash: str, threads: int = 1) -> None:
        """Make the first ``payload_bytes`` bytes the image: digest them chunk by chunk, then mark the slot as sealed.

        Raises `StaleFencingToken` or `DuplicateOwner` when another writer has taken over since `Arena.begin`,
        `CheckpointError` when the image is too large or the slot was ended already.
        """
        arena, at = self._arena, self._arena._superblock.geometry
        self._check_open()
        if not 0 <= payload_bytes <= at.payload_bytes:
            raise CheckpointError(
                f"an image of {payload_bytes} bytes is not within the slot's {at.payload_bytes}.",
                remedy="create the arena with larger slots.",
            )
        arena._file.check()
        if self._digested > payload_bytes:
            del self._crcs[payload_bytes // at.chunk_bytes :]
            self._digested = len(self._crcs) * at.chunk_bytes
        self._digest(min(len(self._crcs) * at.chunk_bytes, payload_bytes))
        rest = chunk_crcs(self.payload[self._digested : payload_bytes], at.chunk_bytes, threads)
        self._await_digests()
        table = table_bytes(np.concatenate([np.array(self._crcs, dtype=np.uint32), rest]))
        crash_point("arena.seal.digested")
        sealed = self._header._replace(state=SlotState.SEALED, payload_bytes=payload_bytes, layout_hash=layout_hash)
        sealed = sealed._replace(digest=manifest_digest(sealed, at.chunk_bytes, table))
        with arena._changing():
            self._check_ours()
            arena._file.write(at.table_at(self.index), table)
            crash_point("arena.seal.tabled")
            arena._store(sealed, "arena.seal")
        self._end()

    def abandon(self) -> None:
        """Free the slot. No effect after `seal`, or when another writer has taken over."""
        if self not in self._arena._writers:
            return
        try:
            with contextlib.suppress(StaleFencingToken, DuplicateOwner, IntegrityError), self._arena._changing():
                self._check_ours()
                self._arena._store(SlotHeader(self._header.arena_id, self.index), "arena.abandon")
        finally:
            self._end()

    def __enter__(self) -> SlotWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _check_open(self) -> None:
        if self not in self._arena._writers:
            raise CheckpointError(
                f"slot {self.index} was sealed or abandoned already.", remedy="begin the next checkpoint."
            )

    def _digest(self, upto: int) -> None:
        size = self._arena.chunk_bytes
        while self._digested < upto:
            index = self._digested // size
            stop = min((index + 1) * size, upto)
            if index == len(self._crcs):
                self._crcs.append(0)
            self._crcs[index] = crc(self.payload[self._digested : stop], self._crcs[index])
            self._digested = stop

    def _begin_digests(self, upto: int, threads: int) -> None:
        """Have other threads digest the whole chunks before ``upto``."""
        size = self._arena.chunk_bytes
        self._digest(min(-(-self._digested // size) * size, upto))  # the rest of a chunk that was begun in this thread
        first, last = self._digested // size, upto // size
        if self._digested % size or first >= last:
            return
        if self._digesting is None:
            self._digesting = ChunkDigests(threads)
        for index in range(first, last):
            self._digesting.add(index, self.payload[index * size : (index + 1) * size])
        self._crcs += [0] * (last - first)
        self._digested = last * size

    def _await_digests(self) -> None:
        if self._digesting is None:
            return
        for index, found in self._digesting.finish().items():
            if index < len(self._crcs):
                self._crcs[index] = found
        self._digesting = None

    def _check_ours(self) -> None:
        now = self._arena._header(self.index)
        if now._replace(seq=0) != self._header._replace(seq=0):
            raise IntegrityError(
                f"the header of slot {self.index} was changed or damaged while checkpoint {self._header.number} was written.",
                remedy="save again.",
            )

    def _end(self) -> None:
        self._arena._writers.remove(self)
        if self._digesting is not None:
            self._digesting.stop()
            self._digesting = None
        with contextlib.suppress(BufferError):  # the caller still has views of it
            self.payload.release()


class SlotReader:
    """A sealed image. Its chunk table was verified on opening; its bytes are verified chunk by chunk when read."""

    def __init__(self, arena: Arena, header: SlotHeader) -> None:
        self._arena, self._header = arena, header
        geometry = arena._superblock.geometry
        count = geometry.chunks(header.payload_bytes)
        table = os.pread(arena._file.fd, 4 * count, geometry.table_at(header.slot))
        if manifest_digest(header, geometry.chunk_bytes, table) != header.digest:
            raise IntegrityError(f"{self} has a damaged chunk table.", remedy="restore this shard from another holder.")
        self.crcs: np.ndarray[Any, Any] = np.frombuffer(table, dtype="<u4")
        self._payload = arena._file.view(geometry.payload_at(header.slot), header.payload_bytes).toreadonly()

    @property
    def payload(self) -> memoryview:
        """The bytes of the image, not verified."""
        self._arena._file.check()
        return self._payload

    @property
    def chunk_bytes(self) -> int:
        return self._arena.chunk_bytes

    @property
    def layout_hash(self) -> str:
        return self._header.layout_hash

    @property
    def manifest_digest(self) -> str:
        return self._header.digest.hex()

    def chunk(self, index: int) -> memoryview:
        """Return a verified chunk.

        Raises `IntegrityError` when it is not what was sealed, IndexError for no such chunk.
        """
        if not 0 <= index < len(self.crcs):
            raise IndexError(f"{self} has {len(self.crcs)} chunks, and chunk {index} was asked for.")
        size = self._arena.chunk_bytes
        data = self.payload[index * size : (index + 1) * size]
        if crc(data) != self.crcs[index]:
            raise IntegrityError(
                f"chunk {index} of {self} is not what was sealed.",
                remedy="take it from another holder, and mark it as bad.",
            )
        return data

    def verify(self, threads: int = 1) -> None:
        """Verify every chunk, with ``threads`` threads.

        Raises `IntegrityError` at a chunk that is not what was sealed.
        """

        def check(first: int) -> None:
            for index in range(first, len(self.crcs), threads):
                self.chunk(index)

        threads = max(min(threads, len(self.crcs)), 1)
        if threads == 1:
            check(0)
            return
        with ThreadPoolExecutor(threads, "rackrun-verify") as pool:
            for checked in [pool.submit(check, first) for first in range(threads)]:
                checked.result()

    def __str__(self) -> str:
        header = self._header
        return f"checkpoint {header.number} ({header.kind} of rank {header.owner}) in slot {header.slot}"
