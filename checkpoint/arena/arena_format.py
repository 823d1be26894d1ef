"""The binary format of an arena's file: its geometry, and the records in it.

::

    0      superblock A | superblock B                     rank and job, geometry, fencing token, claim
    8192   slot 0: header A | header B | chunk table | payload
           slot 1: ...

A record is 512 bytes at the start of a page of its own, little-endian; its last 4 bytes are the CRC32C of the others.
Of its two copies, the valid one with the larger sequence number counts. The payload and the chunk table (one CRC32C for
each chunk) start at pages too.

Anything read here may be damaged or forged: a record either decodes within its bounds or does not count. Only the
prefix and the place of the CRC are fixed for all releases, so that an older release can tell a newer format from
damage.
"""

from __future__ import annotations

import struct
import sys
from enum import IntEnum
from typing import Literal, NamedTuple, get_args

import numpy as np

from rackrun.checkpoint.base.digest import content_digest, crc
from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError
from rackrun.checkpoint.base.process_identity import NOBODY, ProcessIdentity

__all__ = [
    "PAGE",
    "RECORD_BYTES",
    "Geometry",
    "Kind",
    "SlotHeader",
    "SlotState",
    "Superblock",
    "manifest_digest",
    "table_bytes",
]

FORMAT = 1
PAGE = 4096
RECORD_BYTES = 512
SLOTS_MAX = 64
PAYLOAD_BYTES_MAX = 2**46
CHUNK_BYTES_MAX = 2**30
JOB_BYTES_MAX = 128
LAYOUT_HASH_BYTES_MAX = 64
REASON_BYTES_MAX = 160

Kind = Literal["data", "parity"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_PREFIX = struct.Struct("<8sHHcxxxQ")  # magic, format, oldest format whose reader reads it, byte order of payloads, seq
_CRC = struct.Struct("<I")
_BYTE_ORDER = b"<" if sys.byteorder == "little" else b">"
_SUPERBLOCK_MAGIC, _HEADER_MAGIC = b"RRARENA\0", b"RRSLOT\0\0"
_SUPERBLOCK = struct.Struct("<16sIQIQIB128sQQQQ")
_HEADER = struct.Struct("<16sIBBqqQIQB64s32sB160sQQQQ")


class SlotState(IntEnum):
    """The state of a slot; `rackrun.checkpoint.arena.arena` draws the transitions."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    COMMITTED = 3
    BAD = 4


_STATES = frozenset(map(int, SlotState))


class Geometry(NamedTuple):
    """Offsets in an arena's file. All of them follow from these three numbers."""

    slots: int
    payload_bytes: int
    """Room for one image, in bytes."""
    chunk_bytes: int

    def problem(self) -> str:
        """Return which number is out of range; "" when all are valid."""
        for name, value, most in (
            ("slots", self.slots, SLOTS_MAX),
            ("payload_bytes", self.payload_bytes, PAYLOAD_BYTES_MAX),
            ("chunk_bytes", self.chunk_bytes, CHUNK_BYTES_MAX),
        ):
            if not 1 <= value <= most:
                return f"{name} is {value}, not 1 to {most}"
        return ""

    @property
    def _table_room(self) -> int:
        return _pages(4 * self.chunks(self.payload_bytes))

    @property
    def _slot_room(self) -> int:
        return 2 * PAGE + self._table_room + _pages(self.payload_bytes)

    @property
    def total_bytes(self) -> int:
        return 2 * PAGE + self.slots * self._slot_room

    def chunks(self, payload_bytes: int) -> int:
        """Return how many chunks ``payload_bytes`` bytes have."""
        return -(-payload_bytes // self.chunk_bytes)

    def header_at(self, slot: int) -> int:
        return 2 * PAGE + slot * self._slot_room

    def table_at(self, slot: int) -> int:
        return self.header_at(slot) + 2 * PAGE

    def payload_at(self, slot: int) -> int:
        return self.table_at(slot) + self._table_room


class Superblock(NamedTuple):
    """The first record of an arena: whose arena it is, and who may write to it."""

    arena_id: bytes
    """16 random bytes that every header repeats, so that a header copied from another arena does not count."""
    job: str
    rank: int
    fencing_token: int
    """The newest fencing token with which a writer has attached. Writers with smaller ones are fenced."""
    geometry: Geometry
    claim: ProcessIdentity
    """The process that writes with this fencing token."""
    seq: int = 0

    def encode(self) -> bytes:
        """Return the record as 512 bytes. Raises `CheckpointError` when the job's name is too long."""
        job = self.job.encode()
        if len(job) > JOB_BYTES_MAX:
            raise CheckpointError(
                f"the job's name has {len(job)} bytes, more than {JOB_BYTES_MAX}.", remedy="shorten it."
            )
        slots, payload_bytes, chunk_bytes = self.geometry
        body = _SUPERBLOCK.pack(
            self.arena_id, self.rank, self.fencing_token, slots, payload_bytes, chunk_bytes, len(job), job, *self.claim
        )
        return _record(_SUPERBLOCK_MAGIC, self.seq, body)

    @classmethod
    def decode(cls, page: bytes) -> Superblock | None:
        """Return the record; None when it is damaged.

        Raises `FormatVersionError` when only a newer release can read it.
        """
        found = _body(_SUPERBLOCK_MAGIC, page)
        if found is None:
            return None
        seq, body = found
        arena_id, rank, fencing_token, slots, payload, chunk, job_bytes, job, *claim = _SUPERBLOCK.unpack_from(body)
        geometry = Geometry(slots, payload, chunk)
        text = _text(job, job_bytes)
        if text is None or geometry.problem():
            return None
        return cls(arena_id, text, rank, fencing_token, geometry, ProcessIdentity(*claim), seq)


class SlotHeader(NamedTuple):
    """The record of one slot: its state, and the image in it."""

    arena_id: bytes
    slot: int
    state: SlotState = SlotState.FREE
    kind: Kind = "data"
    number: int = -1
    step: int = -1
    fencing_token: int = 0
    owner: int = 0
    payload_bytes: int = 0
    layout_hash: str = ""
    digest: bytes = bytes(32)
    reason: str = ""
    writer: ProcessIdentity = NOBODY
    seq: int = 0

    def encode(self) -> bytes:
        """Return the record as 512 bytes; ``reason`` is cut.

        Raises `CheckpointError` when the layout hash is too long.
        """
        layout_hash, reason = self.layout_hash.encode(), _shortened(self.reason, REASON_BYTES_MAX)
        if len(layout_hash) > LAYOUT_HASH_BYTES_MAX:
            raise CheckpointError(
                f"the layout hash has {len(layout_hash)} bytes, more than {LAYOUT_HASH_BYTES_MAX}.",
                remedy="shorten it.",
            )
        body = _HEADER.pack(
            self.arena_id,
            self.slot,
            self.state,
            KINDS.index(self.kind),
            self.number,
            self.step,
            self.fencing_token,
            self.owner,
            self.payload_bytes,
            len(layout_hash),
            layout_hash,
            self.digest,
            len(reason),
            reason,
            *self.writer,
        )
        return _record(_HEADER_MAGIC, self.seq, body)

    @classmethod
    def decode(cls, page: bytes) -> SlotHeader | None:
        """Return the header; None when it is damaged. The caller checks with `fits` whether it belongs to the arena.

        Raises `FormatVersionError` when only a newer release can read it.
        """
        found = _body(_HEADER_MAGIC, page)
        if found is None:
            return None
        seq, body = found
        (
            arena_id,
            slot,
            state,
            kind,
            number,
            step,
            fencing_token,
            owner,
            payload_bytes,
            layout_hash_bytes,
            layout_hash,
            digest,
            reason_bytes,
            reason,
            *writer,
        ) = _HEADER.unpack_from(body)
        texts = _text(layout_hash, layout_hash_bytes), _text(reason, reason_bytes)
        if state not in _STATES or kind >= len(KINDS) or texts[0] is None or texts[1] is None:
            return None
        return cls(
            arena_id,
            slot,
            SlotState(state),
            KINDS[kind],
            number,
            step,
            fencing_token,
            owner,
            payload_bytes,
            texts[0],
            digest,
            texts[1],
            ProcessIdentity(*writer),
            seq,
        )

    def fits(self, superblock: Superblock, slot: int) -> bool:
        """Whether this header belongs to slot ``slot`` of the superblock's arena."""
        return (
            self.arena_id == superblock.arena_id
            and self.slot == slot
            and self.payload_bytes <= superblock.geometry.payload_bytes
        )

    @property
    def whole(self) -> bool:
        """Whether the slot holds a sealed image that is not known to be bad."""
        return self.state in (SlotState.SEALED, SlotState.COMMITTED)


def manifest_digest(header: SlotHeader, chunk_bytes: int, table: bytes) -> bytes:
    """Return the blake2b digest of an image's identity and chunk table, 32 bytes.

    It is equal for every copy of one image, whatever the arena and fencing token of the copy.
    """
    identity = (
        f"{header.kind} {header.owner} {header.number} {header.step} {header.payload_bytes} {chunk_bytes} "
        f"{header.layout_hash}\n"
    )
    return bytes.fromhex(content_digest(identity.encode() + table))


def table_bytes(crcs: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> bytes:
    """Return the chunk table as bytes: one little-endian uint32 for each chunk."""
    return crcs.astype("<u4").tobytes()


# -- helpers


def _record(magic: bytes, seq: int, body: bytes) -> bytes:
    """Return a record of `RECORD_BYTES` bytes: prefix, body, padding and CRC32C."""
    record = (_PREFIX.pack(magic, FORMAT, FORMAT, _BYTE_ORDER, seq) + body).ljust(RECORD_BYTES - _CRC.size, b"\0")
    assert len(record) == RECORD_BYTES - _CRC.size
    return record + _CRC.pack(crc(memoryview(record)))


def _body(magic: bytes, page: bytes) -> tuple[int, bytes] | None:
    """Return the sequence number and the body of a record; None when it is damaged or of another kind.

    Raises `FormatVersionError` for a newer format or another byte order.
    """
    record, stored = page[: RECORD_BYTES - _CRC.size], page[RECORD_BYTES - _CRC.size : RECORD_BYTES]
    if len(stored) != _CRC.size or crc(memoryview(record)) != _CRC.unpack(stored)[0]:
        return None
    found, written_as, oldest_reader, byte_order, seq = _PREFIX.unpack_from(record)
    if found != magic:
        return None
    if oldest_reader > FORMAT:
        raise FormatVersionError(
            f"the arena is of format {written_as}, and this release reads up to {FORMAT}.",
            remedy="use the release that wrote it, or one that is newer; or remove the arena.",
        )
    if byte_order != _BYTE_ORDER:
        raise FormatVersionError(
            "the arena was written on a machine of the other byte order.",
            remedy="read it on a machine of its own kind.",
        )
    return seq, record[_PREFIX.size :]


def _text(field: bytes, length: int) -> str | None:
    if length > len(field):
        return None
    try:
        return field[:length].decode()
    except UnicodeDecodeError:
        return None


def _shortened(text: str, most: int) -> bytes:
    return text.encode(errors="replace")[:most].decode(errors="ignore").encode()


def _pages(count: int) -> int:
    return -(-count // PAGE) * PAGE
