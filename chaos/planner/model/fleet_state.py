"""The state of every slot of the fleet, and which rank sits in it.

The placement's own rules seat the ranks: `rackrun.topology.placement.rank_assignment` at the start,
`rackrun.topology.placement.solver` when ranks are lost, called as `rackrun.core.placement.seating` calls them.

Most losses concern one rack that has enough spares. Then no other rank moves (`solver` says why), and each lost rank
takes the free slot that `rackrun.topology.placement.slot_assignment.preference` names; the solver is called for
everything else. With ``shortcut=False`` it is called each time: the answers are the same, which a test checks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.inputs.fleet import Fleet, FleetJob, board_of
from rackrun.chaos.planner.model.rack_counts import RackCounter, RackCounts
from rackrun.topology.model.errors import DoesNotFit
from rackrun.topology.model.mesh import Ints, Mesh
from rackrun.topology.placement.exhaustive import RANKS_MAX
from rackrun.topology.placement.objective import Fitness, PlacementInput, PreviousFacts
from rackrun.topology.placement.rank_assignment import place
from rackrun.topology.placement.slot_assignment import preference
from rackrun.topology.placement.solver import solve

__all__ = ["FleetState", "NewSlots", "SlotStamps"]


class NewSlots(NamedTuple):
    """The new slots of ranks, by rank."""

    takeovers: dict[int, int]
    uprooted: dict[int, int]
    """Ranks that are alive and move with their group."""


class SlotStamps(NamedTuple):
    """Slots, and a stamp for each, both of shape (slots,)."""

    slots: Ints
    stamps: Ints


class FleetState:
    """All slots of a fleet, and the ranks of its job."""

    def __init__(self, fleet: Fleet, job: FleetJob, *, shortcut: bool = True) -> None:
        self.fleet, self.job = fleet, job
        self.board = board_of(fleet)
        self._shortcut = shortcut
        slots = fleet.total_gpus
        self._down = np.zeros(slots, np.int16)
        """(slots,): the number of repairs that are under way or waited for."""
        self._ready = np.zeros(slots, bool)
        """(slots,): whether a worker waits there as a spare."""
        self._held = np.zeros(slots, bool)
        """(slots,): whether a living rank is there."""
        self._stamp = np.zeros(slots, np.int64)
        """(slots,): a number that changes with every event there, so that a start that was overtaken has no effect."""
        self._beginnings = 0
        """How many times all workers have started at once; a part of each slot's stamp."""
        self._lemons = np.zeros(slots, np.int64)
        self._states: Ints = np.full(slots, int(Fitness.BAD), np.int64)
        """(slots,): usable where a rank or a spare is."""
        self.full = job.replicas(fleet)
        """The number of replicas of the whole world."""
        self.replicas = self.full
        self.lost: dict[int, None] = {}
        self.seats: Ints = _first(fleet, job).copy()
        self._held[self.seats] = True
        self._ready[:] = ~self._held
        self._states[:] = int(Fitness.USABLE)
        self._homes: Ints = self._found_homes()
        """(groups,): the rack of each group of the world."""
        self._counter = RackCounter(self.board)

    # -- what there is
    @property
    def ranks(self) -> int:
        """The number of ranks of the present world, including those that are lost."""
        return len(self.seats)

    @property
    def ready(self) -> int:
        return int(np.count_nonzero(self._ready))

    @property
    def starting(self) -> int:
        return self.usable - (self.ranks - len(self.lost)) - self.ready

    @property
    def usable(self) -> int:
        """The number of slots in order, whatever is in them."""
        return len(self._down) - int(np.count_nonzero(self._down))

    def tray_of(self, slot: int) -> int:
        return slot // self.fleet.gpus

    def is_down(self, tray: int) -> bool:
        return bool(self._down[tray * self.fleet.gpus : (tray + 1) * self.fleet.gpus].any())

    # -- what happens
    def strike(self, slots: range, *, hardware: bool) -> list[int]:
        """Take the workers in ``slots``, which belong to one rack, as lost. Returns the ranks among them."""
        at = slice(slots.start, slots.stop)
        found = self._ranks_on(slots)
        self._held[at] = False
        self._ready[at] = False
        self._states[at] = int(Fitness.BAD)
        self._stamp[at] += 1
        self._down[at] += hardware
        self._counter.touch(slots[:1])
        self.lost.update(dict.fromkeys(found))
        return found

    def repaired(self, slots: range) -> None:
        self._down[slots.start : slots.stop] -= 1
        self._counter.touch(slots[:1])

    def in_order(self, slots: range) -> list[int]:
        """Return those of ``slots`` that need no repair."""
        found: list[int] = (np.flatnonzero(self._down[slots.start : slots.stop] == 0) + slots.start).tolist()
        return found

    def stamps(self, slots: Sequence[int]) -> SlotStamps:
        """A worker starts in each of ``slots``. Returns what `started` needs."""
        at = np.array(slots, np.int64)
        return SlotStamps(at, self._stamp[at] + self._beginnings)

    def started(self, stamps: SlotStamps) -> int:
        """The workers have started. Returns how many of them are spares now."""
        slots, before = stamps
        meant = (self._stamp[slots] + self._beginnings == before) & ~self._held[slots] & (self._down[slots] == 0)
        slots = slots[meant]
        self._ready[slots] = True
        self._states[slots] = int(Fitness.USABLE)
        self._counter.touch(slots)
        return len(slots)

    # -- who takes over
    def staff(self) -> NewSlots | None:
        """Return new slots for all lost ranks; None when there are too few spares, or they are in the wrong racks."""
        usable = self._counted().usable
        question = self._question(self._states, usable)
        if self._shortcut:
            if self._groups_that_fit(usable) * self.job.group < self.ranks:
                return None
            found = self._near(question) if self.ranks > RANKS_MAX else None
            if found is not None:
                return NewSlots(found, {})
        try:
            seats = solve(question)
        except DoesNotFit:
            return None
        moved = np.flatnonzero(seats != self.seats).tolist()
        uprooted = {rank: int(seats[rank]) for rank in moved if rank not in self.lost}
        return NewSlots({rank: int(seats[rank]) for rank in self.lost}, uprooted)

    def take(self, staff: NewSlots) -> list[int]:
        """Seat the ranks as ``staff`` says. Returns the slots that they left, in which workers start."""
        left = [int(self.seats[rank]) for rank in staff.uprooted]
        self._leave(left)
        moving = staff.takeovers | staff.uprooted
        ranks, slots = np.array([*moving], np.int64), np.array([*moving.values()], np.int64)
        self.seats[ranks] = slots
        self._homes[ranks // self.job.group] = self.board.clique[slots]
        self._held[slots] = True
        self._ready[slots] = False
        self._states[slots] = int(Fitness.USABLE)
        self._stamp[slots] += 1
        self._counter.touch(slots)
        self.lost.clear()
        return [slot for slot in left if not self._held[slot]]

    # -- fewer, and more again
    def hit(self) -> list[int]:
        """Return the replicas with a lost rank."""
        return sorted({rank // self.job.replica for rank in self.lost})

    def drop(self, replicas: Collection[int]) -> list[int]:
        """Drop ``replicas``; the others go on under new numbers.

        Returns the slots of the dropped ranks that were alive, in which workers start.
        """
        rows = self.seats.reshape(-1, self.job.replica)
        going = np.zeros(len(rows), bool)
        going[list(replicas)] = True
        slots = rows[going].ravel()
        freed: list[int] = slots[self._held[slots]].tolist()
        self.seats = rows[~going].ravel()
        self._homes = self._homes.reshape(len(rows), -1)[~going].ravel()
        self._leave(freed)
        self.replicas = len(rows) - len(replicas)
        self.lost.clear()
        return freed

    def joinable(self) -> int:
        """Return how many replicas could come back now: those whose groups find spares, each group in one rack."""
        room = self.full - self.replicas
        if room <= 0 or self.lost:
            return 0
        return min(room, self._groups_that_fit(self._counted().ready) * self.job.group // self.job.replica)

    def join(self, replicas: int) -> None:
        """Let this many replicas join, in slots of spares."""
        of_rack = self._ready.reshape(self.fleet.racks, -1)
        wanted = replicas * self.job.replica
        taken: list[int] = []
        for rack in np.flatnonzero(self._counted().ready >= self.job.group).tolist():
            free = (np.flatnonzero(of_rack[rack]) + rack * self.fleet.rack_gpus).tolist()
            taken += free[: len(free) // self.job.group * self.job.group][: wanted - len(taken)]
            if len(taken) == wanted:
                break
        slots = np.array(taken, np.int64)
        self._held[slots] = True
        self._ready[slots] = False
        self._stamp[slots] += 1
        self._counter.touch(slots)
        self.seats = np.concatenate([self.seats, slots])
        self._homes = np.concatenate([self._homes, self.board.clique[slots[:: self.job.group]]])
        self.replicas += replicas

    # -- from nothing
    def may_begin(self) -> bool:
        """Whether all ranks of the present world find a slot."""
        return self._groups_that_fit(self._counted().in_order) * self.job.group >= self.ranks

    def begin_again(self) -> None:
        """Start every rank again, in its own slot where that is in order, and all other workers, too."""
        states = self._in_order()
        self._all_start(solve(self._question(states, self._counted().in_order)), states)

    def relaunch(self) -> int:
        """Seat as many replicas as fit now, or all of them where the size is fixed, and return how many.

        Returns 0, and changes nothing, if too few fit.
        """
        groups = self._groups_that_fit(self._counted().in_order)
        replicas = min(self.full, groups * self.job.group // self.job.replica)
        enough = replicas * self.job.replica >= self.job.min_ranks if self.job.min_ranks else replicas == self.full
        if replicas and enough:
            self.replicas = replicas
            states = self._in_order()
            self._all_start(solve(PlacementInput(self.board, self._mesh(replicas), states, self._lemons)), states)
            return replicas
        return 0

    def check(self) -> None:
        """Check the invariants."""
        held = np.flatnonzero(self._held)
        assert not (self._ready[held]).any(), "a spare where a rank sits"
        assert not (self._down[held]).any(), "a rank on what is broken"
        assert not (self._ready & (self._down > 0)).any(), "a spare on what is broken"
        living = [rank for rank in range(self.ranks) if rank not in self.lost]
        assert (np.sort(self.seats[living]) == held).all(), "seats and slots differ"
        there = self._ready | self._held
        assert ((self._states == int(Fitness.USABLE)) == there).all(), "what the solver is told is not so"
        assert self.starting == int(((self._down == 0) & ~there).sum()), "starting workers are miscounted"
        assert (self._homes == self._found_homes()).all(), "groups are not where their ranks are"
        for counted, which in zip(self._counted(), (there, self._ready, self._down == 0), strict=True):
            assert (counted == which.reshape(self.fleet.racks, -1).sum(1)).all(), "slots of a rack are miscounted"

    def _near(self, question: PlacementInput) -> dict[int, int] | None:
        """Return a slot in its own rack for each lost rank; None when a rack has too few spares."""
        by_rack: dict[int, list[int]] = {}
        for rank in sorted(self.lost):
            by_rack.setdefault(int(self.seats[rank]) // self.fleet.rack_gpus, []).append(rank)
        found: dict[int, int] = {}
        for rack, ranks in by_rack.items():
            first = rack * self.fleet.rack_gpus
            free: Ints = np.flatnonzero(self._ready[first : first + self.fleet.rack_gpus]) + first
            if len(free) < len(ranks):
                return None
            own = {rank: int(self.seats[rank]) for rank in ranks if self._ready[self.seats[rank]]}
            found |= own
            free = free[~np.isin(free, list(own.values()))]
            for rank in (rank for rank in ranks if rank not in own):
                best = int(free[np.lexsort(preference(question, rank, free))[0]])
                found[rank] = best
                free = free[free != best]
        return found

    def _question(self, states: Ints, usable: Ints) -> PlacementInput:
        """Return the question for the solver. ``usable``, (racks,): how many slots of each rack are usable by
        ``states``."""
        known = None
        if self._shortcut and self.job.group > 1:
            lost = np.array(sorted(self.lost), np.int64)
            known = PreviousFacts(self._homes, lost[states[self.seats[lost]] == Fitness.BAD], usable)
        return PlacementInput(
            self.board, self._mesh(self.replicas), states, self._lemons, previous=self.seats, known=known
        )

    def _all_start(self, seats: Ints, states: Ints) -> None:
        """Start all ranks in ``seats`` and all spares together. ``states``: every slot in order is usable."""
        self.seats, self._states = seats.copy(), states
        self.lost.clear()
        self._held[:] = False
        self._held[seats] = True
        self._ready = (self._down == 0) & ~self._held
        self._beginnings += 1
        self._homes = self._found_homes()
        self._counter.all_start(self._homes, self.job.group)

    def _in_order(self) -> Ints:
        return np.where(self._down == 0, int(Fitness.USABLE), int(Fitness.BAD))

    def _leave(self, slots: list[int]) -> None:
        self._held[slots] = False
        self._states[slots] = int(Fitness.BAD)
        self._stamp[slots] += 1
        self._counter.touch(slots)

    def _ranks_on(self, slots: range) -> list[int]:
        """Return the living ranks in ``slots``, which belong to one rack, in the order of slots."""
        groups = np.flatnonzero(self._homes == self.board.clique[slots.start])
        ranks = (groups[:, None] * self.job.group + np.arange(self.job.group)).ravel()
        seats = self.seats[ranks]
        there = (seats >= slots.start) & (seats < slots.stop)
        return [rank for rank in ranks[there][np.argsort(seats[there])].tolist() if rank not in self.lost]

    def _counted(self) -> RackCounts:
        return self._counter.counts(self._states, self._ready, self._down)

    def _found_homes(self) -> Ints:
        """Return the rack of each group. The board's cliques are racks, in their order."""
        return self.board.clique[self.seats[:: self.job.group]]

    def _groups_that_fit(self, slots: Ints) -> int:
        """Return how many groups fit if each rack has this many slots and each group is in one rack.

        The solver finds room for exactly as many.
        """
        return int((slots // self.job.group).sum())

    def _mesh(self, replicas: int) -> Mesh:
        return _mesh(self.job.group, self.job.replica, replicas)


@lru_cache(maxsize=8)
def _first(fleet: Fleet, job: FleetJob) -> Ints:
    try:
        return place(board_of(fleet), job.mesh(job.replicas(fleet)), spares=job.spares_per_rack).seats
    except DoesNotFit as error:
        raise PlannerError(error.what, remedy="give fewer spares, or smaller groups (--group).") from error


@lru_cache(maxsize=8)
def _mesh(group: int, replica: int, replicas: int) -> Mesh:
    return FleetJob(group=group, replica=replica).mesh(replicas)
