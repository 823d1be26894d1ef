"""Facts that one part of the core finds and others must act on.

A part never calls a part above it. It states a fact, and `rackrun.core.machine.rules` says who acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rackrun.core.members.workers import Loss, WorkerRecord
from rackrun.protocol.commands import Worker
from rackrun.protocol.events import DepartureAnnounced
from rackrun.protocol.ids import TrayId

__all__ = [
    "AllTrain",
    "Fact",
    "Facts",
    "RecoveryOverdue",
    "WorkersMustGo",
    "HardwareChanged",
    "PlanImpossible",
    "RanksRetired",
    "RestartDue",
    "ShrinkImpossible",
    "SlotFreed",
    "SlotsNeeded",
    "StartFailed",
    "StateWrong",
    "StepRepeats",
    "SwapDue",
    "TrayDeparts",
    "WorkersStall",
]


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """A slot may be free, or another decision may be possible."""


@dataclass(frozen=True, slots=True)
class HardwareChanged:
    """The health of a GPU, or what is known about it, has changed."""


@dataclass(frozen=True, slots=True)
class SwapDue:
    """Ranks may have to pause for a planned swap, or to let others join or leave."""


@dataclass(frozen=True, slots=True)
class SlotsNeeded:
    """The job cannot go on without the slots that are being drained."""


@dataclass(frozen=True, slots=True)
class WorkersMustGo:
    """These workers must go, each for this reason: its GPU has failed, or an operator has asked for it."""

    because: Mapping[Worker, str]


@dataclass(frozen=True, slots=True)
class WorkersStall:
    """These members are to blame that no rank makes progress."""

    records: Sequence[WorkerRecord]
    because: str


@dataclass(frozen=True, slots=True)
class StateWrong:
    """The state of these members is wrong, and spares can replace them."""

    records: Sequence[WorkerRecord]
    because: str


@dataclass(frozen=True, slots=True)
class StepRepeats:
    """The step has to be repeated in place, because no rank is to blame."""

    because: str


@dataclass(frozen=True, slots=True)
class PlanImpossible:
    """The plan cannot be carried out although no rank is lost."""

    because: str


@dataclass(frozen=True, slots=True)
class ShrinkImpossible:
    """The world cannot go on without the ranks that an operator asked to remove."""

    because: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The world must start again although no rank has computed a step."""

    because: str
    losses: Sequence[Loss] = ()


@dataclass(frozen=True, slots=True)
class RecoveryOverdue:
    """The time of a recovery is over, and what the last decision has led to is done."""


@dataclass(frozen=True, slots=True)
class RestartDue:
    """The policy has decided that the world starts again."""

    because: str
    loss: Loss | None


@dataclass(frozen=True, slots=True)
class RanksRetired:
    """Ranks that had finished have exited while others still train."""

    losses: Sequence[Loss]


@dataclass(frozen=True, slots=True)
class AllTrain:
    """All ranks compute."""


@dataclass(frozen=True, slots=True)
class TrayDeparts:
    """A tray has to leave."""

    event: DepartureAnnounced


Fact: TypeAlias = (
    SlotFreed
    | HardwareChanged
    | SwapDue
    | SlotsNeeded
    | WorkersMustGo
    | RecoveryOverdue
    | WorkersStall
    | StateWrong
    | StepRepeats
    | PlanImpossible
    | ShrinkImpossible
    | StartFailed
    | RestartDue
    | RanksRetired
    | AllTrain
    | TrayDeparts
)


@dataclass(slots=True)
class Facts:
    """The facts that nobody has acted on yet, in the order in which they were found."""

    found: list[Fact] = field(default_factory=list)
    """Empty after almost every event, so callers look here before they call anything."""

    def add(self, fact: Fact) -> None:
        """Add a fact, which a rule acts on before the event's handling ends."""
        self.found.append(fact)

    def departing(self) -> list[TrayId]:
        """Return the trays that have to leave and have not been told yet."""
        return [fact.event.tray for fact in self.found if isinstance(fact, TrayDeparts)]

    def take(self) -> list[Fact]:
        """Return the facts and forget them."""
        found, self.found = self.found, []
        return found
