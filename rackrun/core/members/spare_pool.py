"""Spares in the order of their slots, and the choice of a spare for each lost rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from rackrun.core.members.slot_order import slot_order
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.protocol.ids import Rank, SlotId, TrayId, tray_of
from rackrun.topology.placement.objective import Fitness

__all__ = ["SparePool", "choose"]


@dataclass(slots=True)
class SparePool:
    """Living workers without a rank, kept in slot order."""

    _records: dict[SlotId, WorkerRecord] = field(default_factory=dict)
    """All workers that were added, until they end or another worker is in their slot. Some have a rank by now."""
    _ordered: bool = True

    def add(self, record: WorkerRecord) -> None:
        """Add a worker without a rank; it replaces what was in its slot."""
        self._records[record.worker.slot] = record
        self._ordered = False

    def drop(self, slot: SlotId) -> None:
        """Remove the worker in ``slot``, if there is one."""
        self._records.pop(slot, None)

    def living(self) -> list[WorkerRecord]:
        """Return the living spares in slot order."""
        if not self._ordered:
            waiting = [record for record in self._records.values() if record.rank is None]
            waiting.sort(key=lambda record: slot_order(record.worker.slot))
            self._records = {record.worker.slot: record for record in waiting}
            self._ordered = True
        fenced = WorkerState.FENCED
        return [record for record in self._records.values() if record.rank is None and record.state is not fenced]


@dataclass(slots=True)
class _Level:
    """Spares of equal fitness."""

    order: dict[SlotId, WorkerRecord]
    on_tray: dict[TrayId, deque[SlotId]]

    def take(self, tray: TrayId) -> WorkerRecord | None:
        """Remove and return the first spare on this tray; None if there is none."""
        there = self.on_tray.get(tray)
        return self.order.pop(there.popleft()) if there else None


def _levels(
    lost: Mapping[Rank, SlotId], spares: Sequence[WorkerRecord], fitness: Callable[[SlotId], Fitness]
) -> deque[_Level]:
    """Return the spares grouped by fitness, the fittest first."""
    levels: dict[Fitness, _Level] = {}
    trays = dict.fromkeys(map(tray_of, lost.values()))
    for spare in spares:
        slot = spare.worker.slot
        level = levels.setdefault(fitness(slot), _Level({}, {}))
        level.order[slot] = spare
        if (tray := tray_of(slot)) in trays:
            level.on_tray.setdefault(tray, deque()).append(slot)
    return deque(level for _, level in sorted(levels.items(), key=itemgetter(0)))


def choose(
    lost: Mapping[Rank, SlotId], spares: Sequence[WorkerRecord], fitness: Callable[[SlotId], Fitness]
) -> dict[Rank, WorkerRecord]:
    """Choose one of ``spares`` for each lost rank: on its own tray if possible, then in their order. Spares on slots to
    avoid come last.

    Returns fewer entries than ``lost`` if there are too few spares.
    """
    best = _levels(lost, spares, fitness)
    chosen: dict[Rank, WorkerRecord] = {}
    for rank, slot in sorted(lost.items()):
        while best and not best[0].order:
            best.popleft()
        if best and (near := best[0].take(tray_of(slot))) is not None:
            chosen[rank] = near
    far = [rank for rank in sorted(lost) if rank not in chosen]
    left = [spare for level in best for spare in level.order.values()]
    chosen.update(zip(far, left, strict=False))
    return chosen
