"""Checks whether an operator's request is allowed in the job's present state, and why not."""

from __future__ import annotations

from dataclasses import dataclass

from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.policy.choice import allows
from rackrun.core.recovery.recovery import Recovery
from rackrun.core.requests.pending_requests import PendingSwap, Request, RequestRefused, nearest
from rackrun.protocol.events import SwapRequested
from rackrun.protocol.ids import SlotId, TrayId, slot_id, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.topology.placement.objective import Fitness

__all__ = ["HELD", "STEPS_MIN", "Admission"]

HELD = "all ranks wait in a hold, and no step boundary comes"
STEPS_MIN = 2
"""Number of steps before which no rank pauses, because it is not known yet which ranks are replicas of each other."""


@dataclass(slots=True)
class Admission:
    """Checks of requests. Every method raises `RequestRefused` if the request is not allowed, and changes nothing."""

    config: JobConfig
    world: World
    rack: RackMachine
    recovery: Recovery
    under_way: list[Request]

    def check_not_over(self) -> None:
        """Check that the job is not about to end."""
        if because := self.world.ending():
            raise RequestRefused("over", f"the job is about to end ({because})", "see rackctl status.")

    def check_may(self, rung: Rung, steps: int) -> None:
        """Check that all ranks may be paused for this rung: a swap or a shrink."""
        self.check_not_over()
        if not allows(self.world.policy.rules, rung):
            what = "swaps" if rung is Rung.SWAP else "the world to shrink"
            raise RequestRefused(
                "policy", f"the job's policy forbids {what}", "allow it (rackctl policy), or stop the job."
            )
        if not self.world.elastic and steps == 0 and self.world.phase is not Phase.FORMING:
            what = "its script has not come to @rackrun.elastic: ranks of a plain script can neither be replaced in place nor leave"
            raise RequestRefused(
                "plain", what, "ask again when it trains; a plain script can only be stopped (rackctl stop)."
            )
        if steps < STEPS_MIN or self.world.phase is Phase.FORMING:
            raise RequestRefused(
                "early", f"the job has done {steps} steps, and no rank pauses before {STEPS_MIN}", "ask again soon."
            )

    def check_not_held(self, remedy: str) -> None:
        """Check that all ranks do not wait in a hold. Requests that take effect at a step boundary would wait as long."""
        if self.recovery.hold.holds:
            raise RequestRefused("taken", HELD, remedy)

    def slots_of(self, target: str) -> tuple[SlotId, ...]:
        """Return the slots of a tray or slot that is given by name."""
        tray = self.rack.trays.get(TrayId(target))
        if tray is not None:
            return tuple(slot_id(tray.tray, index) for index in range(tray.slots))
        if target in self.rack.slots():
            return (SlotId(target),)
        raise RequestRefused(
            "unknown", f"there is no tray and no slot {target}", nearest(target, [*self.rack.trays, *self.rack.slots()])
        )

    def swap_of(self, event: SwapRequested) -> PendingSwap:
        """Return the swap that the event asks for."""
        record = self.world.members.get(event.rank)
        if not 0 <= event.rank < self.world.size:
            raise RequestRefused(
                "unknown", f"there are ranks 0 to {self.world.size - 1}, and no rank {event.rank}", "name one of them."
            )
        if record is None or any(isinstance(one, PendingSwap) and one.rank == event.rank for one in self.under_way):
            raise RequestRefused("taken", f"rank {event.rank} is being replaced already", "wait until that is done.")
        if event.to:
            self._check_waits(SlotId(event.to))
        return PendingSwap(event.request, event.rank, record.worker, self.world.size, SlotId(event.to))

    def _check_waits(self, slot: SlotId) -> None:
        """Raise `RequestRefused` if no usable spare waits in this slot."""
        if slot not in self.rack.slots():
            raise RequestRefused("unknown", f"there is no slot {slot}", nearest(slot, self.rack.slots()))
        record = self.rack.occupants.get(slot)
        against = (
            self.rack.withdrawn(slot) or "; ".join(self.rack.devices.unfit(slot)) or self.rack.devices.because(slot)
        )
        if record is None or not record.alive or record.rank is not None:
            there = (
                f"rank {record.rank} is there"
                if record is not None and record.rank is not None
                else "nobody waits there"
            )
            raise RequestRefused(
                "taken", f"{slot} cannot take it: {there}{f' ({against})' if against else ''}", self._spares()
            )
        if slot not in self._fit():
            raise RequestRefused("unfit", f"{slot} cannot take it: {against}", self._spares())
        if slot in self.recovery.wishes.values():
            raise RequestRefused("taken", f"{slot} is to take another rank", self._spares())

    def _spares(self) -> str:
        fit = self._fit()
        return f"name one of {', '.join(fit[:4])}." if fit else "wait for a spare."

    def returning(self, target: str) -> tuple[SlotId, ...]:
        """Return the slots of ``target`` that become usable again."""
        known = [slot for slot in self.rack.drained if target in (slot, tray_of(slot))]
        slots = tuple(known) or self.slots_of(target)
        departing = [tray for tray in dict.fromkeys(map(tray_of, slots)) if tray in self.rack.departing]
        if departing:
            raise RequestRefused(
                "taken",
                f"{departing[0]} is told to leave ({self.rack.departing[departing[0]]})",
                "start another agent.",
            )
        held = [slot for slot in slots if self.rack.quarantined(slot) or self.rack.devices.on_probation(slot)]
        if not known and not held:
            raise RequestRefused("taken", f"{target} is not drained", "see rackctl status for what is.")
        devices = self.rack.devices
        unfit = {
            slot: "; ".join(devices.unfit(slot)) or devices.because(slot)
            for slot in slots
            if devices.unfit(slot) or devices.fitness(slot) is Fitness.BAD
        }
        if unfit:
            told = ", ".join(f"{slot} ({why})" for slot, why in unfit.items())
            rest = [slot for slot in slots if slot not in unfit]
            raise RequestRefused(
                "unfit", f"not fit: {told}", f"repair it{f', or return {rest[0]} alone' if rest else ''}."
            )
        return slots

    def _fit(self) -> list[SlotId]:
        return [record.worker.slot for record in self.rack.fit_spares()]
