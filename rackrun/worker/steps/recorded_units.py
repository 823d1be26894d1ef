"""Steps and phases that may have to be done again: all since the oldest state that this rank may go back to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rackrun.protocol.ids import Position
from rackrun.worker.steps.step import Step

__all__ = ["Recorded", "Unit"]


@dataclass(frozen=True)
class Unit:
    """A step or a phase, as the script has it."""

    at: Position
    body: Callable[[Step], Any]
    name: str = ""
    """Of a phase."""


class Recorded:
    """Units in their order. There may be thousands, from one snapshot to the next, and each step asks: nothing here looks at all of them."""

    def __init__(self) -> None:
        self._units: deque[Unit] = deque()

    def append(self, unit: Unit) -> None:
        """Later than all others."""
        self._units.append(unit)

    def first_after(self, passed: Position) -> Unit | None:
        found = None
        for unit in reversed(self._units):
            if unit.at <= passed:
                break
            found = unit
        return found

    def any_after(self, at: Position) -> bool:
        return bool(self._units) and self._units[-1].at > at

    def keep_after(self, oldest: Position | None) -> None:
        """Nobody goes back further than to ``oldest``. None: nobody goes back."""
        while self._units and (oldest is None or self._units[0].at <= oldest):
            self._units.popleft()

    def __len__(self) -> int:
        return len(self._units)
