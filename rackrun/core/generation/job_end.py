"""The end of the job, which any part of the core may bring about with an exit code and a reason."""

from __future__ import annotations

from dataclasses import dataclass

from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import Phase, World
from rackrun.protocol.commands import StopJob
from rackrun.protocol.events import ScriptFailure
from rackrun.protocol.ids import Rank

__all__ = ["JobEnd"]


@dataclass(slots=True)
class JobEnd:
    """Stops the job."""

    world: World
    out: Outbox

    def stop(
        self,
        exit_code: int,
        because: str,
        *,
        remedy: str = "",
        failure: ScriptFailure | None = None,
        rank: Rank | None = None,
    ) -> None:
        """Stop the job with an exit code and a reason. Everything that is emitted afterwards is dropped."""
        world = self.world
        world.enter(Phase.STOPPED, because)
        for held in [held for held, record in world.members.items() if not record.alive]:
            world.lose(held)
        self.out.emit(StopJob(exit_code=exit_code, because=because, remedy=remedy, failure=failure, rank=rank))
