"""Decide which clique takes which bound groups when nothing is placed yet.

How many groups a clique takes is exact: as many as are needed, with as few ranks as possible on degrading slots. Where
they go is a greedy descent of the fabric's tree: pipelines stay whole in the smallest subtree with room, and follow
each other.
"""

from __future__ import annotations

import heapq

import numpy as np

from rackrun.topology.model.mesh import Ints
from rackrun.topology.placement.objective import NOWHERE, Fitness, PlacementInput

__all__ = ["counts", "domain_rooms", "lay_out"]


def lay_out(question: PlacementInput) -> Ints:
    """Return a clique for each bound group, int64[groups]; `NOWHERE` for a group that fits into none."""
    mesh = question.mesh
    groups = len(mesh.groups)
    room = _room(question)
    home = np.full(groups, NOWHERE, np.int64)
    lines = mesh.lines
    stages = lines.shape[1]
    whole = min(len(lines), int(room.sum()) // stages)
    rows = _Tree(question, room, stages).fill(whole)
    for line, row in zip(lines, rows, strict=False):
        home[line] = row
    left = [int(group) for line in lines[whole:] for group in line]
    if left:  # not everything fits, so place what does
        used = np.bincount(home[home != NOWHERE], minlength=len(room))
        for group, clique in zip(left, np.repeat(np.arange(len(room)), np.maximum(room - used, 0)), strict=False):
            home[group] = clique
    return home


def counts(question: PlacementInput) -> tuple[Ints, Ints]:
    """Return how many slots of each clique may be used, and how many of them need not be avoided: int64[cliques]."""
    if question.known is not None:
        return question.known.usable, question.known.usable
    board, states = question.board, question.states
    cliques = len(board.cliques)
    usable = board.sizes - np.bincount(board.clique[states == Fitness.BAD], minlength=cliques)
    return usable, usable - np.bincount(board.clique[states == Fitness.AVOID], minlength=cliques)


def domain_rooms(question: PlacementInput) -> Ints:
    """Return how many groups each NVLink domain may hold, int64[domains], so that its spares are held back.

    Bad slots count as held back.
    """
    board = question.board
    slots = np.bincount(board.domain, weights=board.sizes).astype(np.int64)
    return np.maximum(slots - question.spares, 0) // question.mesh.group_size


def _room(question: PlacementInput) -> Ints:
    """Return the most groups that each clique may take, int64[cliques].

    Whichever of these places are chosen, no more ranks than necessary are on degrading slots.
    """
    size, groups = question.mesh.group_size, len(question.mesh.groups)
    usable, good = counts(question)
    fits = usable // size
    domain, limits = question.board.domain, domain_rooms(question)
    fits = np.minimum(fits, limits[domain])
    for cut in np.flatnonzero(np.bincount(domain) > 1):
        _trim(fits, np.flatnonzero(domain == cut), int(limits[cut]), usable, good, size)
    well = np.minimum(fits, good // size)
    if int(well.sum()) >= groups:
        return well
    units = [
        (_worse(at, int(good[clique]), size), clique) for clique in range(len(fits)) for at in range(int(fits[clique]))
    ]
    return np.bincount([clique for _, clique in sorted(units)[:groups]], minlength=len(fits))


def _trim(fits: Ints, cliques: Ints, limit: int, usable: Ints, good: Ints, size: int) -> None:
    """Reduce the groups of one domain's cliques until it keeps its spares.

    Groups that use degrading slots go first, then groups of cliques with few free slots.
    """

    def worth(clique: int) -> tuple[int, int, int]:
        return (
            -_worse(int(fits[clique]) - 1, int(good[clique]), size),
            int(usable[clique] - fits[clique] * size),
            -clique,
        )

    for _ in range(int(fits[cliques].sum()) - limit):
        fits[min((int(clique) for clique in cliques if fits[clique]), key=worth)] -= 1


def _worse(groups: int, good: int, size: int) -> int:
    """Return how many more ranks are on degrading slots when one group joins ``groups`` others in a clique.

    ``good``: how many slots of the clique need not be avoided.
    """
    return max(0, (groups + 1) * size - good) - max(0, groups * size - good)


class _Tree:
    """Fills the fabric's tree with pipelines of ``stages`` groups."""

    def __init__(self, question: PlacementInput, room: Ints, stages: int) -> None:
        self._tiers = question.board.tiers
        self._room = room.copy()
        self._stages = stages
        self._usable = counts(question)[0]
        self._slots = stages * question.mesh.group_size

    def fill(self, lines: int) -> list[list[int]]:
        """Return a row of ``stages`` cliques for each line."""
        first = self._room.copy()
        rows = self._fill(0, len(self._room), len(self._tiers), lines)
        if all(row[0] == row[-1] for row in rows):
            taken = dict.fromkeys(row[0] for row in rows)
            return self._even({clique: int(first[clique]) // self._stages for clique in taken}, lines)
        return rows

    def _fill(self, low: int, high: int, tier: int, lines: int) -> list[list[int]]:
        """Place ``lines`` in the cliques from ``low`` to ``high``, which share one node of ``tier``."""
        if tier == 0:
            self._room[low] -= lines * self._stages
            return [[low] * self._stages for _ in range(lines)]
        ids = self._tiers[tier - 1, low:high]
        starts = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
        bounds = [low + int(start) for start in starts] + [high]
        takes = self._choose(np.add.reduceat(self._room[low:high], starts) // self._stages, bounds, lines)
        rows = [row for at in sorted(takes) for row in self._fill(bounds[at], bounds[at + 1], tier - 1, takes[at])]
        return rows + [self._split(low, high) for _ in range(lines - len(rows))]

    def _choose(self, rooms: Ints, bounds: list[int], lines: int) -> dict[int, int]:
        """Return how many lines each child takes: the roomiest children are filled until one can take the rest."""
        order = np.argsort(-rooms, kind="stable")
        takes: dict[int, int] = {}
        for at, child in enumerate(order):
            if not lines or not rooms[child]:
                break
            if rooms[child] >= lines:
                fitting = [int(other) for other in order[at:] if rooms[other] >= lines]
                best = min(fitting, key=lambda other: self._cost(bounds[other], bounds[other + 1], lines))
                takes[best] = lines
                break
            takes[int(child)] = int(rooms[child])
            lines -= int(rooms[child])
        return takes

    def _cost(self, low: int, high: int, lines: int) -> tuple[int, int, int]:
        """Return a sort key: the fewest cliques that ``lines`` need there, then the most usable slots."""
        rooms = np.sort(self._room[low:high])[::-1].cumsum()
        return int(np.searchsorted(rooms, lines * self._stages)), -int(self._usable[low:high].sum()), low

    def _split(self, low: int, high: int) -> list[int]:
        """Place one line that fits into no child as a whole, in as few pieces as possible."""
        row: list[int] = []
        while len(row) < self._stages:
            rooms = self._room[low:high]
            need = self._stages - len(row)
            fitting = rooms >= need
            at = int(np.where(fitting, rooms, rooms.max() + 1).argmin() if fitting.any() else rooms.argmax())
            taken = min(need, int(rooms[at]))
            rooms[at] -= taken
            row += [low + at] * taken
        return sorted(row)

    def _even(self, lines_of: dict[int, int], lines: int) -> list[list[int]]:
        """Take surplus lines back from the cliques with the fewest free slots, starting at the last one."""
        heap = [(int(self._usable[at]) - count * self._slots, -at) for at, count in lines_of.items()]
        heapq.heapify(heap)
        for _ in range(sum(lines_of.values()) - lines):
            free, at = heapq.heappop(heap)
            lines_of[-at] -= 1
            if lines_of[-at] > 1:
                heapq.heappush(heap, (free + self._slots, at))
        return [[clique] * self._stages for clique in sorted(lines_of) for _ in range(lines_of[clique])]
