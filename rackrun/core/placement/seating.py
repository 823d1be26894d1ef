"""Which slot each rank takes: by the topology, if trays have reported one, else by the order of slots.

`rackrun.topology.placement.rank_assignment.place` decides, from the present assignment and what is known about each
slot. This module asks it at the start, when ranks are lost, when a rank should leave its slot, and when the world
begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rackrun.core.members.rack import RackMachine
from rackrun.core.members.slot_order import split
from rackrun.protocol.events import TrayJoined
from rackrun.protocol.ids import Rank, SlotId
from rackrun.protocol.job_config import JobConfig
from rackrun.topology.model.errors import DoesNotFit
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.objective import Fitness
from rackrun.topology.placement.rank_assignment import Placement, as_seated, place, place_first
from rackrun.topology.sources.partial_topology import FoundGpu, FoundTray, PartialTopology, merge

__all__ = ["Seating", "Takeovers"]

_partials = msgspec.json.Decoder(list[PartialTopology])


class Takeovers(NamedTuple):
    """The slots of spares that take over ranks."""

    seats: dict[Rank, SlotId]
    """For each rank to replace, the slot of the spare that takes over."""
    uprooted: dict[Rank, str]
    """Those of the ranks that are alive, and why they move: their group leaves its clique as a whole."""


@dataclass(slots=True)
class Seating:
    """Assigns ranks to slots."""

    config: JobConfig
    rack: RackMachine
    mesh: Mesh | None = None
    """The mesh; None: every rank is on its own."""
    board: PlacementArrays | None = None
    """The topology; None: nothing but the trays' names is known."""
    edition: int = 0
    """Changes whenever ``board`` changes."""
    _told: dict[str, TrayJoined] = field(default_factory=dict)
    """All trays that have ever joined. A rank's last slot may be on a tray that is lost."""

    def __post_init__(self) -> None:
        if self.config.mesh:
            self.mesh = Mesh.of(dict(self.config.mesh))

    def learn(self, joined: Iterable[TrayJoined]) -> None:
        """Add the topology of trays. Raises `TopologyError` if the trays contradict each other, and then changes
        nothing."""
        told = dict(self._told)
        for event in joined:
            before = told.get(event.tray)
            if before is not None and not event.topology:  # the driver does not answer; the tray has not moved
                event = msgspec.structs.replace(event, topology=before.topology)  # noqa: PLW2901
            told[event.tray] = event
        if any(event.topology for event in told.values()):
            self.edition += 1
            self.board = PlacementArrays(merge(partial for event in told.values() for partial in _known(event)))
        self._told = told

    def cliques(self) -> dict[str, CliqueId]:
        """Return the NVLink clique of each tray, as far as known. A tray that is divided among several counts for its
        first."""
        if self.board is None:
            return {}
        board = self.board
        return {tray: board.cliques[int(board.clique[slots[0]])] for tray, slots in board.tray_slots.items() if slots}

    def racks(self) -> dict[str, str]:
        """Return the chassis serial number of each tray's rack, as far as known."""
        return (
            {} if self.board is None else {name: rack.serial for name, (rack, _) in self.board.topology.trays.items()}
        )

    # -- the first seats
    def first(self, spares: int, *, hoping: bool = False) -> tuple[SlotId, ...]:
        """Return the slot of each rank for a world that begins. Raises `DoesNotFit`.

        At least ``spares`` slots are held back. With ``hoping``, GPUs that are unfit now but may recover count as fit.
        """
        trays = {tray: joined.slots for tray, joined in self.rack.trays.items()}
        slots = sum(trays.values())
        if self.board is None:
            return split(trays, slots - self.mesh.world_size if self.mesh else spares)[0]
        return place_first(
            self.board,
            self.mesh or Mesh.of({"dp": slots - spares}),
            spares=spares,
            health=self._health(hoping=hoping),
            allow_cross_clique=self.config.cross_clique,
        ).slots

    def world_size(self, spares: int) -> int:
        """Return the world size with this many spares."""
        slots = sum(joined.slots for joined in self.rack.trays.values())
        return self.mesh.world_size if self.mesh else slots - spares

    def adopt(self, mesh: Mesh, seats: Mapping[Rank, SlotId]) -> str:
        """Use the script's mesh, which is reported when ranks already have their slots. Return which of its groups
        spans several cliques; "": none."""
        self.mesh = mesh
        if self.board is None:
            return ""
        board = self.board
        for group in mesh.groups.tolist():
            slots = [board.number[slot] for rank in group if (slot := seats[Rank(rank)]) in board.number]
            cliques = {board.cliques[int(board.clique[slot])] for slot in slots}
            if len(cliques) > 1:
                return (
                    f"the {' x '.join(mesh.bound)} group of ranks {', '.join(map(str, group))} sits in {len(cliques)} cliques "
                    f"({', '.join(map(str, sorted(cliques)))}): NVLink does not join them"
                )
        return ""

    def where(self, seats: Mapping[Rank, SlotId], rank: Rank) -> list[str]:
        """Describe in two lines where ``rank`` is and which ranks it is bound to."""
        slots = [seats[one] for one in sorted(seats)]
        mesh = self.mesh or Mesh.of({"dp": len(slots)})
        if self.board is not None and all(slot in self.board.number for slot in slots):
            return as_seated(self.board, mesh, slots).where(rank)
        coordinate = ", ".join(f"{name} {at}" for name, at in mesh.coordinate(rank))
        what = "Nobody has told of NVLink cliques." if self.board is None else "Some ranks' slots are there no more."
        return [f"rank {rank} ({coordinate}) sits on {seats[rank]}.", what]

    # -- later
    def staff(
        self,
        seats: Mapping[Rank, SlotId],
        lost: Collection[Rank],
        ready: Collection[SlotId],
        wishes: Mapping[Rank, SlotId] | None = None,
    ) -> Takeovers | None:
        """Choose the spares that take over for ``lost``; None if ``ready`` has too few, or none in the right clique.

        ``wishes`` holds the spares that an operator named for ranks; each is used if possible.
        """
        if not lost:
            return Takeovers({}, {})
        named = {rank: slot for rank, slot in (wishes or {}).items() if rank in lost and slot in ready}
        if named:
            left = [slot for slot in ready if slot not in named.values()]
            seated = _exchanged(seats, named)
            others = self.staff(seated, [rank for rank in lost if rank not in named], left)
            if others is not None and self._in_clique({**seated, **others.seats}, named):
                return Takeovers({**named, **others.seats}, others.uprooted)
        ready = dict.fromkeys(ready)
        if self.board is None:
            spares = [record for record in self.rack.fit_spares() if record.worker.slot in ready]
            chosen = self.rack.choose({rank: seats[rank] for rank in lost}, spares)
            taken = {rank: record.worker.slot for rank, record in chosen.items()}
            return Takeovers(taken, {}) if len(taken) == len(lost) else None
        health: dict[str, Fitness] = {slot: self.rack.devices.fitness(slot) for slot in ready}
        health |= {seats[rank]: Fitness.BAD for rank in lost if seats[rank] not in ready}
        found = self._place(seats, health, ready)
        if found is None:
            return None
        moves = {move.rank: move for move in found.moves}
        taken = {rank: seats[rank] for rank in lost} | {rank: move.target for rank, move in moves.items()}
        return Takeovers(taken, {rank: move.why for rank, move in moves.items() if rank not in lost})

    def _in_clique(self, seats: Mapping[Rank, SlotId], ranks: Iterable[Rank]) -> bool:
        """Return whether each of ``ranks`` is in its bound group's clique, or groups may span cliques."""
        board, mesh = self.board, self.mesh
        if board is None or mesh is None or self.config.cross_clique:
            return True
        number, clique = board.number, board.clique
        groups = [mesh.groups[mesh.group_of[rank]].tolist() for rank in ranks]
        return all(
            len({int(clique[number[seats[Rank(one)]]]) for one in group if seats[Rank(one)] in number}) == 1
            for group in groups
        )

    def bundles(self, ready: Iterable[SlotId]) -> list[list[SlotId]]:
        """Divide ready slots into new bound groups, each inside one clique. Slots that do not fill a group are left
        out."""
        size = self.mesh.group_size if self.mesh is not None else 1
        board = None if self.config.cross_clique else self.board
        cliques: dict[int, list[SlotId]] = {}
        for slot in ready:
            if board is None or slot in board.number:
                cliques.setdefault(0 if board is None else int(board.clique[board.number[slot]]), []).append(slot)
        return [
            of[at : at + size] for _, of in sorted(cliques.items()) for at in range(0, len(of) // size * size, size)
        ]

    def leaving(self, seats: Mapping[Rank, SlotId], ready: Collection[SlotId]) -> dict[Rank, SlotId]:
        """Return the ranks on failing slots for which a better slot is ready, with the ranks that have to move with
        them, and their new slots."""
        devices = self.rack.devices
        if devices.all_usable or all(devices.fitness(slot) is Fitness.USABLE for slot in seats.values()):
            return {}
        if self.board is None:
            spares = [record for record in self.rack.ready_spares() if record.worker.slot in ready]
            better = [spare for spare in spares if devices.fitness(spare.worker.slot) is Fitness.USABLE]
            failing = {rank: slot for rank, slot in seats.items() if devices.fitness(slot) is not Fitness.USABLE}
            return {rank: spare.worker.slot for rank, spare in self.rack.choose(failing, better).items()}
        found = self._place(seats, {slot: devices.fitness(slot) for slot in (*seats.values(), *ready)}, ready)
        return {move.rank: move.target for move in found.moves} if found else {}

    def again(self, seats: Mapping[Rank, SlotId], *, hoping: bool = False) -> dict[Rank, SlotId] | None:
        """Return a slot for every rank of a restart, its own if that lives; None if there are too few. ``hoping`` is as
        in `first`."""
        if self.board is None:
            return self.rack.seats(seats, hoping=hoping)
        health = self._health(hoping=hoping)
        usable = [slot for slot in self.rack.slots() if health.get(slot) is not Fitness.BAD]
        try:
            found = self._ask([seats[rank] for rank in sorted(seats)], health, usable)
        except DoesNotFit:
            return None
        return {Rank(rank): slot for rank, slot in enumerate(found.slots)}

    def _place(
        self, seats: Mapping[Rank, SlotId], health: Mapping[str, Fitness], ready: Collection[SlotId]
    ) -> Placement | None:
        try:
            return self._ask([seats[rank] for rank in sorted(seats)], health, ready)
        except DoesNotFit:
            return None

    def _ask(self, previous: list[SlotId], health: Mapping[str, Fitness], ready: Collection[SlotId]) -> Placement:
        assert self.board is not None
        known = self.board.number  # a tray may have come back with fewer slots than before
        return place(
            self.board,
            self.mesh or Mesh.of({"dp": len(previous)}),
            health={slot: fitness for slot, fitness in health.items() if slot in known},
            preflighted=[slot for slot in ready if slot in known],
            lemons={str(slot): count for slot, count in self.rack.quarantine.faults.items() if slot in known},
            previous=previous,
            allow_cross_clique=self.config.cross_clique,
        )

    def _health(self, *, hoping: bool) -> dict[str, Fitness]:
        """Return the fitness of every slot of the topology, for a world that begins."""
        assert self.board is not None
        return {slot: self._fitness(slot, hoping=hoping) for slot in self.board.slots}

    def _fitness(self, slot: SlotId, *, hoping: bool) -> Fitness:
        devices = self.rack.devices
        taken = devices.may_be_taken(slot) or (hoping and devices.may_come(slot))
        if not (taken and self.rack.lives(slot)) or self.rack.withdrawn(slot):
            return Fitness.BAD
        return max(devices.fitness(slot), Fitness.AVOID) if self.rack.quarantined(slot) else devices.fitness(slot)


def _exchanged(seats: Mapping[Rank, SlotId], named: Mapping[Rank, SlotId]) -> dict[Rank, SlotId]:
    """Return the seats after the ``named`` ranks have moved to their slots.

    A spare may be in the slot that a lost rank had. That rank gets the slot that becomes free, so that each rank has
    one.
    """
    by_slot = {slot: rank for rank, slot in named.items()}
    out = {**seats, **named}
    for rank in [rank for rank in seats if rank not in named]:
        while out[rank] in by_slot:
            out[rank] = seats[by_slot[out[rank]]]
    return out


def _known(event: TrayJoined) -> list[PartialTopology]:
    """Return what a tray has reported, with a placeholder GPU for each slot that it reported nothing about."""
    partials = _partials.decode(event.topology) if event.topology else []
    there = {gpu.index for partial in partials for tray in partial.trays for gpu in tray.gpus}
    missing = tuple(
        FoundGpu(index=index, uuid=f"{event.tray}/{index}") for index in range(event.slots) if index not in there
    )
    if missing:
        tray = FoundTray(host=event.tray, gpus=missing)
        partials.append(PartialTopology(kind="rack file", where=f"{event.tray} itself", trays=(tray,)))
    return partials
