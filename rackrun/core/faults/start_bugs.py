"""Whether the script fails in the same way on all ranks before the first step, so that a new start would fail again.

A single rank that fails may have a bad host: the world starts again without it. So the first failure waits for the
others, for a limited time, and only as long as none of them has come further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rackrun.core.faults.script_bug import fingerprint, is_scripts
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import World
from rackrun.core.members.workers import Loss, WorkerState
from rackrun.protocol.commands import SetTimer
from rackrun.protocol.ids import Rank
from rackrun.protocol.timers import StartsGathered

__all__ = ["StartBugs"]

START_GATHER_MS = 10_000
"""Milliseconds for which other ranks' failures are awaited after the first."""
_NO_PROGRAM = (126, 127)
"""Exit codes of a program that cannot be run or does not exist."""


@dataclass(slots=True)
class StartBugs:
    """Gathers failures before the first step."""

    world: World
    out: Outbox
    losses: dict[Rank, Loss] = field(default_factory=dict)
    """Ranks that failed by themselves in this start."""

    def forget(self) -> None:
        self.losses.clear()

    def waits(self, losses: Sequence[Loss], at_ms: int) -> bool:
        """Record failures. Return whether they may be the script's and other ranks should be waited for."""
        if not all(self._may_be(loss) for loss in losses):
            return False
        first = not self.losses
        for loss in losses:
            rank = loss.record.rank
            assert rank is not None
            self.losses[rank] = loss
        if len({self._mark(loss) for loss in self.losses.values()}) > 1:
            return False
        others = [self.world.members[rank] for rank in self.world.members if rank not in self.losses]
        if any(other.state is not WorkerState.STARTING for other in others):
            return False
        if others and first:
            self.out.emit(SetTimer(timer=StartsGathered(self.world.generation), at_ms=at_ms + START_GATHER_MS))
        return bool(others)

    @property
    def alike(self) -> bool:
        """Whether all ranks have failed in the same way."""
        return len(self.losses) == self.world.size and len({self._mark(loss) for loss in self.losses.values()}) == 1

    def because(self) -> str:
        """Return the reason for stopping the job."""
        loss = self.losses[min(self.losses)]
        ranks = f"all {self.world.size} ranks" if self.world.size > 1 else "the script"
        message = f": {loss.failure.message}" if loss.failure is not None and loss.failure.message else ""
        return f"{ranks} failed alike before the first step, with {self._mark(loss)}{message}"

    def _may_be(self, loss: Loss) -> bool:
        """Return whether a loss may be the script's bug.

        In a plain script only failures in which other ranks had no part count; later failures are answered as torchrun
        does.
        """
        event = loss.exit
        if event is None or not is_scripts(event) or (event.exit_code == 0 and event.failure is None):
            return False
        return self.world.elastic or event.early or event.exit_code in _NO_PROGRAM

    def _mark(self, loss: Loss) -> str:
        assert loss.exit is not None
        return fingerprint(loss.exit)
