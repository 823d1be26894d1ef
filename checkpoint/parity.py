"""XOR parity over a set of shards of different lengths: any one lost member is rebuilt from the others.

Stripes and rows are those of `rackrun.checkpoint.xor_set`. A keeper's `Row` takes in the others' stripes as they arrive,
each checked against its owner's CRC32C; `rebuild` gives a lost shard back, stripe by stripe, each checked against the same.

A stripe that breaks off or is damaged spoils its row: what was mixed in is not taken out again, because a row without
every member is of no use. A spoiled or incomplete row gives no header, and without one nothing is rebuilt. A member that
is lost takes its row with it: two lost members of one set are one too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rackrun.checkpoint.digest import crc as crc32c
from rackrun.checkpoint.errors import IntegrityError
from rackrun.checkpoint.xor_set import ParityError, RowHeader, XorSet

__all__ = ["Incoming", "Read", "Row", "rebuild", "xor_into"]

Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
Room: TypeAlias = Callable[[int], Bytes]
"""Writable memory of so many bytes or more. What a former call gave is at its beginning, the rest is zeros."""
Read: TypeAlias = Callable[[int, int | None, int, int], Iterable[Bytes]]
"""``read(keeper, member, start, stop)``: those bytes of ``member``'s shard, in order, in any pieces; of the parity of
``keeper``'s row when ``member`` is None. The keeper says what for."""
_BLOCK = 2**20


class Row:
    """The parity that ``keeper`` keeps. Not for two threads at once; different rows are independent, and XOR and CRC release
    the GIL."""

    def __init__(self, generation: int, xor_set: XorSet, keeper: int, room: Room | None = None) -> None:
        xor_set.index(keeper)
        self.generation, self.xor_set, self.keeper = generation, xor_set, keeper
        self._room = _own_room() if room is None else room
        self._came: dict[int, Incoming] = {}
        self.spoiled = ""
        """Why it will never be whole."""

    def begin(self, owner: int, length: int) -> Incoming:
        """``owner``, whose shard has ``length`` bytes, is about to give its stripe. `ParityError` when it did before, or when the
        row is spoiled."""
        start, stop = self.xor_set.stripe(owner, self.keeper, length)
        if self.spoiled:
            raise ParityError(f"rank {self.keeper}'s row is spoiled: {self.spoiled}.")
        if owner == self.keeper or owner in self._came:
            raise ParityError(f"rank {owner} has no stripe in rank {self.keeper}'s row, or gave it before.")
        self._room(stop - start)
        self._came[owner] = Incoming(self, owner, length, stop - start)
        return self._came[owner]

    @property
    def missing(self) -> list[int]:
        """Members whose stripe is not here, whole."""
        whole = [owner for owner, stripe in self._came.items() if stripe.whole]
        return [member for member in self.xor_set.members if member != self.keeper and member not in whole]

    def header(self) -> RowHeader:
        """Of a row that has all stripes. `ParityError`: it has not."""
        if self.spoiled or self.missing:
            why = self.spoiled or f"the stripes of {self.missing} never came"
            raise ParityError(f"rank {self.keeper}'s row of generation {self.generation}: {why}.")
        came = [self._came.get(member) for member in self.xor_set.members]
        return RowHeader(
            self.generation,
            self.keeper,
            self.xor_set.members,
            tuple(stripe.length if stripe else 0 for stripe in came),
            tuple(stripe.crc if stripe else 0 for stripe in came),
        )

    def parity(self) -> NDArray[np.uint8]:
        """The bytes behind `header`."""
        return _flat(self._room(0))[: self.header().row_bytes]

    def _mix(self, at: int, data: NDArray[np.uint8]) -> None:
        xor_into(_flat(self._room(0))[at : at + len(data)], data)


class Incoming:
    """One stripe on its way into a row: `add` its bytes in order, then `end`."""

    def __init__(self, row: Row, owner: int, length: int, size: int) -> None:
        self._row, self._owner, self.length, self._size = row, owner, length, size
        self._at = 0
        self.crc = 0
        self.whole = False

    def add(self, data: Bytes) -> None:
        view = _flat(data)
        if self._row.spoiled or self._at + len(view) > self._size:
            raise self._spoil(f"more than {self._size} bytes of rank {self._owner}")
        for start in range(0, len(view), _BLOCK):  # one pass over memory for both
            block = view[start : start + _BLOCK]
            self.crc = crc32c(block, self.crc)
            self._row._mix(self._at, block)
            self._at += len(block)

    def end(self, crc: int) -> None:
        """That was all of it. `ParityError` when it was not, `IntegrityError` when it is not what the owner sent; the row is
        spoiled then."""
        if self._row.spoiled or self._at != self._size:
            raise self._spoil(f"{self._at} bytes of rank {self._owner}, of {self._size}")
        if self.crc != crc:
            self._spoil(f"damaged bytes of rank {self._owner}")
            raise IntegrityError(f"rank {self._owner}'s stripe has CRC32C {self.crc:08x}, not {crc:08x}.")
        self.whole = True

    def broke_off(self) -> None:
        """It will not be ended."""
        if not self.whole:
            self._spoil(f"rank {self._owner} broke off")

    def _spoil(self, what: str) -> ParityError:
        self._row.spoiled = self._row.spoiled or what
        return ParityError(f"rank {self._row.keeper}'s row is spoiled: {self._row.spoiled}.")


def rebuild(
    rows: Mapping[int, RowHeader], lost: int, room: Callable[[int], Bytes], read: Read, threads: int = 1
) -> None:
    """The shard of ``lost``, put into ``room(its length)``. ``rows``: keeper -> the header of its row.

    `ParityError` when rows are missing or not of one set and generation, `IntegrityError` when a stripe is not the one that was lost. ``read``
    may be called by ``threads`` threads at once, each for a keeper of its own.
    """
    length = _agreed(rows, lost)
    shard = _flat(room(length))

    def stripe_of(keeper: int) -> None:
        header = rows[keeper]
        start, stop = header.stripe(lost)
        _rebuild_stripe(header, lost, shard[start:stop], read)

    if threads <= 1:
        for keeper in rows:
            stripe_of(keeper)
        return
    with ThreadPoolExecutor(threads, "rackrun-rebuild") as pool:
        for done in [pool.submit(stripe_of, keeper) for keeper in rows]:
            done.result()


def _agreed(rows: Mapping[int, RowHeader], lost: int) -> int:
    """The lost shard's length."""
    some = next(iter(rows.values()), None)
    members = some.members if some else ()
    others = [member for member in members if member != lost]
    if lost not in members or [keeper for keeper in others if keeper not in rows]:
        raise ParityError(
            f"rank {lost} cannot be rebuilt from the rows of {list(rows)}, in a set of {list(members)}: parity replaces one member.",
            remedy="Take a mirror, or an older generation from disk.",
        )
    at = members.index(lost)
    told = {(h.generation, h.members, h.lengths[at]) for h in rows.values()}
    if len(told) != 1 or any(header.keeper != keeper for keeper, header in rows.items()) or lost in rows:
        raise ParityError(f"the rows of {list(rows)} are not of one set and one generation.")
    return rows[others[0]].lengths[at]


def _rebuild_stripe(header: RowHeader, lost: int, target: NDArray[np.uint8], read: Read) -> None:
    _each(read(header.keeper, None, 0, len(target)), target, _assign)
    for member in header.members:
        start, stop = header.stripe(member)
        stop = min(stop, start + len(target))
        if member != lost and start < stop:
            _each(read(header.keeper, member, start, stop), target[: stop - start], xor_into)
    found = crc32c(target) if len(target) else 0
    expected = header.crcs[header.members.index(lost)]
    if found != expected:
        raise IntegrityError(
            f"the stripe of rank {lost} in rank {header.keeper}'s row has CRC32C {found:08x}, not {expected:08x}: data or parity"
            " of another member is damaged.",
            remedy="Take an older generation, or another copy.",
        )


def _each(
    pieces: Iterable[Bytes], target: NDArray[np.uint8], act: Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]
) -> None:
    at = 0
    for piece in pieces:
        view = _flat(piece)
        if at + len(view) > len(target):
            raise ParityError(f"more than the {len(target)} bytes that were asked for.")
        act(target[at : at + len(view)], view)
        at += len(view)
    if at != len(target):
        raise ParityError(f"{at} bytes, of {len(target)} that were asked for.")


def xor_into(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """``target ^= source``, in blocks that stay in the cache.

    numpy's loop over uint8 is as wide as the processor's vectors and does not mind where the bytes begin; over uint64 it
    is no faster, and it copies whatever is not aligned.
    """
    for start in range(0, len(target), _BLOCK):
        block = target[start : start + _BLOCK]
        np.bitwise_xor(block, source[start : start + _BLOCK], out=block)


def _assign(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    target[:] = source


def _flat(data: Bytes) -> NDArray[np.uint8]:
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return np.frombuffer(view.cast("B"), dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def _own_room() -> Room:
    held = np.zeros(0, dtype=np.uint8)

    def room(size: int) -> Bytes:
        nonlocal held
        if size > len(held):
            held = np.concatenate([held, np.zeros(size - len(held), dtype=np.uint8)])
        return held

    return room
