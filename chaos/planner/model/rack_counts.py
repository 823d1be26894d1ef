"""Count the slots of each rack that are usable, ready and in order, anew only in racks where something has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rackrun.topology.model.mesh import Ints
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.objective import Fitness

__all__ = ["Bools", "RackCounter", "RackCounts"]

Bools = npt.NDArray[np.bool_]


class RackCounts(NamedTuple):
    """Slots of each rack, by state; each array has the shape (racks,)."""

    usable: Ints
    """Slots with a rank or a spare."""
    ready: Ints
    """Slots with a spare."""
    in_order: Ints
    """Slots that are not down."""


class RackCounter:
    """The counter of one fleet. Each rack is one clique of ``board``, and all have one size."""

    def __init__(self, board: PlacementArrays) -> None:
        racks = len(board.cliques)
        self._board = board
        self._counts = RackCounts(*np.zeros((3, racks), np.int64))
        self._changed = np.ones(racks, bool)

    def touch(self, slots: Sequence[int] | Ints) -> None:
        """Note that something has changed in these slots."""
        self._changed[self._board.clique[slots]] = True

    def all_start(self, homes: Ints, group: int) -> None:
        """Set the counts for a start of all workers. Call it right after `counts`.

        Every slot that is not down becomes usable; those without a rank become ready, because they have a spare.
        ``homes``, shape (groups,): the rack of each group. ``group``: ranks per group.
        """
        usable, ready, in_order = self._counts
        assert not self._changed.any(), "counted before all start"
        usable[:] = in_order
        ready[:] = in_order - np.bincount(homes, minlength=len(in_order)) * group

    def counts(self, states: Ints, ready: Bools, down: npt.NDArray[np.int16]) -> RackCounts:
        """Return the counts for these arrays, each of shape (slots,)."""
        racks = np.flatnonzero(self._changed)
        if len(racks):
            shape = (len(self._changed), -1)
            usable, spares, in_order = self._counts
            usable[racks] = (states.reshape(shape)[racks] == Fitness.USABLE).sum(1)
            spares[racks] = ready.reshape(shape)[racks].sum(1)
            in_order[racks] = (down.reshape(shape)[racks] == 0).sum(1)
            self._changed[:] = False
        return self._counts
