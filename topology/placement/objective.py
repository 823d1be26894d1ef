"""What makes one placement better than another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rackrun.topology.model.mesh import Ints, Mesh
from rackrun.topology.placement.arrays import Board

__all__ = ["NOWHERE", "Fitness", "Known", "Question", "Terms", "score"]

NOWHERE = -1


class Fitness(IntEnum):
    """What may be done with a slot."""

    USABLE = 0
    AVOID = 1
    """It still works, but is on its way out: used last, and left for a better one when there is one."""
    BAD = 2
    """Never used."""


class Terms(NamedTuple):
    """Compared from left to right; smaller is better. All are counts."""

    crossing: int
    """Bound groups that are not inside one clique."""
    uprooted: int
    """Bound groups of two or more ranks that leave their clique as a whole."""
    degrading: int
    """Ranks on slots to avoid."""
    moved: int
    """Ranks that do not sit where they sat."""
    touched: int
    """Bound groups with a rank that moved; one that changes its clique counts twice."""
    pp: int
    """Fabric distance between neighbours along pp, summed over ranks."""
    dp: int
    """The same along the other axes that are not bound."""
    imbalance: int
    """Free slots of each clique, squared, summed: the least when they are even. A spare serves its own clique only."""
    lemons: int
    """Lemon points of the slots in use."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in zip(self._fields, self, strict=True))


@dataclass(frozen=True)
class Known:
    """What a caller that follows every change knows of `Question.previous`, so that the solver need not look at every slot for one loss."""

    homes: Ints
    """(groups,): the clique of each bound group. Every group is inside one clique."""
    lost: Ints
    """The ranks whose previous slot is BAD, in ascending order. No previous slot is `NOWHERE`, and no slot is AVOID."""
    usable: Ints
    """(cliques,): how many slots of each are not BAD."""


@dataclass(frozen=True)
class Question:
    """All that a placement is computed from."""

    board: Board
    mesh: Mesh
    states: Ints
    """(slots,): a `Fitness`; BAD also for a slot that is not preflighted and on which nobody sits."""
    lemons: Ints
    """(slots,)"""
    previous: Ints | None = None
    """(world_size,): slots; `NOWHERE` for one that is no longer there."""
    spares: int = 0
    """Slots of each NVLink domain to hold back. Only when there is nothing previous: later they are there to be used."""
    allow_crossing: bool = False
    known: Known | None = None
    """The answer is the same without it, and takes longer."""

    @cached_property
    def previous_cliques(self) -> Ints:
        """(groups,): the clique that each bound group sat in; `NOWHERE` when it sat in several or in none."""
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


def score(question: Question, seats: Ints) -> Terms:
    """Of ``seats``, (world_size,): the slot of each rank."""
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


def _distances(board: Board, mesh: Mesh, cliques: Ints) -> tuple[int, int]:
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
