"""Forming the world: how many trays are waited for, and which slots the ranks get."""

from __future__ import annotations

from dataclasses import dataclass

from rackrun.core.faults.triage import Triage
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import Phase, World
from rackrun.core.lifecycle.beginning import WorldStart
from rackrun.core.members.rack import RackMachine
from rackrun.core.placement.seating import Seating
from rackrun.protocol.commands import Notice, SetTimer
from rackrun.protocol.events import TrayJoined
from rackrun.protocol.ids import Rank
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import JoinGraceOver, UnfitWaitOver
from rackrun.topology.model.errors import DoesNotFit, TopologyError

__all__ = ["WorldForming"]

_REMEDY = "repair these GPUs, leave them out (CUDA_VISIBLE_DEVICES), or start more trays."


@dataclass(slots=True)
class WorldForming:
    """Waits for trays, and launches the world when there are enough."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    triage: Triage
    out: Outbox
    beginning: WorldStart
    end: JobEnd
    _waits: str = ""
    """Why the ranks have no slots yet. GPUs that are unfit now may become fit and change that."""

    def joined(self, event: TrayJoined) -> None:
        """Handle a tray that joined before the world is formed."""
        joined = len(self.rack.trays)
        if joined >= self.config.trays_max:
            self._form(event.at_ms)
        elif joined >= self.config.trays_min:
            self.out.emit(SetTimer(timer=JoinGraceOver(joined), at_ms=event.at_ms + self.config.last_call_ms))

    def joined_late(self, event: TrayJoined) -> None:
        """Handle a tray that joined after the world was formed. If its topology contradicts the known one, the tray is
        not used."""
        try:
            self._learn(event.at_ms, event)
        except TopologyError as error:
            self.out.emit(Notice(text=f"{event.tray} is not used: {error}"))
            self.rack.devices.refuse(event.tray, event.slots, error.what)

    def form_if_possible(self, at_ms: int) -> None:
        """Try to form the world again, because a GPU has become fit or unfit."""
        if self._waits:
            self._form(at_ms)

    def last_call_over(self, at_ms: int) -> None:
        """Form the world without waiting for further trays."""
        if self.world.phase is Phase.FORMING and len(self.rack.trays) >= self.config.trays_min:
            self._form(at_ms)

    def fit_over(self) -> None:
        """Stop the job, because too many GPUs are still unfit."""
        if self.world.phase is Phase.FORMING and self._waits:
            because = f"{self._waits}; for {self.config.join_timeout_ms} ms not fit: {self.rack.unfit()}"
            self.end.stop(3, because, remedy=_REMEDY)

    def join_over(self) -> None:
        """Stop the job if trays are missing. Otherwise the last call is running."""
        wanted, joined = self.config.trays_min, len(self.rack.trays)
        if self.world.phase is Phase.FORMING and joined < wanted:
            named = "".join(f"{', ' if number else ': '}{tray}" for number, tray in enumerate(sorted(self.rack.trays)))
            self.end.stop(
                3,
                f"{wanted - joined} of {wanted} trays missing after {self.config.join_timeout_ms} ms ({joined} joined{named})",
                remedy="start the missing agents, lower --nnodes, or raise join_timeout_ms.",
            )

    def _learn(self, at_ms: int, *joined: TrayJoined) -> None:
        self.seating.learn(joined)
        self.triage.learn(self.seating.cliques(), at_ms)

    def _form(self, at_ms: int) -> None:
        trays, spares = self.rack.trays, self.config.spares
        try:
            self._learn(at_ms, *trays.values())
        except TopologyError as error:
            self.end.stop(2, error.what, remedy=error.remedy)
            return
        slots = sum(joined.slots for joined in trays.values())
        size = self.seating.world_size(spares)
        if spares >= slots:
            because = f"{spares} spares, but only {slots} slots on {len(trays)} trays: nobody would train"
            self.end.stop(2, because, remedy="hold back fewer spares (--spares), or start more workers a tray.")
            return
        if size > slots - spares:
            because = f"the mesh has {size} ranks, but {slots} slots without {spares} spares are too few"
            self.end.stop(
                2, because, remedy="make the mesh smaller (--mesh), hold back fewer spares, or start more trays."
            )
            return
        try:
            ranks = self.seating.first(spares)
        except DoesNotFit as error:
            if self._may_fit(spares):
                self._wait(error.what.rstrip("."), at_ms)
            else:
                self.end.stop(2, error.what, remedy=error.remedy)
            return
        self.world.size = self.world.full = size
        self.world.spares = slots - size
        self.world.seats = {Rank(rank): slot for rank, slot in enumerate(ranks)}
        self._waits = ""
        self.beginning.launch(f"{len(trays)} trays joined: {size} ranks, {self.world.spares} spares")

    def _may_fit(self, spares: int) -> bool:
        try:
            self.seating.first(spares, hoping=True)
        except DoesNotFit:
            return False
        return True

    def _wait(self, what: str, at_ms: int) -> None:
        if not self._waits:
            self.out.emit(SetTimer(timer=UnfitWaitOver(), at_ms=at_ms + self.config.join_timeout_ms))
        self._waits = what
        self.triage.awaits(what)
