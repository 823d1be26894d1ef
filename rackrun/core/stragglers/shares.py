"""Arithmetic of dividing a step's micro-batches among ranks of different speed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from rackrun.core.placement.mesh_resize import Axes
from rackrun.topology.model.mesh import DATA_AXES

__all__ = ["GAIN_MIN", "shared_out", "sharing"]

GAIN_MIN = 0.05
"""Smallest gain, as a fraction of the slowest rank's time, for which shares are changed."""


def sharing(axes: Axes, world_size: int) -> list[tuple[int, ...]]:
    """Group the ranks that have the same samples, ordered by their positions along the data axes.

    The size of the first data axis follows from ``world_size`` and may differ from ``axes``.

    >>> sharing((("dp", 3), ("tp", 2)), 4)
    [(0, 1), (2, 3)]
    """
    sizes = [size for _, size in axes]
    data = [at for at, (name, _) in enumerate(axes) if name in DATA_AXES]
    if data:
        others = math.prod(size for at, size in enumerate(sizes) if at != data[0])
        sizes[data[0]] = world_size // others
    if not axes or math.prod(sizes) != world_size:
        return [(rank,) for rank in range(world_size)]
    shared = [at for at in range(len(sizes)) if at not in data]
    ranks = np.arange(world_size).reshape(sizes).transpose([*data, *shared])
    return [tuple(group) for group in ranks.reshape(-1, math.prod(sizes[at] for at in shared)).tolist()]


def shared_out(total: int, times: Sequence[float], rest: float = 0.0) -> tuple[int, ...]:
    """Divide ``total`` micro-batches so that the last rank is done as early as possible; each gets at least one.

    ``times``: time of each rank for the same work, divided by that of the others. ``rest``: time of a step besides its
    micro-batches, in micro-batches. () means equal shares.

    >>> shared_out(32, [1.0, 1.0, 3.0, 1.0])
    (10, 10, 3, 9)
    """
    if total < len(times) or max(times) <= 1.0:
        return ()
    shares = [1] * len(times)
    next_done = [(slow * (rest + 2), place) for place, slow in enumerate(times)]
    heapq.heapify(next_done)
    for _ in range(total - len(times)):  # the rank that would finish one more the earliest gets it
        _, place = next_done[0]
        shares[place] += 1
        heapq.heapreplace(next_done, (times[place] * (rest + shares[place] + 1), place))
    best = max(slow * (rest + share) for slow, share in zip(times, shares, strict=True))
    even = max(times) * (rest + -(-total // len(times)))
    return tuple(shares) if best <= (1 - GAIN_MIN) * even else ()
