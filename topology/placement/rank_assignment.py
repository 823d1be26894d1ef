"""Place ranks on slots, and order the spares. Pure: equal questions have equal answers on every machine.

::

    board = PlacementArrays(topology)                        # once for a topology
    first = place(board, Mesh.of({"pp": 2, "dp": 8, "tp": 4}), spares=8)
    after = place(board, first.mesh, previous=first, health={"tray-03": Fitness.BAD})
    after.moves                                              # who moved where, and why

`rackrun.topology.placement.objective.Terms` defines what is better, and `rackrun.topology.placement.solver` finds it.
docs/topology.md explains both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rackrun.protocol.ids import Rank, SlotId
from rackrun.topology.model.errors import DoesNotFit, TopologyError
from rackrun.topology.model.mesh import Ints, Mesh
from rackrun.topology.model.racks import GpuLocation, Topology
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.objective import NOWHERE, Fitness, PlacementInput, Terms, score
from rackrun.topology.placement.slot_assignment import preference
from rackrun.topology.placement.solver import nearness, solve

__all__ = ["Fitness", "Move", "Placement", "as_seated", "place"]


class Move(NamedTuple):
    """A rank that changed its slot."""

    rank: Rank
    source: SlotId | None
    """None when the rank had no slot of this topology."""
    target: SlotId
    why: str


@dataclass(frozen=True, eq=False)
class Placement:
    """The slot of every rank, and the order of the spares. Equal when the `content_id` is."""

    question: PlacementInput = field(repr=False)
    seats: Ints = field(repr=False)
    """The slot of each rank, as numbered by `PlacementArrays`: int64[world_size]."""

    @property
    def board(self) -> PlacementArrays:
        return self.question.board

    @property
    def mesh(self) -> Mesh:
        return self.question.mesh

    @cached_property
    def slots(self) -> tuple[SlotId, ...]:
        """The slot of each rank, by name."""
        return tuple(map(self.board.slots.__getitem__, self.seats.tolist()))

    @cached_property
    def spares(self) -> tuple[SlotId, ...]:
        """Slots that are free, not bad and preflighted: the healthier first, then in the order of slots.

        For the spares of one rank, see `spares_for`.
        """
        free, question = self._free, self.question
        order = free[np.lexsort((free, question.lemons[free], question.states[free]))]
        return tuple(map(self.board.slots.__getitem__, order.tolist()))

    @cached_property
    def terms(self) -> Terms:
        return score(self.question, self.seats)

    @cached_property
    def content_id(self) -> str:
        """sha256 of the mesh, the slot of each rank and the order of the spares, as hex.

        Two agents that agree have the same one.
        """
        mesh = " ".join(f"{name}={size}{'*' * (name in self.mesh.bound)}" for name, size in self.mesh.axes)
        return hashlib.sha256("\n".join((mesh, *self.slots, "", *self.spares)).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.content_id == other.content_id

    def __hash__(self) -> int:
        return int(self.content_id[:15], 16)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Which ranks moved since the previous placement. Empty when there was none."""
        previous = self.question.previous
        if previous is None:
            return ()
        names = self.board.slots
        return tuple(
            Move(
                Rank(rank),
                names[previous[rank]] if previous[rank] != NOWHERE else None,
                names[self.seats[rank]],
                self._why(rank),
            )
            for rank in np.flatnonzero(previous != self.seats).tolist()
        )

    @cached_property
    def rank_on(self) -> dict[SlotId, Rank]:
        return {slot: Rank(rank) for rank, slot in enumerate(self.slots)}

    def spares_for(self, rank: int) -> tuple[SlotId, ...]:
        """Return the spares that may take ``rank`` over, in the order in which they are used.

        For a rank in a bound group: the spares of its clique, best and nearest first. For any other rank: all spares;
        among equally healthy ones those of its clique come first, then those near its neighbours.
        """
        question, board, free = self.question, self.board, self._free
        here = int(board.clique[self.seats[rank]])
        asked = PlacementInput(board, self.mesh, question.states, question.lemons, previous=self.seats)
        if self.mesh.group_size > 1:
            free = free[board.clique[free] == here]
            order = free[np.lexsort(preference(asked, rank, free))]
        else:
            cliques = board.clique[free]
            every = np.arange(len(board.cliques))
            pp, dp = (found[cliques] for found in nearness(asked, board.clique[self.seats], rank, every))
            room = np.bincount(cliques, minlength=len(board.cliques))[cliques]
            inside = preference(asked, rank, board.members[here])[1:3]
            gap, other = (_spread(board, key, here, free) for key in inside)
            lemons, states = question.lemons[free], question.states[free]
            best = np.full(len(board.cliques), np.iinfo(np.int64).max)
            np.minimum.at(best, cliques, states * 2**32 + lemons)
            order = free[
                np.lexsort((free, gap, other, lemons, cliques, best[cliques], -room, dp, pp, cliques != here, states))
            ]
        return tuple(map(board.slots.__getitem__, order.tolist()))

    def explain(self, rank: int) -> list[str]:
        """Return a few lines of text: where ``rank`` is, why, and which spares would take over.

        Raises `TopologyError`.
        """
        if not 0 <= rank < self.mesh.world_size:
            raise TopologyError(
                f"there is no rank {rank} among {self.mesh.world_size}.",
                remedy=f"name a rank from 0 to {self.mesh.world_size - 1}.",
            )
        lines = [*self.where(rank), self._since(rank)]
        if (lemons := int(self.question.lemons[self.seats[rank]])) > 0:
            lines.append(f"Its slot has {lemons} lemon points.")
        spares = self.spares_for(rank)
        shown = ", ".join(spares[:4]) + (f" and {len(spares) - 4} more" if len(spares) > 4 else "")
        if spares:
            lines.append(f"If it is lost: {shown}.")
        elif self.mesh.group_size > 1:
            lines.append("If it is lost, its clique has no spare: the whole group moves, if another clique has room.")
        else:
            lines.append("If it is lost, there is no spare.")
        lines.append(f"The whole placement: {self.terms}.")
        return lines

    def where(self, rank: int) -> list[str]:
        """Return two lines of text: where ``rank`` is, and with which ranks it is bound."""
        seat = self.board.topology.seats[int(self.seats[rank])]
        coordinate = ", ".join(f"{name} {at}" for name, at in self.mesh.coordinate(rank))
        return [f"rank {rank} ({coordinate}) sits on {seat.slot}: {_place(seat)}.", self._group(rank)]

    # -- reasons
    def _group(self, rank: int) -> str:
        mesh = self.mesh
        if mesh.group_size == 1:
            return "It is bound to no other rank."
        ranks = mesh.groups[mesh.group_of[rank]]
        cliques = {self.board.cliques[at] for at in self.board.clique[self.seats[ranks]].tolist()}
        named = ", ".join(str(one) for one in ranks[:8].tolist()) + (" ..." if len(ranks) > 8 else "")
        where = "one clique" if len(cliques) == 1 else f"{len(cliques)} cliques: NVLink does not join them"
        return f"Its {' x '.join(mesh.bound)} group is the {len(ranks)} ranks {named}: all in {where}."

    def _since(self, rank: int) -> str:
        if self.question.previous is None:
            return "Nothing was placed before."
        if self.question.previous[rank] != self.seats[rank]:
            return f"It moved: {self._why(rank)}."
        if self.question.states[self.seats[rank]] == Fitness.AVOID:
            return "It stays, on a slot that is on its way out: no better one is free."
        return "It stays where it was."

    def _why(self, rank: int) -> str:
        question, board = self.question, self.board
        assert question.previous is not None
        old, new = int(question.previous[rank]), int(self.seats[rank])
        if old == NOWHERE:
            return "it had no slot of this topology"
        before = question.previous_cliques[self.mesh.group_of[rank]]
        if self.mesh.group_size > 1 and before == NOWHERE:
            return "its group was not inside one clique"
        if self.mesh.group_size > 1 and before != board.clique[new]:
            usable = int((question.states[board.members[before]] < Fitness.BAD).sum())
            return f"its group leaves clique {board.cliques[before]}, which has {usable} usable slots left"
        fault = "lost" if question.states[old] == Fitness.BAD else "on its way out"
        return f"{board.slots[old]} is {fault}"

    @cached_property
    def _free(self) -> Ints:
        free = self.question.states < Fitness.BAD
        free[self.seats] = False
        return np.flatnonzero(free)


def place(
    topology: Topology | PlacementArrays,
    mesh: Mesh,
    *,
    spares: int = 0,
    health: Mapping[str, Fitness] | None = None,
    preflighted: Collection[str] | None = None,
    lemons: Mapping[str, int] | None = None,
    previous: Placement | Sequence[SlotId] | None = None,
    allow_cross_clique: bool = False,
) -> Placement:
    """Return a placement: the slot of every rank.

    topology: a `PlacementArrays` of it saves the time to read it, which is most of a repair's.
    spares: slots of each NVLink domain that are held back at first, whole trays before single slots; bad ones count as
        held back. With a ``previous`` placement they may be used.
    health, lemons: by slot, or by tray for all of its slots; the worse value counts. Slots that are not named are
        usable.
    preflighted: slots or trays that may be used; None for all. A slot that a rank is on has passed.
    previous: a placement, or the slots of all ranks; an unknown name, such as "", means that the rank has no slot.
        Ranks that can stay, stay.
    allow_cross_clique: also place groups that fit into no clique, with their ranks near each other. They will be slow.

    Raises `DoesNotFit` when there is no room, and `TopologyError` for unknown slots.
    """
    board = topology if isinstance(topology, PlacementArrays) else PlacementArrays(topology)
    before = _previous(board, mesh, previous)
    states, points = np.zeros(len(board.slots), np.int64), np.zeros(len(board.slots), np.int64)
    if preflighted is not None:
        states[:] = Fitness.BAD
        for name in preflighted:
            states[_slots_of(board, name)] = Fitness.USABLE
        if before is not None:
            states[before[before != NOWHERE]] = Fitness.USABLE
    for name, fitness in (health or {}).items():
        at = _slots_of(board, name)
        states[at] = np.maximum(states[at], int(fitness))
    for name, count in (lemons or {}).items():
        at = _slots_of(board, name)
        points[at] = np.maximum(points[at], count)
    question = PlacementInput(board, mesh, states, points, before, spares, allow_cross_clique)
    seats = solve(question)
    for array in (states, points, seats):
        array.flags.writeable = False
    return Placement(question, seats)


def as_seated(board: PlacementArrays, mesh: Mesh, slots: Sequence[SlotId]) -> Placement:
    """Return the ranks of ``mesh`` on ``slots`` as they are; nothing is chosen."""
    nothing = np.zeros(len(board.slots), np.int64)
    seats = np.array([board.number[slot] for slot in slots], np.int64)
    for array in (nothing, seats):
        array.flags.writeable = False
    return Placement(PlacementInput(board, mesh, nothing, nothing), seats)


def place_first(
    board: PlacementArrays,
    mesh: Mesh,
    *,
    spares: int,
    health: Mapping[str, Fitness] | None = None,
    allow_cross_clique: bool = False,
) -> Placement:
    """Place from nothing, with ``spares`` slots held back over all NVLink domains, evenly, where there is room.

    A bound group may need all of a domain, such as the eight GPUs of a host; then whole domains are spare. Raises
    `DoesNotFit`.
    """
    each = spares // len(dict.fromkeys(board.domain.tolist()))
    while True:
        try:
            return place(board, mesh, spares=each, health=health, allow_cross_clique=allow_cross_clique)
        except DoesNotFit:
            if not each:
                raise
            each -= 1


def _previous(board: PlacementArrays, mesh: Mesh, previous: Placement | Sequence[SlotId] | None) -> Ints | None:
    if previous is None:
        return None
    if isinstance(previous, Placement) and previous.board is board and previous.mesh == mesh:
        return previous.seats
    slots = previous.slots if isinstance(previous, Placement) else tuple(previous)
    found = np.array([board.number.get(slot, NOWHERE) for slot in slots], np.int64)
    taken = found[found != NOWHERE]
    if len(slots) != mesh.world_size or len(np.unique(taken)) != len(taken):
        raise TopologyError(
            f"the previous placement does not fit the mesh: it places {len(slots)} ranks on {len(np.unique(taken))} different slots "
            f"of the topology, and the mesh has {mesh.world_size} ranks.",
            remedy="give one slot for each rank of the mesh, or no previous placement.",
        )
    return found


def _slots_of(board: PlacementArrays, name: str) -> list[int]:
    if name in board.tray_slots:
        return board.tray_slots[name]
    if name in board.number:
        return [board.number[SlotId(name)]]
    raise TopologyError(
        f"{name!r} is neither a slot nor a tray of the topology.", remedy="name it as the topology does."
    )


def _spread(board: PlacementArrays, key: Ints, clique: int, slots: Ints) -> Ints:
    """Extend a key of a clique's members to any slots: 0 outside the clique."""
    every = np.zeros(len(board.slots), np.int64)
    every[board.members[clique]] = key
    return every[slots]


def _place(seat: GpuLocation) -> str:
    return f"rack {seat.rack.serial}, tray {seat.tray.index}, GPU {seat.gpu.index}, clique {seat.clique}"
