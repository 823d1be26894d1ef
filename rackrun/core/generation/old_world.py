"""The previous layout of a world that enters ``main`` again, kept until all ranks have their state in the new one.

Until a gate has passed in the new layout, only the snapshots of the old layout count, by the ranks of the old world. If
anything is lost before that, the next plan is made from them once more. A worker that has not left ``main`` yet still
has its old state and can take such a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rackrun.core.generation import restore_plan
from rackrun.core.generation.restore_plan import ParkReport, StatePlan, StoredSnapshots
from rackrun.core.generation.snapshot_locations import SnapshotLocations
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord
from rackrun.protocol.commands import Reshard, Worker
from rackrun.protocol.ids import Generation, Position, Rank, Step, steps_in, tray_of

__all__ = ["OldWorld"]


@dataclass(slots=True, kw_only=True)
class OldWorld:
    """The old world's size, ranks and snapshots."""

    layout: Generation
    size: int
    committed: Position
    """The last unit that was committed in it; after a rollback, the unit that all ranks went back to."""
    gate: tuple[float, ...]
    ranks: Mapping[Worker, Rank]
    """The rank of each worker that had state in the old world."""
    classes: Mapping[Rank, str]
    snapshots: SnapshotLocations
    gone_back: bool = False
    """Whether no worker has the state of ``committed`` in memory any more, so that only snapshots have it."""
    _damaged: dict[tuple[str, Step], None] = field(default_factory=dict)

    def state(
        self,
        members: Mapping[Rank, WorkerRecord],
        rack: RackMachine,
        going: Collection[Worker] = (),
        *,
        trusted: Position | None = None,
    ) -> StatePlan | None:
        """Return where the state of each old rank comes from, with the step in ``rollback``; None: some of it is lost.

        ``members`` are those of the present world, all parked. Workers in ``going`` take no more snapshots. ``trusted``
        is as in `restore_plan.state_plan`.
        """
        reports = {}
        for record in members.values():
            rank = self.ranks.get(record.worker)
            if rank is not None and record.parked is not None:
                where = _where(record.worker, rack)
                has = self._sealed(record) if record.worker in going else self._has(record)
                reports[rank] = ParkReport(snapshots=tuple(step for step in has if (where, step) not in self._damaged))
        kept = self._kept()
        plans = [self._state(reports, of, trusted) for of in (kept, self._of_replicas(kept))]
        return max((plan for plan in plans if plan is not None), key=lambda plan: plan.rollback or 0, default=None)

    def _state(
        self,
        reports: Mapping[Rank, ParkReport],
        kept: Mapping[Rank, Sequence[StoredSnapshots]],
        trusted: Position | None,
    ) -> StatePlan | None:
        return restore_plan.state_plan(
            reports=reports,
            kept=kept,
            classes=self.classes,
            world_size=self.size,
            upto=self.committed,
            rollback_incomplete=True,
            trusted=trusted,
        )

    def _has(self, record: WorkerRecord) -> tuple[Step, ...]:
        """Return the steps of which a worker has a snapshot or can take one."""
        parked, found = record.parked, self._sealed(record)
        assert parked is not None
        now = Step(self.committed.step)
        stands = parked.layout == self.layout and max(parked.passed, parked.entered) >= self.committed
        return (*found, now) if stands and not self.gone_back and now not in found else found

    def _sealed(self, record: WorkerRecord) -> tuple[Step, ...]:
        parked, now = record.parked, Step(self.committed.step)
        assert parked is not None
        steps = steps_in(self.layout, parked.snapshots)
        return tuple(step for step in steps if not (step == now and self.committed.phase))

    def _kept(self) -> dict[Rank, list[StoredSnapshots]]:
        """Return the known snapshots by rank. If the committed unit is a phase, the snapshot of its step is left out,
        because the phase may have changed the state."""
        now = self.committed.step if self.committed.phase else None
        return {
            rank: [
                StoredSnapshots(
                    tray=one.tray,
                    slot=one.slot,
                    incarnation=one.incarnation,
                    where=one.where,
                    steps=tuple(step for step in one.steps if step != now),
                )
                for one in holders
            ]
            for rank, holders in self.snapshots.by_rank().items()
        }

    def _of_replicas(self, kept: Mapping[Rank, Sequence[StoredSnapshots]]) -> dict[Rank, list[StoredSnapshots]]:
        """Add to each rank's snapshots those of its replicas, which hold the same state."""
        found = {rank: list(kept.get(rank, ())) for rank in (Rank(rank) for rank in range(self.size))}
        for rank, mine in found.items():
            one = self.classes.get(rank, "")
            for other, holders in kept.items():
                if one and other != rank and self.classes.get(other, "") == one:
                    mine.extend(holders)
        return found

    def reshard(self, state: StatePlan, members: Mapping[Rank, WorkerRecord], rack: RackMachine) -> Reshard:
        """Convert the state plan to the instruction for the workers that read the old snapshots."""
        live = {record.worker for record in members.values()}
        own = {rank: _where(worker, rack) for worker, rank in self.ranks.items() if worker in live}
        restores = {restore.rank: restore for restore in state.restores}
        images = []
        for rank in (Rank(rank) for rank in range(self.size)):
            restore = restores.get(rank)
            if restore is None:
                images.append(own[rank])
            else:
                images.append(restore.snapshot or own[restore.sources[0]])
        return Reshard(layout=self.layout, images=tuple(images))

    def leaves(self, record: WorkerRecord, rack: RackMachine) -> None:
        """Record the sealed snapshots of a worker that has no place in the next world and is about to be ended. They
        stay."""
        rank = self.ranks.get(record.worker)
        if rank is not None and record.parked is not None:
            where = _where(record.worker, rack)
            steps = tuple(step for step in self._sealed(record) if (where, step) not in self._damaged)
            self.snapshots.leaves(rank, record.worker, where, steps)

    def settle(self, step: Step) -> None:
        """Record the step after which the next world begins."""
        if step < self.committed.step:
            self.committed, self.gate, self.gone_back = Position(step), (), True

    def damaged(self, where: str, step: Step) -> None:
        """Let no worker read this snapshot again, even if its owner lives."""
        self.snapshots.damaged(where, step)
        self._damaged[where, step] = None


def _where(worker: Worker, rack: RackMachine) -> str:
    return f"{rack.trays[tray_of(worker.slot)].snapshots}/{worker.slot}/{worker.incarnation}"
