"""One rack: its trays and slots, the workers in them, the spares and their order.

The rack knows processes, not ranks' meaning: the job asks it to start, fence and choose, and is told of losses. Its
narrow interface (`Loss` upwards; `start`, `fence`, `choose`, `free_slots` downwards) is what a job over many racks
will speak with each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rackrun.core.commands import FenceWorker, StartWorker, Worker
from rackrun.core.devices import Devices
from rackrun.core.events import TrayJoined, WorkerEvent, WorkerExited
from rackrun.core.ids import Generation, Incarnation, Rank, SlotId, TrayId, slot_id, tray_of
from rackrun.core.layout import natural, slot_order
from rackrun.core.workers import Loss, Trigger, WorkerRecord, WorkerState, why_exited

__all__ = ["QUARANTINE_LOSSES", "RackMachine"]

QUARANTINE_LOSSES = 3
"""A slot that has lost so many workers by hangs, errors or failed starts gets no other."""


@dataclass(slots=True)
class RackMachine:
    trays: dict[TrayId, TrayJoined] = field(default_factory=dict)
    """Those that live."""
    occupants: dict[SlotId, WorkerRecord] = field(default_factory=dict)
    """Who is in a slot, until its exit is known: a slot is empty only then."""
    faults: dict[SlotId, int] = field(default_factory=dict)
    devices: Devices = field(default_factory=Devices)
    drained: dict[SlotId, str] = field(default_factory=dict)
    """Where nobody is to be until a person returns it, and why."""
    departing: dict[TrayId, str] = field(default_factory=dict)
    """Those that are told to leave."""
    last_spare_loss: str = ""
    _incarnation: Incarnation = Incarnation(0)

    # -- trays -----------------------------------------------------------------------------------------------------
    def join(self, event: TrayJoined) -> None:
        assert event.tray not in self.trays, "a tray that comes back is lost first"
        self.trays[event.tray] = event
        for index, unfit in event.unfit.items():
            self.devices.checked(slot_id(event.tray, index), unfit)

    def lose_tray(self, tray: TrayId, because: str) -> list[Loss]:
        """Its workers have ended with it. Losses of workers that were condemned already are not repeated."""
        del self.trays[tray]
        self.devices.forget(tray)
        self.departing.pop(tray, None)
        losses = []
        for slot in [slot for slot in self.occupants if tray_of(slot) == tray]:
            record = self.occupants.pop(slot)
            was_alive = record.alive
            record.move(Trigger.EXIT, because)
            if was_alive:
                losses.append(Loss(record=record, because=because))
        return losses

    def store(self, last: str = "") -> str:
        """The store stays where it was as long as its tray lives (workers are connected to it); else the first's."""
        order = sorted(self.trays, key=natural)
        stores = [self.trays[tray].store for tray in [tray for tray in order if not self.goes(tray)] or order]
        return last if last in stores else next(iter(stores), "")

    def mirrors(self) -> dict[TrayId, str]:
        """Each tray's holder: the next one in order, on another host if there is one."""
        order = sorted(self.trays, key=natural)
        goes = {tray: self.goes(tray) for tray in order}
        found = {}
        for at, tray in enumerate(order):
            near = ""
            for after in range(1, len(order)):
                other = order[(at + after) % len(order)]
                if goes[other]:
                    continue
                near = near or other
                if self.trays[other].host != self.trays[tray].host:
                    near = other
                    break
            if near:
                found[tray] = f"{self.trays[TrayId(near)].snapshots}/{near}"
        return found

    # -- slots -----------------------------------------------------------------------------------------------------
    def slots(self) -> list[SlotId]:
        """All slots of live trays, in slot order."""
        return [
            slot_id(tray, index) for tray in sorted(self.trays, key=natural) for index in range(self.trays[tray].slots)
        ]

    def slots_on(self, tray: TrayId) -> list[SlotId]:
        return [slot_id(tray, index) for index in range(self.trays[tray].slots)]

    def lives(self, slot: SlotId) -> bool:
        tray = self.trays.get(tray_of(slot))
        return tray is not None and int(slot.rpartition("/")[2]) < tray.slots

    def quarantined(self, slot: SlotId) -> bool:
        return self.faults.get(slot, 0) >= QUARANTINE_LOSSES

    def forgive(self, slot: SlotId) -> bool:
        """Nothing that happened there counts any more. Whether anything did."""
        counted = self.faults.pop(slot, 0) > 0 or self.devices.on_probation(slot)
        self.devices.end_probation(slot)
        return counted

    def withdrawn(self, slot: SlotId) -> str:
        """Why nobody is to come there, however its GPU is; "": somebody may."""
        return self.drained.get(slot, "") or self.departing.get(tray_of(slot), "")

    def goes(self, tray: TrayId) -> bool:
        """All of it is withdrawn: nothing that is to last is put there."""
        return all(self.withdrawn(slot_id(tray, index)) for index in range(self.trays[tray].slots))

    def usable(self, slot: SlotId) -> bool:
        """A worker may be started there, or take a rank over."""
        return not self.quarantined(slot) and not self.withdrawn(slot) and self.devices.may_be_taken(slot)

    def free_slots(self) -> list[SlotId]:
        """Where a worker can be started now, slots whose GPU is on its way out last."""
        free = [slot for slot in self.slots() if slot not in self.occupants and self.usable(slot)]
        return sorted(free, key=self.devices.fitness)

    def clearing_slots(self) -> list[SlotId]:
        """Where one could be started as soon as what is condemned there has ended."""
        return [slot for slot, record in self.occupants.items() if not record.alive and self.usable(slot)]

    def may_come(self, slot: SlotId) -> bool:
        """Nobody may start there now, for what may pass."""
        return not self.quarantined(slot) and not self.withdrawn(slot) and self.devices.may_come(slot)

    def held_back(self, most: int = 4) -> str:
        """Slots of live trays that are drained, and why: for people; "" when there are none."""
        found = [f"{slot} ({why})" for slot in self.slots() if (why := self.withdrawn(slot))]
        more = f" and {len(found) - most} more" if len(found) > most else ""
        return f"; not used: {', '.join(found[:most])}{more}" if found else ""

    def unfit(self, most: int = 4) -> str:
        """Slots of live trays that may not be taken into use now, and why: for people."""
        found = [f"{slot} ({'; '.join(why)})" for slot in self.slots() if (why := self.devices.unfit(slot))]
        more = f" and {len(found) - most} more" if len(found) > most else ""
        return ", ".join(found[:most]) + more

    # -- workers ---------------------------------------------------------------------------------------------------
    def current(self, event: WorkerEvent) -> WorkerRecord | None:
        """Whom the event speaks of; None if that incarnation is no longer (or was never) in its slot."""
        record = self.occupants.get(event.slot)
        return record if record is not None and record.worker.incarnation == event.incarnation else None

    def start(
        self,
        slot: SlotId,
        rank: Rank,
        *,
        spare: bool,
        world_size: int,
        generation: Generation,
        store: str,
        restarts: int,
    ) -> StartWorker:
        assert slot not in self.occupants, "one worker a slot"
        self._incarnation = Incarnation(self._incarnation + 1)
        worker = Worker(slot, self._incarnation)
        self.occupants[slot] = WorkerRecord(worker, None if spare else rank, built_for=world_size)
        return StartWorker(
            slot=slot,
            incarnation=worker.incarnation,
            spare=spare,
            rank=rank,
            world_size=world_size,
            generation=generation,
            store=store,
            restarts=restarts,
        )

    def fence(
        self, record: WorkerRecord, because: str, *, fault: bool = False, swept_along: bool = False
    ) -> FenceWorker:
        record.move(Trigger.FENCE, because)
        record.fenced_for = because
        if fault:
            self._blame_slot(record)
        worker = record.worker
        return FenceWorker(
            slot=worker.slot,
            incarnation=worker.incarnation,
            because=because,
            fault=fault,
            swept_along=swept_along,
        )

    def exited(self, record: WorkerRecord, event: WorkerExited) -> Loss:
        """Its slot is empty now."""
        if record.alive and _counts(record, event):
            self._blame_slot(record)
        because = why_exited(event)
        if record.rank is None and record.alive:
            self.last_spare_loss = f"{record.worker.slot}: {because}"
        record.move(Trigger.EXIT, because)
        del self.occupants[record.worker.slot]
        return Loss(record=record, because=because, exit=event)

    def _blame_slot(self, record: WorkerRecord) -> None:
        slot = record.worker.slot
        self.faults[slot] = self.faults.get(slot, 0) + 1

    # -- spares ----------------------------------------------------------------------------------------------------
    def spares(self) -> list[WorkerRecord]:
        """All that live, starting or ready, in slot order."""
        spares = [record for record in self.occupants.values() if record.rank is None and record.alive]
        return sorted(spares, key=lambda record: slot_order(record.worker.slot))

    def fit_spares(self) -> list[WorkerRecord]:
        """Those on a GPU that is in order or, as the last choice, on its way out."""
        slots = {record.worker.slot: record for record in self.spares()}
        return [
            record for slot, record in slots.items() if self.devices.may_be_taken(slot) and not self.withdrawn(slot)
        ]

    def ready_spares(self) -> list[WorkerRecord]:
        """Those that may take a rank over now."""
        return [record for record in self.fit_spares() if record.state is WorkerState.READY]

    def choose(self, lost: Mapping[Rank, SlotId], spares: Sequence[WorkerRecord]) -> dict[Rank, WorkerRecord]:
        """One of ``spares`` for each lost rank: on its own tray if there is one, then in their order; those on slots to avoid last."""
        ready = sorted(spares, key=lambda spare: self.devices.fitness(spare.worker.slot))
        chosen: dict[Rank, WorkerRecord] = {}
        for rank, slot in sorted(lost.items()):
            best = [spare for spare in ready if self._as_fit(spare, ready[0])]
            near = next((spare for spare in best if tray_of(spare.worker.slot) == tray_of(slot)), None)
            if near is not None:
                chosen[rank] = near
                ready.remove(near)
        far = [rank for rank in sorted(lost) if rank not in chosen]
        chosen.update(zip(far, ready, strict=False))
        return chosen

    def _as_fit(self, one: WorkerRecord, other: WorkerRecord) -> bool:
        return self.devices.fitness(one.worker.slot) is self.devices.fitness(other.worker.slot)

    def seats(self, wanted: Mapping[Rank, SlotId], *, hoping: bool = False) -> dict[Rank, SlotId] | None:
        """A slot for every rank of a new start: its own where that lives, else a free one; None if there are too few. ``hoping``: as if
        GPUs that are not fit now were."""
        left = {slot: None for slot in self.slots() if self._may_begin(slot, hoping=hoping)}
        kept = {rank: slot for rank, slot in wanted.items() if slot in left and not self.quarantined(slot)}
        homeless = [rank for rank in sorted(wanted) if rank not in kept]
        free = _without(list(left), kept.values())
        healthy_first = sorted(free, key=self.quarantined)  # stable: slot order within each
        if len(homeless) > len(healthy_first):
            return None
        kept.update(zip(homeless, healthy_first, strict=False))
        return dict(sorted(kept.items()))

    def _may_begin(self, slot: SlotId, *, hoping: bool) -> bool:
        fit = self.devices.may_be_taken(slot) or (hoping and self.devices.may_come(slot))
        return fit and not self.withdrawn(slot)

    def check_invariants(self) -> None:
        incarnations = [record.worker.incarnation for record in self.occupants.values()]
        assert len(incarnations) == len(dict.fromkeys(incarnations)), "one incarnation in two slots"
        for slot, record in self.occupants.items():
            assert record.worker.slot == slot, "a worker in another's slot"
            assert record.state is not WorkerState.EXITED, "a slot held by a worker that has exited"
            assert self.lives(slot), "a worker on a tray that is lost"


def _counts(record: WorkerRecord, event: WorkerExited) -> bool:
    """Against its slot: an error, or a start that failed. A kill from outside, in mid-run, says nothing of the slot."""
    if record.state is WorkerState.RELEASED:
        return False
    return record.state is WorkerState.STARTING or why_exited(event) not in ("SIGKILL", "SIGTERM", "gone")


def _without(slots: Sequence[SlotId], taken: Iterable[SlotId]) -> list[SlotId]:
    out: Collection[SlotId] = dict.fromkeys(taken)
    return [slot for slot in slots if slot not in out]
