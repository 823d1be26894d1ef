"""XOR parity over a set of shards of different lengths: any one lost member is rebuilt from the others.

Stripes and rows are those of `rackrun.checkpoint.xor_set`. A rebuilt shard that does not match the CRC32C that every
member has of it is never handed out.

Traps: to XOR a range twice takes it out again, so ranges are booked, and refused the second time; an encoder or a
rebuilder that has not had everything says what is missing instead of giving bytes. A member that is lost takes its
parity with it: encode that again from the others' data, with an `Encoder` fed from the same stream.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rackrun.checkpoint.digest import crc as crc32c
from rackrun.checkpoint.errors import IntegrityError
from rackrun.checkpoint.xor_set import Descriptor, ParityError, Span, XorSet, open_parity, write_header

__all__ = [
    "Descriptor",
    "Encoder",
    "ParityError",
    "Rebuilder",
    "XorSet",
    "open_parity",
    "rebuild",
    "write_header",
    "xor_into",
]

Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
Kind = Literal["data", "parity"]
_BLOCK = 2**20


class Encoder:
    """The parity that ``keeper`` keeps, as the others' stripes arrive, in any order and any pieces.

    Not for two threads at once; different encoders are independent, and XOR and CRC release the GIL.
    """

    def __init__(self, xor_set: XorSet, keeper: int, into: Bytes | None = None) -> None:
        target = _target(xor_set.row_bytes, into)
        pieces: dict[_Source, list[_Piece]] = {}
        for owner in xor_set.members:
            start, stop = xor_set.stripe(owner, keeper)
            pieces[owner, "data"] = [_Piece(start, stop, 0)] if start < stop else []
        self._fold = _Fold(xor_set, target, pieces)

    def add(self, member: int, offset: int, data: Bytes, crc: int | None = None) -> None:
        """XOR in ``data``, which stands at ``offset`` in ``member``'s shard. Bytes of other rows are skipped.

        Raises `IntegrityError` when they do not match ``crc``, `ParityError` when some were added before; nothing is
        added then.
        """
        self._fold.add((member, "data"), offset, data, crc)

    def missing(self) -> dict[int, list[Span]]:
        """What has to come yet: member -> spans of its shard."""
        return {member: spans for (member, _), spans in self._fold.missing().items()}

    def parity(self) -> memoryview:
        self._fold.finish()
        return self._fold.target.data


class Rebuilder:
    """The shard of a lost member, as the others' data and parity arrive, in any order and any pieces."""

    def __init__(self, descriptor: Descriptor, lost: int, into: Bytes | None = None) -> None:
        xor_set = descriptor.xor_set()
        at = xor_set.index(lost)
        self.lost, self._length, self._crc = lost, xor_set.lengths[at], descriptor.crcs[at]
        pieces: dict[_Source, list[_Piece]] = {}
        for keeper in xor_set.members:
            goal, end = xor_set.stripe(lost, keeper)
            if goal == end:
                continue
            pieces.setdefault((keeper, "parity"), []).append(_Piece(0, end - goal, goal))
            for owner in xor_set.members:
                start, stop = xor_set.stripe(owner, keeper)
                stop = min(stop, start + end - goal)
                if owner != lost and start < stop:
                    pieces.setdefault((owner, "data"), []).append(_Piece(start, stop, goal))
        self._fold = _Fold(xor_set, _target(self._length, into), pieces)

    def add(self, member: int, offset: int, data: Bytes, kind: Kind = "data", crc: int | None = None) -> None:
        """As `Encoder.add`; ``kind`` says whether ``offset`` is in the member's shard or in its parity."""
        if member == self.lost:
            raise ParityError(f"rank {member} is the lost one: nothing of it is known.")
        self._fold.add((member, kind), offset, data, crc)

    def missing(self) -> dict[tuple[int, Kind], list[Span]]:
        """What has to come yet: (member, kind) -> spans."""
        return self._fold.missing()

    def shard(self) -> memoryview:
        """The rebuilt bytes. `IntegrityError`: they are not those of which the descriptor tells."""
        self._fold.finish()
        found = crc32c(self._fold.target) if self._length else 0
        if found != self._crc:
            raise IntegrityError(
                f"the rebuilt shard of rank {self.lost} has CRC32C {found:08x}, not {self._crc:08x}: data or parity of"
                " another member is damaged.",
                remedy="Take an older generation, or another copy.",
            )
        return self._fold.target.data


def rebuild(
    descriptor: Descriptor,
    lost: int,
    data: Mapping[int, Bytes],
    parity: Mapping[int, Bytes],
    into: Bytes | None = None,
) -> memoryview:
    """The shard of ``lost`` from all others' data and parity, verified."""
    others = [member for member in descriptor.members if member != lost]
    if gone := [member for member in others if member not in data or member not in parity]:
        raise ParityError(
            f"rank {lost} cannot be rebuilt: {gone} of its set are gone as well, and parity replaces one member.",
            remedy="Take a mirror, or an older generation from disk.",
        )
    rebuilder = Rebuilder(descriptor, lost, into)
    for member in others:
        rebuilder.add(member, 0, data[member])
        rebuilder.add(member, 0, parity[member], "parity")
    return rebuilder.shard()


def xor_into(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """``target ^= source``, in blocks that stay in the cache.

    numpy's loop over uint8 is as wide as the processor's vectors and does not mind where the bytes begin; over uint64 it
    is no faster, and it copies whatever is not aligned.
    """
    for start in range(0, len(target), _BLOCK):
        block = target[start : start + _BLOCK]
        np.bitwise_xor(block, source[start : start + _BLOCK], out=block)


_Source = tuple[int, Kind]


class _Piece(NamedTuple):
    start: int
    stop: int
    goal: int
    """Where ``start`` lands in the target."""


@dataclass
class _Booked:
    """Disjoint spans, in order; what touches is joined."""

    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)

    def gaps(self, start: int, stop: int) -> list[Span]:
        found = []
        for i in range(bisect_right(self.stops, start), bisect_left(self.starts, stop)):
            if start < self.starts[i]:
                found.append((start, self.starts[i]))
            start = self.stops[i]
        return [*found, (start, stop)] if start < stop else found

    def add(self, start: int, stop: int) -> None:
        first, last = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if first < last:
            start, stop = min(start, self.starts[first]), max(stop, self.stops[last - 1])
        self.starts[first:last], self.stops[first:last] = [start], [stop]


class _Fold:
    """A target, and which bytes of which sources are XORed into it, each once."""

    def __init__(self, xor_set: XorSet, target: NDArray[np.uint8], pieces: Mapping[_Source, Sequence[_Piece]]) -> None:
        self.target = target
        self._set, self._pieces = xor_set, pieces
        self._written = _Booked()
        self._booked: dict[_Source, _Booked] = {source: _Booked() for source in pieces}

    def add(self, source: _Source, offset: int, data: Bytes, crc: int | None) -> None:
        view = _flat(data)
        member, kind = source
        length = self._set.lengths[self._set.index(member)] if kind == "data" else self._set.row_bytes
        if not 0 <= offset <= offset + len(view) <= length:
            raise ParityError(f"bytes {offset} to {offset + len(view)} of rank {member}'s {kind}, which has {length}.")
        if crc is not None and (found := crc32c(view) if len(view) else 0) != crc:
            raise IntegrityError(
                f"bytes {offset} to {offset + len(view)} of rank {member}'s {kind} have CRC32C {found:08x}, not {crc:08x}.",
                remedy="Send them again.",
            )
        parts = [
            _Piece(start, stop, piece.goal + start - piece.start)
            for piece in self._pieces.get(source, ())
            if (start := max(piece.start, offset)) < (stop := min(piece.stop, offset + len(view)))
        ]
        for start, stop, _ in parts:
            if self._booked[source].gaps(start, stop) != [(start, stop)]:
                raise ParityError(
                    f"bytes {start} to {stop} of rank {member}'s {kind} came before, all or some of them."
                )
        for start, stop, goal in parts:
            self._booked[source].add(start, stop)
            self._mix(goal, view[start - offset : stop - offset])

    def _mix(self, goal: int, data: NDArray[np.uint8]) -> None:
        """XOR in, save where nothing was yet: copy there, which spares zeroing the target first."""
        at, end = goal, goal + len(data)
        for start, stop in (*self._written.gaps(goal, end), (end, end)):
            xor_into(self.target[at:start], data[at - goal : start - goal])
            fresh = data[start - goal : stop - goal]
            np.bitwise_or(fresh, fresh, out=self.target[start:stop])  # a copy; measured faster than assigning
            at = stop
        self._written.add(goal, end)

    def missing(self) -> dict[_Source, list[Span]]:
        found = {
            source: [gap for piece in pieces for gap in self._booked[source].gaps(piece.start, piece.stop)]
            for source, pieces in self._pieces.items()
        }
        return {source: gaps for source, gaps in found.items() if gaps}

    def finish(self) -> None:
        if missing := self.missing():
            (member, kind), gaps = next(iter(missing.items()))
            raise ParityError(
                f"{sum(stop - start for spans in missing.values() for start, stop in spans)} bytes of {len(missing)} sources"
                f" never came, the first of them {gaps[0][0]} to {gaps[0][1]} of rank {member}'s {kind}.",
                remedy="Add them, or drop this generation.",
            )
        for start, stop in self._written.gaps(0, len(self.target)):
            self.target[start:stop] = 0


def _flat(data: Bytes) -> NDArray[np.uint8]:
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return np.frombuffer(view.cast("B"), dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def _target(length: int, into: Bytes | None) -> NDArray[np.uint8]:
    if into is None:
        return np.empty(length, dtype=np.uint8)
    target = _flat(into)
    if len(target) != length:
        raise ParityError(f"room for {len(target)} bytes where {length} are to be written.")
    return target
