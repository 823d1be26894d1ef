"""Parity over a set of shards of different lengths: as many lost members as the set has parities can be rebuilt.

`rackrun.checkpoint.redundancy.stripe_set` defines stripes and rows. A keeper's `Row` adds the other members' stripes as
they arrive: each is checked against its owner's CRC32C and multiplied by its factor, which is 1 for XOR. `rebuild`
restores a lost shard stripe by stripe, each checked against the same CRC32C.

A stripe that breaks off or is damaged spoils its row. What was added is not taken out again, because a row without all
members is useless. A spoiled or incomplete row gives no header, and nothing is rebuilt without one. A member that is
lost takes its parities with it; the set's size accounts for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rackrun.checkpoint.base.digest import crc as crc32c
from rackrun.checkpoint.base.errors import IntegrityError
from rackrun.checkpoint.redundancy.isal import multiply_into
from rackrun.checkpoint.redundancy.stripe_set import ParityError, Part, Recipe, RowHeader, StripeSet

__all__ = ["Incoming", "Read", "Row", "mix_into", "rebuild", "xor_into"]

Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
Room: TypeAlias = Callable[[int], Bytes]
"""Returns writable memory of at least that many bytes.

It begins with what a former call returned; the rest is zeros.
"""
Read: TypeAlias = Callable[[Part | int, int, int], Iterable[Bytes]]
"""``read(where, start, stop)`` yields bytes of a member's shard, or of a block of parity, in pieces of any size."""
_BLOCK = 2**20


class Row:
    """One block of parity that is being built.

    Not for two threads at once. Different rows are independent, and their arithmetic and CRC release the GIL.
    """

    def __init__(self, checkpoint: int, stripe_set: StripeSet, part: Part, room: Room | None = None) -> None:
        self.owners = stripe_set.owners(part)
        """The members whose stripes are in the row."""
        self.checkpoint, self.stripe_set, self.part = checkpoint, stripe_set, part
        self._room = _own_room() if room is None else room
        self._came: dict[int, Incoming] = {}
        self.spoiled = ""
        """Why the row will never be whole; empty while it may."""

    @property
    def keeper(self) -> int:
        return self.part.keeper

    def begin(self, owner: int, length: int) -> Incoming:
        """Begin the stripe of ``owner``, whose shard has ``length`` bytes.

        Raises `ParityError` when the owner began before or has no stripe here, or when the row is spoiled.
        """
        start, stop = self.stripe_set.stripe(owner, self.part, length)
        if self.spoiled:
            raise _spoilt(self)
        if owner not in self.owners or owner in self._came:
            raise ParityError(
                f"rank {owner} sent a stripe that has no place in the row of parity of rank {self.keeper}, or sent it twice."
            )
        self._room(stop - start)
        self._came[owner] = Incoming(self, owner, length, stop - start)
        return self._came[owner]

    @property
    def missing(self) -> list[int]:
        """Members whose stripe has not arrived whole."""
        whole = [owner for owner, stripe in self._came.items() if stripe.whole]
        return [owner for owner in self.owners if owner not in whole]

    def header(self) -> RowHeader:
        """Return the header of a complete row. Raises `ParityError` when stripes are missing or the row is spoiled."""
        if self.spoiled or self.missing:
            why = self.spoiled or f"the stripes of ranks {self.missing} never came"
            raise ParityError(
                f"the row of parity of rank {self.keeper} for checkpoint {self.checkpoint} cannot be used: {why}."
            )
        came = [self._came.get(member) for member in self.stripe_set.members]
        return RowHeader(
            self.checkpoint,
            self.keeper,
            self.stripe_set.members,
            tuple(stripe.length if stripe else 0 for stripe in came),
            tuple(stripe.crc if stripe else 0 for stripe in came),
            self.stripe_set.parity,
            self.part.number,
        )

    def parity(self) -> NDArray[np.uint8]:
        """Return the bytes of the row's parity (uint8). Raises `ParityError` like `header`."""
        return _flat(self._room(0))[: self.header().row_bytes]

    def _mix(self, at: int, data: NDArray[np.uint8], factor: int) -> None:
        mix_into(_flat(self._room(0))[at : at + len(data)], data, factor)


class Incoming:
    """One stripe that is being added to a row: call `add` with its bytes in order, then `end`."""

    def __init__(self, row: Row, owner: int, length: int, size: int) -> None:
        self._row, self._owner, self.length, self._size = row, owner, length, size
        self._factor = row.stripe_set.factor(owner, row.part)
        self._at = 0
        self.crc = 0
        self.whole = False

    def add(self, data: Bytes) -> None:
        """Add bytes to the row. Raises `ParityError` when there are more than the stripe has, or the row is spoiled."""
        view = _flat(data)
        if self._row.spoiled or self._at + len(view) > self._size:
            raise self._spoil(f"rank {self._owner} sent more than the {self._size} bytes of its stripe")
        for start in range(0, len(view), _BLOCK):  # one pass over memory for CRC and parity
            block = view[start : start + _BLOCK]
            self.crc = crc32c(block, self.crc)
            self._row._mix(self._at, block, self._factor)
            self._at += len(block)

    def end(self, crc: int) -> None:
        """End the stripe. ``crc``: its owner's CRC32C.

        Raises `ParityError` when bytes are missing, `IntegrityError` when they are not what the owner sent. The row is
        spoiled then.
        """
        if self._row.spoiled or self._at != self._size:
            raise self._spoil(f"rank {self._owner} sent {self._at} of the {self._size} bytes of its stripe")
        if self.crc != crc:
            self._spoil(f"the bytes of rank {self._owner} arrived damaged")
            raise IntegrityError(
                f"the stripe of rank {self._owner} arrived damaged: its CRC32C is {self.crc:08x}, not {crc:08x}.",
                remedy="The next snapshot sends it again.",
            )
        self.whole = True

    def broke_off(self) -> None:
        """Spoil the row, because the rest of this stripe will not come. No effect after `end`."""
        if not self.whole:
            self._spoil(f"rank {self._owner} broke off")

    def _spoil(self, what: str) -> ParityError:
        self._row.spoiled = self._row.spoiled or what
        return _spoilt(self._row)


def _spoilt(row: Row) -> ParityError:
    return ParityError(
        f"the row of parity of rank {row.keeper} is spoiled: {row.spoiled}.",
        remedy="The next snapshot makes a new row.",
    )


def rebuild(
    stripe_set: StripeSet,
    lost: int,
    gone: Collection[int],
    header: Callable[[Part], RowHeader],
    room: Callable[[int], Bytes],
    read: Read,
    threads: int = 1,
) -> None:
    """Rebuild the shard of ``lost`` into ``room(its length)``. ``gone``: all lost members, including ``lost``.

    ``header`` returns the header of a block of parity. ``threads`` threads may call ``read`` at once. Raises
    `ParityError` when too many members are lost, or the rows are not of one set and checkpoint; `IntegrityError` when a
    rebuilt stripe is not the one that was lost.
    """
    recipes = stripe_set.recipes(lost, gone)
    rows = [_agreed(stripe_set, [header(part) for part in recipe.parities]) for recipe in recipes]
    at = stripe_set.index(lost)
    if len({(row.checkpoint, row.lengths[at]) for row in rows}) != 1:
        raise ParityError(
            f"rank {lost} cannot be rebuilt: the rows of parity with its stripes are not of one set and one checkpoint.",
            remedy="Take an older checkpoint, or another copy.",
        )
    shard = _flat(room(rows[0].lengths[at]))
    failed = threading.Event()

    def stripe_of(row: RowHeader, recipe: Recipe) -> None:
        if failed.is_set():
            return  # each read from a silent peer takes its whole deadline
        try:
            start, stop = row.stripe(lost)
            _rebuild_stripe(row, recipe, lost, shard[start:stop], read)
        except BaseException:
            failed.set()
            raise

    if threads <= 1:
        for row, recipe in zip(rows, recipes, strict=True):
            stripe_of(row, recipe)
        return
    with ThreadPoolExecutor(threads, "rackrun-rebuild") as pool:
        for done in [pool.submit(stripe_of, row, recipe) for row, recipe in zip(rows, recipes, strict=True)]:
            done.result()


def _agreed(stripe_set: StripeSet, headers: list[RowHeader]) -> RowHeader:
    """Return the common header of one row's parities. Raises `ParityError` unless they contain the same stripes."""
    first = headers[0]
    told = {(one.checkpoint, one.members, one.parity, one.lengths, one.crcs) for one in headers}
    if len(told) != 1 or first.stripe_set() != stripe_set:
        raise ParityError(
            f"the blocks of parity in the row of rank {first.keeper} are not of one set and one checkpoint.",
            remedy="Take an older checkpoint, or another copy.",
        )
    return first


def _rebuild_stripe(header: RowHeader, recipe: Recipe, lost: int, target: NDArray[np.uint8], read: Read) -> None:
    """Rebuild one stripe into ``target``, and compare it with its CRC32C. Raises `IntegrityError`."""
    for nth, (part, factor) in enumerate(recipe.parities.items()):
        _each(read(part, 0, len(target)), target, factor, fresh=nth == 0)
    for member, factor in recipe.stripes.items():
        start, stop = header.stripe(member)
        stop = min(stop, start + len(target))
        if start < stop:
            _each(read(member, start, stop), target[: stop - start], factor)
    found = crc32c(target) if len(target) else 0
    expected = header.crcs[header.members.index(lost)]
    if found != expected:
        raise IntegrityError(
            f"the stripe of rank {lost} in rank {header.keeper}'s row has CRC32C {found:08x}, not {expected:08x}: data or parity"
            " of another member is damaged.",
            remedy="Take an older checkpoint, or another copy.",
        )


def _each(pieces: Iterable[Bytes], target: NDArray[np.uint8], factor: int, *, fresh: bool = False) -> None:
    """Add ``factor`` times the pieces to ``target``, which they must fill. ``fresh``: the target has no content yet."""
    at = 0
    for piece in pieces:
        view = _flat(piece)
        if at + len(view) > len(target):
            raise ParityError(f"a peer sent more than the {len(target)} bytes of a stripe that were asked for.")
        into = target[at : at + len(view)]
        if fresh:
            into[:] = view if factor == 1 else 0
        if not fresh or factor != 1:
            mix_into(into, view, factor)
        at += len(view)
    if at != len(target):
        raise ParityError(f"a peer sent {at} of the {len(target)} bytes of a stripe that were asked for.")


def mix_into(target: NDArray[np.uint8], source: NDArray[np.uint8], factor: int) -> None:
    """Compute ``target ^= factor * source`` in GF(2^8), in place.

    Raises `rackrun.checkpoint.redundancy.isal.CodecMissing` for a factor above 1 where Reed-Solomon is not installed.
    """
    if factor == 1:
        xor_into(target, source)
    elif factor:
        multiply_into(target, source, factor)


def xor_into(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Compute ``target ^= source`` in place, in blocks that stay in the cache.

    numpy's loop over uint8 is as wide as the processor's vectors, whatever the alignment. Over uint64 it is no faster,
    and it copies memory that is not aligned.
    """
    for start in range(0, len(target), _BLOCK):
        block = target[start : start + _BLOCK]
        np.bitwise_xor(block, source[start : start + _BLOCK], out=block)


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
