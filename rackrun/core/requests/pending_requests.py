"""What is asked of a job that runs, while it is under way; and why it is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from rackrun.core.generation.world import World
from rackrun.protocol.commands import Refusal, Worker
from rackrun.protocol.ids import Rank, SlotId

__all__ = ["Drain", "Grow", "Refused", "Request", "Shrink", "Swap", "nearest"]


class Refused(Exception):
    """Not an error of anybody's: it becomes an `Answer`."""

    def __init__(self, kind: Refusal, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.remedy = kind, what, remedy


@dataclass(slots=True, eq=False)
class Drain:
    """Of a tray, or of a slot."""

    request: str
    target: str
    slots: tuple[SlotId, ...]
    why: str
    waits: bool
    """For spares, however long."""
    departing: bool = False
    """Its agent has been told to leave, and does, whether the tray is empty or not."""
    added: tuple[SlotId, ...] = ()
    """Those that were not drained before."""
    empty: bool = False
    """No rank is there any more."""
    begun: bool = False
    patient: bool = True
    """It waits for copies of what the tray keeps for others."""

    def ranks(self, world: World) -> list[Rank]:
        return sorted(rank for slot in self.slots if (rank := world.rank_at(slot)) is not None)

    def __str__(self) -> str:
        return f"drain of {self.target}"


@dataclass(slots=True, eq=False)
class Swap:
    request: str
    rank: Rank
    worker: Worker
    """Who held the rank when it was asked for."""
    of: int
    """So many ranks there were then."""
    to: SlotId
    """"" : whichever spare is the best."""
    waits: bool = False
    begun: bool = False

    @property
    def why(self) -> str:
        return "asked for (rackctl swap)"

    def ranks(self, world: World) -> list[Rank]:
        record = world.members.get(self.rank)
        return [self.rank] if record is not None and record.worker == self.worker else []

    def __str__(self) -> str:
        return f"swap of rank {self.rank}"


@dataclass(slots=True, eq=False)
class Shrink:
    request: str
    to: int
    """So many ranks."""
    workers: tuple[Worker, ...]
    """Who is to go; when they have, or are (), whoever is best spared."""
    wanted: int
    """What was wanted before, as of `World.wanted`."""

    def __str__(self) -> str:
        return f"shrink to {self.to} ranks"


@dataclass(slots=True, eq=False)
class Grow:
    request: str
    to: int

    def __str__(self) -> str:
        return f"grow to {self.to} ranks"


Request: TypeAlias = Drain | Swap
"""What moves ranks to other slots."""


def nearest(name: str, names: Iterable[str]) -> str:
    """A remedy for a name that there is not."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"is {close[0]} meant? See rackctl status." if close else "see rackctl status."
