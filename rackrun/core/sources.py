"""What is told of snapshots, from whom members may be restored; and what to do when one of them is gone or damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rackrun.core.commands import Restore
from rackrun.core.events import SnapshotDamaged, SnapshotMirrored, SnapshotStriped, WorkerExited
from rackrun.core.ids import Rank, TrayId, tray_of
from rackrun.core.rack import RackMachine
from rackrun.core.snapshots import Snapshots, upto
from rackrun.core.workers import WorkerRecord, WorkerState
from rackrun.core.world import Phase, World

__all__ = ["Sources", "named"]


@dataclass(slots=True)
class Sources:
    world: World
    rack: RackMachine
    plan_again: Callable[[str, int], None]
    """Somebody cannot be restored as planned, though nobody else is lost."""
    snapshots: Snapshots = field(default_factory=Snapshots)

    def remember(self, record: WorkerRecord, event: WorkerExited) -> None:
        """What a member leaves behind may be the only copy of its shard."""
        if record.rank is None or not event.snapshots or not (record.stateful or record.resumed_in):
            return
        plan = self.world.plan
        behind = plan is not None and record.resumed_in < plan.generation
        steps = upto(event.snapshots, plan) if plan is not None and behind else event.snapshots
        self.snapshots.left(record.rank, event, self.rack.trays[tray_of(event.slot)].snapshots, steps)

    def mirrored(self, record: WorkerRecord, event: SnapshotMirrored) -> None:
        """Another tray has copies of a member's snapshots: they outlive the member's own tray."""
        if record.rank is not None and event.holder in self.rack.trays:
            self.snapshots.mirrored(record.rank, event)

    def striped(self, record: WorkerRecord, event: SnapshotStriped) -> None:
        """The other trays of a member's set have the parity of its snapshot."""
        if record.rank is not None:
            self.snapshots.striped(record.rank, event)

    def tray_lost(self, tray: TrayId, address: str, at_ms: int) -> None:
        """If somebody is about to restore a snapshot from there: another plan, now, not after the resume timeout."""
        plan, members = self.world.plan, self.world.members
        if self.world.phase is not Phase.RESUMING or plan is None:
            return
        waiting = [
            restore.rank
            for restore in plan.restores
            if any(source.startswith(f"{address}/") for source in _read_from(restore))
            and members[restore.rank].state is WorkerState.RESUMING
        ]
        if waiting:
            self.plan_again(f"{tray} lost, with the snapshots that {named(waiting)} would have restored", at_ms)

    def damaged(self, record: WorkerRecord, event: SnapshotDamaged) -> None:
        """Somebody cannot be restored as planned. What it reports next leaves its own damaged snapshot out."""
        if event.where:
            self.snapshots.damaged(event.where, event.step)
        if event.generation == self.world.generation and record.state is WorkerState.RESUMING:
            because = f"the snapshot of step {event.step} for rank {record.rank} cannot be used ({event.because})"
            self.plan_again(because, event.at_ms)


def _read_from(restore: Restore) -> list[str]:
    """All that it is read from, in the memory of agents."""
    return [restore.snapshot, *(of for one in restore.rebuild for of in (one.row, one.snapshot))]


def named(ranks: Sequence[Rank]) -> str:
    """``rank 2``, or ``ranks 2, 3``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(str(rank) for rank in ranks)}"
