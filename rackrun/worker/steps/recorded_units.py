"""Keeps the recent steps and phases, which may have to be done again: all since the oldest state that this rank may go
back to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rackrun.protocol.ids import Position
from rackrun.worker.steps.step import Step

__all__ = ["RecordedUnits", "RecordedUnit"]


@dataclass(frozen=True)
class RecordedUnit:
    """One step or phase as the script has called it."""

    at: Position
    body: Callable[[Step], Any]
    name: str = ""
    """A phase's name; "" for a step."""
    in_body: bool = False
    """Whether the loop's body has called this phase."""


class RecordedUnits:
    """Units in ascending order of position. Each step uses it and there may be thousands of units between two
    snapshots, so no method visits all of them."""

    def __init__(self) -> None:
        self._units: deque[RecordedUnit] = deque()

    def append(self, unit: RecordedUnit) -> None:
        """Add ``unit``, which must be later than all others."""
        self._units.append(unit)

    def first_after(self, passed: Position) -> RecordedUnit | None:
        """Return the first unit after ``passed``, or None."""
        found = None
        for unit in reversed(self._units):
            if unit.at <= passed:
                break
            found = unit
        return found

    def any_after(self, at: Position) -> bool:
        """Whether a unit later than ``at`` is recorded."""
        return bool(self._units) and self._units[-1].at > at

    def keep_after(self, oldest: Position | None) -> None:
        """Drop the units up to ``oldest``, because no rank goes back further. None drops all."""
        while self._units and (oldest is None or self._units[0].at <= oldest):
            self._units.popleft()

    def __len__(self) -> int:
        return len(self._units)
