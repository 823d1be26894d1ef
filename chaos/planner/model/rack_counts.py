"""How many slots of each rack are usable, ready and in order: counted anew only in racks where something has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rackrun.topology.model.mesh import Ints
from rackrun.topology.placement.arrays import Board
from rackrun.topology.placement.objective import Fitness

__all__ = ["Bools", "RackCounts", "RackCounter"]

Bools = npt.NDArray[np.bool_]


class RackCounts(NamedTuple):
    """(racks,) each: how many slots of each rack are so."""

    usable: Ints
    """A rank or a spare is there."""
    ready: Ints
    """A spare is there."""
    in_order: Ints


class RackCounter:
    """Each rack is one clique of ``board``, and all are of one size."""

    def __init__(self, board: Board) -> None:
        racks = len(board.cliques)
        self._board = board
        self._counts = RackCounts(*np.zeros((3, racks), np.int64))
        self._changed = np.ones(racks, bool)

    def touch(self, slots: Sequence[int] | Ints) -> None:
        """Something has changed there."""
        self._changed[self._board.clique[slots]] = True

    def all_start(self, homes: Ints, group: int) -> None:
        """Right after `counts`: all slots in order are usable now, and ready where no rank sits. ``homes``, (groups,): the rack of each group
        of ``group`` ranks."""
        usable, ready, in_order = self._counts
        assert not self._changed.any(), "counted before all start"
        usable[:] = in_order
        ready[:] = in_order - np.bincount(homes, minlength=len(in_order)) * group

    def counts(self, states: Ints, ready: Bools, down: npt.NDArray[np.int16]) -> RackCounts:
        """As these are now, (slots,) each."""
        racks = np.flatnonzero(self._changed)
        if len(racks):
            shape = (len(self._changed), -1)
            usable, spares, in_order = self._counts
            usable[racks] = (states.reshape(shape)[racks] == Fitness.USABLE).sum(1)
            spares[racks] = ready.reshape(shape)[racks].sum(1)
            in_order[racks] = (down.reshape(shape)[racks] == 0).sum(1)
            self._changed[:] = False
        return self._counts
