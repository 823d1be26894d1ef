"""Arithmetic of meshes: which ranks stay when positions along one axis are removed, and where new ones are added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from rackrun.protocol.ids import Rank
from rackrun.topology.model.mesh import DATA_AXES

__all__ = ["Axes", "data_axis", "fitted", "joined", "places", "spared", "without"]

Axes = tuple[tuple[str, int], ...]
"""Names and sizes of a mesh's axes; the last axis varies fastest."""


def data_axis(axes: Axes) -> int | None:
    """Return the index of the axis along which the mesh shrinks and grows; None if there is none.

    Each position on it is a replica of the model, or a part whose state can be sharded anew.
    """
    return next((at for at, (name, _) in enumerate(axes) if name in DATA_AXES), None)


def places(axes: Axes, at: int, ranks: Collection[Rank]) -> set[int]:
    """Return the positions of these ranks along axis ``at``."""
    shape = [size for _, size in axes]
    return {int(np.unravel_index(rank, shape)[at]) for rank in ranks}


def spared(axes: Axes, at: int, least: Callable[[Rank], int], places_left: int) -> list[Rank]:
    """Return the ranks to remove so that ``places_left`` positions of axis ``at`` stay.

    ``least`` is larger for ranks that should go first. The largest value among a position's ranks counts for the
    position; of equal positions the last go first.
    """
    shape = [size for _, size in axes]
    grid = np.moveaxis(np.arange(int(np.prod(shape))).reshape(shape), at, 0).reshape(shape[at], -1)
    order = sorted(range(shape[at]), key=lambda place: (max(least(Rank(int(r))) for r in grid[place]), place))
    return sorted(Rank(int(rank)) for place in order[places_left:] for rank in grid[place])


def without(axes: Axes, at: int, gone: Collection[int]) -> tuple[Axes, dict[Rank, Rank]]:
    """Return the axes without these positions of axis ``at``, and the new number of each rank that stays (old -> new,
    in the same order)."""
    shape = [size for _, size in axes]
    stay = [place for place in range(shape[at]) if place not in gone]
    grid = np.arange(int(np.prod(shape))).reshape(shape).take(stay, axis=at)
    return _resized(axes, at, len(stay)), {Rank(int(old)): Rank(new) for new, old in enumerate(grid.ravel())}


def joined(axes: Axes, at: int, more: int) -> tuple[Axes, dict[Rank, Rank], list[Rank]]:
    """Return the axes with ``more`` positions at the end of axis ``at``, the new numbers of present ranks (old -> new),
    and the added ranks."""
    shape = [size for _, size in axes]
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    room = np.full([*shape[:at], more, *shape[at + 1 :]], -1)
    wide = np.concatenate([grid, room], axis=at).ravel()
    there: Mapping[Rank, Rank] = {Rank(int(old)): Rank(new) for new, old in enumerate(wide) if old >= 0}
    return _resized(axes, at, shape[at] + more), dict(there), [Rank(new) for new, old in enumerate(wide) if old < 0]


def fitted(axes: Axes, ranks: int) -> Axes:
    """Return the axes for a world of this many ranks; () if the mesh cannot have that size."""
    at, all_ranks = data_axis(axes), int(np.prod([size for _, size in axes]))
    if all_ranks == ranks:
        return axes
    if at is None or ranks % (others := all_ranks // axes[at][1]):
        return ()
    return _resized(axes, at, ranks // others)


def _resized(axes: Axes, at: int, size: int) -> Axes:
    return (*axes[:at], (axes[at][0], size), *axes[at + 1 :])
