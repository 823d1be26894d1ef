"""What is started while all train: a spare in each slot that is free, before one is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rackrun.core.generation.world import World
from rackrun.core.members.rack import RackMachine
from rackrun.core.policy.measured_costs import Meter
from rackrun.core.resize.acquiring import Acquiring
from rackrun.protocol.commands import Command, SetTimer, StartWorker
from rackrun.protocol.ids import SlotId, tray_of

__all__ = ["CALM_MS_MAX", "CALM_STEPS", "Background"]

CALM_STEPS, CALM_MS_MAX = 2, 5_000
"""After a recovery nothing is started beside so many steps, or for so long."""


@dataclass(slots=True)
class Background:
    world: World
    rack: RackMachine
    acquiring: Acquiring
    meter: Meter
    emit: Callable[[Command], None]
    _calm_ms: int = 0
    """Until then nothing starts."""

    def rest(self, at_ms: int) -> None:
        """All compute again: nothing beside the first steps."""
        first_steps_ms = round((self.meter.costs(0).step_s or 0) * 1e3) * CALM_STEPS
        self._calm_ms = at_ms + min(first_steps_ms, CALM_MS_MAX)
        if self._calm_ms > at_ms:
            self.emit(SetTimer(name=f"calm:{self.world.generation}", at_ms=self._calm_ms))

    def top_up(self, at_ms: int) -> None:
        """Spares start in the background, in the slots that are free: what training loses is replaced before it is
        needed. Not beside the first steps after a recovery: a start takes processors and memory that these are short of."""
        if at_ms < self._calm_ms or not self.rack.has_vacant_slots:
            return
        wanted = self.world.spares + self.world.full - self.world.size
        short = max(wanted - len(self.rack.spares()), self.acquiring.spares_short(), 0)
        for slot in self.acquiring.own_first(self.rack.free_slots())[:short]:
            self.emit(self.start_spare(slot))

    def start_spare(self, slot: SlotId) -> StartWorker:
        """Its provisional rank is one that it may well have to replace: the first on its own tray. Its generation is
        that of the last plan, never the one that is being decided: the next plan is newer for everyone."""
        plan = self.world.plan
        assert plan is not None, "spares start after the first plan"
        return self.rack.start(
            slot,
            self.world.first_on(tray_of(slot)),
            spare=True,
            world_size=self.world.size,
            generation=plan.generation,
            store=self.rack.store(plan.store),
            restarts=self.world.restarts,
        )
