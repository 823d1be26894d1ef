"""Stripe sets: which shards protect each other, how each is cut into stripes, and the header of a row of parity.

Any M of a set's N members may be lost. With M = 1 (XOR) the layout is that of RAID-5, as in SCR's redset; a larger M
(Reed-Solomon) keeps its rotation. Each shard is cut into N - M stripes, by its own length alone, so no member needs the
others' lengths. Row ``r`` joins one stripe of each member but M. Members r, r + 1, ... keep its parities 0, 1, ...,
each as wide as the widest stripe; shorter stripes count as padded with zeros, which are neither stored nor sent.

For N = 4, and M = 1 and 2::

    row      member 0   member 1   member 2   member 3        member 0   member 1   member 2   member 3
    0        parity     stripe 0   stripe 0   stripe 0        parity 0   parity 1   stripe 0   stripe 0
    1        stripe 0   parity     stripe 1   stripe 1        stripe 0   parity 0   parity 1   stripe 1
    2        stripe 1   stripe 1   parity     stripe 2        stripe 1   stripe 0   parity 0   parity 1
    3        stripe 2   stripe 2   stripe 2   parity          parity 1   stripe 1   stripe 1   parity 0

So a member keeps M blocks of parity, its *parts*: part ``j`` is parity ``j`` of the row ``j`` before its own number. In
front of each block is its `RowHeader`: the members of the set, the true lengths, and the CRC32C of every stripe in the
row. Anything read here may be damaged or forged: every length is bounded before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, IntegrityError
from rackrun.checkpoint.redundancy.galois import POINTS, coefficient, multiply, solve

__all__ = ["ParityError", "Part", "Recipe", "RowHeader", "Span", "StripeSet", "decode_header", "encode_header"]

Span = tuple[int, int]
"""(start, stop) in bytes."""

FORMAT = 3
LENGTH_MAX = 2**46
MEMBERS_MAX = 2**16
_ALIGN = 64
_PAGE = 4096
_OLDER = "Take an older checkpoint, or another copy."
_HEAD = struct.Struct("<II")  # bytes of the header, and their CRC32C


class ParityError(CheckpointError):
    """A stripe came twice or never, or does not belong to this set."""


class Part(NamedTuple):
    """One block of parity: the member that keeps it, and its number among that member's blocks."""

    keeper: int
    number: int = 0


class Recipe(NamedTuple):
    """How one stripe of a lost member is computed: a sum of parities and stripes of its row, each times its factor."""

    parities: Mapping[Part, int]
    stripes: Mapping[int, int]
    """Member -> the factor of its stripe."""


@dataclass(frozen=True)
class StripeSet:
    """The members of a set: ranks, in the order of `ShardPlacement.sets`. Any ``parity`` of them may be lost."""

    members: tuple[int, ...]
    parity: int = 1

    def __post_init__(self) -> None:
        count = len(self.members)
        most = MEMBERS_MAX if self.parity == 1 else POINTS - self.parity
        if not 1 <= self.parity < count <= most or len(set(self.members)) != count:
            raise ParityError(
                f"the {count} ranks {self.members[:9]} cannot form a stripe set that tolerates {self.parity} losses.",
                remedy=f"Give 2 or more different ranks, at most {MEMBERS_MAX}, and 1 loss or more, but fewer than ranks.",
            )

    def index(self, member: int) -> int:
        """Return a member's number in the set. Raises `ParityError` for a rank that is no member."""
        if member not in self.members:
            raise ParityError(f"rank {member} is not in the set {self.members}.")
        return self.members.index(member)

    def parts(self, keeper: int) -> list[Part]:
        """Return the blocks of parity that ``keeper`` keeps."""
        return [Part(keeper, number) for number in range(self.parity)]

    def owners(self, part: Part) -> list[int]:
        """Return the members whose stripes are in the row of this parity."""
        row = self._row(part)
        return [member for i, member in enumerate(self.members) if not self._keeps(i, row)]

    def stripe(self, owner: int, part: Part, length: int) -> Span:
        """Return which bytes of ``owner``'s shard, of ``length`` bytes, are in the row of ``part``.

        Empty, (0, 0), when the owner keeps one of the row's parities.
        """
        i, row = self.index(owner), self._row(part)
        width = self.widest(length)
        without = sum((i - number) % len(self.members) < row for number in range(self.parity))
        start = (row - without) * width  # its stripes are numbered without the rows of which it keeps a parity
        return (0, 0) if self._keeps(i, row) else (min(start, length), min(start + width, length))

    def factor(self, owner: int, part: Part) -> int:
        """Return the factor of ``owner``'s stripe in this parity: 1 in all of part 0."""
        return coefficient(part.number, self.index(owner)) if part.number else 1

    def recipes(self, lost: int, gone: Collection[int]) -> list[Recipe]:
        """Return the recipe of every stripe of ``lost``, in order. ``gone``: all lost members, including ``lost``.

        Raises `ParityError` when too many members are lost.
        """
        if lost not in gone or len(gone) > self.parity:
            left = [member for member in self.members if member not in gone]
            raise ParityError(
                f"rank {lost} cannot be rebuilt from {left}, in a set of {list(self.members)}: parity replaces"
                f" {'one member' if self.parity == 1 else f'{self.parity} members'}.",
                remedy="Take a mirror, or an older checkpoint from disk.",
            )
        i = self.index(lost)
        return [self._recipe(lost, gone, row) for row in range(len(self.members)) if not self._keeps(i, row)]

    def _recipe(self, lost: int, gone: Collection[int], row: int) -> Recipe:
        count = len(self.members)
        parts = [Part(self.members[(row + number) % count], number) for number in range(self.parity)]
        owners = self.owners(parts[0])
        unknown = [owner for owner in owners if owner in gone]
        used = [part for part in parts if part.keeper not in gone][: len(unknown)]
        weights = solve(
            [[self.factor(owner, part) for owner in unknown] for part in used],
            [int(owner == lost) for owner in unknown],
        )
        factors = {owner: 0 for owner in owners if owner not in gone}
        for owner in factors:
            for part, weight in zip(used, weights, strict=True):
                factors[owner] ^= multiply(weight, self.factor(owner, part))
        return Recipe(
            {part: weight for part, weight in zip(used, weights, strict=True) if weight},
            {owner: factor for owner, factor in factors.items() if factor},
        )

    def _row(self, part: Part) -> int:
        """Return the row of a block of parity. Raises `ParityError`."""
        if not 0 <= part.number < self.parity:
            raise ParityError(
                f"rank {part.keeper} keeps {self.parity} blocks of parity, so there is no block {part.number}."
            )
        return (self.index(part.keeper) - part.number) % len(self.members)

    def _keeps(self, index: int, row: int) -> bool:
        """Whether the member of this number keeps a parity of the row."""
        return (index - row) % len(self.members) < self.parity

    def widest(self, length: int) -> int:
        """Return the bytes of the longest stripe of a shard of ``length`` bytes, rounded up to 64.

        Raises `ParityError`.
        """
        if not 0 <= length <= LENGTH_MAX:
            raise ParityError(
                f"a shard of {length} bytes cannot have parity: its length must be 0 to 2**46.",
                remedy="Shard the state over more ranks.",
            )
        return -(-length // ((len(self.members) - self.parity) * _ALIGN)) * _ALIGN

    @property
    def header_bytes(self) -> int:
        return -(-(256 + 64 * len(self.members)) // _PAGE) * _PAGE

    def kept_bytes(self, length: int) -> int:
        """Return how many bytes a member keeps for the others, headers included. ``length``: of the longest shard."""
        return self.parity * (self.header_bytes + self.widest(length))


class RowHeader(msgspec.Struct, frozen=True, rename={"checkpoint": "generation"}):
    """Describes a row of parity. ``lengths`` and ``crcs`` have an item for each member.

    Both items are 0 for a member without a stripe in the row.
    """

    checkpoint: int
    """Checkpoint number; ``generation`` in the encoded header, as decision 12 says."""
    keeper: int
    members: tuple[int, ...]
    lengths: tuple[int, ...]
    """Bytes of each whole shard."""
    crcs: tuple[int, ...]
    """CRC32C of each stripe."""
    parity: int = 1
    part: int = 0
    format: int = FORMAT

    def stripe_set(self) -> StripeSet:
        return StripeSet(self.members, self.parity)

    def stripe(self, owner: int) -> Span:
        """Return which bytes of ``owner``'s shard are in this row."""
        stripe_set = self.stripe_set()
        part = Part(self.keeper, self.part)
        return stripe_set.stripe(owner, part, self.lengths[stripe_set.index(owner)])

    @property
    def row_bytes(self) -> int:
        """Bytes of the row's parity: those of its longest stripe."""
        stripe_set, part = self.stripe_set(), Part(self.keeper, self.part)
        lengths = zip(self.members, self.lengths, strict=True)
        spans = [stripe_set.stripe(owner, part, length) for owner, length in lengths]
        return max(stop - start for start, stop in spans)


def encode_header(header: RowHeader) -> bytes:
    """Return ``StripeSet.header_bytes`` bytes of canonical JSON: equal headers give equal bytes."""
    encoded = msgspec.json.encode(header)
    return (_HEAD.pack(len(encoded), crc(memoryview(encoded))) + encoded).ljust(header.stripe_set().header_bytes, b"\0")


def decode_header(data: bytes | memoryview) -> RowHeader:
    """Decode the header at the beginning of ``data``. Bounds every length before it is used.

    Raises `IntegrityError` for a damaged header, `FormatVersionError` for one of another format.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise IntegrityError(
            f"a row of parity was cut to {len(view)} bytes, which is less than its header.", remedy=_OLDER
        )
    length, expected = _HEAD.unpack_from(view)
    encoded = view[_HEAD.size : _HEAD.size + length]
    if length == 0 or len(encoded) < length or crc(encoded) != expected:
        raise IntegrityError("the header of a row of parity is damaged.", remedy=_OLDER)
    try:
        found = msgspec.json.decode(encoded, type=_Format).format
        if found != FORMAT:
            raise FormatVersionError(
                f"the row of parity has format {found}; this release reads format {FORMAT}.",
                remedy="Restore with the release that wrote it.",
            )
        header = msgspec.json.decode(encoded, type=RowHeader)
        if not len(header.members) == len(header.lengths) == len(header.crcs):
            raise IntegrityError(
                f"the header of a row of parity names {len(header.members)} members, {len(header.lengths)} lengths and "
                f"{len(header.crcs)} checksums.",
                remedy=_OLDER,
            )
        _ = header.row_bytes
    except (msgspec.DecodeError, UnicodeDecodeError, ParityError) as error:
        raise IntegrityError(f"a row of parity does not begin with a valid header: {error}", remedy=_OLDER) from error
    return header


class _Format(msgspec.Struct):
    format: int
