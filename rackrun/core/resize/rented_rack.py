"""One rack requested from a provider, and its stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from rackrun.core.members.transitions import check_transition
from rackrun.protocol.ids import TrayId

__all__ = ["STAGES", "RentedRack", "RackStage"]


class RackStage(Enum):
    """Stage of a rack. `STAGES` says which may follow which; from each the rack may also be released."""

    ASKED = "asked"
    DELIVERED = "delivered"
    JOINED = "joined"
    SERVING = "serving"
    LEAVING = "leaving"


STAGES: Mapping[RackStage, tuple[RackStage, ...]] = {
    RackStage.ASKED: (RackStage.DELIVERED,),
    RackStage.DELIVERED: (RackStage.JOINED,),
    RackStage.JOINED: (RackStage.SERVING, RackStage.LEAVING),
    RackStage.SERVING: (RackStage.LEAVING,),
    RackStage.LEAVING: (),
}
"""The transition table of a rack: it is asked for, delivered, its trays join, one of its workers is ready, and it is
given back."""


@dataclass(slots=True)
class RentedRack:
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
    counted: bool = False
    """Whether it was given up, and that counts among the consecutive failed requests."""
    given_up: bool = False
    """Whether it came to nothing, and has not come late."""
    stage: RackStage = RackStage.ASKED
    named: tuple[TrayId, ...] = ()
    proved: bool = False
    """Whether one of its workers was ready while all trained, or trained with them."""
    released: bool = False
    """Whether the provider was told to release it."""
    revoked: bool = False
    """Whether the provider has said, before any worker was ready, that it takes the rack back."""
    _story: list[str] = field(default_factory=lambda: [RackStage.ASKED.value])

    def enter(self, stage: RackStage) -> None:
        """Enter a stage. Raises `InvalidTransition` if it cannot follow the present one."""
        check_transition(str(self), self.stage, stage, STAGES, self._story)
        self.stage = stage
        self._story.append(stage.value)

    def __str__(self) -> str:
        return f"rack {self.request}"
