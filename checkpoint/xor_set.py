"""XOR sets: which shards are tied together, how they are cut into stripes, and what every member knows of the others.

The layout is that of RAID-5, as in SCR's redset. Each of N shards is cut into N - 1 stripes of equal length; shorter
shards count as padded with zeros, which are neither stored nor sent. Member ``i`` keeps the parity of row ``i``, which
holds one stripe of each other member: 1/(N - 1) of the longest shard, on everybody. ::

    row      member 0   member 1   member 2   member 3
    0        parity     stripe 0   stripe 0   stripe 0
    1        stripe 0   parity     stripe 1   stripe 1
    2        stripe 1   stripe 1   parity     stripe 2
    3        stripe 2   stripe 2   stripe 2   parity

Every member keeps the whole `Descriptor` in front of its parity: who is in the set, true lengths, CRC32C of the inputs.
Whatever is read here may be damaged or made up: every length is bounded before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from rackrun.checkpoint.digest import crc
from rackrun.checkpoint.errors import CheckpointError, FormatVersionError, IntegrityError

__all__ = ["Descriptor", "ParityError", "Span", "XorSet", "open_parity", "write_header"]

Span = tuple[int, int]
"""Bytes from start up to stop."""

FORMAT = 1
LENGTH_MAX = 2**46
MEMBERS_MAX = 2**16
_ALIGN = 64
_PAGE = 4096
_HEAD = struct.Struct("<II")  # bytes of the descriptor, their CRC32C


class ParityError(CheckpointError):
    """A range came twice or never, or it is not of this set."""


@dataclass(frozen=True)
class XorSet:
    """The members (ranks, in the order of `Placement.sets`) and the true lengths of their shards, in bytes."""

    members: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.members)
        if not 2 <= count <= MEMBERS_MAX or len(set(self.members)) != count or len(self.lengths) != count:
            raise ParityError(f"no set: {count} members {self.members[:9]}, {len(self.lengths)} lengths.")
        if not all(0 <= length <= LENGTH_MAX for length in self.lengths):
            raise ParityError(f"lengths of shards are 0 to 2**46, not {self.lengths[:9]}.")

    @property
    def row_bytes(self) -> int:
        """Bytes of a stripe and of each member's parity."""
        stripes = len(self.members) - 1
        return -(-max(self.lengths) // (stripes * _ALIGN)) * _ALIGN

    @property
    def header_bytes(self) -> int:
        return -(-(256 + 64 * len(self.members)) // _PAGE) * _PAGE

    @property
    def payload_bytes(self) -> int:
        """What a member keeps for the set: the descriptor, then its parity."""
        return self.header_bytes + self.row_bytes

    def index(self, member: int) -> int:
        if member not in self.members:
            raise ParityError(f"rank {member} is not in the set {self.members}.")
        return self.members.index(member)

    def stripe(self, owner: int, keeper: int) -> Span:
        """The bytes of ``owner``'s shard that go into ``keeper``'s parity, without padding; empty when all are."""
        i, row, width = self.index(owner), self.index(keeper), self.row_bytes
        if i == row:
            return 0, 0
        start = (row if row < i else row - 1) * width
        length = self.lengths[i]
        return min(start, length), min(start + width, length)


class Descriptor(msgspec.Struct, frozen=True):
    """What every member of a set knows about all of it."""

    generation: int
    members: tuple[int, ...]
    lengths: tuple[int, ...]
    crcs: tuple[int, ...]
    """CRC32C of each whole shard."""
    format: int = FORMAT

    def xor_set(self) -> XorSet:
        return XorSet(self.members, self.lengths)

    def encode(self) -> bytes:
        """Canonical JSON: equal descriptors are equal bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Descriptor:
        try:
            found = msgspec.json.decode(bytes(data), type=_Format).format
            if found != FORMAT:
                raise FormatVersionError(
                    f"parity of format {found}, this release reads {FORMAT}.",
                    remedy="Restore with the release that wrote it.",
                )
            descriptor = msgspec.json.decode(bytes(data), type=cls)
            descriptor.xor_set()
        except (msgspec.DecodeError, UnicodeDecodeError, ParityError) as error:
            raise IntegrityError(f"not a redundancy descriptor: {error}") from error
        if len(descriptor.crcs) != len(descriptor.members):
            raise IntegrityError(f"{len(descriptor.crcs)} checksums of {len(descriptor.members)} members.")
        return descriptor


def write_header(payload: memoryview, descriptor: Descriptor) -> memoryview:
    """Put the descriptor in front of a member's parity; returns the place for the parity behind it."""
    xor_set, encoded = descriptor.xor_set(), descriptor.encode()
    head = _HEAD.pack(len(encoded), crc(memoryview(encoded))) + encoded
    payload[: xor_set.header_bytes] = head.ljust(xor_set.header_bytes, b"\0")
    return payload[xor_set.header_bytes : xor_set.payload_bytes]


def open_parity(payload: memoryview) -> tuple[Descriptor, memoryview]:
    """What `write_header` and an `Encoder` wrote. Bounds every length before it is used."""
    if len(payload) < _HEAD.size:
        raise IntegrityError(f"parity of {len(payload)} bytes has no header.")
    length, expected = _HEAD.unpack_from(payload)
    encoded = payload[_HEAD.size : _HEAD.size + length]
    if length == 0 or len(encoded) < length or crc(encoded) != expected:
        raise IntegrityError(
            "the redundancy descriptor in front of the parity is damaged.", remedy="Use another member's."
        )
    descriptor = Descriptor.decode(encoded)
    xor_set = descriptor.xor_set()
    if len(payload) < xor_set.payload_bytes:
        raise IntegrityError(f"parity of {len(payload)} bytes is cut short, {xor_set.payload_bytes} are due.")
    return descriptor, payload[xor_set.header_bytes : xor_set.payload_bytes]


class _Format(msgspec.Struct):
    format: int
