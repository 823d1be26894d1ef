"""The mesh of a job, read from its journal."""

from __future__ import annotations

import sqlite3

import msgspec

from rackrun.core.placement.mesh_resize import Axes

__all__ = ["mesh_of"]


def mesh_of(connection: sqlite3.Connection) -> Axes:
    """Return the mesh that a rank reported, with the world size of that time; () if none did."""
    row = connection.execute(
        "SELECT body FROM events WHERE kind = 'event' AND name = 'WorkerReady' AND body LIKE '%\"mesh\":[[%' ORDER BY id LIMIT 1"
    ).fetchone()
    return msgspec.convert(msgspec.json.decode(row[0])["mesh"], Axes) if row else ()
