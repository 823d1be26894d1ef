"""Memory for what this tray keeps of others: asked for before it is touched, so that too much is refused and kills nobody."""

from __future__ import annotations

from rackrun.checkpoint.arena.memory_plan import ceilings

__all__ = ["Refused", "check_room"]

_HEADROOM = 8
"""One part in so many of the host's memory stays free."""


class Refused(Exception):
    """Something is not taken, and why."""


def check_room(size: int) -> None:
    """Raises `Refused` when so many bytes more are too much."""
    if any(size + ceiling.total // _HEADROOM > ceiling.free for ceiling in ceilings(None)):
        raise Refused(f"{size} bytes do not fit into this host's memory")
