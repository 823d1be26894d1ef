"""What lost workers mean for the job: a recovery in place, a restart, or the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rackrun.core.faults.script_bug import MISUSES, ScriptBugs, remedy_for
from rackrun.core.faults.start_bugs import StartBugs
from rackrun.core.generation.facts import Facts, SlotFreed
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.world import IN_PLACE, Phase, World
from rackrun.core.lifecycle.restart import Restart
from rackrun.core.lifecycle.shutdown import Shutdown, ended_well
from rackrun.core.members.workers import Loss
from rackrun.core.recovery.recovery import Recovery, named
from rackrun.protocol.events import WorkerExited
from rackrun.protocol.job_config import JobConfig

__all__ = ["LossResponse"]


@dataclass(slots=True)
class LossResponse:
    """Decides what follows from losses, by the phase and by who is to blame."""

    config: JobConfig
    world: World
    facts: Facts
    end: JobEnd
    recovery: Recovery
    restart: Restart
    shutdown: Shutdown
    start_bugs: StartBugs
    script_bugs: ScriptBugs = field(init=False)

    def __post_init__(self) -> None:
        self.script_bugs = ScriptBugs(self.config.gather_ms)

    def lost(self, losses: Sequence[Loss], at_ms: int) -> None:
        """Handle workers that were lost without having been condemned. They belong together: one event reported
        them."""
        members = [loss for loss in losses if loss.record.rank is not None]
        if members:
            self._members_lost(members, at_ms)
        self.facts.add(SlotFreed())

    def _members_lost(self, losses: Sequence[Loss], at_ms: int) -> None:
        phase = self.world.phase
        if phase is Phase.SETUP and not self.world.elastic and all(ended_well(loss) for loss in losses):
            self.shutdown.plain_ended(losses)
        elif phase is Phase.SETUP:
            self._lost_before_steps(losses, at_ms)
        elif phase is Phase.ENDING:
            self.shutdown.ended(losses)
        elif phase in IN_PLACE and not any(self._convicted(loss) for loss in losses):
            self.recovery.lose([_told_better(loss) for loss in losses], at_ms)

    def _lost_before_steps(self, losses: Sequence[Loss], at_ms: int) -> None:
        if any(self._convicted(loss) for loss in losses if self._may_convict(loss)):
            return
        bugs = self.start_bugs
        if bugs.waits(losses, at_ms):
            for loss in losses:
                assert loss.record.rank is not None
                self.world.lose(loss.record.rank)
            return
        if bugs.alike:
            first, because = bugs.losses[min(bugs.losses)], bugs.because()
            remedy = "" if " Remedy: " in because else "see its traceback, or its output."
            self.end.stop(1, because, remedy=remedy, failure=first.failure, rank=first.record.rank)
            return
        losses = self._with_held(losses)
        told = named([rank for loss in losses if (rank := loss.record.rank) is not None])
        before = " before the first step" if self.world.elastic else ""
        self.restart.early(
            f"{told} lost ({_because(losses[0]) if before else losses[0].because}){before}", losses, at_ms
        )

    def _with_held(self, losses: Sequence[Loss]) -> list[Loss]:
        """Return these losses together with the earlier ones that waited for others to fail in the same way."""
        held = {rank: loss for rank, loss in self.start_bugs.losses.items() if loss not in losses}
        self.start_bugs.forget()
        return sorted([*held.values(), *losses], key=lambda loss: loss.record.rank or 0)

    def bugs_overdue(self, at_ms: int) -> None:
        """Restart, because the other ranks have started or not failed: the script does not fail on all of them."""
        losses = [*self.start_bugs.losses.values()]
        if self.world.phase is Phase.SETUP and losses:
            self.start_bugs.forget()
            told = named([rank for loss in losses if (rank := loss.record.rank) is not None])
            self.restart.early(f"{told} lost ({_because(losses[0])}) before the first step", losses, at_ms)

    def _may_convict(self, loss: Loss) -> bool:
        """Return whether a loss may be blamed on the script. A plain script's errors lead to a restart, as under
        torchrun."""
        failure = loss.exit.failure if loss.exit else None
        return self.world.elastic or (failure is not None and failure.type in MISUSES)

    def _convicted(self, loss: Loss) -> bool:
        """Stop the job if the script is to blame for this loss, because another attempt would fail again. Return
        whether it stopped."""
        rank = loss.record.rank
        if loss.exit is None or rank is None:
            return False
        if because := self.script_bugs.cannot_be_restored(loss.exit, rank):
            self.end.stop(3, because, failure=loss.failure, rank=rank)
            return True
        because = self.script_bugs.convict(loss.exit, rank, in_first_step=self._in_first_step(loss.exit))
        if not because:
            return False
        if ended_well(loss):
            because = f"{because} (exited with code 0 before training was finished)"
        remedy = remedy_for(loss.exit) or "see the traceback of that rank."
        if " Remedy: " in because:  # rackrun's own errors contain their remedy
            remedy = ""
        self.end.stop(1, because, remedy=remedy, failure=loss.failure, rank=rank)
        return True

    def _in_first_step(self, event: WorkerExited) -> bool:
        """Whether the worker joined in the newest generation and failed in its first step there."""
        plan = self.world.plan
        if plan is None or event.step != plan.committed.step + 1:
            return False
        return any(member.fresh and member.incarnation == event.incarnation for member in plan.members)


def _because(loss: Loss) -> str:
    return "exited with code 0 before training was finished" if ended_well(loss) else loss.because


def _told_better(loss: Loss) -> Loss:
    return Loss(record=loss.record, because=_because(loss), exit=loss.exit)
