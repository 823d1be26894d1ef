"""Holds how many micro-batches each data-parallel rank computes, and changes that at the same step on all ranks.

The command with new shares (`rackrun.protocol.commands.DealShards`) reaches each rank at a different time. Each rank
says in its gates whether it has received the next change. When all have, the unit after that gate is the first with the
new shares. A rank that does not see the gate pass does not change: its generation is over then, and the next begins
with the shares of its plan."""

from __future__ import annotations

__all__ = ["ShareChanges"]


class ShareChanges:
    """The changes of shares in one generation, numbered from 1. Callers hold the world's lock, except for
    `take_effect`, which the main thread calls."""

    def __init__(self) -> None:
        self.shares: tuple[int, ...] = ()
        """The current shares (see `GenerationPlan.shares`)."""
        self._number = self._agreed = 0
        self._received: dict[int, tuple[int, ...]] = {}

    def begin(self, shares: tuple[int, ...]) -> None:
        """Begin a generation with ``shares``."""
        self.shares = shares
        self._number = self._agreed = 0
        self._received = {}

    def receive(self, number: int, shares: tuple[int, ...]) -> None:
        """Record a change that was received, unless all ranks have agreed on it already."""
        if number > self._agreed:
            self._received[number] = shares

    @property
    def has_next(self) -> bool:
        """Whether the change after the last one that all ranks have agreed on was received."""
        return self._agreed + 1 in self._received

    def agree(self) -> None:
        """Record that all ranks have received the next change."""
        self._agreed += 1

    def take_effect(self) -> None:
        """Switch to the newest shares that were agreed on. Called between two units."""
        while self._number < self._agreed:
            self._number += 1
            self.shares = self._received.pop(self._number)
