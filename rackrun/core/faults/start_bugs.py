"""Does the script fail on all ranks alike, before the first step? Then it is the script's, and a new start would fail again.

A single rank that fails may have been unlucky with its host: the world starts again without it. So the first failure waits for the others, as
long as none of them has come further, and not for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rackrun.core.faults.script_bug import fingerprint, is_scripts
from rackrun.core.generation.world import World
from rackrun.core.members.workers import Loss, WorkerState
from rackrun.protocol.commands import Command, SetTimer
from rackrun.protocol.ids import Rank

__all__ = ["StartBugs"]

START_GATHER_MS = 10_000
_NO_PROGRAM = (126, 127)
"""Exit codes of a program that cannot be run, or is not there."""


@dataclass(slots=True)
class StartBugs:
    world: World
    emit: Callable[[Command], None]
    losses: dict[Rank, Loss] = field(default_factory=dict)
    """Of this start: ranks that failed by themselves."""

    def forget(self) -> None:
        self.losses.clear()

    def waits(self, losses: Sequence[Loss], at_ms: int) -> bool:
        """Whether the failures so far may be the script's, and others are to be heard first."""
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
            self.emit(SetTimer(name=f"bugs:{self.world.generation}", at_ms=at_ms + START_GATHER_MS))
        return bool(others)

    @property
    def alike(self) -> bool:
        """All ranks have failed, and in the same way."""
        return len(self.losses) == self.world.size and len({self._mark(loss) for loss in self.losses.values()}) == 1

    def because(self) -> str:
        loss = self.losses[min(self.losses)]
        ranks = f"all {self.world.size} ranks" if self.world.size > 1 else "the script"
        message = f": {loss.failure.message}" if loss.failure is not None and loss.failure.message else ""
        return f"{ranks} failed alike before the first step, with {self._mark(loss)}{message}"

    def _may_be(self, loss: Loss) -> bool:
        """Of a plain script only what other ranks have no part in: what comes later is answered as torchrun does."""
        event = loss.exit
        if event is None or not is_scripts(event) or (event.exit_code == 0 and event.failure is None):
            return False
        return self.world.elastic or event.early or event.exit_code in _NO_PROGRAM

    def _mark(self, loss: Loss) -> str:
        assert loss.exit is not None
        return fingerprint(loss.exit)
