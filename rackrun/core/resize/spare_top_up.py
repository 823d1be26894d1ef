"""Start of spares in free slots while all train, before they are needed."""

from __future__ import annotations

from dataclasses import dataclass

from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import World
from rackrun.core.members.rack import RackMachine
from rackrun.core.policy.measured_costs import CostMeter
from rackrun.core.resize.acquiring import RackAcquisition
from rackrun.protocol.commands import SetTimer, StartWorker
from rackrun.protocol.ids import SlotId, tray_of
from rackrun.protocol.timers import RecoverySettled

__all__ = ["SETTLE_MS_MAX", "SETTLE_STEPS", "SpareTopUp"]

SETTLE_STEPS, SETTLE_MS_MAX = 2, 5_000
"""Number of steps after a recovery, and longest time in milliseconds, in which no spare is started."""


@dataclass(slots=True)
class SpareTopUp:
    """Starts spares in the background."""

    world: World
    rack: RackMachine
    acquiring: RackAcquisition
    cost_meter: CostMeter
    out: Outbox
    _settled_ms: int = 0
    """Time until which no spare starts."""

    def rest(self, at_ms: int) -> None:
        """Start no spare beside the first steps, because all compute again."""
        first_steps_ms = round((self.cost_meter.costs(0).step_s or 0) * 1e3) * SETTLE_STEPS
        self._settled_ms = at_ms + min(first_steps_ms, SETTLE_MS_MAX)
        if self._settled_ms > at_ms:
            self.out.emit(SetTimer(timer=RecoverySettled(self.world.generation), at_ms=self._settled_ms))

    def top_up(self, at_ms: int) -> None:
        """Start spares in free slots, so that they are ready before they are needed.

        None is started beside the first steps after a recovery, because a start takes processors and memory that these
        need.
        """
        if at_ms < self._settled_ms or not self.rack.has_vacant_slots:
            return
        wanted = self.world.spares + self.world.full - self.world.size
        short = max(wanted - len(self.rack.spares()), self.acquiring.spares_short(), 0)
        for slot in self.acquiring.own_first(self.rack.free_slots())[:short]:
            self.out.emit(self.start_spare(slot))

    def start_spare(self, slot: SlotId) -> StartWorker:
        """Return the command that starts a spare.

        Its provisional rank is the lowest on its own tray, which it may well have to replace. Its generation is that of
        the last plan, never one that is being decided, so that the next plan is newer for every worker.
        """
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
