"""Back-off between attempts to grow the world after failed ones.

A newcomer may die each time (when memory runs out, it is the process that the kernel kills), or there may be no state
for it. Every attempt costs all ranks a pause, so each failed one doubles the time until the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.workers import WorkerRecord
from rackrun.protocol.commands import Notice, SetTimer, Worker
from rackrun.protocol.ids import BEGIN, Position
from rackrun.protocol.timers import GrowthDue

__all__ = ["PAUSE_MS", "PAUSE_MS_MAX", "PROVEN_STEPS", "GrowthBackoff"]

PAUSE_MS, PAUSE_MS_MAX = 10_000, 3_600_000
"""Milliseconds until the next attempt after the first failed one, and the longest time. Each failure doubles it."""
PROVEN_STEPS = 3
"""Number of steps after which a worker that joined counts as in."""


@dataclass(slots=True)
class GrowthBackoff:
    """Counts failed attempts to grow."""

    out: Outbox
    _failed: int = 0
    """Number of consecutive failed attempts."""
    _due_ms: int = 0
    _joined: dict[Worker, None] = field(default_factory=dict)
    """Workers that joined with the latest growth, until it is known whether it succeeded."""
    _since: Position = BEGIN

    def may(self, at_ms: int) -> bool:
        """Return whether the world may grow now."""
        return at_ms >= self._due_ms

    def forget(self) -> None:
        """Allow growth at once, because an operator asked for it."""
        self._failed = self._due_ms = 0

    def joined(self, workers: Collection[Worker], committed: Position) -> None:
        """Record the workers that join after ``committed``."""
        self._joined, self._since = dict.fromkeys(workers), committed

    def let_go(self, workers: Collection[Worker]) -> None:
        """Forget workers that leave again without a fault."""
        self._joined = {worker: None for worker in self._joined if worker not in workers}

    def broken(self, members: Collection[WorkerRecord], committed: Position, at_ms: int) -> None:
        """Judge the latest growth at the end of a generation: it failed if a worker that joined was lost before
        `PROVEN_STEPS` steps."""
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
        """Count a failed attempt, and set the time of the next."""
        self._failed += 1
        pause_ms = min(PAUSE_MS << min(self._failed - 1, 16), PAUSE_MS_MAX)
        self._due_ms = at_ms + pause_ms
        times = f"{self._failed} times in a row" if self._failed > 1 else "once"
        self.out.emit(Notice(text=f"growing has failed {times}: {why}; not again for {pause_ms // 1000} s"))
        self.out.emit(SetTimer(timer=GrowthDue(self._due_ms), at_ms=self._due_ms))
