"""Response to trays that stand still: people are told, and a tray that does so repeatedly is the last choice for ranks.

A tray that stood still for less than its lease has lost nothing: its ranks wait for it, and go on. But every rank of the
job waits with them. So the slots of a tray that stands still repeatedly are put on probation, as those of slow ranks
are: its ranks leave at a step boundary when better slots have spares that are ready, and nobody comes there who has
another choice. ``rackctl return`` ends that. A tray that stands still for longer than its lease is lost instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.generation.facts import Facts, HardwareChanged
from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.gpu_fitness import ProbationCause
from rackrun.core.members.rack import RackMachine
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import TrayStoodStill
from rackrun.protocol.ids import TrayId

__all__ = ["STANDSTILLS_MAX", "WITHIN_MS", "Standstills"]

STANDSTILLS_MAX = 3
"""Number of standstills within `WITHIN_MS` after which the slots of a tray are put on probation."""
WITHIN_MS = 600_000


@dataclass(slots=True)
class Standstills:
    """Counts how often each tray stood still."""

    rack: RackMachine
    out: Outbox
    facts: Facts
    _at_ms: dict[TrayId, list[int]] = field(default_factory=dict)
    """For each tray, when its latest standstills were reported, oldest first."""

    def stood_still(self, event: TrayStoodStill) -> None:
        """Handle a report that a live tray stood still."""
        tray = event.tray
        recent = [at_ms for at_ms in self._at_ms.get(tray, ()) if event.at_ms - at_ms < WITHIN_MS] + [event.at_ms]
        self._at_ms[tray] = recent[-STANDSTILLS_MAX:]
        text = (
            f"{tray} stood still for {event.for_ms / 1e3:.1f} s and goes on; its ranks are not blamed for that time. "
            "Its host was suspended, migrated or stalled by its hypervisor, or its processes were frozen: look there"
        )
        repeats = len(recent) >= STANDSTILLS_MAX
        if repeats:
            text += f". It was not the first time in {WITHIN_MS // 60_000} minutes: its slots are the last choice now"
        self.out.emit(Notice(text=text))
        if repeats:
            for slot in self.rack.slots_on(tray):
                self.rack.devices.put_on_probation(slot, ProbationCause.STANDSTILLS, _why(len(recent)))
            self.facts.add(HardwareChanged())

    def forget(self, tray: TrayId) -> None:
        """Forget a lost tray."""
        self._at_ms.pop(tray, None)


def _why(times: int) -> str:
    return f"its tray stood still {times} times within {WITHIN_MS // 60_000} minutes"
