"""Memory checks before a tray keeps data for others, so that too much is refused and kills no process."""

from __future__ import annotations

from rackrun.checkpoint.arena.memory_plan import ceilings

__all__ = ["OverMemoryLimit", "check_room"]

_HEADROOM = 8
"""One part in this many of the host's memory stays free."""


class OverMemoryLimit(Exception):
    """Data is not accepted; the text says why."""


def check_room(size: int) -> None:
    """Raise `OverMemoryLimit` if ``size`` more bytes do not fit."""
    if any(size + ceiling.total // _HEADROOM > ceiling.free for ceiling in ceilings(None)):
        raise OverMemoryLimit(f"{size} bytes do not fit into this host's memory")
