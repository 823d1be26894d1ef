"""The objective of a placement: what makes one placement better than another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rackrun.topology.model.mesh import Ints, Mesh
from rackrun.topology.placement.arrays import PlacementArrays

__all__ = ["NOWHERE", "Fitness", "PreviousFacts", "PlacementInput", "Terms", "score"]

NOWHERE = -1


class Fitness(IntEnum):
    """Whether a slot may be used."""

    USABLE = 0
    AVOID = 1
    """It still works but is degrading: used last, and left when a better slot is free."""
    BAD = 2
    """It is never used."""


class Terms(NamedTuple):
    """The value of a placement: counts, compared from left to right; smaller is better."""

    crossing: int
    """Bound groups that are not inside one clique."""
    uprooted: int
    """Bound groups of two or more ranks that leave their clique as a whole."""
    degrading: int
    """Ranks on slots to avoid."""
    moved: int
    """Ranks that are on another slot than before."""
    touched: int
    """Bound groups with a rank that moved. A group that changes its clique counts twice."""
    pp: int
    """Fabric distance between neighbours along pp, summed over ranks."""
    dp: int
    """The same along the other axes that are not bound."""
    imbalance: int
    """Sum of the squares of each clique's free slots: least when they are even. A spare serves its own clique only."""
    lemons: int
    """Lemon points of the slots in use."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in zip(self._fields, self, strict=True))


@dataclass(frozen=True)
class PreviousFacts:
    """What a caller that follows every change knows about `PlacementInput.previous`.

    With it the solver need not examine every slot after a single loss.
    """

    homes: Ints
    """The clique of each bound group, int64[groups]. Every group is inside one clique."""
    lost: Ints
    """The ranks whose previous slot is BAD, ascending. No previous slot is `NOWHERE`, and no slot is AVOID."""
    usable: Ints
    """How many slots of each clique are not BAD: int64[cliques]."""


@dataclass(frozen=True)
class PlacementInput:
    """All input from which a placement is computed."""

    board: PlacementArrays
    mesh: Mesh
    states: Ints
    """The `Fitness` of each slot, int64[slots]. BAD also for a slot that is not preflighted and has no rank."""
    lemons: Ints
    """Lemon points of each slot: int64[slots]."""
    previous: Ints | None = None
    """The previous slot of each rank, int64[world_size]; `NOWHERE` for a slot that no longer exists.

    None: no placement.
    """
    spares: int = 0
    """How many slots of each NVLink domain to hold back.

    Only without a previous placement: later, spares may be used.
    """
    allow_crossing: bool = False
    known: PreviousFacts | None = None
    """Optional: the answer is the same without it, and takes longer."""

    @cached_property
    def previous_cliques(self) -> Ints:
        """The clique that each bound group was in, int64[groups]; `NOWHERE` when it was in several or in none."""
        assert self.previous is not None
        if self.known is not None:
            return self.known.homes
        known = self.previous != NOWHERE
        every = np.where(known, self.board.clique[self.previous], NOWHERE)
        cliques = every[self.mesh.columns]
        first: Ints = cliques.max(0)
        together = (cliques == first).all(0)
        if not known.all():
            together = ((cliques == first) | (cliques == NOWHERE)).all(0)
        found: Ints = np.where(together, first, NOWHERE)
        found.flags.writeable = False
        return found


def score(question: PlacementInput, seats: Ints) -> Terms:
    """Return the terms of ``seats``, int64[world_size]: the slot of each rank."""
    board, mesh = question.board, question.mesh
    cliques = board.clique[seats]
    grouped = cliques[mesh.groups]
    free = question.states < Fitness.BAD
    free[seats] = False
    spare = np.bincount(board.clique[free], minlength=len(board.cliques))
    uprooted = moved = touched = 0
    if question.previous is not None:
        moves = seats != question.previous
        before = question.previous_cliques
        left = int(((before != NOWHERE) & (before != grouped[:, 0])).sum())
        uprooted = left if mesh.group_size > 1 else 0
        moved = int(moves.sum())
        touched = int(moves[mesh.groups].any(1).sum()) + left
    along = _distances(board, mesh, cliques)
    return Terms(
        crossing=int((grouped != grouped[:, :1]).any(1).sum()),
        uprooted=uprooted,
        degrading=int((question.states[seats] == Fitness.AVOID).sum()),
        moved=moved,
        touched=touched,
        pp=along[0],
        dp=along[1],
        imbalance=int((spare * spare).sum()),
        lemons=int(question.lemons[seats].sum()),
    )


def _distances(board: PlacementArrays, mesh: Mesh, cliques: Ints) -> tuple[int, int]:
    grid = cliques.reshape(mesh.shape)
    pp = others = 0
    for at in mesh.free:
        count = mesh.shape[at]
        if count > 1:
            one = grid.take(np.arange(count - 1), axis=at).ravel()
            other = grid.take(np.arange(1, count), axis=at).ravel()
            total = int(board.distance(one, other).sum())
            pp, others = (pp + total, others) if mesh.axes[at][0] == "pp" else (pp, others + total)
    return pp, others
