"""Locations of snapshots: those that former workers left on their trays, and copies and parity on other trays."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from rackrun.core.generation.restore_plan import Rebuild, StoredSnapshots
from rackrun.core.generation.stripes import ParityRows
from rackrun.core.members.workers import WorkerRecord
from rackrun.protocol.commands import GenerationPlan, Worker
from rackrun.protocol.events import SnapshotMirrored, SnapshotStriped, TrayJoined, WorkerExited
from rackrun.protocol.ids import Generation, Position, Rank, SlotId, Step, TrayId, steps_in, tray_of

__all__ = ["SnapshotLocations", "upto"]

LEFT_IN_SLOT_MAX = 2
"""Number of former workers whose snapshots an agent keeps in one slot."""
PLANS_MAX = 16
KEPT_MAX = 3
"""Number of former owners of a rank, and of copies, that are remembered."""


@dataclass(slots=True)
class SnapshotLocations:
    """The known locations of snapshots, by rank."""

    _left: dict[Rank, list[StoredSnapshots]] = field(default_factory=dict)
    """Snapshots of former workers on their own trays, the latest worker's first."""
    _copies: dict[Rank, list[StoredSnapshots]] = field(default_factory=dict)
    """Copies on other trays, of snapshots of present and former workers."""
    told: dict[Rank, Generation] = field(default_factory=dict)
    """The ranks whose snapshots other trays keep, each with the newest generation in which such a snapshot was
    taken."""
    behind: dict[Rank, None] = field(default_factory=dict)
    """The ranks of ``told`` of which no other tray has a snapshot of the last plan's generation yet."""
    _rows: ParityRows = field(default_factory=ParityRows)
    _there: dict[TrayId, dict[Rank, None]] = field(default_factory=dict)
    """For each tray, the ranks of which it may hold something. Only these are looked at when something happens to the
    tray."""
    _ends: deque[tuple[Generation, Position]] = field(default_factory=lambda: deque(maxlen=PLANS_MAX))
    """For each of the last plans, the last unit of the history that it continues."""

    def left(self, rank: Rank, event: WorkerExited, address: str, steps: tuple[Step, ...]) -> None:
        """Record the snapshots of a worker that has exited. ``address`` is the tray's snapshot service."""
        where = f"{address}/{event.slot}/{event.incarnation}"
        self.leaves(rank, Worker(event.slot, event.incarnation), where, steps)

    def leaves(self, rank: Rank, worker: Worker, where: str, steps: tuple[Step, ...]) -> None:
        """Record snapshots that a worker leaves at ``where``."""
        slot, incarnation = worker.slot, worker.incarnation
        others = [one for one in self._left.get(rank, ()) if (one.slot, one.incarnation) != (slot, incarnation)]
        kept = StoredSnapshots(tray=tray_of(slot), slot=slot, incarnation=incarnation, where=where, steps=steps)
        self._left[rank] = [kept, *others][:KEPT_MAX]
        self._there.setdefault(kept.tray, {})[rank] = None
        self._forget_as_the_agent_does(slot)

    def mirrored(self, rank: Rank, event: SnapshotMirrored, steps: tuple[Step, ...]) -> None:
        """Record copies on another tray. ``steps`` are the event's steps in the present layout."""
        if self._ends and event.generation < self._ends[0][0] - 1:
            return
        for generation, end in self._ends:
            if generation > event.generation:  # the event was under way when that plan was made
                steps = _until(end, steps)
        self._tell(rank, event.generation)
        copy = StoredSnapshots(
            tray=event.holder, slot=event.slot, incarnation=event.incarnation, where=event.where, steps=steps
        )
        others = [one for one in self._copies.get(rank, ()) if not _same_place(one, copy)]
        self._copies[rank] = [copy, *others][:KEPT_MAX]
        self._there.setdefault(copy.tray, {})[rank] = None

    def damaged(self, where: str, step: Step) -> None:
        """Let no rank be restored from this snapshot again, nor from that row or its set."""
        self._rows.damaged(where, step)
        for held in (self._left, self._copies):
            for rank, holders in held.items():
                if any(holder.where == where for holder in holders):
                    held[rank] = [_without(holder, step) if holder.where == where else holder for holder in holders]

    def striped(self, rank: Rank, event: SnapshotStriped) -> None:
        """Record that a set keeps parity of a snapshot. Its keepers drop older rows and copies."""
        self._rows.striped(rank, event)
        self._tell(rank, event.generation)
        if event.besides >= 0:
            wanted = (event.step, event.besides)
            copies = self._copies.get(rank, ())
            self._copies[rank] = [
                replace(one, steps=tuple(step for step in one.steps if step in wanted)) for one in copies
            ]

    def _tell(self, rank: Rank, generation: Generation) -> None:
        self.told[rank] = max(generation, self.told.get(rank, generation))
        if self._ends and generation >= self._ends[-1][0]:
            self.behind.pop(rank, None)

    def rebuilding(
        self, members: Mapping[Rank, WorkerRecord], trays: Mapping[TrayId, TrayJoined], layout: Generation
    ) -> Rebuild:
        """Return a function that returns how a lost snapshot can be rebuilt.

        It uses the snapshots of parked ``members`` with state, and those that former workers left.
        """

        def whole(rank: Rank) -> Sequence[StoredSnapshots]:
            record, left = members.get(rank), self._left.get(rank, [])
            if record is None or not record.stateful:
                return left
            slot, incarnation, tray = record.worker.slot, record.worker.incarnation, tray_of(record.worker.slot)
            steps = steps_in(layout, record.parked.snapshots) if record.parked is not None else ()
            where = f"{trays[tray].snapshots}/{slot}/{incarnation}"
            return [StoredSnapshots(tray=tray, slot=slot, incarnation=incarnation, where=where, steps=steps), *left]

        return lambda rank, step: self._rows.rebuild(rank, step, whole)

    def by_rank(self) -> Mapping[Rank, Sequence[StoredSnapshots]]:
        """Return the locations for each rank, those on its own tray first."""
        if not self._left and not self._copies:
            return {}
        ranks = sorted({*self._left, *self._copies})
        return {rank: [*self._left.get(rank, ()), *self._copies.get(rank, ())] for rank in ranks}

    def left_on(self, tray: TrayId, ranks: Iterable[Rank]) -> bool:
        """Return whether former workers of these ranks have left snapshots on their own tray ``tray``."""
        return any(one.tray == tray and one.steps for rank in ranks for one in self._left.get(rank, ()))

    def forget_tray(self, tray: TrayId) -> None:
        """Drop the snapshots and copies on a lost tray."""
        for rank in self._there.pop(tray, ()):
            for held in (self._left, self._copies):
                if rank in held:
                    held[rank] = [holder for holder in held[rank] if holder.tray != tray]

    def go_on(self, plan: GenerationPlan) -> None:
        """Drop what does not belong to the history of ``plan``."""
        end = _end(plan)
        for held in (self._left, self._copies):
            for rank, holders in held.items():
                if any(step > end.step for holder in holders for step in holder.steps):
                    held[rank] = [replace(holder, steps=_until(end, holder.steps)) for holder in holders]
        self._ends.append((plan.generation, end))
        self._rows.planned(plan)
        self.behind = {rank: None for rank, newest in self.told.items() if newest < plan.generation}

    def clear(self) -> None:
        """Forget all snapshots, copies and parity: nothing from before is used."""
        self.behind.clear()
        self._there.clear()
        self._left.clear()
        self._copies.clear()
        self.told.clear()
        self._rows.clear()

    def _forget_as_the_agent_does(self, slot: SlotId) -> None:
        """Forget the snapshots that the agent has dropped: it keeps those of the last workers of a slot, including the
        present one."""
        there = {rank: self._left[rank] for rank in self._there.get(tray_of(slot), ()) if rank in self._left}
        left = [holder.incarnation for holders in there.values() for holder in holders if holder.slot == slot]
        gone = sorted(left, reverse=True)[LEFT_IN_SLOT_MAX:]
        for rank, holders in there.items() if gone else ():
            self._left[rank] = [holder for holder in holders if holder.slot != slot or holder.incarnation not in gone]


def upto(steps: Sequence[Step], plan: GenerationPlan) -> tuple[Step, ...]:
    """Return the steps that belong to the history that ``plan`` continues. All ranks compute later steps again, which
    only lost workers may have seen."""
    return _until(_end(plan), steps)


def _end(plan: GenerationPlan) -> Position:
    return plan.committed if plan.rollback is None else Position(plan.rollback)


def _until(end: Position, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps up to ``end``. A snapshot is taken after its step and before the step's phases."""
    return tuple([step for step in steps if step <= end.step])


def _same_place(one: StoredSnapshots, other: StoredSnapshots) -> bool:
    """Return whether both are snapshots of one worker on one tray."""
    return one.incarnation == other.incarnation and one.tray == other.tray and one.slot == other.slot


def _without(holder: StoredSnapshots, step: Step) -> StoredSnapshots:
    return replace(holder, steps=tuple(other for other in holder.steps if other != step))
