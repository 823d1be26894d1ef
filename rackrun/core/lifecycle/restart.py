"""Restart of the whole world: all workers are ended, then every rank starts in a free slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rackrun.core.faults.script_bug import is_scripts
from rackrun.core.faults.triage import Triage
from rackrun.core.generation.facts import Facts, SlotsNeeded
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import Phase, World
from rackrun.core.lifecycle.beginning import WorldStart
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import Loss
from rackrun.core.placement.seating import Seating
from rackrun.core.policy.choice import only_answer
from rackrun.core.recovery.view_builder import DecisionInputs, ViewBuilder, failure_of
from rackrun.protocol.commands import Decided, SetTimer
from rackrun.protocol.ids import BEGIN
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import ExitsOver

__all__ = ["Restart"]


@dataclass(slots=True)
class Restart:
    """Ends all workers and launches the world again."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    view_builder: ViewBuilder
    out: Outbox
    beginning: WorldStart
    triage: Triage
    facts: Facts
    end: JobEnd

    def begin(self, because: str, loss: Loss | None, at_ms: int) -> None:
        """Restart as soon as all workers have exited. If no restart is left, the job stops."""
        world = self.world
        if world.restarts >= self.config.max_restarts:
            self._none_left(because, loss)
            return
        world.restarts += 1
        world.enter(Phase.RESTARTING, because)
        world.empty()
        for record in [record for record in self.rack.occupants.values() if record.alive]:
            self.out.emit(self.rack.fence(record, "the world starts again", swept_along=True))
        self.out.emit(SetTimer(timer=ExitsOver(world.generation), at_ms=at_ms + self.config.join_timeout_ms))
        self.launch_if_possible()

    def early(self, because: str, losses: Sequence[Loss], at_ms: int) -> None:
        """Restart without a decision, because no rank has computed a step or the script does not report steps."""
        if self.world.restarts < self.config.max_restarts:
            self._tell(because, losses)
        self.begin(because, losses[0] if losses else None, at_ms)

    def launch_if_possible(self) -> None:
        """Launch the world if all workers have exited and there are slots. Called when a worker has exited or hardware
        has come."""
        if self.rack.occupants:
            return
        world = self.world
        seats = self.seating.again(world.seats)
        if seats is None and self.rack.revocable:
            self.facts.add(SlotsNeeded())
            return
        if seats is None and (self._returning() or self.seating.again(world.seats, hoping=True) is not None):
            self.triage.awaits(f"{world.size} ranks need a slot")
            return
        if seats is None:
            self.no_slots()
            return
        world.seats = seats
        self.beginning.launch(f"{world.reason}; restart {world.restarts} of {self.config.max_restarts}")

    def _returning(self) -> bool:
        """Return whether lost trays come back that could give enough slots."""
        returning = sum(self.rack.returning.values())
        return returning > 0 and len(self.rack.slots()) + returning >= self.world.size

    def no_slots(self) -> None:
        """Stop the job because there are too few slots."""
        world = self.world
        against = "; ".join(f"{slot}: {why}" for slot, why in self.rack.devices.against().items())
        left = f"{len(self.rack.slots())} are left on {len(self.rack.trays)} trays"
        self.end.stop(
            3,
            f"{world.reason}; {world.size} ranks need a slot, {left}{f' ({against})' if against else ''}{self.rack.held_back()}",
            remedy="hold back more spares (--spares), or start with more trays.",
        )

    def _none_left(self, because: str, loss: Loss | None) -> None:
        scripts = loss is not None and loss.exit is not None and is_scripts(loss.exit)
        failure = loss.failure if loss is not None else None
        remedy = "see the traceback." if scripts else "raise --max-restarts, or look at the health of the hardware."
        if failure is not None and failure.type == "rackrun.errors.StateLost":  # it brings its own remedy
            what, _, remedy = failure.message.partition(" Remedy: ")
            because = f"{because}: {what.rstrip('.')}"
        self.end.stop(
            1 if scripts else 3,
            f"{because}; restarted {self.world.restarts} of {self.config.max_restarts} times already",
            remedy=remedy,
            failure=failure,
            rank=loss.record.rank if loss else None,
        )

    def _tell(self, because: str, losses: Sequence[Loss]) -> None:
        world = self.world
        by_rank = {loss.record.rank: loss for loss in losses if loss.record.rank is not None}
        lost = {rank: world.seats[rank] for rank in by_rank}
        failure = failure_of(because, by_rank, lost, again=False, planned=False)
        view = None
        if world.elastic:
            nothing = DecisionInputs(
                committed=BEGIN,
                gate=(),
                state=None,
                lost=world.lost(),
                ranks=self.view_builder.ranks(),
                exact=self.view_builder.exact(),
                may_begin_again=True,
            )
            view = self.view_builder.view(nothing, moved=(), waited_ms=0, absorbs=0)
        why = "nothing would be lost by it" if world.elastic else "a script without steps begins again"
        decision = only_answer(Rung.RESTART, why, failure, view)
        self.out.emit(Decided(generation=world.generation, failure=failure, decision=decision))
