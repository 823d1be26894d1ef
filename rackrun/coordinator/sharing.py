"""Which ranks share their samples, as a journal tells: those that differ only along axes of the mesh that do not split the data."""

from __future__ import annotations

import math
import sqlite3

import msgspec
import numpy as np

from rackrun.topology.mesh import DATA_AXES

__all__ = ["mesh_of", "sharing"]

Axes = tuple[tuple[str, int], ...]


def mesh_of(connection: sqlite3.Connection) -> Axes:
    """As a rank has told it, at whatever size its world then had; () when none has."""
    row = connection.execute(
        "SELECT body FROM events WHERE kind = 'event' AND name = 'WorkerReady' AND body LIKE '%\"mesh\":[[%' ORDER BY id LIMIT 1"
    ).fetchone()
    return msgspec.convert(msgspec.json.decode(row[0])["mesh"], Axes) if row else ()


def sharing(axes: Axes, world_size: int) -> list[tuple[int, ...]]:
    """The ranks of a world of ``world_size``, those together that share. Its first data axis may be longer or shorter than in ``axes``.

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
