"""A world that enters ``main`` again: what it was before, for as long as not everybody has the state of what it is now.

Until a gate has passed in the new layout, the snapshots of the old one are what counts, by the ranks of the world before: whatever
is lost in the middle of it, the next plan is made from them once more. Whoever has its old state still, because it has not left
``main`` yet, can take such a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rackrun.core.generation import restore_plan
from rackrun.core.generation.restore_plan import Kept, Report, StatePlan
from rackrun.core.generation.snapshot_locations import Snapshots
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord
from rackrun.protocol.commands import Reshard, Worker
from rackrun.protocol.ids import Generation, Position, Rank, Step, steps_in, tray_of

__all__ = ["OldWorld"]


@dataclass(slots=True, kw_only=True)
class OldWorld:
    layout: Generation
    size: int
    committed: Position
    """The last unit that was committed in it; after a rollback, the one that all went back to."""
    gate: tuple[float, ...]
    ranks: Mapping[Worker, Rank]
    """Who was which rank, and had its state."""
    classes: Mapping[Rank, str]
    snapshots: Snapshots
    gone_back: bool = False
    """Nobody stands at ``committed`` any more: there are only snapshots of it."""
    _damaged: dict[tuple[str, Step], None] = field(default_factory=dict)

    def state(
        self,
        members: Mapping[Rank, WorkerRecord],
        rack: RackMachine,
        going: Collection[Worker] = (),
        *,
        trusted: Position | None = None,
    ) -> StatePlan | None:
        """Where the state of each of its ranks is to be had; ``rollback`` is the step. None: some of it is nowhere. ``members``: of
        the world now, all parked. Those that are ``going`` seal nothing more. ``trusted``: as of `verdict.state_plan`."""
        reports = {}
        for record in members.values():
            rank = self.ranks.get(record.worker)
            if rank is not None and record.parked is not None:
                where = _where(record.worker, rack)
                has = self._sealed(record) if record.worker in going else self._has(record)
                reports[rank] = Report(snapshots=tuple(step for step in has if (where, step) not in self._damaged))
        kept = self._kept()
        plans = [self._state(reports, of, trusted) for of in (kept, self._of_replicas(kept))]
        return max((plan for plan in plans if plan is not None), key=lambda plan: plan.rollback or 0, default=None)

    def _state(
        self, reports: Mapping[Rank, Report], kept: Mapping[Rank, Sequence[Kept]], trusted: Position | None
    ) -> StatePlan | None:
        return restore_plan.state_plan(
            reports=reports,
            kept=kept,
            classes=self.classes,
            world_size=self.size,
            upto=self.committed,
            torn=True,
            trusted=trusted,
        )

    def _has(self, record: WorkerRecord) -> tuple[Step, ...]:
        """Of which steps it has snapshots, or can take one."""
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

    def _kept(self) -> dict[Rank, list[Kept]]:
        """After a phase, a snapshot of its step may be something else than what is committed."""
        now = self.committed.step if self.committed.phase else None
        return {
            rank: [
                Kept(
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

    def _of_replicas(self, kept: Mapping[Rank, Sequence[Kept]]) -> dict[Rank, list[Kept]]:
        """What a replica has left is as good, once nobody lives who has the same."""
        found = {rank: list(kept.get(rank, ())) for rank in (Rank(rank) for rank in range(self.size))}
        for rank, mine in found.items():
            one = self.classes.get(rank, "")
            for other, holders in kept.items():
                if one and other != rank and self.classes.get(other, "") == one:
                    mine.extend(holders)
        return found

    def reshard(self, state: StatePlan, members: Mapping[Rank, WorkerRecord], rack: RackMachine) -> Reshard:
        """What ``state`` says, for those who read it."""
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
        """It has no place in the next world, and is about to be ended: what it has sealed stays."""
        rank = self.ranks.get(record.worker)
        if rank is not None and record.parked is not None:
            where = _where(record.worker, rack)
            steps = tuple(step for step in self._sealed(record) if (where, step) not in self._damaged)
            self.snapshots.leaves(rank, record.worker, where, steps)

    def settle(self, step: Step) -> None:
        """The next world begins after ``step``."""
        if step < self.committed.step:
            self.committed, self.gate, self.gone_back = Position(step), (), True

    def damaged(self, where: str, step: Step) -> None:
        """Nobody is to read it again, not even if its owner lives."""
        self.snapshots.damaged(where, step)
        self._damaged[where, step] = None


def _where(worker: Worker, rack: RackMachine) -> str:
    return f"{rack.trays[tray_of(worker.slot)].snapshots}/{worker.slot}/{worker.incarnation}"
