"""A planned swap: a rank is replaced between two steps, because its GPU is on its way out, or because a person wants it. No step is
done again. In the same way ranks join a world that has shrunk, and leave one that a person wants smaller.

All ranks pause after one and the same step; then the rank is fenced, and the recovery that follows finds everybody at rest. Whatever
breaks the pause (a loss, a timeout) is a recovery as any other; the swap is looked at again when all train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rackrun.core.generation.restore_sources import named
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord
from rackrun.core.placement.seating import Seating
from rackrun.core.policy.choice import allows
from rackrun.core.requests.operator_requests import Control
from rackrun.core.requests.resize_requests import Sizes
from rackrun.protocol.commands import Command, Notice, PauseWorkers, SetTimer
from rackrun.protocol.events import WorkerPaused
from rackrun.protocol.ids import Generation, Rank
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung

__all__ = ["PlannedSwap"]


@dataclass(slots=True)
class PlannedSwap:
    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    control: Control
    sizes: Sizes
    emit: Callable[[Command], None]
    replace: Callable[[dict[Rank, str], int], None]
    """These ranks go now, for these reasons."""
    call_off: Callable[[str, int], None]
    """End a pause without any loss."""
    shrink: Callable[[list[Rank], int], None]
    """The world goes on without these ranks."""
    joining: Callable[[int], str]
    """Who can join the world as a rank more, for people; "": nobody."""
    grow: Callable[[str, int], None]
    _pausing: Generation = Generation(0)
    """Whose ranks were told to pause."""
    _paused: dict[Rank, None] = field(default_factory=dict)

    def look(self, at_ms: int) -> None:
        """Is there a rank to be replaced, and a spare for it? Or somebody to join?"""
        world = self.world
        if world.phase is not Phase.TRAINING or self._pausing == world.generation:
            return
        if self._ends():
            return
        what, because = self._due(at_ms)
        if not because:
            return
        told = f"{what}, at the next step boundary: {because}"
        self._pausing = world.generation
        self._paused.clear()
        self.emit(Notice(text=told))
        self.emit(PauseWorkers(generation=world.generation, workers=world.workers(), because=because))
        self.emit(SetTimer(name=f"pause:{world.generation}", at_ms=at_ms + self.config.pause_timeout_ms))

    def _due(self, at_ms: int) -> tuple[str, str]:
        """What all are to pause for, and why; "": nothing."""
        if going := self.sizes.leaving():
            return "the world shrinks", f"{named(going)} will leave (rackctl shrink)"
        may = allows(self.world.policy.rules, Rung.SWAP)  # else it would end in something else
        leaving = self._leaving() if may else {}
        because = "; ".join(f"rank {rank}: {why}" for rank, why in leaving.items()) or self.control.regroup()
        if because:
            return "a planned swap", because
        return "the world grows", self.joining(at_ms)

    @property
    def under_way(self) -> bool:
        """This generation was told to pause: it ends soon."""
        return self._pausing == self.world.generation != 0

    @property
    def all_paused(self) -> bool:
        return len(self._paused) == self.world.size

    def paused(self, record: WorkerRecord, event: WorkerPaused) -> None:
        if not self._is_on(event.generation) or record.rank is None:
            return
        self._paused[record.rank] = None
        if self.all_paused:
            self._swap(event.at_ms)

    def timer(self, generation: str, at_ms: int) -> None:
        """Some have not paused: as after a loss, then, with the step they are in done again."""
        if generation == str(self._pausing) and self._is_on(self._pausing) and not self._ends():
            self._swap(at_ms)

    def _ends(self) -> bool:
        """The end is near: some ranks have come to it, so none of them pauses any more."""
        return self.world.some_have_finished

    def _is_on(self, generation: Generation) -> bool:
        return generation == self._pausing == self.world.generation and self.world.phase is Phase.TRAINING

    def _swap(self, at_ms: int) -> None:
        leaving = self._leaving()
        if going := self.sizes.leaving():
            self.shrink(going, at_ms)
        elif leaving:
            self.replace(leaving, at_ms)
        elif self.joining(at_ms):
            self.grow("all pause, and the world grows", at_ms)
        else:
            because = "a planned swap is called off: no better GPU is ready, or none is needed any more"
            self.call_off(self.control.regroup() or because, at_ms)

    def _leaving(self) -> dict[Rank, str]:
        if not self.control.under_way and self.rack.devices.all_usable:
            return {}
        ready = [record.worker.slot for record in self.rack.ready_spares()]
        if asked := self.control.asked(ready):
            return self._with_sources_left(asked)
        leaving = self.seating.leaving(self.world.seats, ready)
        return self._with_sources_left(
            {
                rank: self.rack.devices.because(self.world.seats[rank]) or f"its group moves to {slot}"
                for rank, slot in leaving.items()
            }
        )

    def _with_sources_left(self, leaving: dict[Rank, str]) -> dict[Rank, str]:
        """Replicas that all leave would leave nobody to restore them from: one of them, with its group, goes the next time."""
        classes, mesh = self.control.recovery.classes, self.seating.mesh
        staying: list[Rank] = []
        for rank in sorted(leaving, reverse=True):
            same = [one for one in self.world.ranks() if classes.get(one) and classes.get(one) == classes.get(rank)]
            if len(same) > 1 and all(one in leaving and one not in staying for one in same):
                group = mesh.groups[mesh.group_of[rank]].tolist() if mesh is not None else [rank]
                staying += [Rank(one) for one in group]
        return {rank: why for rank, why in leaving.items() if rank not in staying}
