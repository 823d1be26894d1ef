"""Where a fault strikes, as a symbol that is resolved from the state of the job at the moment of the strike.

What the symbol resolved to is recorded. A run is repeated from that record (`Exactly`), because the same symbol may
mean another rank the next time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from rackrun.chaos.base.errors import NoTarget, PlanError
from rackrun.chaos.faults.fault_types import Subjects

__all__ = [
    "AN_AGENT",
    "A_RANK",
    "A_SPARE",
    "A_TRAY",
    "THE_COORDINATOR",
    "THE_STORAGE",
    "BuddyOf",
    "Exactly",
    "Last",
    "Majority",
    "Minority",
    "NeighbourOf",
    "One",
    "SlotOccupant",
    "Scene",
    "Several",
    "Subject",
    "Target",
    "resolve",
]

NAMELESS = (Subjects.COORDINATOR, Subjects.STORAGE)
"""Kinds of which a job has exactly one, so that no name is needed."""


class Subject(msgspec.Struct, frozen=True):
    """One thing that a fault strikes. ``name`` is a rank's number, a spare's slot, or the tray of an agent."""

    kind: Subjects
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else str(self.kind)


class _Target(msgspec.Struct, frozen=True, tag_field="who", forbid_unknown_fields=True, omit_defaults=True):
    pass


class Exactly(_Target, frozen=True, tag="exactly"):
    """The subjects with these names."""

    kind: Subjects
    names: tuple[str, ...] = ("",)


class One(_Target, frozen=True, tag="one"):
    """One subject of this kind, drawn at random."""

    of: Subjects


class Several(_Target, frozen=True, tag="several"):
    """``count`` subjects of this kind, drawn at random."""

    of: Subjects
    count: int


class Minority(_Target, frozen=True, tag="minority"):
    """As many subjects of this kind as possible, but fewer than half of them; which ones is drawn at random."""

    of: Subjects


class Majority(_Target, frozen=True, tag="majority"):
    """As few subjects of this kind as possible, but more than half of them; which ones is drawn at random."""

    of: Subjects


class NeighbourOf(_Target, frozen=True, tag="neighbour_of"):
    """Another subject of the same kind in the same NVLink clique as ``whom``.

    For a rank or a spare, one on the same tray is preferred.
    """

    whom: Target


class BuddyOf(_Target, frozen=True, tag="buddy_of"):
    """The subject that keeps the snapshots of ``whom``: another tray, or for a rank a rank on that other tray."""

    whom: Target


class Last(_Target, frozen=True, tag="last"):
    """The subject of this kind that was struck last."""

    of: Subjects


Target = Exactly | One | Several | Minority | Majority | NeighbourOf | BuddyOf | Last


A_RANK, A_SPARE, AN_AGENT, A_TRAY = One(Subjects.RANK), One(Subjects.SPARE), One(Subjects.AGENT), One(Subjects.TRAY)
THE_COORDINATOR, THE_STORAGE = One(Subjects.COORDINATOR), One(Subjects.STORAGE)


@dataclass(frozen=True, slots=True)
class SlotOccupant:
    """A slot (a worker's place, ``tray/index``), where it is, and which worker is in it now."""

    slot: str
    tray: str
    clique: str
    rack: str
    rank: int | None
    """The rank that the worker holds; None for a spare that waits."""
    incarnation: int = 0
    """The incarnation of the worker in the slot; each new worker there has another number."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The state of the job at the moment when a fault is to strike."""

    places: tuple[SlotOccupant, ...]
    """The slots whose workers are alive."""
    buddies: dict[str, str] = field(default_factory=dict)
    """Tray -> the tray that keeps its snapshots."""
    struck: tuple[Subject, ...] = ()
    """The subjects struck so far, oldest first."""

    def names(self, kind: Subjects) -> list[str]:
        """Return the names of all subjects of this kind that exist now, in order."""
        match kind:
            case Subjects.RANK:
                return [str(rank) for rank in sorted(p.rank for p in self.places if p.rank is not None)]
            case Subjects.SPARE:
                return sorted(p.slot for p in self.places if p.rank is None)
            case Subjects.AGENT | Subjects.TRAY:
                return sorted({p.tray for p in self.places})
            case Subjects.RACK:
                return sorted({p.rack for p in self.places})
            case Subjects.COORDINATOR | Subjects.STORAGE:
                return [""]
            case _:
                assert_never(kind)

    def of(self, subject: Subject) -> list[SlotOccupant]:
        """Return the slots that ``subject`` occupies or contains; empty for the coordinator and the storage."""
        match subject.kind:
            case Subjects.RANK:
                return [p for p in self.places if str(p.rank) == subject.name]
            case Subjects.SPARE:
                return [p for p in self.places if p.slot == subject.name]
            case Subjects.AGENT | Subjects.TRAY:
                return [p for p in self.places if p.tray == subject.name]
            case Subjects.RACK:
                return [p for p in self.places if p.rack == subject.name]
            case _:
                return []


def resolve(target: Target, scene: Scene, draw: random.Random) -> tuple[Subject, ...]:
    """Return the subjects that ``target`` means now, drawing from ``draw`` where the choice is random.

    Raises `NoTarget` when there is no such subject now, and `PlanError` when there can never be one.
    """
    match target:
        case Exactly(kind, names):
            there = scene.names(kind)
            back = Subjects.TRAY, Subjects.AGENT, Subjects.SPARE  # these may be lost now and still be meant
            for name in names:
                if name not in there and kind not in back:
                    raise NoTarget(f"there is no {Subject(kind, name)} now ({', '.join(there) or 'none'})")
            return tuple(Subject(kind, name) for name in names)
        case One(kind):
            return _some(kind, 1, scene, draw)
        case Several(kind, count):
            return _some(kind, count, scene, draw)
        case Minority(kind):
            return _some(kind, (len(scene.names(kind)) - 1) // 2, scene, draw)
        case Majority(kind):
            return _some(kind, len(scene.names(kind)) // 2 + 1, scene, draw)
        case NeighbourOf(whom):
            return tuple(_neighbour(one, scene, draw) for one in resolve(whom, scene, draw))
        case BuddyOf(whom):
            return tuple(_buddy(one, scene, draw) for one in resolve(whom, scene, draw))
        case Last(kind):
            struck = [subject for subject in scene.struck if subject.kind == kind]
            if not struck:
                raise NoTarget(f"no {kind} has been struck yet")
            return (struck[-1],)
        case _:
            assert_never(target)


def _some(kind: Subjects, count: int, scene: Scene, draw: random.Random) -> tuple[Subject, ...]:
    there = scene.names(kind)
    if not 1 <= count <= len(there):
        raise NoTarget(f"{count} {kind}(s) were to be struck, and there are {len(there)}")
    chosen = draw.sample(there, count)
    return tuple(Subject(kind, name) for name in there if name in chosen)


def _neighbour(of: Subject, scene: Scene, draw: random.Random) -> Subject:
    mine = scene.of(of)
    if not mine:
        raise NoTarget(f"{of} is nowhere")
    cliques, trays = {p.clique for p in mine}, {p.tray for p in mine}
    others = [Subject(of.kind, name) for name in scene.names(of.kind) if name != of.name]
    near = [one for one in others if {p.clique for p in scene.of(one)} & cliques]
    if of.kind in (Subjects.RANK, Subjects.SPARE):
        near = [one for one in near if {p.tray for p in scene.of(one)} & trays] or near
    if not near:
        raise NoTarget(f"{of} has no neighbour")
    return draw.choice(near)


def _buddy(of: Subject, scene: Scene, draw: random.Random) -> Subject:
    mine = scene.of(of)
    buddy = scene.buddies.get(mine[0].tray) if mine else None
    if of.kind not in (Subjects.RANK, Subjects.TRAY, Subjects.AGENT):
        raise PlanError(f"a {of.kind} has no buddy.", remedy="name a rank or a tray.")
    if buddy is None:
        raise NoTarget(f"nobody keeps the snapshots of {of}")
    if of.kind is not Subjects.RANK:
        return Subject(of.kind, buddy)
    ranks = [str(p.rank) for p in scene.places if p.tray == buddy and p.rank is not None]
    if not ranks:
        raise NoTarget(f"no rank is on {buddy}, which keeps the snapshots of {of}")
    return Subject(Subjects.RANK, draw.choice(ranks))
