"""How many micro-batches each data-parallel rank computes, and when that changes: at one step, for all.

A deal comes over the control thread, to every rank at its own time. Each says in its gates whether it has heard of the next one; when
all have, the unit after that gate is the first of the new shares. Who does not see that gate pass does not change: its generation is
over then, and the next begins with the shares of its plan.
"""

from __future__ import annotations

__all__ = ["Deals"]


class Deals:
    """Of one generation. Whoever changes it holds the world's lock, but for `take_effect`, which the main thread calls."""

    def __init__(self) -> None:
        self.shares: tuple[int, ...] = ()
        """As `Plan.shares`."""
        self._number = self._agreed = 0
        self._heard: dict[int, tuple[int, ...]] = {}

    def begin(self, shares: tuple[int, ...]) -> None:
        """A generation, with these."""
        self.shares = shares
        self._number = self._agreed = 0
        self._heard = {}

    def hear(self, number: int, shares: tuple[int, ...]) -> None:
        if number > self._agreed:
            self._heard[number] = shares

    @property
    def heard_next(self) -> bool:
        """Of the deal after the last one that all have agreed on."""
        return self._agreed + 1 in self._heard

    def agree(self) -> None:
        """All ranks have heard of the next."""
        self._agreed += 1

    def take_effect(self) -> None:
        """Between two units: what was agreed on."""
        while self._number < self._agreed:
            self._number += 1
            self.shares = self._heard.pop(self._number)
