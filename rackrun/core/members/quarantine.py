"""Slots that lose one worker after another by hangs, errors or failed starts: left out for a while, and tried again.

Not every such loss is the slot's fault: the script may hang, or the network, and then healthy hardware would run out. So a slot is left
out for a pause that doubles with every further loss, and what it has lost is forgotten once a worker there has trained for long. Kills
from outside are not counted at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rackrun.protocol.ids import SlotId

__all__ = ["HEALTHY_MS", "PAUSE_MS", "PAUSE_MS_MAX", "QUARANTINE_LOSSES", "Quarantine"]

QUARANTINE_LOSSES = 3
"""A slot that has lost so many workers is left out."""
PAUSE_MS, PAUSE_MS_MAX = 30_000, 3_600_000
"""For so long; after each further loss twice as long, and an hour at the most."""
HEALTHY_MS = 600_000
"""A worker that has held a rank there for so long shows that the slot is in order: its former losses count no more."""


@dataclass(slots=True)
class Quarantine:
    faults: dict[SlotId, int] = field(default_factory=dict)
    """Losses that count."""
    until_ms: dict[SlotId, int] = field(default_factory=dict)
    """Slots that are left out, and until when; `lift` lets them in again."""
    _trains_since: dict[SlotId, int] = field(default_factory=dict)
    _new: list[SlotId] = field(default_factory=list)

    def trains(self, slots: Iterable[SlotId], at_ms: int) -> None:
        """Workers there hold ranks, and go on computing."""
        for slot in slots:
            self._trains_since.setdefault(slot, at_ms)

    def left(self, slot: SlotId) -> None:
        """By whoever was there."""
        self._trains_since.pop(slot, None)

    def blame(self, slot: SlotId, at_ms: int) -> None:
        """A worker was lost there, before `left`."""
        since = self._trains_since.get(slot)
        if since is not None and at_ms - since >= HEALTHY_MS:
            self.faults.pop(slot, None)
        count = self.faults[slot] = self.faults.get(slot, 0) + 1
        if count >= QUARANTINE_LOSSES:
            self.until_ms[slot] = at_ms + min(PAUSE_MS << min(count - QUARANTINE_LOSSES, 16), PAUSE_MS_MAX)
            self._new.append(slot)

    def take_new(self) -> list[tuple[SlotId, int]]:
        """Who was left out since this was asked last, and until when: somebody is to set a timer."""
        found = [(slot, self.until_ms[slot]) for slot in dict.fromkeys(self._new) if slot in self.until_ms]
        self._new.clear()
        return found

    def lift(self, slot: SlotId, at_ms: int) -> bool:
        """The pause is over, if no other has begun since. Whether it is."""
        over = self.until_ms.get(slot, at_ms + 1) <= at_ms
        if over:
            del self.until_ms[slot]
        return over

    def forgive(self, slot: SlotId) -> bool:
        """A person says that it is in order. Whether anything was counted."""
        self.until_ms.pop(slot, None)
        return self.faults.pop(slot, 0) > 0
