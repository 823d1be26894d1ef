"""How the micro-batches of a step are shared out among ranks that are not equally fast: arithmetic."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from rackrun.core.placement.mesh_resize import Axes
from rackrun.topology.model.mesh import DATA_AXES

__all__ = ["GAIN_MIN", "shared_out", "sharing"]

GAIN_MIN = 0.05
"""Less than that of the slowest rank's time is not worth a change."""


def sharing(axes: Axes, world_size: int) -> list[tuple[int, ...]]:
    """The ranks of a world of ``world_size``, those together that have the same samples, in the order of their places along the data
    axes. Its first data axis may be longer or shorter than in ``axes``.

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
    """So many of ``total`` micro-batches for each, one at the least, that the last is done as early as can be. ``times``: what each takes
    for the same work, over what the others take; ``rest``: what a step costs beside its micro-batches, in micro-batches. (): all as many.

    >>> shared_out(32, [1.0, 1.0, 3.0, 1.0])
    (10, 10, 3, 9)
    """
    if total < len(times) or max(times) <= 1.0:
        return ()
    shares = [1] * len(times)
    next_done = [(slow * (rest + 2), place) for place, slow in enumerate(times)]
    heapq.heapify(next_done)
    for _ in range(total - len(times)):  # whoever is done with one more the earliest
        _, place = next_done[0]
        shares[place] += 1
        heapq.heapreplace(next_done, (times[place] * (rest + shares[place] + 1), place))
    best = max(slow * (rest + share) for slow, share in zip(times, shares, strict=True))
    even = max(times) * (rest + -(-total // len(times)))
    return tuple(shares) if best <= (1 - GAIN_MIN) * even else ()
