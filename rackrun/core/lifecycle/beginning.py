"""Beginning of a world, for the first time or again: all ranks start in their slots, reach their first step, and
train."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rackrun.core.generation.facts import AllTrain, Facts, StartFailed, SwapDue
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import IN_PLACE, Phase, World
from rackrun.core.lifecycle.shutdown import Shutdown
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import Trigger, WorkerRecord, WorkerState
from rackrun.core.placement.seating import Seating
from rackrun.core.placement.snapshot_keepers import protect
from rackrun.core.recovery.recovery import Recovery, named
from rackrun.core.stragglers.shifting import Shifting
from rackrun.protocol.commands import GenerationPlan, Notice, ResumeGeneration
from rackrun.protocol.events import WorkerReady
from rackrun.protocol.job_config import JobConfig
from rackrun.topology.model.mesh import Mesh

__all__ = ["WorldStart"]


@dataclass(slots=True)
class WorldStart:
    """Starts all ranks, and lets them train when all have reached their first step."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    recovery: Recovery
    shutdown: Shutdown
    shifting: Shifting
    out: Outbox
    facts: Facts
    end: JobEnd
    setup_ms: int = -1
    """Time of the slowest worker from the beginning of ``main`` to its first step, in milliseconds; -1: no worker has
    reached it."""

    def launch(self, because: str) -> None:
        """Start every rank from the beginning. The plan is emitted first, so that it is in the journal before any
        worker runs."""
        world = self.world
        generation = world.next_generation()
        world.enter(Phase.SETUP, because)
        world.elastic = False
        world.empty()
        self.shutdown.gone.clear()
        self.recovery.forget_all()
        self.shifting.forget()
        store = self.rack.store(world.plan.store if world.plan else "")
        starts = [
            self.rack.start(
                slot,
                rank,
                spare=False,
                world_size=world.size,
                generation=generation,
                store=store,
                restarts=world.restarts,
            )
            for rank, slot in sorted(world.seats.items())
        ]
        for start in starts:
            world.seat(start.rank, self.rack.occupants[start.slot])
        world.await_all()
        protection = protect(self.config, world.seats, self.rack)
        world.plan = GenerationPlan(
            generation=generation,
            layout=world.layout,
            world_size=world.size,
            members=world.as_members(),
            store=store,
            mirrors=dict(protection.mirrors),
            sets=protection.sets,
            parity=protection.parity,
            full=world.full,
            worlds=world.go_on_after(world.reached),
        )
        self.recovery.snapshots.go_on(world.plan)
        self.rack.trains(member.slot for member in world.plan.members)
        self.out.emit(ResumeGeneration(plan=world.plan, because=because, protected=protection.said))
        for start in starts:
            self.out.emit(start)

    def elastic(self) -> None:
        """Record that the script is not a plain one. The first `WorkerElastic` shows it."""
        self.world.elastic = True
        if self.world.phase is Phase.SETUP and self.shutdown.gone:
            told = named(list(self.shutdown.gone))
            self.facts.add(StartFailed(f"{told} exited with code 0 before the first step"))

    def ready(self, record: WorkerRecord, event: WorkerReady | None, at_ms: int) -> None:
        """Record that a worker has reached its first step. ``event`` is None for a rank that returned before its first
        step."""
        if event is not None:
            record.fixed, record.reenters, record.exact = event.fixed, event.reenters, event.exact
            record.shards = event.shards
            self.setup_ms = max(self.setup_ms, event.setup_ms)
            self.world.learned += record.rank is not None
            self.recovery.learn_class(
                record, event.replica_class
            )  # sent again once the first step has shown which ranks differ
            if record.rank is not None and event.mesh and not self._adopt(event.mesh):
                return
        if record.state is not WorkerState.STARTING:
            return
        self.rack.ready(record)
        if record.rank is None:
            self.recovery.spare_ready(at_ms)
            self.facts.add(SwapDue())
            return
        self.elastic()
        if self.world.phase is Phase.SETUP and self.world.answered(record.rank):
            self._all_ready()

    def _adopt(self, axes: tuple[tuple[str, int], ...]) -> bool:
        """Use the mesh that the script has named. Return False, after stopping the job, if the job cannot go on with
        it."""
        known = self.seating.mesh
        if math.prod([size for _, size in axes]) != self.world.size:
            if self.world.phase in IN_PLACE:
                return True  # the report is from before the world changed its size
            shape = ",".join(f"{name}={size}" for name, size in axes)
            because = f"the script's mesh {shape} is not of {self.world.size} ranks"
            self.end.stop(
                2, because, remedy="leave one axis open (-1), or give --mesh and as many slots as it has ranks."
            )
            return False
        if known is not None and known.axes == axes:
            return True
        mesh, shape = Mesh.of(dict(axes)), ",".join(f"{name}={size}" for name, size in axes)
        broken = self.seating.adopt(mesh, self.world.seats)
        if broken and self.config.cross_clique:
            self.out.emit(Notice(text=f"{broken}, and that is allowed"))
        elif broken:
            self.end.stop(2, broken, remedy=f"give --mesh {shape}: ranks are placed by it then; or --cross-clique.")
            return False
        return True

    def _all_ready(self) -> None:
        for record in self.world.members.values():
            record.move(Trigger.TRAIN)
            record.stateful = True
            record.resumed_in = self.world.generation
        self.world.train()
        self.facts.add(AllTrain())
