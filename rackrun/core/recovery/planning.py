"""Construction of the next generation's plan: the worker of each rank, and where its state comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rackrun.core.faults.partition import PartitionReports
from rackrun.core.generation.old_world import OldWorld
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.restore_plan import StatePlan
from rackrun.core.generation.restore_sources import RestoreSources
from rackrun.core.generation.snapshot_locations import SnapshotLocations
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import Trigger, WorkerRecord
from rackrun.core.placement.snapshot_keepers import protect
from rackrun.core.recovery.view_builder import DecisionInputs
from rackrun.core.stragglers.shifting import Shifting
from rackrun.protocol.commands import GenerationPlan, ResumeGeneration, SetTimer
from rackrun.protocol.ids import Position, Rank, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import ResumeOver

__all__ = ["Planner", "takeovers_text"]


def takeovers_text(chosen: Mapping[Rank, WorkerRecord], rack: RackMachine) -> str:
    """Describe which spares are about to take over and how many are left, for people; "": none takes over."""
    if not chosen:
        return ""
    slots = ", ".join(record.worker.slot for _, record in sorted(chosen.items()))
    left = len(rack.ready_spares()) - len(chosen)
    return f"{slots} {'takes' if len(chosen) == 1 else 'take'} over, {left} {'spare' if left == 1 else 'spares'} left"


@dataclass(slots=True)
class Planner:
    """Builds and sends the plan of the next generation."""

    config: JobConfig
    world: World
    rack: RackMachine
    sources: RestoreSources
    shifting: Shifting
    out: Outbox
    partition_reports: PartitionReports

    def resume(self, prospect: DecisionInputs, chosen: Mapping[Rank, WorkerRecord], told: str, at_ms: int) -> None:
        """Build the plan and send it.

        ``chosen`` holds the spare that takes over each lost rank. ``told`` describes for people what has happened.
        """
        world, committed, state = self.world, prospect.committed, prospect.state
        assert state is not None, "checked by the decision"
        for rank, spare in chosen.items():
            world.seat(rank, spare)
        gate, reshard = prospect.gate, None
        if world.old is not None:
            reshard = world.old.reshard(state, world.members, self.rack)
            state, committed, gate = self._cut_anew(world.old, state)
        because = told
        if state.rollback is not None:
            again = max(prospect.committed.step - state.rollback, 0)
            back = f"everyone goes back to step {state.rollback}, {again} steps are computed again"
            if not again:
                back = f"everyone goes on from the state after step {state.rollback}"
            because = f"{told}; {back}" if told else back
        note, fresh = f"generation {world.generation}", dict.fromkeys(state.fresh)
        for rank, record in world.members.items():
            record.move(Trigger.RESUME, f"{note}, rank {rank}" if rank in chosen else note)
            record.stateful = record.stateful and rank not in fresh and reshard is None
            record.finished = False  # it reports this again when it has done its part for the others
        world.await_all()
        if state.rollback is not None:
            committed = max(committed, Position(state.rollback))
        protection = protect(self.config, world.seats, self.rack)
        world.plan = GenerationPlan(
            generation=world.generation,
            world_size=world.size,
            members=world.as_members(state.fresh),
            store=self.rack.store(
                world.plan.store if world.plan else "",
                self.partition_reports.tried,
                [tray_of(slot) for slot in world.seats.values()],
            ),
            committed=committed,
            gate=gate,
            restores=state.restores,
            mirrors=dict(protection.mirrors),
            sets=protection.sets,
            parity=protection.parity,
            rollback=state.rollback,
            anew=state.rollback is not None and world.trusted is not None,
            layout=world.layout,
            reshard=reshard,
            full=world.full,
            worlds=world.go_on_after(prospect.committed),
            shares=self.shifting.in_plan(),
        )
        self.sources.snapshots.go_on(world.plan)
        world.enter(Phase.RESUMING, because)
        self.rack.trains(member.slot for member in world.plan.members)
        self.out.emit(ResumeGeneration(plan=world.plan, because=because, protected=protection.said))
        self.out.emit(SetTimer(timer=ResumeOver(world.generation), at_ms=at_ms + self.timeout_ms()))

    def timeout_ms(self) -> int:
        """Return how long members may take to resume.

        The limit is that of a start if ``main`` has to be entered again first: by all ranks, or by a spare that was
        built for a world of another size.
        """
        world = self.world
        waits = [record for record in world.members.values() if record.reenters and not record.stateful]
        again = (world.plan is not None and world.plan.reshard is not None) or any(
            record.built_for != world.size for record in waits
        )
        return self.config.reenter_timeout_ms if again else self.config.resume_timeout_ms

    def _cut_anew(self, old: OldWorld, state: StatePlan) -> tuple[StatePlan, Position, tuple[float, ...]]:
        """Convert the state plan of the old world's ranks to one for this world's ranks, which all enter ``main``
        again.

        Returns the state plan, the committed unit and the values of its gate.
        """
        world = self.world
        assert state.rollback is not None, "it is made of snapshots"
        old.settle(state.rollback)
        world.layout = world.generation
        self.sources.snapshots = (
            SnapshotLocations()
        )  # snapshots that an earlier attempt has left are in that attempt's layout
        new = tuple(rank for rank, record in sorted(world.members.items()) if record.worker not in old.ranks)
        back = state.rollback if old.gone_back else None
        return StatePlan(fresh=new, restores=(), rollback=back), old.committed, old.gate
