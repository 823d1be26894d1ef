"""Try all ways to spread groups over cliques, when there are few."""

from __future__ import annotations

import numpy as np

from rackrun.topology.model.mesh import Ints
from rackrun.topology.placement.clique_assignment import counts, domain_rooms
from rackrun.topology.placement.objective import NOWHERE, Fitness, PlacementInput, score
from rackrun.topology.placement.slot_assignment import seat_groups

__all__ = ["CELLS_MAX", "RANKS_MAX", "best_way"]

CELLS_MAX = 1_000_000
"""Limit on the number of ways times the number of groups, or of cliques if there are more of them."""
RANKS_MAX = 64
"""Largest world in which all ways are tried.

In a larger one a way takes longer, and the greedy choice is as good in practice.
"""
_TRIED_MAX = 400


def best_way(question: PlacementInput, home: Ints) -> Ints:
    """Return the best slot of each rank, int64[world_size], over all homes of the groups that may move.

    ``home`` has a clique for every group; its slots are returned when there are too many ways to try.
    """
    found = seat_groups(question, home)
    ways = _ways(question, home)
    if ways is None:
        return found
    ways = ways[_promising(question, ways)]
    best = score(question, found)
    for way in ways[:_TRIED_MAX]:
        seats = seat_groups(question, way)
        terms = score(question, seats)
        if terms < best:
            best, found = terms, seats
    return found


def _ways(question: PlacementInput, home: Ints) -> Ints | None:
    """Return all ways that fit, int64[ways, groups]: a clique for each group.

    None when there are too many, or no choice.
    """
    mesh = question.mesh
    if mesh.world_size > RANKS_MAX:
        return None
    fits = counts(question)[0] // mesh.group_size
    options = np.flatnonzero(fits > 0)
    asked = _asked(question, home)
    if not len(asked) or len(options) < 2:
        return None
    if len(options) ** min(len(asked), 32) * max(len(home), len(fits)) > CELLS_MAX:
        return None
    choices = np.indices((len(options),) * len(asked)).reshape(len(asked), -1).T
    ways = np.repeat(home[None], len(choices), axis=0)
    ways[:, asked] = options[choices]
    taken = _taken(ways, len(fits))
    fitting = (taken <= fits).all(1)
    if question.previous is None:
        limits, domains = domain_rooms(question), question.board.domain
        for domain, limit in enumerate(limits):
            fitting &= taken[:, domains == domain].sum(1) <= limit
    return ways[fitting]


def _asked(question: PlacementInput, home: Ints) -> Ints:
    """Return the groups that may move: at first all.

    Later those with a rank that lost its slot or may leave it, and those that get a new home.
    """
    if question.previous is None:
        return np.arange(len(home))
    old = question.previous
    unwell = (old == NOWHERE) | (question.states[old] > Fitness.USABLE)
    return np.flatnonzero(unwell[question.mesh.groups].any(1) | (home != question.previous_cliques))


def _promising(question: PlacementInput, ways: Ints) -> Ints:
    """Return the indices of the ways that are best in the terms that depend on the homes alone."""
    size = question.mesh.group_size
    usable, good = counts(question)
    used = _taken(ways, len(usable)) * size
    degrading = np.maximum(used - good, 0).sum(1)
    if question.previous is not None:
        before = question.previous_cliques
        uprooted = ((before != NOWHERE) & (ways != before)).sum(1) if size > 1 else np.zeros_like(degrading)
        return _least(uprooted, degrading)
    imbalance = ((usable - used) ** 2).sum(1)
    return _least(degrading, *_distances(question, ways), imbalance)


def _distances(question: PlacementInput, ways: Ints) -> tuple[Ints, Ints]:
    """Return the fabric distances of each way along pp, and along the other axes: int64[ways] each."""
    mesh, tiers = question.mesh, question.board.tiers
    found = np.zeros((2, len(ways)), np.int64)
    for group in range(ways.shape[1]):
        for kind, neighbours in enumerate(mesh.neighbours(group)):
            for other in neighbours:
                if other > group:
                    found[kind] += (tiers[:, ways[:, group]] != tiers[:, ways[:, other]]).sum(0)
    return found[0], found[1]


def _taken(ways: Ints, cliques: int) -> Ints:
    """Return how many groups each clique has in each way: int64[ways, cliques]."""
    rows = np.arange(len(ways))[:, None] * cliques
    return np.bincount((ways + rows).ravel(), minlength=len(ways) * cliques).reshape(len(ways), cliques)


def _least(*keys: Ints) -> Ints:
    """Return the indices at which the keys, compared in order, are smallest."""
    left = np.arange(len(keys[0]))
    for key in keys:
        if len(left):
            left = left[key[left] == key[left].min()]
    return left
