"""Which ranks a mesh keeps when places along one of its axes go, and where new ones come: arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from rackrun.protocol.ids import Rank
from rackrun.topology.model.mesh import DATA_AXES

__all__ = ["Axes", "data_axis", "fitted", "joined", "places", "spared", "without"]

Axes = tuple[tuple[str, int], ...]
"""Names and sizes, the last axis the fastest."""


def data_axis(axes: Axes) -> int | None:
    """Along which the mesh gets smaller and larger: each place on it is a replica of the model, or a part that can be cut anew."""
    return next((at for at, (name, _) in enumerate(axes) if name in DATA_AXES), None)


def places(axes: Axes, at: int, ranks: Collection[Rank]) -> set[int]:
    """Where these ranks are along axis ``at``."""
    shape = [size for _, size in axes]
    return {int(np.unravel_index(rank, shape)[at]) for rank in ranks}


def spared(axes: Axes, at: int, least: Callable[[Rank], int], places_left: int) -> list[Rank]:
    """Who goes when so many places of axis ``at`` are to be left. ``least`` is larger for ranks that are better spared; a place is
    judged by the one that is best spared, and of equal places the last go."""
    shape = [size for _, size in axes]
    grid = np.moveaxis(np.arange(int(np.prod(shape))).reshape(shape), at, 0).reshape(shape[at], -1)
    order = sorted(range(shape[at]), key=lambda place: (max(least(Rank(int(r))) for r in grid[place]), place))
    return sorted(Rank(int(rank)) for place in order[places_left:] for rank in grid[place])


def without(axes: Axes, at: int, gone: Collection[int]) -> tuple[Axes, dict[Rank, Rank]]:
    """The axes when these places of axis ``at`` are left out; and the ranks that stay: old -> new, in the same order."""
    shape = [size for _, size in axes]
    stay = [place for place in range(shape[at]) if place not in gone]
    grid = np.arange(int(np.prod(shape))).reshape(shape).take(stay, axis=at)
    return _resized(axes, at, len(stay)), {Rank(int(old)): Rank(new) for new, old in enumerate(grid.ravel())}


def joined(axes: Axes, at: int, more: int) -> tuple[Axes, dict[Rank, Rank], list[Rank]]:
    """The axes with ``more`` places at the end of axis ``at``; the ranks that are there, old -> new; and those that are new."""
    shape = [size for _, size in axes]
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    room = np.full([*shape[:at], more, *shape[at + 1 :]], -1)
    wide = np.concatenate([grid, room], axis=at).ravel()
    there: Mapping[Rank, Rank] = {Rank(int(old)): Rank(new) for new, old in enumerate(wide) if old >= 0}
    return _resized(axes, at, shape[at] + more), dict(there), [Rank(new) for new, old in enumerate(wide) if old < 0]


def fitted(axes: Axes, ranks: int) -> Axes:
    """The axes once the world has so many ranks; () when it cannot have."""
    at, all_ranks = data_axis(axes), int(np.prod([size for _, size in axes]))
    if all_ranks == ranks:
        return axes
    if at is None or ranks % (others := all_ranks // axes[at][1]):
        return ()
    return _resized(axes, at, ranks // others)


def _resized(axes: Axes, at: int, size: int) -> Axes:
    return (*axes[:at], (axes[at][0], size), *axes[at + 1 :])
