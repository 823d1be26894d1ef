"""XOR sets: which shards are tied together, how each is cut into stripes, and what stands in front of a row of parity.

The layout is that of RAID-5, as in SCR's redset. Each of N shards is cut into N - 1 stripes, by its own length alone, so
nobody has to know the others' lengths. Member ``i`` keeps row ``i``: the XOR of one stripe of each other member, as wide as
the widest of them; shorter ones count as padded with zeros, which are neither stored nor sent. ::

    row      member 0   member 1   member 2   member 3
    0        parity     stripe 0   stripe 0   stripe 0
    1        stripe 0   parity     stripe 1   stripe 1
    2        stripe 1   stripe 1   parity     stripe 2
    3        stripe 2   stripe 2   stripe 2   parity

In front of each row stands its `RowHeader`: who is in the set, the true lengths, the CRC32C of every stripe in the row.
Whatever is read here may be damaged or made up: every length is bounded before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from rackrun.checkpoint.digest import crc
from rackrun.checkpoint.errors import CheckpointError, FormatVersionError, IntegrityError

__all__ = ["ParityError", "RowHeader", "Span", "XorSet", "decode_header", "encode_header"]

Span = tuple[int, int]
"""Bytes from start up to stop."""

FORMAT = 2
LENGTH_MAX = 2**46
MEMBERS_MAX = 2**16
_ALIGN = 64
_PAGE = 4096
_HEAD = struct.Struct("<II")  # bytes of the header, their CRC32C


class ParityError(CheckpointError):
    """A stripe came twice or never, or it is not of this set."""


@dataclass(frozen=True)
class XorSet:
    """The members: ranks, in the order of `Placement.sets`."""

    members: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.members)
        if not 2 <= count <= MEMBERS_MAX or len(set(self.members)) != count:
            raise ParityError(f"no set: {count} members {self.members[:9]}.")

    def index(self, member: int) -> int:
        if member not in self.members:
            raise ParityError(f"rank {member} is not in the set {self.members}.")
        return self.members.index(member)

    def stripe(self, owner: int, keeper: int, length: int) -> Span:
        """The bytes of ``owner``'s shard of ``length`` bytes that go into ``keeper``'s row; none into its own."""
        i, row = self.index(owner), self.index(keeper)
        width = self.widest(length)
        start = (row if row < i else row - 1) * width
        return (0, 0) if i == row else (min(start, length), min(start + width, length))

    def widest(self, length: int) -> int:
        """Bytes of the longest stripe of a shard of ``length`` bytes, rounded up."""
        if not 0 <= length <= LENGTH_MAX:
            raise ParityError(f"the length of a shard is 0 to 2**46, not {length}.")
        return -(-length // ((len(self.members) - 1) * _ALIGN)) * _ALIGN

    @property
    def header_bytes(self) -> int:
        return -(-(256 + 64 * len(self.members)) // _PAGE) * _PAGE

    def kept_bytes(self, length: int) -> int:
        """What a member keeps for the others when none of their shards is longer: a header, and its row."""
        return self.header_bytes + self.widest(length)


class RowHeader(msgspec.Struct, frozen=True):
    """What a keeper knows of its row. ``lengths`` and ``crcs`` are 0 for the keeper itself, which has no stripe in it."""

    generation: int
    keeper: int
    members: tuple[int, ...]
    lengths: tuple[int, ...]
    """Bytes of each whole shard."""
    crcs: tuple[int, ...]
    """CRC32C of each stripe."""
    format: int = FORMAT

    def xor_set(self) -> XorSet:
        return XorSet(self.members)

    def stripe(self, owner: int) -> Span:
        """Which bytes of ``owner``'s shard are in this row."""
        xor_set = self.xor_set()
        return xor_set.stripe(owner, self.keeper, self.lengths[xor_set.index(owner)])

    @property
    def row_bytes(self) -> int:
        return max(stop - start for start, stop in map(self.stripe, self.members))


def encode_header(header: RowHeader) -> bytes:
    """``XorSet.header_bytes`` bytes: canonical JSON, so equal headers are equal bytes."""
    encoded = msgspec.json.encode(header)
    return (_HEAD.pack(len(encoded), crc(memoryview(encoded))) + encoded).ljust(header.xor_set().header_bytes, b"\0")


def decode_header(data: bytes | memoryview) -> RowHeader:
    """The header at the beginning of ``data``. Bounds every length before it is used."""
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise IntegrityError(f"parity of {len(view)} bytes has no header.")
    length, expected = _HEAD.unpack_from(view)
    encoded = view[_HEAD.size : _HEAD.size + length]
    if length == 0 or len(encoded) < length or crc(encoded) != expected:
        raise IntegrityError("the header of a row of parity is damaged.", remedy="take an older generation.")
    try:
        found = msgspec.json.decode(encoded, type=_Format).format
        if found != FORMAT:
            raise FormatVersionError(
                f"parity of format {found}, this release reads {FORMAT}.",
                remedy="Restore with the release that wrote it.",
            )
        header = msgspec.json.decode(encoded, type=RowHeader)
        if not len(header.members) == len(header.lengths) == len(header.crcs):
            raise IntegrityError(f"{len(header.lengths)} lengths, {len(header.crcs)} checksums: {header.members[:9]}.")
        _ = header.row_bytes
    except (msgspec.DecodeError, UnicodeDecodeError, ParityError) as error:
        raise IntegrityError(f"not the header of a row of parity: {error}") from error
    return header


class _Format(msgspec.Struct):
    format: int
