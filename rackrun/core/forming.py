"""From the first tray to a world: who is waited for, and which slots the ranks get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rackrun.core.commands import Command, Notice, SetTimer
from rackrun.core.config import JobConfig
from rackrun.core.events import TrayJoined
from rackrun.core.ids import Rank, slot_id
from rackrun.core.rack import RackMachine
from rackrun.core.seating import Seating
from rackrun.core.triage import Triage
from rackrun.core.world import Phase, World
from rackrun.topology.errors import TopologyError

__all__ = ["Forming"]


class _Stop(Protocol):
    def __call__(self, exit_code: int, because: str, *, remedy: str = "") -> None: ...


@dataclass(slots=True)
class Forming:
    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    triage: Triage
    emit: Callable[[Command], None]
    launch: Callable[[str], None]
    stop: _Stop

    def joined(self, event: TrayJoined) -> None:
        """One tray more, before the world is formed."""
        joined = len(self.rack.trays)
        if joined >= self.config.trays_max:
            self._form()
        elif joined >= self.config.trays_min:
            self.emit(SetTimer(name=f"last-call:{joined}", at_ms=event.at_ms + self.config.last_call_ms))

    def joined_late(self, event: TrayJoined) -> None:
        """What it tells of itself must not contradict what is known; else nobody starts there."""
        try:
            self._learn(event)
        except TopologyError as error:
            self.emit(Notice(text=f"{event.tray} is not used: {error}"))
            for index in range(event.slots):
                self.rack.devices.checked(slot_id(event.tray, index), (error.what,))

    def timer(self, kind: str) -> None:
        if self.world.phase is not Phase.FORMING:
            return
        wanted, joined = self.config.trays_min, len(self.rack.trays)
        if kind == "last-call" and joined >= wanted:
            self._form()
        elif kind == "join" and joined < wanted:  # else the last call is under way
            self.stop(
                3,
                f"{wanted - joined} of {wanted} trays missing after {self.config.join_timeout_ms} ms ({joined} joined)",
                remedy="start the missing agents, lower --nnodes, or raise join_timeout_ms.",
            )

    def _learn(self, *joined: TrayJoined) -> None:
        self.seating.learn(joined)
        self.triage.learn(self.seating.cliques())

    def _form(self) -> None:
        trays, spares = self.rack.trays, self.config.spares
        slots = sum(joined.slots for joined in trays.values())
        size = self.seating.world_size(spares)
        if spares >= slots:
            because = f"{spares} spares, but only {slots} slots on {len(trays)} trays: nobody would train"
            self.stop(2, because, remedy="hold back fewer spares (--spares), or start more workers a tray.")
            return
        if size > slots - spares:
            because = f"the mesh has {size} ranks, but {slots} slots without {spares} spares are too few"
            self.stop(2, because, remedy="make the mesh smaller (--mesh), hold back fewer spares, or start more trays.")
            return
        try:
            self._learn(*trays.values())
            ranks = self.seating.first(spares)
        except TopologyError as error:
            self.stop(2, error.what, remedy=error.remedy)
            return
        self.world.size = size
        self.world.spares = slots - size
        self.world.seats = {Rank(rank): slot for rank, slot in enumerate(ranks)}
        self.launch(f"{len(trays)} trays joined: {size} ranks, {self.world.spares} spares")
