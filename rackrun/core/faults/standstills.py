"""Response to trays that stand still: people are told, and a tray that does so repeatedly is the last choice for ranks.

A tray that stood still for less than its lease has lost nothing: its ranks wait for it, and go on. But every rank of the
job waits with them. So the slots of a tray that stands still repeatedly are put on probation, as those of slow ranks
are: its ranks leave at a step boundary when better slots have spares that are ready, and nobody comes there who has
another choice. ``rackctl return`` ends that. A tray that stands still for longer than its lease is lost instead.

If most trays stand still as often (several on one host, a hypervisor or a file system that all use), no tray is the
cause, and none is put on probation: no other would be a better choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from rackrun.core.generation.facts import Facts, HardwareChanged
from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.gpu_fitness import ProbationCause
from rackrun.core.members.rack import RackMachine
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import TrayStoodStill
from rackrun.protocol.ids import SlotId, TrayId

__all__ = ["STANDSTILLS_MAX", "WITHIN_MS", "Standstills"]

STANDSTILLS_MAX = 3
"""Number of standstills within `WITHIN_MS` after which the slots of a tray are put on probation."""
WITHIN_MS = 600_000
_MINUTES = WITHIN_MS // 60_000
_SHARE = 0.5
"""Share of all trays. If more have stood still about as often, none is put on probation."""


@dataclass(slots=True)
class Standstills:
    """Counts how often each tray stood still."""

    rack: RackMachine
    out: Outbox
    facts: Facts

    def stood_still(self, event: TrayStoodStill) -> None:
        """Handle a report that a live tray stood still."""
        tray = event.tray
        self.rack.standstills_ms[tray] = [*self._recent(tray, event.at_ms), event.at_ms]
        times, more, leave = len(self.rack.standstills_ms[tray]), "", list[SlotId]()
        if times >= STANDSTILLS_MAX and len(self.rack.trays) > 1:
            more, leave = self._judge(tray, event.at_ms)
        if times <= STANDSTILLS_MAX or leave:  # people know of the others
            self.out.emit(
                Notice(
                    text=f"{tray} stood still for {event.for_ms / 1e3:.1f} s and goes on; its ranks are not blamed for "
                    "that time. Its host was suspended, migrated or stalled by its hypervisor, or its processes were "
                    f"frozen: look there{more}"
                )
            )
        for slot in leave:
            why = f"its tray stood still {times} times within {_MINUTES} minutes"
            self.rack.devices.put_on_probation(slot, ProbationCause.STANDSTILLS, why)
        if leave:
            self.facts.add(HardwareChanged())

    def _judge(self, tray: TrayId, at_ms: int) -> tuple[str, list[SlotId]]:
        """Return what else people are told about a tray that stands still repeatedly, and which of its slots to put on
        probation.

        The reports of trays that stand still together come one after another, so others may be one behind.
        """
        trays = self.rack.trays
        alike = [one for one in trays if one == tray or len(self._recent(one, at_ms)) >= STANDSTILLS_MAX - 1]
        if len(alike) > _SHARE * len(trays):
            why = f"{len(alike)} of {len(trays)} trays did so as often within {_MINUTES} minutes"
            return f". {why}: a common cause is likely, and no rank leaves for it", []
        devices, cause = self.rack.devices, ProbationCause.STANDSTILLS
        slots = [slot for slot in self.rack.slots_on(tray) if not devices.on_probation(slot, cause)]
        return f". It was not the first time in {_MINUTES} minutes: its slots are the last choice now", slots

    def _recent(self, tray: TrayId, at_ms: int) -> list[int]:
        return [then for then in self.rack.standstills_ms.get(tray, ()) if at_ms - then < WITHIN_MS]
