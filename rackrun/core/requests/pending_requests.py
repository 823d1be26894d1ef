"""Requests under way, and the reasons for which they are refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from rackrun.core.generation.world import World
from rackrun.protocol.commands import Refusal, Worker
from rackrun.protocol.ids import Rank, SlotId

__all__ = ["PendingDrain", "PendingGrow", "RequestRefused", "Request", "PendingShrink", "PendingSwap", "nearest"]


class RequestRefused(Exception):
    """A request is not allowed. It is no error: it becomes an `Answer`."""

    def __init__(self, kind: Refusal, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.remedy = kind, what, remedy


@dataclass(slots=True, eq=False)
class PendingDrain:
    """A drain of a tray or of a slot."""

    request: str
    target: str
    slots: tuple[SlotId, ...]
    why: str
    waits: bool
    """Whether it waits for spares, however long."""
    departing: bool = False
    """Whether the tray's agent has been told to leave, and leaves whether the tray is empty or not."""
    added: tuple[SlotId, ...] = ()
    """The slots that were not drained before."""
    empty: bool = False
    """Whether no rank is there any more."""
    begun: bool = False
    patient: bool = True
    """Whether it still waits for copies of what the tray keeps for others."""

    def ranks(self, world: World) -> list[Rank]:
        """Return the ranks that are still there."""
        return sorted(rank for slot in self.slots if (rank := world.rank_at(slot)) is not None)

    def __str__(self) -> str:
        return f"drain of {self.target}"


@dataclass(slots=True, eq=False)
class PendingSwap:
    """A swap of one rank."""

    request: str
    rank: Rank
    worker: Worker
    """The worker that held the rank when the swap was requested."""
    of: int
    """World size when the swap was requested."""
    to: SlotId
    """Slot of the spare; "": the best spare."""
    waits: bool = False
    begun: bool = False

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
class PendingShrink:
    """A shrink of the world."""

    request: str
    to: int
    """Number of ranks that stay."""
    workers: tuple[Worker, ...]
    """The workers that leave. When they have left, or if there are none, the ranks that are best spared leave."""
    wanted: int
    """`World.wanted` before this request."""

    def __str__(self) -> str:
        return f"shrink to {self.to} ranks"


@dataclass(slots=True, eq=False)
class PendingGrow:
    """A growth of the world."""

    request: str
    to: int

    def __str__(self) -> str:
        return f"grow to {self.to} ranks"


Request: TypeAlias = PendingDrain | PendingSwap
"""Requests that move ranks to other slots."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the most similar known name, if there is one."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"is {close[0]} meant? See rackctl status." if close else "see rackctl status."
