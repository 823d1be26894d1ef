"""Events about snapshots from which members may be restored, and a new plan if one of them is gone or damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from rackrun.core.generation.facts import Facts, PlanImpossible
from rackrun.core.generation.snapshot_locations import SnapshotLocations, upto
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.protocol.commands import Restore
from rackrun.protocol.events import SnapshotDamaged, SnapshotMirrored, SnapshotStriped, SourcesDiffer, WorkerExited
from rackrun.protocol.ids import Rank, Step, TrayId, step_in, steps_in, tray_of

__all__ = ["RestoreSources", "counted", "named"]


@dataclass(slots=True)
class RestoreSources:
    """Keeps track of where snapshots are."""

    world: World
    rack: RackMachine
    facts: Facts
    snapshots: SnapshotLocations = field(default_factory=SnapshotLocations)

    def remember(self, record: WorkerRecord, event: WorkerExited) -> None:
        """Record the snapshots that a member leaves when it exits. They may be the only copies of its shard. At the end
        of the job they are not needed, and those of a member whose state was found wrong are not used."""
        if record.corrupt or self.world.phase is Phase.ENDING or record.is_wrong:
            return
        plan, address = self.world.plan, self.rack.trays[tray_of(event.slot)].snapshots
        old = self.world.old
        if old is not None and record.worker in old.ranks and event.snapshots:
            old.snapshots.left(old.ranks[record.worker], event, address, steps_in(old.layout, event.snapshots))
        if record.rank is None or not event.snapshots or not (record.stateful or record.resumed_in):
            return
        behind = plan is not None and record.resumed_in < plan.generation
        steps = steps_in(self.world.layout, event.snapshots)
        steps = upto(steps, plan) if plan is not None and behind else steps
        self.snapshots.left(record.rank, event, address, steps)

    def mirrored(self, record: WorkerRecord, event: SnapshotMirrored) -> None:
        """Record that another tray has copies of a member's snapshots, which outlive the member's own tray."""
        if record.rank is not None and event.holder in self.rack.trays:
            self.snapshots.mirrored(record.rank, event, steps_in(self.world.layout, event.steps))

    def striped(self, record: WorkerRecord, event: SnapshotStriped) -> None:
        """Record that the other trays of a member's set have the parity of its snapshot."""
        step = step_in(self.world.layout, event.step)
        if record.rank is not None and step is not None:
            besides = step_in(self.world.layout, event.besides) if event.besides >= 0 else None
            event = msgspec.structs.replace(event, step=step, besides=Step(-1) if besides is None else besides)
            self.snapshots.striped(record.rank, event)

    def forget_tray(self, tray: TrayId) -> None:
        """Drop the snapshots on a lost tray, also those of the world before a resize."""
        self.snapshots.forget_tray(tray)
        if self.world.old is not None:
            self.world.old.snapshots.forget_tray(tray)

    def tray_lost(self, tray: TrayId, address: str) -> None:
        """Plan again at once if a member is about to restore a snapshot from the lost tray, rather than after the
        resume timeout."""
        plan, members = self.world.plan, self.world.members
        if self.world.phase is not Phase.RESUMING or plan is None:
            return
        waiting = [
            restore.rank
            for restore in plan.restores
            if any(source.startswith(f"{address}/") for source in _read_from(restore))
            and members[restore.rank].state is WorkerState.RESUMING
        ]
        if plan.reshard is not None and any(image.startswith(f"{address}/") for image in plan.reshard.images):
            waiting = [rank for rank, record in sorted(members.items()) if record.state is WorkerState.RESUMING]
        if waiting:
            self.facts.add(PlanImpossible(f"{tray} lost, with the snapshots that {named(waiting)} would have restored"))

    def damaged(self, record: WorkerRecord, event: SnapshotDamaged) -> None:
        """Record a damaged snapshot and plan again if a member was to be restored from it. A member's next report
        leaves out its own damaged snapshot."""
        step, old = step_in(self.world.layout, event.step), self.world.old
        if event.where and step is not None:
            self.snapshots.damaged(event.where, step)
        elif event.where and old is not None and (step := step_in(old.layout, event.step)) is not None:
            old.damaged(event.where, step)
        if event.generation == self.world.generation and record.state is WorkerState.RESUMING:
            because = f"the snapshot of step {event.step if step is None else step} for rank {record.rank} cannot be used ({event.because})"
            self.facts.add(PlanImpossible(because))

    def differ(self, record: WorkerRecord, event: SourcesDiffer) -> None:
        """Plan again without what may be wrong: a newcomer has found that its sources differ."""
        if event.generation == self.world.generation and record.state is WorkerState.RESUMING:
            self.world.doubted = True
            self.facts.add(PlanImpossible(event.because))


def _read_from(restore: Restore) -> list[str]:
    """Return the addresses of all snapshots and parity rows that a restore reads from agents."""
    return [restore.snapshot, *(of for one in restore.rebuild for of in (one.row, one.snapshot))]


def counted(number: int, what: str) -> str:
    """Return ``1 rank``, or ``2 ranks``."""
    return f"{number} {what if number == 1 else f'{what}s'}"


def named(ranks: Sequence[Rank]) -> str:
    """Return ``rank 2``, or ``ranks 2, 3``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(str(rank) for rank in ranks)}"
