"""Requests under way, the transitions of their table, and the reasons for which they are refused."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from rackrun.core.generation.world import World
from rackrun.core.members.transitions import STORY_MAX, next_state
from rackrun.protocol.commands import Refusal, Worker
from rackrun.protocol.ids import Rank, SlotId

__all__ = [
    "REQUEST_TRANSITIONS",
    "PendingDrain",
    "PendingGrow",
    "PendingRequest",
    "PendingShrink",
    "PendingSwap",
    "Request",
    "RequestRefused",
    "RequestState",
    "RequestTrigger",
    "nearest",
]


class RequestRefused(Exception):
    """A request is not allowed. It is no error: it becomes an `Answer`."""

    def __init__(self, kind: Refusal, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.remedy = kind, what, remedy


class RequestState(StrEnum):
    """State of a request; `REQUEST_TRANSITIONS` says what leads from one to the next."""

    ASKED = "asked"
    BEGUN = "begun"
    EMPTY = "empty"
    DONE = "done"
    REFUSED = "refused"


class RequestTrigger(StrEnum):
    """What moves a request from one state to the next."""

    BEGIN = "begin"
    VACATE = "vacate"
    INTERRUPT = "interrupt"
    FINISH = "finish"
    CALL_OFF = "call off"


_ENDS = {RequestTrigger.FINISH: RequestState.DONE, RequestTrigger.CALL_OFF: RequestState.REFUSED}
REQUEST_TRANSITIONS: Mapping[RequestState, Mapping[RequestTrigger, RequestState]] = {
    RequestState.ASKED: _ENDS | {RequestTrigger.BEGIN: RequestState.BEGUN},
    RequestState.BEGUN: _ENDS | {RequestTrigger.VACATE: RequestState.EMPTY},
    RequestState.EMPTY: _ENDS | {RequestTrigger.INTERRUPT: RequestState.BEGUN},
    RequestState.DONE: {},
    RequestState.REFUSED: {},
}
"""The transition table. `docs/state_machines.md` draws it. A request is answered once when it begins, and once when it
ends."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """What all requests have in common."""

    request: str
    state: RequestState = field(default=RequestState.ASKED, init=False)
    _story: deque[str] = field(default_factory=lambda: deque([RequestState.ASKED.value], STORY_MAX), init=False)

    def move(self, trigger: RequestTrigger) -> None:
        """Make one transition of the table. Raises `InvalidTransition`, and changes nothing, if there is none."""
        self.state = next_state(self, self.state, trigger, REQUEST_TRANSITIONS, self._story)


@dataclass(slots=True, eq=False)
class PendingDrain(PendingRequest):
    """A drain of a tray or of a slot."""

    target: str
    slots: tuple[SlotId, ...]
    why: str
    waits: bool
    """Whether it waits for spares, however long."""
    departing: bool = False
    """Whether the tray's agent has been told to leave, and leaves whether the tray is empty or not."""
    added: tuple[SlotId, ...] = ()
    """The slots that were not drained before."""
    patient: bool = True
    """Whether it still waits for copies of what the tray keeps for others."""
    copies_until_ms: int = 0
    """Until when it waits for them, once it is empty."""

    def ranks(self, world: World) -> list[Rank]:
        """Return the ranks that are still there."""
        return sorted(rank for slot in self.slots if (rank := world.rank_at(slot)) is not None)

    def __str__(self) -> str:
        return f"drain of {self.target}"


@dataclass(slots=True, eq=False)
class PendingSwap(PendingRequest):
    """A swap of one rank."""

    rank: Rank
    worker: Worker
    """The worker that held the rank when the swap was requested."""
    of: int
    """World size when the swap was requested."""
    to: SlotId
    """Slot of the spare; "": the best spare."""
    waits: bool = False

    @property
    def why(self) -> str:
        return "asked for (rackctl swap)"

    def ranks(self, world: World) -> list[Rank]:
        """Return the rank if its worker is still the same, else []."""
        record = world.members.get(self.rank)
        return [self.rank] if record is not None and record.worker == self.worker else []

    def __str__(self) -> str:
        return f"swap of rank {self.rank}"


@dataclass(slots=True, eq=False)
class PendingShrink(PendingRequest):
    """A shrink of the world."""

    to: int
    """Number of ranks that stay."""
    workers: tuple[Worker, ...]
    """The workers that leave. When they have left, or if there are none, the ranks that are best spared leave."""
    wanted: int
    """`World.wanted` before this request."""

    def __str__(self) -> str:
        return f"shrink to {self.to} ranks"


@dataclass(slots=True, eq=False)
class PendingGrow(PendingRequest):
    """A growth of the world."""

    to: int

    def __str__(self) -> str:
        return f"grow to {self.to} ranks"


Request: TypeAlias = PendingDrain | PendingSwap
"""Requests that move ranks to other slots."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the most similar known name, if there is one."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"is {close[0]} meant? See rackctl status." if close else "see rackctl status."
