"""One rack: its trays and slots, the workers in them, the spares and their order.

The rack knows processes, not what ranks mean. The job asks it to start, fence and choose workers, and the rack reports
losses. This interface (`Loss` upwards; `start`, `fence`, `choose`, `free_slots` downwards) is narrow, so that a job
over many racks can use it with each of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rackrun.core.members.gpu_fitness import GpuFitness
from rackrun.core.members.quarantine import Quarantine
from rackrun.core.members.slot_order import natural, slot_order
from rackrun.core.members.spare_pool import SparePool, choose
from rackrun.core.members.workers import Loss, Trigger, WorkerRecord, WorkerState, why_exited
from rackrun.protocol.commands import FenceWorker, StartWorker, Worker
from rackrun.protocol.events import TrayJoined, WorkerEvent, WorkerExited
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId, TrayId, slot_id, tray_of

__all__ = ["RackMachine", "RevocableDrain"]


class RevocableDrain(NamedTuple):
    """A drain that can be called off."""

    slots: tuple[SlotId, ...]
    """The slots that it took out of use."""
    asked_in: Generation | None
    """The generation in whose hold it was asked for; None: not in a hold."""


@dataclass(slots=True)
class RackMachine:
    """State of the rack: live trays, workers by slot, and everything that keeps a slot from being used."""

    trays: dict[TrayId, TrayJoined] = field(default_factory=dict)
    """The live trays."""
    occupants: dict[SlotId, WorkerRecord] = field(default_factory=dict)
    """The worker in each slot, oldest first. A slot becomes empty only when its worker's exit is known. `occupy` adds
    workers."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    now_ms: int = 0
    """Time of the event that is being handled."""
    devices: GpuFitness = field(default_factory=GpuFitness)
    drained: dict[SlotId, str] = field(default_factory=dict)
    """Slots that are out of use until an operator returns them, each with the reason."""
    departing: dict[TrayId, str] = field(default_factory=dict)
    """Trays whose agents have been told to leave, each with the reason."""
    revocable: dict[str, RevocableDrain] = field(default_factory=dict)
    """Drains that can be called off so that their slots can be used, by their requests."""
    returning: dict[TrayId, int] = field(default_factory=dict)
    """Lost trays whose agents are being started again, each with its number of slots."""
    standstills: dict[TrayId, list[tuple[int, bool]]] = field(default_factory=dict)
    """For each live tray that stood still lately: when that was reported, in milliseconds, and whether only its agent
    did. Oldest first."""
    last_spare_loss: str = ""
    trays_edition: int = 0
    """Changes whenever `trays` changes."""
    _edition: int = 0
    _incarnation: Incarnation = Incarnation(0)
    _order: list[TrayId] = field(default_factory=list)
    _slots: tuple[SlotId, ...] | None = None
    """Cached result of `slots`; None after the trays have changed."""
    _stores: dict[str, dict[TrayId, None]] = field(default_factory=dict)
    _vacant: dict[SlotId, None] = field(default_factory=dict)
    """Slots of live trays without an occupant."""
    _clearing: dict[SlotId, None] = field(default_factory=dict)
    """Slots whose occupant is condemned."""
    _pool: SparePool = field(default_factory=SparePool)

    @property
    def edition(self) -> int:
        """A number that changes whenever the set of possible spares, or of slots where one could start, may have
        changed."""
        return self._edition + self.devices.edition

    # -- trays -----------------------------------------------------------------------------------------------------
    def join(self, event: TrayJoined) -> None:
        """Add a tray that has joined, with all its slots empty."""
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
        """Remove a lost tray and its workers. Return the losses, without those of workers that were already
        condemned."""
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
        self.standstills.pop(tray, None)
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
        """Return the live trays in natural order (`tray-2` before `tray-10`)."""
        return self._order

    def describe(self, joined: TrayJoined) -> None:
        """Replace what is known about a tray that has joined."""
        self.trays_edition += 1
        self.trays[joined.tray] = joined

    def store(self, last: str = "", tried: Collection[str] = (), seated: Collection[TrayId] = ()) -> str:
        """Return the address of the exchange for the next generation; "" if there is no tray.

        It stays on ``last`` while its tray lives and stays, because workers are connected to it; otherwise it is the
        first tray's. Addresses in ``tried`` failed and are the last choice. If there are any, trays without a
        ``seated`` rank come first.
        """
        if not tried and any(not self.goes(tray) for tray in self._stores.get(last, ())):
            return last
        order: Sequence[TrayId] = [tray for tray in self._order if not self.goes(tray)] or self._order
        order = [tray for tray in order if self.trays[tray].store not in tried] or order
        stores = [self.trays[tray].store for tray in sorted(order, key=lambda tray: bool(tried) and tray in seated)]
        return last if last in stores else next(iter(stores), "")

    def mirrors(self) -> dict[TrayId, str]:
        """Return for each tray the address of the agent that keeps copies of its snapshots: that of the next tray in
        order, on another host if there is one."""
        order = [self.trays[tray] for tray in self._order]
        stays = [not self.goes(tray) for tray in self._order]
        found: dict[TrayId, TrayJoined] = {}
        near: TrayJoined | None = None  # the next tray that stays
        far: TrayJoined | None = None  # the next one after that on another host
        for at in reversed(range(2 * len(order))):  # twice round, so that the last tray has a next one
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
        """Return all slots of live trays, in slot order."""
        if self._slots is None:
            self._slots = tuple([slot for tray in self._order for slot in self.slots_on(tray)])
        return self._slots

    def slots_on(self, tray: TrayId) -> list[SlotId]:
        """Return all slots of a tray, by index. Raises `KeyError` if the tray is not in the job."""
        return [slot_id(tray, index) for index in range(self.trays[tray].slots)]

    def lives(self, slot: SlotId) -> bool:
        """Return whether a slot exists on a live tray."""
        tray = self.trays.get(tray_of(slot))
        return tray is not None and int(slot.rpartition("/")[2]) < tray.slots

    def quarantined(self, slot: SlotId) -> bool:
        """Return whether a slot is in quarantine after losing several workers."""
        return slot in self.quarantine.until_ms

    def lift_quarantine(self, slot: SlotId) -> bool:
        """Call `Quarantine.lift` with the current time."""
        self._edition += 1
        return self.quarantine.lift(slot, self.now_ms)

    def trains(self, slots: Iterable[SlotId]) -> None:
        """Record that workers in these slots hold ranks, from now on or still."""
        self.quarantine.trains(slots, self.now_ms)

    def forgive(self, slot: SlotId) -> bool:
        """Forget everything counted against a slot. Return whether anything was."""
        self._edition += 1
        counted = self.quarantine.forgive(slot)
        if self.devices.forgive(slot):
            self.standstills.pop(tray_of(slot), None)
            counted = True
        return counted

    def withdrawn(self, slot: SlotId) -> str:
        """Return why a slot is out of use regardless of its GPU's health; "": it is in use."""
        if not self.drained and not self.departing:
            return ""
        return self.drained.get(slot, "") or self.departing.get(tray_of(slot), "")

    def drain(self, slots: Iterable[SlotId], why: str) -> None:
        """Take slots out of use until `give_back`."""
        self._edition += 1
        self.drained |= dict.fromkeys(slots, why)

    def give_back(self, slots: Iterable[SlotId]) -> None:
        """Make drained slots usable again."""
        self._edition += 1
        for slot in slots:
            self.drained.pop(slot, None)

    def depart(self, tray: TrayId, why: str) -> None:
        """Mark a tray as told to leave."""
        self._edition += 1
        self.departing[tray] = why

    def serves(self, slots: Iterable[SlotId]) -> bool:
        """Return whether one of these drained slots could be used if it were given back, now or once its GPU is fit."""
        return any(self.devices.may_be_taken(slot) or self.devices.may_come(slot) for slot in slots)

    def goes(self, tray: TrayId) -> bool:
        """Return whether all slots of a tray are withdrawn. Nothing lasting is placed on such a tray."""
        if not self.drained and not self.departing:
            return not self.trays[tray].slots
        return all(self.withdrawn(slot) for slot in self.slots_on(tray))

    def usable(self, slot: SlotId) -> bool:
        """Return whether a worker in this slot may be started or may take over a rank."""
        return not self.quarantined(slot) and not self.withdrawn(slot) and self.devices.may_be_taken(slot)

    def free_slots(self) -> list[SlotId]:
        """Return the slots in which a worker can be started now; slots with a failing GPU come last."""
        free = sorted((slot for slot in self._vacant if self.usable(slot)), key=slot_order)
        return sorted(free, key=self.devices.fitness)

    @property
    def has_vacant_slots(self) -> bool:
        """Whether some slot has no worker, usable or not."""
        return bool(self._vacant)

    def condemned(self) -> list[WorkerRecord]:
        """Return the condemned workers that have not exited yet."""
        return [self.occupants[slot] for slot in self._clearing]

    def clearing_slots(self) -> list[SlotId]:
        """Return the slots in which a worker can be started as soon as the condemned one has exited."""
        return [slot for slot in self._clearing if self.usable(slot)]

    def unusable(self) -> list[SlotId]:
        """Return the slots of live trays that are not `usable`, in slot order. Only trays with a known problem are
        searched."""
        trays = self._in_doubt() | dict.fromkeys(map(tray_of, self.quarantine.until_ms))
        known = sorted((tray for tray in trays if tray in self.trays), key=natural)
        return [slot for tray in known for slot in self.slots_on(tray) if not self.usable(slot)]

    def _in_doubt(self) -> dict[TrayId, None]:
        """Return the trays with a slot that may be withdrawn or unfit. All other trays are fit."""
        return dict.fromkeys((*map(tray_of, self.drained), *self.departing)) | self.devices.doubted()

    def may_come(self, slot: SlotId) -> bool:
        """Return whether a slot cannot be used now for a reason that may pass by itself."""
        passes = self.devices.may_come(slot) or (self.quarantined(slot) and self.devices.may_be_taken(slot))
        return passes and not self.withdrawn(slot)

    def hopeless(self, unusable: Iterable[SlotId]) -> list[SlotId]:
        """Return those of the unusable slots for which a restart does not wait either: it waits for GPUs that may
        become fit, and calls off drains that are under way."""
        drained = {} if self.revocable else self.drained
        return [
            slot
            for slot in unusable
            if slot in drained
            or tray_of(slot) in self.departing
            or not (self.devices.may_be_taken(slot) or self.devices.may_come(slot))
        ]

    def held_back(self, most: int = 4) -> str:
        """Describe, for people, the drained slots of live trays and why; "": none."""
        slots = self.slots() if self.drained or self.departing else ()
        found = [f"{slot} ({why})" for slot in slots if (why := self.withdrawn(slot))]
        more = f" and {len(found) - most} more" if len(found) > most else ""
        return f"; not used: {', '.join(found[:most])}{more}" if found else ""

    def unfit(self, most: int = 4) -> str:
        """Describe, for people, what cannot be used now but may be soon, and why."""
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
        """Return the worker that an event is about; None if its incarnation is not, or no longer, in its slot."""
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
        """Put a new worker in an empty slot and return the command that starts it."""
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
        """Put a worker in its slot."""
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
        """Record that a worker has reached its first step."""
        self._edition += 1
        record.move(Trigger.READY)

    def fence(
        self, record: WorkerRecord, because: str, *, fault: bool = False, swept_along: bool = False
    ) -> FenceWorker:
        """Condemn a worker and return the command that kills it. ``fault`` counts this against its slot."""
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
        """Remove a worker that has exited, so that its slot is empty, and return the loss."""
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
        """Make a worker's slot empty."""
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
        """Return all living spares, starting or ready, in slot order."""
        return self._pool.living()

    def fit_spares(self) -> list[WorkerRecord]:
        """Return the spares whose GPU is in order or, as the last choice, failing but still usable."""
        if not self.drained and not self.departing and self.devices.all_takeable:
            return self.spares()
        doubtful = [tray for tray in self._in_doubt() if tray in self.trays]
        unfit = frozenset([slot for tray in doubtful for slot in self.slots_on(tray) if not self._is_fit(slot)])
        return [record for record in self.spares() if record.worker.slot not in unfit]

    def is_fit_spare(self, slot: SlotId) -> bool:
        """Return whether one of `fit_spares` is in this slot."""
        record = self.occupants.get(slot)
        return record is not None and record.rank is None and record.alive and self._is_fit(slot)

    def _is_fit(self, slot: SlotId) -> bool:
        return self.devices.may_be_taken(slot) and not self.withdrawn(slot)

    def ready_spares(self) -> list[WorkerRecord]:
        """Return the spares that may take over a rank now."""
        return [record for record in self.fit_spares() if record.state is WorkerState.READY]

    def coming(self) -> int:
        """Return the number of spares that are not ready yet, plus those that could be started."""
        return len(self.fit_spares()) - len(self.ready_spares()) + len(self.clearing_slots()) + len(self.free_slots())

    def starting(self, lost: int) -> int:
        """Return how many spares start, or are about to be started because ``lost`` ranks are to be replaced."""
        ready = len(self.ready_spares())
        return max(len(self.fit_spares()) - ready, min(self.coming(), lost - ready))

    def choose(self, lost: Mapping[Rank, SlotId], spares: Sequence[WorkerRecord]) -> dict[Rank, WorkerRecord]:
        """Choose one of ``spares`` for each lost rank: on its own tray if possible, then in their order. Spares on
        slots to avoid come last."""
        return choose(lost, spares, self.devices.fitness)

    def seats(self, wanted: Mapping[Rank, SlotId], *, hoping: bool = False) -> dict[Rank, SlotId] | None:
        """Return a slot for every rank of a new start; None if there are too few.

        A rank keeps its own slot if that lives, else it gets a free one. With ``hoping``, GPUs that are unfit now but
        may recover count as fit.
        """
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
        """Raise AssertionError if the rack's state contradicts itself."""
        incarnations = [record.worker.incarnation for record in self.occupants.values()]
        assert len(incarnations) == len(dict.fromkeys(incarnations)), "one incarnation in two slots"
        for slot, record in self.occupants.items():
            assert record.worker.slot == slot, "a worker in another's slot"
            assert record.state is not WorkerState.EXITED, "a slot held by a worker that has exited"
            assert self.lives(slot), "a worker on a tray that is lost"
        self._check_what_is_kept()

    def _check_what_is_kept(self) -> None:
        """Check that every cached value equals what a search would find."""
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
    """Return whether a loss counts against its slot: an error or a failed start does; a kill from outside during
    training does not."""
    if record.state is WorkerState.RELEASED:
        return False
    return record.state is WorkerState.STARTING or because not in ("SIGKILL", "SIGTERM", "gone")


def _without(slots: Sequence[SlotId], taken: Iterable[SlotId]) -> list[SlotId]:
    out: Collection[SlotId] = dict.fromkeys(taken)
    return [slot for slot in slots if slot not in out]
