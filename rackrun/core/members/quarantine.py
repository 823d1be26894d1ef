"""Quarantine of slots that lose one worker after another by hangs, errors or failed starts.

Not every such loss is the slot's fault: the script or the network may hang, and healthy hardware must not run out for
that. So a slot is left out for a pause that doubles with every further loss. Its losses are forgotten once a worker has
trained there for long (`HEALTHY_MS`). Kills from outside are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rackrun.protocol.ids import SlotId

__all__ = ["HEALTHY_MS", "PAUSE_MS", "PAUSE_MS_MAX", "QUARANTINE_LOSSES", "Quarantine"]

QUARANTINE_LOSSES = 3
"""Number of counted losses from which on a slot is quarantined."""
PAUSE_MS, PAUSE_MS_MAX = 30_000, 3_600_000
"""Length of the first quarantine and the longest one, in milliseconds. Each further loss doubles it."""
HEALTHY_MS = 600_000
"""A worker that has held a rank in a slot for this many milliseconds shows that the slot works; its earlier losses no
longer count."""


@dataclass(slots=True)
class Quarantine:
    """Counts losses for each slot and decides which slots are left out, and until when."""

    faults: dict[SlotId, int] = field(default_factory=dict)
    """Counted losses of each slot."""
    until_ms: dict[SlotId, int] = field(default_factory=dict)
    """For each quarantined slot, the time at which its quarantine ends; `lift` removes it then."""
    _trains_since: dict[SlotId, int] = field(default_factory=dict)
    new: list[SlotId] = field(default_factory=list)
    """Slots whose quarantine has begun and that `take_new` has not returned."""

    def trains(self, slots: Iterable[SlotId], at_ms: int) -> None:
        """Record that workers in these slots hold ranks and compute."""
        for slot in slots:
            self._trains_since.setdefault(slot, at_ms)

    def left(self, slot: SlotId) -> None:
        """Record that a slot's worker has left it."""
        self._trains_since.pop(slot, None)

    def blame(self, slot: SlotId, at_ms: int) -> None:
        """Count the loss of a worker against its slot. Call it before `left`."""
        since = self._trains_since.get(slot)
        if since is not None and at_ms - since >= HEALTHY_MS:
            self.faults.pop(slot, None)
        count = self.faults[slot] = self.faults.get(slot, 0) + 1
        if count >= QUARANTINE_LOSSES:
            self.until_ms[slot] = at_ms + min(PAUSE_MS << min(count - QUARANTINE_LOSSES, 16), PAUSE_MS_MAX)
            self.new.append(slot)

    def take_new(self) -> list[tuple[SlotId, int]]:
        """Return the slots quarantined since the last call, with the time each ends. The caller sets timers for
        them."""
        found = [(slot, self.until_ms[slot]) for slot in dict.fromkeys(self.new) if slot in self.until_ms]
        self.new.clear()
        return found

    def lift(self, slot: SlotId, at_ms: int) -> bool:
        """End a slot's quarantine if its time is over, unless a newer one has begun. Return whether it ended."""
        over = self.until_ms.get(slot, at_ms + 1) <= at_ms
        if over:
            del self.until_ms[slot]
        return over

    def forgive(self, slot: SlotId) -> bool:
        """Forget a slot's losses, because an operator says that it works. Return whether any were counted."""
        self.until_ms.pop(slot, None)
        return self.faults.pop(slot, 0) > 0
