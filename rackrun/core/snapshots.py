"""Where snapshots lie: what former workers have left on their trays, and what other trays keep of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rackrun.core.commands import Plan, Worker
from rackrun.core.events import SnapshotMirrored, SnapshotStriped, TrayJoined, WorkerExited
from rackrun.core.ids import Generation, Position, Rank, SlotId, Step, TrayId, steps_in, tray_of
from rackrun.core.stripes import Rows
from rackrun.core.verdict import Kept, Rebuild
from rackrun.core.workers import WorkerRecord

__all__ = ["Snapshots", "upto"]

LEFT_IN_SLOT_MAX = 2
"""Workers that are gone, whose snapshots an agent keeps in one slot."""
PLANS_MAX = 16
KEPT_MAX = 3
"""Former owners of a rank, and copies, that are remembered."""


@dataclass(slots=True)
class Snapshots:
    _left: dict[Rank, list[Kept]] = field(default_factory=dict)
    """By former workers, on their own trays; the last one's first."""
    _copies: dict[Rank, list[Kept]] = field(default_factory=dict)
    """Of workers present and former, on other trays."""
    told: dict[Rank, Generation] = field(default_factory=dict)
    """Whose snapshots other trays keep: the newest generation in which they had one of it."""
    _rows: Rows = field(default_factory=Rows)
    _ends: deque[tuple[Generation, Position]] = field(default_factory=lambda: deque(maxlen=PLANS_MAX))
    """Of the last plans: which history goes on from each."""

    def left(self, rank: Rank, event: WorkerExited, address: str, steps: tuple[Step, ...]) -> None:
        """``address`` is the tray's snapshot service."""
        where = f"{address}/{event.slot}/{event.incarnation}"
        self.leaves(rank, Worker(event.slot, event.incarnation), where, steps)

    def leaves(self, rank: Rank, worker: Worker, where: str, steps: tuple[Step, ...]) -> None:
        slot, incarnation = worker.slot, worker.incarnation
        others = [one for one in self._left.get(rank, ()) if (one.slot, one.incarnation) != (slot, incarnation)]
        kept = Kept(tray=tray_of(slot), slot=slot, incarnation=incarnation, where=where, steps=steps)
        self._left[rank] = [kept, *others][:KEPT_MAX]
        self._forget_as_the_agent_does(slot)

    def mirrored(self, rank: Rank, event: SnapshotMirrored) -> None:
        steps = event.steps
        for generation, end in self._ends:
            if generation > event.generation:  # it was on its way when that plan was made
                steps = tuple(step for step in steps if Position(step) <= end)
        if self._ends and event.generation < self._ends[0][0] - 1:
            return
        self.told[rank] = max(event.generation, self.told.get(rank, event.generation))
        copy = Kept(tray=event.holder, slot=event.slot, incarnation=event.incarnation, where=event.where, steps=steps)
        same = (copy.tray, copy.slot, copy.incarnation)
        others = [one for one in self._copies.get(rank, ()) if (one.tray, one.slot, one.incarnation) != same]
        self._copies[rank] = [copy, *others][:KEPT_MAX]

    def damaged(self, where: str, step: Step) -> None:
        """Nobody is to restore from this one again, or to rebuild anything from that row and its set's."""
        self._rows.damaged(where, step)
        for held in (self._left, self._copies):
            for rank, holders in held.items():
                held[rank] = [
                    replace(holder, steps=tuple(s for s in holder.steps if s != step))
                    if holder.where == where
                    else holder
                    for holder in holders
                ]

    def striped(self, rank: Rank, event: SnapshotStriped) -> None:
        """Keepers drop what is older, rows and copies."""
        self._rows.striped(rank, event)
        self.told[rank] = max(event.generation, self.told.get(rank, event.generation))
        if event.besides >= 0:
            wanted = (event.step, event.besides)
            copies = self._copies.get(rank, ())
            self._copies[rank] = [replace(one, steps=tuple(s for s in one.steps if s in wanted)) for one in copies]

    def rebuilding(
        self, parked: Mapping[Rank, WorkerRecord], trays: Mapping[TrayId, TrayJoined], layout: Generation
    ) -> Rebuild:
        """With what the ``parked`` members have themselves, and what former workers have left."""
        whole = {rank: list(holders) for rank, holders in self._left.items()}
        for rank, record in parked.items():
            slot, incarnation, tray = record.worker.slot, record.worker.incarnation, tray_of(record.worker.slot)
            steps = steps_in(layout, record.parked.snapshots) if record.parked is not None else ()
            where = f"{trays[tray].snapshots}/{slot}/{incarnation}"
            own = Kept(tray=tray, slot=slot, incarnation=incarnation, where=where, steps=steps)
            whole[rank] = [own, *whole.get(rank, ())]
        return lambda rank, step: self._rows.rebuild(rank, step, whole)

    def by_rank(self) -> Mapping[Rank, Sequence[Kept]]:
        """What its own tray has comes first."""
        ranks = sorted({*self._left, *self._copies})
        return {rank: [*self._left.get(rank, ()), *self._copies.get(rank, ())] for rank in ranks}

    def forget_tray(self, tray: TrayId) -> None:
        for held in (self._left, self._copies):
            for rank, holders in held.items():
                held[rank] = [holder for holder in holders if holder.tray != tray]

    def go_on(self, plan: Plan) -> None:
        """Only the history of ``plan`` counts from here on."""
        for held in (self._left, self._copies):
            for rank, holders in held.items():
                held[rank] = [replace(holder, steps=upto(holder.steps, plan)) for holder in holders]
        self._ends.append((plan.generation, plan.committed if plan.rollback is None else Position(plan.rollback)))
        self._rows.planned(plan)

    def clear(self) -> None:
        self._left.clear()
        self._copies.clear()
        self.told.clear()
        self._rows.clear()

    def _forget_as_the_agent_does(self, slot: SlotId) -> None:
        """It keeps what the last workers of a slot have left, the present one included."""
        left = sorted(
            (holder.incarnation for holders in self._left.values() for holder in holders if holder.slot == slot),
            reverse=True,
        )
        gone = left[LEFT_IN_SLOT_MAX:]
        for rank, holders in self._left.items():
            self._left[rank] = [holder for holder in holders if holder.slot != slot or holder.incarnation not in gone]


def upto(steps: Sequence[Step], plan: Plan) -> tuple[Step, ...]:
    """Snapshots of the history that goes on. Only the lost may have seen what comes after: everyone computes it again."""
    end = plan.committed if plan.rollback is None else Position(plan.rollback)
    return tuple(step for step in steps if Position(step) <= end)
