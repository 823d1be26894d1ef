"""Compute the slots of all ranks: first the clique of each bound group, its *home*, then the slots inside each clique.

Existing assignments are kept. In a clique with enough slots for its groups, the only ranks that move are those that
lost their slot, and those on degrading slots while better ones are free. A clique with too few slots gives up as many
whole groups as it must: those that lost most.

Why that is the least: let F ranks of a clique have no slot, s slots be free, and groups be of size S. If k groups
leave, the rest fits when F <= s + k S, whichever groups they are. So k is fixed, and leaving costs least for groups
that have little to keep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np

from rackrun.topology.model.errors import DoesNotFit
from rackrun.topology.model.mesh import Ints
from rackrun.topology.placement.clique_assignment import counts, lay_out
from rackrun.topology.placement.exhaustive import best_way
from rackrun.topology.placement.objective import NOWHERE, Fitness, PlacementInput
from rackrun.topology.placement.slot_assignment import seat_groups

__all__ = ["nearness", "solve"]

_LEAVERS_MAX = 400
"""All choices of the groups that leave a clique are tried when there are at most this many."""


def solve(question: PlacementInput, *, look_further: bool = True) -> Ints:
    """Return the slot of each rank, int64[world_size]. Raises `DoesNotFit`.

    look_further: whether to try all ways (`rackrun.topology.placement.exhaustive`); False keeps the greedy choice.
    """
    mesh = question.mesh
    usable, good = counts(question)
    if int(usable.sum()) < mesh.world_size:
        raise _too_few(question, usable)
    if question.previous is None:
        home = lay_out(question)
    elif mesh.group_size > 1:
        home = _rehome(question, usable, good)
    else:
        home = _rehome_singles(question, good)
    if (home == NOWHERE).any() and not question.allow_crossing:
        raise _too_few(question, usable)
    if (home == NOWHERE).any() or not look_further:
        return seat_groups(question, home)
    return best_way(question, home)


def nearness(question: PlacementInput, home: Ints, group: int, cliques: Ints) -> tuple[Ints, Ints]:
    """Return the fabric distances from each of ``cliques`` to the neighbours of ``group``.

    The first array is for neighbours along pp, the second for those along the other axes.

    Each is int64[len(cliques)].
    """
    board = question.board
    found = []
    for neighbours in question.mesh.neighbours(group):
        total = np.zeros(len(cliques), np.int64)
        for other in neighbours:
            if home[other] != NOWHERE:
                total += board.distance(cliques, int(home[other]))
        found.append(total)
    return found[0], found[1]


def _rehome(question: PlacementInput, usable: Ints, good: Ints) -> Ints:
    """Return the home of each group after deciding which groups leave their clique, and where they go."""
    size = question.mesh.group_size
    home = question.previous_cliques.copy()
    fits = usable // size
    inside = np.bincount(home[home != NOWHERE], minlength=len(fits))
    for clique in np.flatnonzero(inside > fits):
        leaving = _leavers(
            question, home, int(clique), int(inside[clique] - fits[clique]), int(fits[clique] * size - good[clique])
        )
        home[leaving] = NOWHERE
        inside[clique] = fits[clique]
    lost = np.flatnonzero(home == NOWHERE)
    if not len(lost):
        return home
    on_avoid = _on_avoid(question, home) if (usable != good).any() else np.zeros(len(fits), np.int64)
    for group in lost:
        open_to = np.flatnonzero(fits > inside)
        if not len(open_to):
            break
        slots = (inside[open_to] + 1) * size
        after, before = (np.maximum(0, taken - good[open_to]) for taken in (slots, slots - size))
        worse, staying = after - before, np.minimum(on_avoid[open_to], after) - np.minimum(on_avoid[open_to], before)
        pp, dp = nearness(question, home, int(group), open_to)
        lemons = _lemons(question, open_to, size)
        clique = open_to[least(worse, -staying, pp, dp, -(usable[open_to] - slots), lemons, open_to)]
        home[group] = clique
        inside[clique] += 1
    return home


def _on_avoid(question: PlacementInput, home: Ints) -> Ints:
    """Return how many ranks of staying groups are on slots to avoid, for each clique: int64[cliques]."""
    mesh = question.mesh
    assert question.previous is not None
    sits = (question.previous != NOWHERE) & (question.states[question.previous] == Fitness.AVOID)
    sits &= home[mesh.group_of] != NOWHERE
    return np.bincount(home[mesh.group_of[sits]], minlength=len(question.board.cliques))


def _leavers(question: PlacementInput, home: Ints, clique: int, count: int, avoid: int) -> list[int]:
    """Return the ``count`` groups of a clique that lose least by leaving.

    What a group loses is its slots that are still good, and slots to avoid as far as those must be used anyway.
    """
    assert question.previous is not None
    groups = np.flatnonzero(home == clique)
    old = question.previous[question.mesh.groups[groups]]
    states = np.where(old != NOWHERE, question.states[old], Fitness.BAD)
    well, badly = (states == Fitness.USABLE).sum(1), (states == Fitness.AVOID).sum(1)
    avoid = max(0, avoid)
    if badly.any() and avoid and math.comb(len(groups), count) <= _LEAVERS_MAX:

        def lost(way: tuple[int, ...]) -> int:
            left = list(way)
            return int(well[left].sum()) - min(avoid, int(badly.sum() - badly[left].sum()))

        return [int(groups[at]) for at in min(itertools.combinations(range(len(groups)), count), key=lost)]
    return [int(groups[at]) for at in np.lexsort((groups, badly, well))[:count]]


def _rehome_singles(question: PlacementInput, good: Ints) -> Ints:
    """Return the home of each rank, for ranks that are bound to no others.

    Ranks that lost their slot go where one is free, then those on degrading slots.
    """
    assert question.previous is not None
    old = question.previous
    home = question.previous_cliques.copy()
    states = np.where(old != NOWHERE, question.states[old], Fitness.BAD)
    cliques = len(good)
    stays = states < Fitness.BAD
    free_good = good - np.bincount(home[states == Fitness.USABLE], minlength=cliques)
    free_bad = np.bincount(question.board.clique[question.states == Fitness.AVOID], minlength=cliques)
    free_bad -= np.bincount(home[states == Fitness.AVOID], minlength=cliques)
    failed = [int(rank) for rank in np.flatnonzero(~stays)]
    leaving = [int(rank) for rank in np.flatnonzero(states == Fitness.AVOID)]
    escapes = min(max(int(free_good.sum()) - len(failed), 0), len(leaving))

    def settle(ranks: Iterable[int], rooms: Ints, most: int, *, elsewhere: bool) -> list[int]:
        """Give at most ``most`` of ``ranks`` a clique with room. Return the ranks without one."""
        left = []
        for rank in ranks:
            own = home[rank]
            if most and own != NOWHERE and rooms[own] > 0:
                clique = own
            elif most and elsewhere and (rooms > 0).any():
                open_to = np.flatnonzero(rooms > 0)
                pp, dp = nearness(question, home, rank, open_to)
                free = (free_good + free_bad)[open_to]
                clique = open_to[least(pp, dp, -free, _lemons(question, open_to, 1), open_to)]
            else:
                left.append(rank)
                continue
            most -= 1
            home[rank] = clique
            rooms[clique] -= 1
        return left

    everyone = len(failed) + len(leaving)
    lost = settle(failed, free_good, everyone, elsewhere=False)
    before = len(leaving)
    leaving = settle(leaving, free_good, escapes, elsewhere=False)
    escapes -= before - len(leaving)
    lost = settle(lost, free_good, everyone, elsewhere=True)
    settle(leaving, free_good, escapes, elsewhere=True)
    home[settle(lost, free_bad, everyone, elsewhere=True)] = NOWHERE
    return home


def _lemons(question: PlacementInput, cliques: Ints, size: int) -> Ints:
    """Return the lemon points of the best ``size`` free slots of each of ``cliques``."""
    found = np.zeros(len(cliques), np.int64)
    if question.lemons.any():
        free = question.states < Fitness.BAD
        if question.previous is not None:
            free[question.previous[question.previous != NOWHERE]] = False
        for at, clique in enumerate(cliques):
            slots = question.board.members[clique]
            slots = slots[free[slots]]
            order = np.lexsort((question.lemons[slots], question.states[slots]))[:size]
            found[at] = question.lemons[slots[order]].sum()
    return found


def least(*keys: Ints) -> int:
    """Return the index with the smallest keys, compared in order."""
    left = np.arange(len(keys[0]))
    for key in keys:
        values = key[left]
        left = left[values == values.min()]
    return int(left[0])


def _too_few(question: PlacementInput, usable: Ints) -> DoesNotFit:
    mesh, board = question.mesh, question.board
    size, groups = mesh.group_size, len(mesh.groups)
    spares = question.spares if question.previous is None else 0
    held = f", with {spares} slots of each NVLink domain held back" if spares else ""
    cut = [
        f"{board.cliques[at]}: {usable[at]} of {len(board.members[at])} slots, {usable[at] // size} groups"
        for at in range(len(usable))
    ]
    shown = "; ".join(cut[:4]) + (f"; and {len(cut) - 4} cliques more" if len(cut) > 4 else "")
    bound = f" ({' x '.join(mesh.bound)})" if mesh.bound else ""
    who = (
        f"{groups} groups of {size} ranks{bound} must each sit inside one clique"
        if size > 1
        else f"{groups} ranks need a slot"
    )
    return DoesNotFit(
        f"{who}, but only {min(int((usable // size).sum()), groups if not spares else 10**9)} fit in {int(usable.sum())} usable slots{held}. {shown}.",
        remedy="repair or add trays, hold back fewer spares, or shrink the mesh.",
    )
