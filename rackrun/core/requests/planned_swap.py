"""Planned swaps: a rank is replaced between two steps, because its GPU is failing or an operator asks for it.

No step is repeated. In the same way ranks join a world that has shrunk, and leave one that an operator wants smaller.

All ranks pause after the same step. Then the rank is fenced, and the recovery that follows finds all ranks at rest.
Anything that interrupts the pause (a loss, a timeout) is a recovery like any other; the swap is checked again when all
train.
"""

from __future__ import annotations

from dataclasses import dataclass

from rackrun.core.generation.facts import Facts, WorkersMustGo
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.restore_sources import named
from rackrun.core.generation.world import Phase, World
from rackrun.core.generation.world_pause import PauseState, PauseTrigger
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord
from rackrun.core.placement.seating import Seating
from rackrun.core.policy.choice import allows
from rackrun.core.recovery.recovery import Recovery
from rackrun.core.requests.operator_requests import OperatorRequests
from rackrun.core.requests.resize_requests import ResizeRequests
from rackrun.protocol.commands import Notice, PauseWorkers, SetTimer
from rackrun.protocol.events import WorkerPaused
from rackrun.protocol.ids import Rank
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import PauseOver

__all__ = ["PlannedSwap"]


@dataclass(slots=True)
class PlannedSwap:
    """Pauses all ranks when a change is due, and makes it when they have paused."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    operator_requests: OperatorRequests
    resize_requests: ResizeRequests
    recovery: Recovery
    out: Outbox
    facts: Facts

    def pause_if_due(self, at_ms: int) -> None:
        """Pause all ranks if one should be replaced and a spare is ready, or if spares can join."""
        world = self.world
        if world.phase is not Phase.TRAINING or world.pause.state is not PauseState.NONE:
            return
        if world.some_have_finished:  # no rank pauses any more
            return
        what, because = self._due(at_ms)
        if not because:
            return
        told = f"{what}, at the next step boundary: {because}"
        world.pause.move(PauseTrigger.BEGIN)
        self.out.emit(Notice(text=told))
        self.out.emit(PauseWorkers(generation=world.generation, workers=world.workers(), because=because))
        self.out.emit(SetTimer(timer=PauseOver(world.generation), at_ms=at_ms + self.config.pause_timeout_ms))

    def _due(self, at_ms: int) -> tuple[str, str]:
        """Return what all ranks should pause for, and why; two empty strings if for nothing."""
        if going := self.resize_requests.leaving():
            return "the world shrinks", f"{named(going)} will leave (rackctl shrink)"
        may = allows(self.world.policy.rules, Rung.SWAP)  # without SWAP another rung would follow
        leaving = self._leaving() if may else {}
        because = "; ".join(f"rank {rank}: {why}" for rank, why in leaving.items()) or self.operator_requests.regroup()
        if because:
            return "a planned swap", because
        return "the world grows", self.recovery.joining(at_ms)

    def paused(self, record: WorkerRecord, event: WorkerPaused) -> None:
        """Record that a rank has paused; make the change if it was the last."""
        pause = self.world.pause
        if pause.state is not PauseState.PAUSING or record.rank is None:
            return
        pause.ranks[record.rank] = None
        if len(pause.ranks) == self.world.size:
            pause.move(PauseTrigger.COMPLETE)
            self._swap(event.at_ms)

    def pause_over(self, at_ms: int) -> None:
        """Make the change although some ranks have not paused: as after a loss, the step they are in is repeated."""
        if self.world.pause.state is PauseState.PAUSING and not self.world.some_have_finished:
            self.world.pause.move(PauseTrigger.EXPIRE)
            self._swap(at_ms)

    def _swap(self, at_ms: int) -> None:
        leaving, at_rest = self._leaving(), self.world.pause.state is PauseState.PAUSED
        recovery = self.recovery
        if going := self.resize_requests.leaving():
            recovery.between_steps = at_rest
            recovery.plan_again(f"{named(going)} leave (rackctl shrink)", at_ms)
            recovery.leaving = tuple(going)
        elif leaving:
            recovery.between_steps = at_rest
            workers = {self.world.members[rank].worker: why for rank, why in leaving.items()}
            self.facts.add(WorkersMustGo(workers))
        elif self.recovery.joining(at_ms):
            recovery.growing, recovery.between_steps = True, at_rest
            recovery.plan_again("all pause, and the world grows", at_ms)
        else:
            because = "a planned swap is called off: no better GPU is ready, or none is needed any more"
            recovery.absorb(self.operator_requests.regroup() or because, at_ms)

    def _leaving(self) -> dict[Rank, str]:
        if not self.operator_requests.under_way and self.rack.devices.all_usable:
            return {}
        ready = [record.worker.slot for record in self.rack.ready_spares()]
        if asked := self.operator_requests.asked(ready):
            return self._with_sources_left(asked)
        leaving = self.seating.leaving(self.world.seats, ready)
        return self._with_sources_left(
            {
                rank: self.rack.devices.because(self.world.seats[rank]) or f"its group moves to {slot}"
                for rank, slot in leaving.items()
            }
        )

    def _with_sources_left(self, leaving: dict[Rank, str]) -> dict[Rank, str]:
        """Keep one replica if all would leave, so that the others can be restored from it. It leaves, with its group,
        the next time."""
        classes, mesh = self.recovery.classes, self.seating.mesh
        staying: list[Rank] = []
        for rank in sorted(leaving, reverse=True):
            same = [one for one in self.world.ranks() if classes.get(one) and classes.get(one) == classes.get(rank)]
            if len(same) > 1 and all(one in leaving and one not in staying for one in same):
                group = mesh.groups[mesh.group_of[rank]].tolist() if mesh is not None else [rank]
                staying += [Rank(one) for one in group]
        return {rank: why for rank, why in leaving.items() if rank not in staying}
