"""One rack requested from a provider, and its stage.

::

    ASKED --delivered--> DELIVERED --its trays join--> JOINED --a worker is ready--> SERVING --not needed--> LEAVING --> (released)
      +----------------------+-----------------------------+---- nothing comes of it --> (released) <-- unusable ---+
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rackrun.protocol.ids import TrayId

__all__ = ["Rented", "Stage"]


class Stage(Enum):
    """Stage of a rack; the module's docstring draws the transitions."""

    ASKED = "asked"
    DELIVERED = "delivered"
    JOINED = "joined"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(slots=True)
class Rented:
    """One rack, from the request until it is released."""

    request: int
    trays: int
    asked_ms: int
    until_ms: int
    """End of the present stage's time limit."""
    there: tuple[TrayId, ...]
    """Trays that had joined before the request. None of them can be part of the rack."""
    failed: int
    """Number of consecutive failed requests before this one."""
    stage: Stage = Stage.ASKED
    named: tuple[TrayId, ...] = ()
    proved: bool = False
    """Whether one of its workers was ready while all trained, or trained with them."""

    def __str__(self) -> str:
        return f"rack {self.request}"
