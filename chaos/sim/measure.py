"""What the core itself costs: processor time of `ControlPlane.handle`, and of nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rackrun.core.commands import BreakGeneration, Command, ResumeGeneration, StartWorker
from rackrun.core.config import JobConfig
from rackrun.core.control_plane import ControlPlane
from rackrun.core.events import (
    Event,
    SnapshotMirrored,
    TimerFired,
    TrayJoined,
    WorkerElastic,
    WorkerExited,
    WorkerParked,
    WorkerReady,
    WorkerResumed,
)
from rackrun.core.ids import Generation, Position, Step, TrayId, tray_of

__all__ = ["Cost", "measure"]

SLOTS = 4


@dataclass(frozen=True, slots=True)
class Cost:
    what: str
    events: int
    cpu_s: float

    def __str__(self) -> str:
        each = f"{self.cpu_s / self.events * 1e6:.1f} us each, {self.events / self.cpu_s:,.0f} a second"
        return f"{self.what}: {self.events} events in {self.cpu_s:.3f} s of processor time ({each})"


class _World:
    """A job of replicas that trains, with one spare a tray."""

    def __init__(self, ranks: int, clock: Callable[[], float]) -> None:
        trays = -(-ranks // (SLOTS - 1))
        self.core = ControlPlane(JobConfig(trays_min=trays, trays_max=trays, spares=trays * SLOTS - ranks))
        self.events, self.cpu_s = 0, 0.0
        self._clock = clock
        self._at_ms = 0
        started: list[Command] = []
        for number in range(trays):
            tray = TrayId(f"tray-{number:05}")
            joined = TrayJoined(tray=tray, host=tray, slots=SLOTS, store=f"{tray}:1", snapshots=f"{tray}:2", codec=True)
            started += self.tell(joined)
        while started:  # the ranks, and then the spares
            started = [out for command in started if isinstance(command, StartWorker) for out in self._ready(command)]
        assert self.core.view().phase == "training"

    def _ready(self, command: StartWorker) -> list[Command]:
        slot, incarnation = command.slot, command.incarnation
        kind = "" if command.spare else "all"
        ready = WorkerReady(slot=slot, incarnation=incarnation, replica_class=kind, fixed="", exact=True)
        return [*self.tell(WorkerElastic(slot=slot, incarnation=incarnation)), *self.tell(ready)]

    def tell(self, event: Event) -> Sequence[Command]:
        began = self._clock()
        commands = self.core.handle(event)
        self.cpu_s += self._clock() - began
        self.events += 1
        return commands

    def begin_to_measure(self) -> None:
        self.events, self.cpu_s = 0, 0.0

    def lose_one(self, rank: int, draw: random.Random) -> None:
        """A rank is killed; all others park, in no order, after the window has closed, and all resume."""
        self._at_ms += 100_000
        victim = self.core.view().ranks[rank]
        assert victim.incarnation is not None
        at_ms = self._at_ms
        gone = WorkerExited(at_ms=at_ms, slot=victim.slot, incarnation=victim.incarnation, signal=9, step=Step(10))
        out = self.tell(gone)
        breaks = next(command for command in out if isinstance(command, BreakGeneration))
        generation = breaks.generation
        self.tell(TimerFired(at_ms=at_ms + 5, name=f"gather:{generation}"))
        plan = None
        for worker in draw.sample(breaks.workers, len(breaks.workers)):
            parked = WorkerParked(
                at_ms=at_ms + 8,
                slot=worker.slot,
                incarnation=worker.incarnation,
                generation=generation,
                passed=Position(9),
                entered=Position(9),
                gate=(1.0,),
                replica_class="all",
            )
            for command in self.tell(parked):
                if isinstance(command, ResumeGeneration):
                    plan = command.plan
        assert plan is not None
        for member in draw.sample(plan.members, len(plan.members)):
            self.tell(
                WorkerResumed(
                    at_ms=at_ms + 50, slot=member.slot, incarnation=member.incarnation, generation=plan.generation
                )
            )
        assert self.core.view().phase == "training"

    def nothing(self) -> Event:
        return TimerFired(at_ms=self._at_ms, name="resume:0")

    def copied(self) -> Event:
        view = self.core.view()
        slot, incarnation = view.ranks[0].slot, view.ranks[0].incarnation
        assert incarnation is not None
        holder = next(tray.tray for tray in view.trays if tray.tray != tray_of(slot))
        return SnapshotMirrored(
            at_ms=self._at_ms,
            slot=slot,
            incarnation=incarnation,
            generation=Generation(view.generation),
            holder=holder,
            where=f"{holder}:2/{slot}/{incarnation}",
            steps=(Step(1), Step(2)),
        )


def measure(ranks: int, *, repeats: int = 20_000, clock: Callable[[], float] = time.process_time) -> list[Cost]:
    """Of a job of ``ranks``."""
    world = _World(ranks, clock)
    found = [Cost(f"{ranks} ranks begin", world.events, world.cpu_s)]
    for what, event in (("an old timer", world.nothing()), ("a snapshot copied", world.copied())):
        began = clock()
        for _ in range(repeats):
            world.core.handle(event)
        found.append(Cost(f"{ranks} ranks, {what}", repeats, clock() - began))
    world.begin_to_measure()
    world.lose_one(ranks // 2, random.Random(1))
    found.append(Cost(f"{ranks} ranks, one is lost and replaced", world.events, world.cpu_s))
    return found
