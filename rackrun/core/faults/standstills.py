"""Response to trays that stand still: people are told, and a tray that does so repeatedly is the last choice for ranks.

A tray that stood still for less than its lease has lost nothing: its ranks wait for it, and go on. But every rank of the
job waits with them. So the slots of a tray that stands still repeatedly are put on probation, as those of slow ranks
are: its ranks leave at a step boundary when better slots have spares that are ready, and nobody comes there who has
another choice. ``rackctl return`` ends that. A tray that stands still for longer than its lease is lost instead.

Nobody waits for an agent that stood still alone, while its workers ran. That is told, and not counted.

Trays that stand still together report it one after another. Their reports are gathered for a moment and told in one
notice. If most trays stand still as often (several on one host, a hypervisor or a file system that all use), no tray is
the cause, and none is put on probation: no other would be a better choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rackrun.core.generation.facts import Facts, HardwareChanged
from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.gpu_fitness import ProbationCause
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.slot_order import natural
from rackrun.protocol.commands import Notice, SetTimer
from rackrun.protocol.events import TrayStoodStill
from rackrun.protocol.ids import SlotId, TrayId
from rackrun.protocol.timers import StandstillsGathered

__all__ = ["GATHER_MS", "STANDSTILLS_MAX", "WITHIN_MS", "Standstills"]

GATHER_MS = 1_000
"""Milliseconds from the first report until all that have come are told together."""
STANDSTILLS_MAX = 3
"""Number of standstills within `WITHIN_MS` after which the slots of a tray are put on probation."""
WITHIN_MS = 600_000
_SHARE = 0.5
"""Share of all trays. If more have stood still about as often, none is put on probation."""
_NAMED_MAX = 4
"""Most trays that a notice names."""
_MINUTES = f"within {WITHIN_MS // 60_000} minutes"
_LAST_CHOICE = "its ranks leave them when better slots have spares that are ready"


@dataclass(slots=True)
class Standstills:
    """Counts how often each tray stood still."""

    rack: RackMachine
    out: Outbox
    facts: Facts
    _untold: dict[TrayId, TrayStoodStill] = field(default_factory=dict)
    """The reports that are being gathered."""

    def stood_still(self, event: TrayStoodStill) -> None:
        """Handle a report that a live tray stood still."""
        tray, alone = event.tray, event.workers_ran is True
        recent = [one for one in self.rack.standstills.get(tray, ()) if event.at_ms - one[0] < WITHIN_MS]
        self.rack.standstills[tray] = [*recent, (event.at_ms, alone)]
        if not self._untold:
            self.out.emit(SetTimer(timer=StandstillsGathered(), at_ms=event.at_ms + GATHER_MS))
        self._untold[tray] = event

    def gathered(self, at_ms: int) -> None:
        """Tell people of the reports that have come, and put the slots of trays that stand still repeatedly on
        probation."""
        untold, self._untold = self._untold, {}
        live = [untold[tray] for tray in sorted(untold, key=natural) if tray in self.rack.trays]
        for ran in (False, None, True):
            if alike := [event for event in live if event.workers_ran is ran]:
                self._handle(alike, ran, at_ms)

    def _handle(self, events: Sequence[TrayStoodStill], ran: bool | None, at_ms: int) -> None:
        """Handle the reports of trays whose workers ran (``ran``: as in `TrayStoodStill.workers_ran`)."""
        told, further, leave = list[TrayStoodStill](), dict[str, list[TrayId]](), dict[SlotId, str]()
        for event in events:
            times = self._times(event.tray, at_ms, alone=ran is True)
            slots, text = ([], "") if ran else self._judge(event.tray, times, at_ms)
            leave |= dict.fromkeys(slots, f"its tray stood still {times} times {_MINUTES}")
            if times <= STANDSTILLS_MAX or slots:  # people know of the others
                told.append(event)
                if text:
                    further.setdefault(text, []).append(event.tray)
        if told:
            more = [
                f" {text}" if len(trays) == len(told) else f" Of {self._named(trays)}: {text}"
                for text, trays in further.items()
            ]
            self.out.emit(Notice(text=f"{self._answer_again(told)}. {_what_is_known(ran)}{''.join(more)}"))
        for slot, why in leave.items():
            self.rack.devices.put_on_probation(slot, ProbationCause.STANDSTILLS, why)
        if leave:
            self.facts.add(HardwareChanged())

    def _judge(self, tray: TrayId, times: int, at_ms: int) -> tuple[list[SlotId], str]:
        """Return which slots of a tray that has stood still so many times to put on probation, and what people are told
        about it."""
        trays, devices, cause = self.rack.trays, self.rack.devices, ProbationCause.STANDSTILLS
        if times < STANDSTILLS_MAX - 1 or len(trays) == 1:
            return [], ""
        # reports that are not gathered together may leave others one behind
        alike = [one for one in trays if one == tray or self._times(one, at_ms, alone=False) >= STANDSTILLS_MAX - 1]
        if len(alike) > _SHARE * len(trays):
            often = f"{len(alike)} of {len(trays)} trays did so as often {_MINUTES}"
            return [], f"{often}: a common cause is likely, and no rank leaves for it."
        if times < STANDSTILLS_MAX:
            again = f"{times} times {_MINUTES} now: after {STANDSTILLS_MAX} its slots are on probation"
            return [], f"{again}, and {_LAST_CHOICE}."
        slots = [slot for slot in self.rack.slots_on(tray) if not devices.on_probation(slot, cause)]
        again = f"{times} times {_MINUTES} now: its slots are on probation, the last choice until rackctl return"
        return slots, f"{again}, and {_LAST_CHOICE}."

    def _times(self, tray: TrayId, at_ms: int, *, alone: bool) -> int:
        """Return how often a tray stood still lately. ``alone``: how often only its agent did."""
        known = self.rack.standstills.get(tray, ())
        return sum(only == alone and at_ms - then < WITHIN_MS for then, only in known)

    def _answer_again(self, events: Sequence[TrayStoodStill]) -> str:
        shortest, longest = (of(event.for_ms for event in events) / 1e3 for of in (min, max))
        span = f"{shortest:.1f} s" if f"{shortest:.1f}" == f"{longest:.1f}" else f"{shortest:.1f} to {longest:.1f} s"
        if len(events) == 1:
            return f"the agent of {events[0].tray} did not answer for {span}, and does again"
        return f"the agents of {self._named([event.tray for event in events])} did not answer for {span}, and do again"

    def _named(self, trays: Sequence[TrayId]) -> str:
        if len(trays) == len(self.rack.trays) > 1:
            return f"all {len(trays)} trays"
        more = f" and {len(trays) - _NAMED_MAX} more" if len(trays) > _NAMED_MAX else ""
        return ", ".join(trays[:_NAMED_MAX]) + more


def _what_is_known(ran: bool | None) -> str:
    if ran:
        return "The workers there went on: only the agent was stopped or held up, and no rank waited for it."
    where = "suspended, migrated or stalled by its hypervisor, or the processes were frozen or stopped"
    if ran is None:
        return (
            "Whether the workers there went on is not known; they are not blamed for that time. Only the agent was "
            f"stopped or held up, or its host was {where}."
        )
    return f"The workers there stood still with it, and are not blamed for that time. The host was {where}: look there."
