"""Choose the slots inside each clique: the best ones, with as few moves as possible.

Inside a clique all slots are equally near each other.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from rackrun.topology.model.mesh import Ints
from rackrun.topology.placement.objective import NOWHERE, Fitness, PlacementInput, PreviousFacts

__all__ = ["preference", "seat_groups"]


def seat_groups(question: PlacementInput, home: Ints) -> Ints:
    """Return the slot of each rank, int64[world_size].

    ``home``: the clique of each bound group, int64[groups], which must have room. `NOWHERE` groups are placed last, on
    the slots nearest to each other.
    """
    if question.known is not None and not (home == NOWHERE).any():
        return _seat_unseated(question, home, question.known)
    board, mesh = question.board, question.mesh
    seats = _kept(question, home)
    taken = np.zeros(len(board.slots), bool)
    taken[seats[seats != NOWHERE]] = True
    homes = home[mesh.group_of]
    unwell = seats == NOWHERE
    unwell |= question.states[seats] == Fitness.AVOID
    of_clique = _ranks_by_clique(homes, unwell)
    for clique, ranks in of_clique.items():
        slots = board.members[clique]
        free = slots[(question.states[slots] < Fitness.BAD) & ~taken[slots]]
        lost = ranks[seats[ranks] == NOWHERE]
        if question.previous is None:
            seats[lost] = _without_spares(question, free, len(free) - len(lost))
            continue
        good = int((question.states[free] == Fitness.USABLE).sum())
        escapes = min(max(good - len(lost), 0), len(ranks) - len(lost))
        if escapes:
            lost = np.sort(np.concatenate([lost, _escaping(question, seats, ranks, escapes)]))
        for rank in lost:
            best = free[np.lexsort(preference(question, int(rank), free))[0]]
            seats[rank] = best
            free = free[free != best]
    crossing = np.flatnonzero(home == NOWHERE)
    if len(crossing):
        _scatter(question, seats, crossing)
    return seats


def _seat_unseated(question: PlacementInput, home: Ints, known: PreviousFacts) -> Ints:
    """Place ranks like `seat_groups`, using ``known``: only the cliques of ranks without a slot are examined."""
    board, mesh = question.board, question.mesh
    assert question.previous is not None
    moved = mesh.groups[home != known.homes].ravel()
    unseated = np.union1d(known.lost, moved)
    seats = question.previous.copy()
    seats[unseated] = NOWHERE
    everyone = np.ones(len(unseated), bool)
    taken = np.zeros(len(board.slots), bool)
    for clique, at in _ranks_by_clique(home[mesh.group_of[unseated]], everyone).items():
        held = seats[mesh.groups[home == clique]]
        taken[held[held != NOWHERE]] = True
        slots = board.members[clique]
        free = slots[(question.states[slots] == Fitness.USABLE) & ~taken[slots]]
        for rank in unseated[at]:
            best = free[np.lexsort(preference(question, int(rank), free))[0]]
            seats[rank] = best
            free = free[free != best]
    return seats


def preference(question: PlacementInput, rank: int, slots: Ints) -> tuple[Ints, ...]:
    """Return keys for ``np.lexsort``, the most important last, for the choice of ``rank`` among ``slots`` of a clique.

    In order: slots that need not be avoided, few lemon points, the same rack, the nearest tray, the order of slots.
    """
    board = question.board
    old = question.previous[rank] if question.previous is not None else NOWHERE
    if old == NOWHERE or not len(slots) or board.clique[old] != board.clique[slots[0]]:
        gap = other = np.zeros(len(slots), np.int64)
    else:
        other = (board.rack[slots] != board.rack[old]).astype(np.int64)
        gap = np.abs(board.tray_index[slots] - board.tray_index[old])
    return slots, gap, other, question.lemons[slots], question.states[slots]


def _kept(question: PlacementInput, home: Ints) -> Ints:
    """Return the slots that ranks keep; `NOWHERE` for the others.

    A rank keeps its slot if its group keeps its clique and the slot may still be used.
    """
    mesh = question.mesh
    if question.previous is None:
        return np.full(mesh.world_size, NOWHERE, np.int64)
    old = question.previous
    stays = (home == question.previous_cliques) & (home != NOWHERE)
    keeps = stays[mesh.group_of] & (old != NOWHERE) & (question.states[old] < Fitness.BAD)
    return np.where(keeps, old, NOWHERE)


def _ranks_by_clique(homes: Ints, which: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> dict[int, Ints]:
    ranks = np.flatnonzero(which & (homes != NOWHERE))
    ranks = ranks[np.argsort(homes[ranks], kind="stable")]
    found = homes[ranks]
    cuts = np.flatnonzero(found[1:] != found[:-1]) + 1
    return {int(homes[part[0]]): part for part in np.split(ranks, cuts) if len(part)}


def _escaping(question: PlacementInput, seats: Ints, ranks: Ints, count: int) -> Ints:
    """Return which ``count`` of the ranks on degrading slots move.

    Ranks of groups that have to move others anyway come first, then ranks of as few other groups as possible.
    """
    group_of = question.mesh.group_of
    touched = set(group_of[ranks[seats[ranks] == NOWHERE]].tolist())
    of_group: dict[int, list[int]] = {}
    for rank in ranks[seats[ranks] != NOWHERE].tolist():
        of_group.setdefault(int(group_of[rank]), []).append(rank)

    def points(rank: int) -> tuple[int, int]:
        return -int(question.lemons[seats[rank]]), rank

    at_hand = [rank for group in of_group if group in touched for rank in of_group[group]]
    others = sorted((group for group in of_group if group not in touched), key=lambda group: -len(of_group[group]))
    need = 0
    while len(at_hand) + sum(len(of_group[group]) for group in others[:need]) < count:
        need += 1
    ways = itertools.combinations(others, need) if math.comb(len(others), need) <= 64 else iter([tuple(others[:need])])
    best: list[int] = []
    for way in ways:
        ranks_of = sorted(
            (rank for part in (at_hand, *(of_group[group] for group in way)) for rank in part), key=points
        )
        chosen = ranks_of[:count]
        if len(chosen) == count and (not best or sum(points(r)[0] for r in chosen) < sum(points(r)[0] for r in best)):
            best = chosen
    return np.array(best, np.int64)


def _without_spares(question: PlacementInput, free: Ints, held: int) -> Ints:
    """Return ``free`` without ``held`` slots.

    Slots to avoid are held back first, then lemons, and among equals whole trays from the end.
    """
    if not held:
        return free
    worth = np.stack([question.states[free], question.lemons[free]], 1)
    keeps: Ints = np.zeros(0, np.int64)
    for kind in np.unique(worth, axis=0)[::-1]:
        alike = free[(worth == kind).all(1)]
        taken = min(held, len(alike))
        held -= taken
        if taken < len(alike):
            keeps = np.concatenate([keeps, _without_last(question, alike, taken)])
    return np.sort(keeps)


def _without_last(question: PlacementInput, slots: Ints, held: int) -> Ints:
    """Hold back whole trays from the end while more than two are left, then single slots from the end of each tray.

    This follows `rackrun.core.members.slot_order.split`: a lost tray is replaced by a whole one, and a lost rank on a
    small machine by its neighbour.
    """
    trays: dict[int, list[int]] = {}
    for slot in slots.tolist():
        trays.setdefault(int(question.board.tray[slot]), []).append(slot)
    left = list(trays.values())
    while len(left) > 2 and held >= len(left[-1]):
        held -= len(left.pop())
    while held:
        for tray in reversed(left):
            if held and tray:
                tray.pop()
                held -= 1
    return np.array([slot for tray in left for slot in tray], np.int64)


def _scatter(question: PlacementInput, seats: Ints, groups: Ints) -> None:
    """Place groups that fit into no clique.

    Each rank keeps its slot if it can, or takes one near the roomiest clique.
    """
    board, states = question.board, question.states
    free = states < Fitness.BAD
    free[seats[seats != NOWHERE]] = False
    if question.previous is not None:
        ranks = question.mesh.groups[groups].ravel()
        old = question.previous[ranks]
        keeps = (old != NOWHERE) & free[old]
        seats[ranks[keeps]] = old[keeps]
        free[old[keeps]] = False
    for group in groups:
        ranks = question.mesh.groups[group]
        lost = ranks[seats[ranks] == NOWHERE]
        slots = np.flatnonzero(free)
        room = np.bincount(board.clique[slots], minlength=len(board.cliques))
        far = board.distance(board.clique[slots], int(room.argmax()))
        order = slots[np.lexsort((slots, question.lemons[slots], far, states[slots]))][: len(lost)]
        seats[lost] = order
        free[order] = False
