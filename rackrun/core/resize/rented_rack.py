"""One rack that was asked of a provider, and how far it is.

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
    ASKED = "asked"
    DELIVERED = "delivered"
    JOINED = "joined"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(slots=True)
class Rented:
    request: int
    trays: int
    asked_ms: int
    until_ms: int
    """How long the present stage may take."""
    there: tuple[TrayId, ...]
    """Trays that had joined when it was asked for: none of them can be what comes."""
    failed: int
    """Requests in a row that had failed before it."""
    stage: Stage = Stage.ASKED
    named: tuple[TrayId, ...] = ()
    proved: bool = False
    """A worker of it was ready while all trained, or trained with them."""

    def __str__(self) -> str:
        return f"rack {self.request}"
