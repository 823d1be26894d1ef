"""Where a fault strikes, as a symbol: it is resolved when the fault strikes, from what the job is then, and recorded.

A run is repeated from the record (`Exactly`), where the same symbol may mean another rank.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from rackrun.chaos.base.errors import NoTarget, PlanError
from rackrun.chaos.faults.fault_types import Subjects

__all__ = [
    "BuddyOf",
    "Exactly",
    "Last",
    "Majority",
    "Minority",
    "NeighbourOf",
    "One",
    "Place",
    "Scene",
    "Several",
    "Subject",
    "Target",
    "resolve",
]

NAMELESS = (Subjects.COORDINATOR, Subjects.STORAGE)
"""There is one of each."""


class Subject(msgspec.Struct, frozen=True):
    """One thing that is struck. ``name``: of a rank its number, of a spare its slot, of an agent its tray."""

    kind: Subjects
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else str(self.kind)


class _Target(msgspec.Struct, frozen=True, tag_field="who", forbid_unknown_fields=True, omit_defaults=True):
    pass


class Exactly(_Target, frozen=True, tag="exactly"):
    """These, by name."""

    kind: Subjects
    names: tuple[str, ...] = ("",)


class One(_Target, frozen=True, tag="one"):
    of: Subjects


class Several(_Target, frozen=True, tag="several"):
    of: Subjects
    count: int


class Minority(_Target, frozen=True, tag="minority"):
    """As many as can be, but fewer than half."""

    of: Subjects


class Majority(_Target, frozen=True, tag="majority"):
    """As few as can be, but more than half."""

    of: Subjects


class NeighbourOf(_Target, frozen=True, tag="neighbour_of"):
    """Another of the same kind, in the same NVLink clique; of a rank or a spare, on the same tray if there is one."""

    whom: Target


class BuddyOf(_Target, frozen=True, tag="buddy_of"):
    """Who keeps the copies of its snapshots: of a tray, and of a rank, another tray's."""

    whom: Target


class Last(_Target, frozen=True, tag="last"):
    """Whatever of this kind was struck last."""

    of: Subjects


Target = Exactly | One | Several | Minority | Majority | NeighbourOf | BuddyOf | Last


@dataclass(frozen=True, slots=True)
class Place:
    """A slot and who is in it."""

    slot: str
    tray: str
    clique: str
    rack: str
    rank: int | None
    """None: a spare that waits."""
    incarnation: int = 0
    """Of the worker in the slot: another one has another."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The job when a fault is to strike."""

    places: tuple[Place, ...]
    """Of those that live."""
    buddies: dict[str, str] = field(default_factory=dict)
    """Tray -> the tray that keeps its snapshots."""
    struck: tuple[Subject, ...] = ()
    """So far, oldest first."""

    def names(self, kind: Subjects) -> list[str]:
        """Of all that there are of it, in order."""
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

    def of(self, subject: Subject) -> list[Place]:
        """The slots that it is, or has."""
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
    """Who that is now. Raises `NoTarget` when there is nobody, `PlanError` when there can never be."""
    match target:
        case Exactly(kind, names):
            there = scene.names(kind)
            back = Subjects.TRAY, Subjects.AGENT, Subjects.SPARE  # they may be lost now, and be meant for all that
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
