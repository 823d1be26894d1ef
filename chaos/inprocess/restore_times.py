"""Measure in each rank how long it took to restore its state; the coordinator sees only rebuild and restore together.

Each restore adds a line to ``restores`` in the folder: rank, generation, and the host's monotonic clock at the
beginning and at the end.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Restored", "read_restores", "watch_restores"]

NAME = "restores"


class Restored(NamedTuple):
    """One restore of one rank: when it began and ended, by the host's monotonic clock."""

    rank: int
    generation: int
    began_s: float
    ended_s: float


def watch_restores(folder: Path) -> None:
    """Hook the restore in a worker, before it trains."""
    from rackrun.worker.loop.join_generation import Rejoin

    restore = Rejoin._restore

    def watched(self: Any, plan: Any, *, fresh: bool) -> None:
        began_s = time.monotonic()
        restore(self, plan, fresh=fresh)
        line = f"{self._world.rank} {plan.generation} {began_s:.6f} {time.monotonic():.6f}\n"
        with contextlib.suppress(OSError), (folder / NAME).open("ab", buffering=0) as file:
            os.write(file.fileno(), line.encode())  # one write, so that lines of several ranks do not mix

    Rejoin._restore = watched  # type: ignore[method-assign]


def read_restores(folder: Path) -> list[Restored]:
    """Return all restores, in the order in which they ended; empty if there were none. Incomplete lines are
    left out."""
    try:
        words = [line.split() for line in (folder / NAME).read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [Restored(int(of[0]), int(of[1]), float(of[2]), float(of[3])) for of in words if len(of) == 4]
