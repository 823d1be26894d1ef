"""When the world lets others join: not at once again, where it has come to nothing.

A newcomer may die each time (it is the process that the kernel ends when memory runs out), or there may be no state that it could
have. Every attempt costs all ranks a pause, so each one that fails doubles the time until the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rackrun.core.members.workers import WorkerRecord
from rackrun.protocol.commands import Command, Notice, SetTimer, Worker
from rackrun.protocol.ids import BEGIN, Position

__all__ = ["PAUSE_MS", "PAUSE_MS_MAX", "PROVEN_STEPS", "Growth"]

PAUSE_MS, PAUSE_MS_MAX = 10_000, 3_600_000
"""After the first attempt that fails, and at the most."""
PROVEN_STEPS = 3
"""Who has taken part in so many is in."""


@dataclass(slots=True)
class Growth:
    emit: Callable[[Command], None]
    _failed: int = 0
    """Attempts in a row."""
    _due_ms: int = 0
    _joined: dict[Worker, None] = field(default_factory=dict)
    """With the last growth, until it is known whether they are in."""
    _since: Position = BEGIN

    def may(self, at_ms: int) -> bool:
        return at_ms >= self._due_ms

    def forget(self) -> None:
        """A person wants it now."""
        self._failed = self._due_ms = 0

    def joined(self, workers: Collection[Worker], committed: Position) -> None:
        self._joined, self._since = dict.fromkeys(workers), committed

    def let_go(self, workers: Collection[Worker]) -> None:
        """They leave again, and nothing is wrong with them."""
        self._joined = {worker: None for worker in self._joined if worker not in workers}

    def broken(self, members: Collection[WorkerRecord], committed: Position, at_ms: int) -> None:
        """A generation has ended after ``committed``. Who of those that had joined is no member did so for nothing?"""
        if not self._joined:
            return
        alive = {record.worker for record in members}
        lost = [worker.slot for worker in self._joined if worker not in alive]
        if committed.step >= self._since.step + PROVEN_STEPS:
            self._joined.clear()
            self._failed = 0
        elif lost:
            self._joined.clear()
            self.came_to_nothing(f"{', '.join(lost)} joined, and was lost before {PROVEN_STEPS} steps were done", at_ms)

    def came_to_nothing(self, why: str, at_ms: int) -> None:
        self._failed += 1
        pause_ms = min(PAUSE_MS << min(self._failed - 1, 16), PAUSE_MS_MAX)
        self._due_ms = at_ms + pause_ms
        times = f"{self._failed} times in a row" if self._failed > 1 else "once"
        self.emit(Notice(text=f"growing has failed {times}: {why}; not again for {pause_ms // 1000} s"))
        self.emit(SetTimer(name=f"grow:{self._due_ms}", at_ms=self._due_ms))
