"""One rack: its trays and slots, the workers in them, the spares and their order.

The rack knows processes, not ranks' meaning: the job asks it to start, fence and choose, and is told of losses. Its
narrow interface (`Loss` upwards; `start`, `fence`, `choose`, `free_slots` downwards) is what a job over many racks
will speak with each of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rackrun.core.members.gpu_fitness import Devices
from rackrun.core.members.quarantine import Quarantine
from rackrun.core.members.slot_order import natural, slot_order
from rackrun.core.members.spare_pool import Pool, choose
from rackrun.core.members.workers import Loss, Trigger, WorkerRecord, WorkerState, why_exited
from rackrun.protocol.commands import FenceWorker, StartWorker, Worker
from rackrun.protocol.events import TrayJoined, WorkerEvent, WorkerExited
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId, TrayId, slot_id, tray_of

__all__ = ["RackMachine"]


@dataclass(slots=True)
class RackMachine:
    trays: dict[TrayId, TrayJoined] = field(default_factory=dict)
    """Those that live."""
    occupants: dict[SlotId, WorkerRecord] = field(default_factory=dict)
    """Who is in a slot, until its exit is known: a slot is empty only then. The oldest first. `occupy` fills it."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    now_ms: int = 0
    """Of the event that is being handled."""
    devices: Devices = field(default_factory=Devices)
    drained: dict[SlotId, str] = field(default_factory=dict)
    """Where nobody is to be until a person returns it, and why."""
    departing: dict[TrayId, str] = field(default_factory=dict)
    """Those that are told to leave."""
    returning: dict[TrayId, int] = field(default_factory=dict)
    """Lost trays whose agents are started again, and their slots."""
    last_spare_loss: str = ""
    trays_edition: int = 0
    """Changes with `trays`."""
    _edition: int = 0
    _incarnation: Incarnation = Incarnation(0)
    _order: list[TrayId] = field(default_factory=list)
    _slots: tuple[SlotId, ...] | None = None
    """Of `slots`, while the trays are the same."""
    _stores: dict[str, dict[TrayId, None]] = field(default_factory=dict)
    _vacant: dict[SlotId, None] = field(default_factory=dict)
    """Slots of live trays without an occupant."""
    _clearing: dict[SlotId, None] = field(default_factory=dict)
    """Those whose occupant is condemned."""
    _pool: Pool = field(default_factory=Pool)

    @property
    def edition(self) -> int:
        """Changes whenever somebody else may be a spare, or where one could be started: for those who look after every event."""
        return self._edition + self.devices.edition

    # -- trays -----------------------------------------------------------------------------------------------------
    def join(self, event: TrayJoined) -> None:
        assert event.tray not in self.trays, "a tray that comes back is lost first"
        self._edition += 1
        self.trays_edition += 1
        self.trays[event.tray] = event
        self.returning.pop(event.tray, None)
        insort(self._order, event.tray, key=natural)
        self._slots = None
        self._stores.setdefault(event.store, {})[event.tray] = None
        self._vacant |= dict.fromkeys([slot for slot in self.slots_on(event.tray) if slot not in self.occupants])
        for index, unfit in event.unfit.items():
            self.devices.checked(slot_id(event.tray, index), unfit)

    def lose_tray(self, tray: TrayId, because: str, *, returns: bool = False) -> list[Loss]:
        """Its workers have ended with it. Losses of workers that were condemned already are not repeated."""
        self._edition += 1
        self.trays_edition += 1
        there = sorted(self._occupied(tray), key=lambda record: record.worker.incarnation)  # the oldest first
        for slot in self.slots_on(tray):
            self._vacant.pop(slot, None)
        self._order.remove(tray)
        self._slots = None
        del self._stores[self.trays[tray].store][tray]
        if returns and tray not in self.departing:
            self.returning[tray] = self.trays[tray].slots
        del self.trays[tray]
        self.devices.forget(tray)
        self.departing.pop(tray, None)
        losses = []
        for record in there:
            self._leave(record)
            was_alive = record.alive
            record.move(Trigger.EXIT, because)
            if was_alive:
                losses.append(Loss(record=record, because=because))
        return losses

    def order(self) -> Sequence[TrayId]:
        """Live trays, in their order."""
        return self._order

    def describe(self, joined: TrayJoined) -> None:
        """A tray that has joined tells more of itself."""
        self.trays_edition += 1
        self.trays[joined.tray] = joined

    def store(self, last: str = "", tried: Collection[str] = (), seated: Collection[TrayId] = ()) -> str:
        """The store stays where it was as long as its tray lives (workers are connected to it); else the first's. One that was ``tried`` in
        vain is the last choice, and where some were, one on a tray that nobody is ``seated`` on the first."""
        if not tried and any(not self.goes(tray) for tray in self._stores.get(last, ())):
            return last
        order: Sequence[TrayId] = [tray for tray in self._order if not self.goes(tray)] or self._order
        order = [tray for tray in order if self.trays[tray].store not in tried] or order
        stores = [self.trays[tray].store for tray in sorted(order, key=lambda tray: bool(tried) and tray in seated)]
        return last if last in stores else next(iter(stores), "")

    def mirrors(self) -> dict[TrayId, str]:
        """Each tray's holder: the next one in order, on another host if there is one."""
        order = [self.trays[tray] for tray in self._order]
        stays = [not self.goes(tray) for tray in self._order]
        found: dict[TrayId, TrayJoined] = {}
        near: TrayJoined | None = None  # the next one that stays
        far: TrayJoined | None = None  # the next after that on another host
        for at in reversed(range(2 * len(order))):  # once round, so that the last has a next one
            one = order[at % len(order)]
            beside = near is not None and near.host == one.host
            holder = far if far is not None and beside else near
            if at < len(order) and holder is not None and holder is not one:
                found[one.tray] = holder
            if stays[at % len(order)]:
                far = far if near is None or beside else near
                near = one
        return {tray: f"{found[tray].snapshots}/{found[tray].tray}" for tray in self._order if tray in found}

    # -- slots -----------------------------------------------------------------------------------------------------
    def slots(self) -> tuple[SlotId, ...]:
        """All slots of live trays, in slot order."""
        if self._slots is None:
            self._slots = tuple([slot for tray in self._order for slot in self.slots_on(tray)])
        return self._slots

    def slots_on(self, tray: TrayId) -> list[SlotId]:
        return [slot_id(tray, index) for index in range(self.trays[tray].slots)]

    def lives(self, slot: SlotId) -> bool:
        tray = self.trays.get(tray_of(slot))
        return tray is not None and int(slot.rpartition("/")[2]) < tray.slots

    def quarantined(self, slot: SlotId) -> bool:
        return slot in self.quarantine.until_ms

    def lift_quarantine(self, slot: SlotId) -> bool:
        """As `Quarantine.lift`, now."""
        self._edition += 1
        return self.quarantine.lift(slot, self.now_ms)

    def trains(self, slots: Iterable[SlotId]) -> None:
        """Workers there hold ranks from now on, or still."""
        self.quarantine.trains(slots, self.now_ms)

    def forgive(self, slot: SlotId) -> bool:
        """Nothing that happened there counts any more. Whether anything did."""
        self._edition += 1
        counted = self.quarantine.forgive(slot) or self.devices.on_probation(slot)
        self.devices.end_probation(slot)
        return counted

    def withdrawn(self, slot: SlotId) -> str:
        """Why nobody is to come there, however its GPU is; "": somebody may."""
        if not self.drained and not self.departing:
            return ""
        return self.drained.get(slot, "") or self.departing.get(tray_of(slot), "")

    def drain(self, slots: Iterable[SlotId], why: str) -> None:
        self._edition += 1
        self.drained |= dict.fromkeys(slots, why)

    def give_back(self, slots: Iterable[SlotId]) -> None:
        """They are drained no more."""
        self._edition += 1
        for slot in slots:
            self.drained.pop(slot, None)

    def depart(self, tray: TrayId, why: str) -> None:
        self._edition += 1
        self.departing[tray] = why

    def goes(self, tray: TrayId) -> bool:
        """All of it is withdrawn: nothing that is to last is put there."""
        if not self.drained and not self.departing:
            return not self.trays[tray].slots
        return all(self.withdrawn(slot) for slot in self.slots_on(tray))

    def usable(self, slot: SlotId) -> bool:
        """A worker may be started there, or take a rank over."""
        return not self.quarantined(slot) and not self.withdrawn(slot) and self.devices.may_be_taken(slot)

    def free_slots(self) -> list[SlotId]:
        """Where a worker can be started now, slots whose GPU is on its way out last."""
        free = sorted((slot for slot in self._vacant if self.usable(slot)), key=slot_order)
        return sorted(free, key=self.devices.fitness)

    @property
    def has_vacant_slots(self) -> bool:
        return bool(self._vacant)

    def condemned(self) -> list[WorkerRecord]:
        """Those whose exit is still to come."""
        return [self.occupants[slot] for slot in self._clearing]

    def clearing_slots(self) -> list[SlotId]:
        """Where one could be started as soon as what is condemned there has ended."""
        return [slot for slot in self._clearing if self.usable(slot)]

    def unusable(self) -> list[SlotId]:
        """Slots of live trays that are not `usable`, in slot order: looked for where something is known against one."""
        trays = self._in_doubt() | dict.fromkeys(map(tray_of, self.quarantine.until_ms))
        known = sorted((tray for tray in trays if tray in self.trays), key=natural)
        return [slot for tray in known for slot in self.slots_on(tray) if not self.usable(slot)]

    def _in_doubt(self) -> dict[TrayId, None]:
        """Trays with a slot that may be withdrawn, or may not be taken: all others are fit."""
        return dict.fromkeys((*map(tray_of, self.drained), *self.departing)) | self.devices.doubted()

    def may_come(self, slot: SlotId) -> bool:
        """Nobody may start there now, for what may pass."""
        passes = self.devices.may_come(slot) or (self.quarantined(slot) and self.devices.may_be_taken(slot))
        return passes and not self.withdrawn(slot)

    def held_back(self, most: int = 4) -> str:
        """Slots of live trays that are drained, and why: for people; "" when there are none."""
        slots = self.slots() if self.drained or self.departing else ()
        found = [f"{slot} ({why})" for slot in slots if (why := self.withdrawn(slot))]
        more = f" and {len(found) - most} more" if len(found) > most else ""
        return f"; not used: {', '.join(found[:most])}{more}" if found else ""

    def unfit(self, most: int = 4) -> str:
        """What may not be taken into use now and may be soon, and why: for people."""
        slots = self.slots() if self.devices.doubted() else ()
        found = [f"{slot} ({'; '.join(why)})" for slot in slots if (why := self.devices.unfit(slot))]
        found = [f"{tray} (its agent is started again)" for tray in self.returning] + found
        found += [
            f"{slot} (it has lost {self.quarantine.faults[slot]} workers, and is tried again in {(until - self.now_ms) / 1e3:.0f} s)"
            for slot, until in self.quarantine.until_ms.items()
            if self.lives(slot)
        ]
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
        self.occupy(WorkerRecord(worker, None if spare else rank, built_for=world_size))
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

    def occupy(self, record: WorkerRecord) -> None:
        """It is in its slot from now on."""
        slot = record.worker.slot
        self._edition += 1
        self.occupants.pop(slot, None)
        self.occupants[slot] = record
        self.quarantine.left(slot)
        self._vacant.pop(slot, None)
        self._clearing.pop(slot, None)
        self._pool.drop(slot)
        if record.rank is None:
            self._pool.add(record)

    def ready(self, record: WorkerRecord) -> None:
        """It stands at its first step."""
        self._edition += 1
        record.move(Trigger.READY)

    def fence(
        self, record: WorkerRecord, because: str, *, fault: bool = False, swept_along: bool = False
    ) -> FenceWorker:
        record.move(Trigger.FENCE, because)
        record.fenced_for = because
        self._edition += 1
        self._clearing[record.worker.slot] = None
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
        because, was_alive = why_exited(event), record.alive
        if was_alive and _counts(record, because):
            self._blame_slot(record)
        if record.rank is None and was_alive:
            self.last_spare_loss = f"{record.worker.slot}: {because}"
        record.move(Trigger.EXIT, because)
        self._edition += 1
        self._leave(record)
        return Loss(record=record, because=because, exit=event)

    def _occupied(self, tray: TrayId) -> list[WorkerRecord]:
        return [self.occupants[slot] for slot in self.slots_on(tray) if slot in self.occupants]

    def _leave(self, record: WorkerRecord) -> None:
        """Its slot is empty now."""
        slot = record.worker.slot
        del self.occupants[slot]
        self.quarantine.left(slot)
        self._clearing.pop(slot, None)
        self._pool.drop(slot)
        if tray_of(slot) in self.trays:
            self._vacant[slot] = None

    def _blame_slot(self, record: WorkerRecord) -> None:
        self.quarantine.blame(record.worker.slot, self.now_ms)

    # -- spares ----------------------------------------------------------------------------------------------------
    def spares(self) -> list[WorkerRecord]:
        """All that live, starting or ready, in slot order."""
        return self._pool.living()

    def fit_spares(self) -> list[WorkerRecord]:
        """Those on a GPU that is in order or, as the last choice, on its way out."""
        if not self.drained and not self.departing and self.devices.all_takeable:
            return self.spares()
        doubtful = [tray for tray in self._in_doubt() if tray in self.trays]
        unfit = frozenset([slot for tray in doubtful for slot in self.slots_on(tray) if not self._is_fit(slot)])
        return [record for record in self.spares() if record.worker.slot not in unfit]

    def is_fit_spare(self, slot: SlotId) -> bool:
        """One of `fit_spares` is there."""
        record = self.occupants.get(slot)
        return record is not None and record.rank is None and record.alive and self._is_fit(slot)

    def _is_fit(self, slot: SlotId) -> bool:
        return self.devices.may_be_taken(slot) and not self.withdrawn(slot)

    def ready_spares(self) -> list[WorkerRecord]:
        """Those that may take a rank over now."""
        return [record for record in self.fit_spares() if record.state is WorkerState.READY]

    def choose(self, lost: Mapping[Rank, SlotId], spares: Sequence[WorkerRecord]) -> dict[Rank, WorkerRecord]:
        """One of ``spares`` for each lost rank: on its own tray if there is one, then in their order; those on slots to avoid last."""
        return choose(lost, spares, self.devices.fitness)

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
        self._check_what_is_kept()

    def _check_what_is_kept(self) -> None:
        """So that it need not be looked for: is it what would be found?"""
        assert self._order == sorted(self.trays, key=natural), "the order of trays"
        assert self.slots() == tuple(slot for tray in self._order for slot in self.slots_on(tray)), "the slots"
        assert sorted(self._vacant) == sorted(slot for slot in self.slots() if slot not in self.occupants), "vacant"
        condemned = [slot for slot, record in self.occupants.items() if not record.alive]
        assert sorted(self._clearing) == sorted(condemned), "slots that become free"
        waiting = [record for record in self.occupants.values() if record.rank is None and record.alive]
        waiting.sort(key=lambda record: slot_order(record.worker.slot))
        found = self.spares()
        assert len(found) == len(waiting), "spares"
        assert all(one is other for one, other in zip(found, waiting, strict=True)), "the order of spares"
        assert self.unusable() == [slot for slot in self.slots() if not self.usable(slot)], "slots that cannot be used"


def _counts(record: WorkerRecord, because: str) -> bool:
    """Against its slot: an error, or a start that failed. A kill from outside, in mid-run, says nothing of the slot."""
    if record.state is WorkerState.RELEASED:
        return False
    return record.state is WorkerState.STARTING or because not in ("SIGKILL", "SIGTERM", "gone")


def _without(slots: Sequence[SlotId], taken: Iterable[SlotId]) -> list[SlotId]:
    out: Collection[SlotId] = dict.fromkeys(taken)
    return [slot for slot in slots if slot not in out]
