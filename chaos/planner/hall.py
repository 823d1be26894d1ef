"""Which slot is in order, and who sits there. The placement's own rules seat the ranks: `rackrun.topology.placement` at the start,
`rackrun.topology.solver` when ranks are lost, as `rackrun.core.seating` asks them.

Most losses concern one rack that has spares enough. Then nobody else moves (`solver` says why), and each lost rank takes the free slot
that `rackrun.topology.inside.preference` names; the solver is asked about all else. ``shortcut=False`` asks it each time: the answers
are the same, which a test holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rackrun.chaos.errors import PlannerError
from rackrun.chaos.planner.fleet import Fleet, Job, board_of
from rackrun.topology.errors import DoesNotFit
from rackrun.topology.inside import preference
from rackrun.topology.mesh import Ints, Mesh
from rackrun.topology.objective import Fitness, Known, Question
from rackrun.topology.placement import place
from rackrun.topology.solver import solve
from rackrun.topology.ways import RANKS_MAX

__all__ = ["Hall", "Staff"]

Bools = npt.NDArray[np.bool_]
NOBODY = -1


class Staff(NamedTuple):
    """Slots by rank."""

    takeovers: dict[int, int]
    uprooted: dict[int, int]
    """Ranks that live, and move with their group."""


class Hall:
    def __init__(self, fleet: Fleet, job: Job, *, shortcut: bool = True) -> None:
        self.fleet, self.job = fleet, job
        self.board = board_of(fleet)
        self._shortcut = shortcut
        slots = fleet.total_gpus
        self._down = np.zeros(slots, np.int16)
        """So many repairs are under way, or waited for."""
        self._ready = np.zeros(slots, bool)
        """A worker waits there as a spare."""
        self._holder = np.full(slots, NOBODY, np.int64)
        self._stamp = np.zeros(slots, np.int64)
        """Of the last thing that happened there: a start that is overtaken comes to nothing."""
        self._lemons = np.zeros(slots, np.int64)
        self._states: Ints = np.full(slots, int(Fitness.BAD), np.int64)
        """Usable: where a rank or a spare is."""
        self.full = job.replicas(fleet)
        """Replicas of the whole world."""
        self.replicas = self.full
        self.lost: dict[int, None] = {}
        self.seats: Ints = _first(fleet, job).copy()
        self._sit()
        self._ready[self._holder == NOBODY] = True
        self._states[:] = int(Fitness.USABLE)

    # -- what there is
    @property
    def ranks(self) -> int:
        """Of the world as it is, the lost ones too."""
        return len(self.seats)

    @property
    def ready(self) -> int:
        return int(np.count_nonzero(self._ready))

    @property
    def starting(self) -> int:
        return self.usable - (self.ranks - len(self.lost)) - self.ready

    @property
    def usable(self) -> int:
        """Slots in order, whoever is there."""
        return len(self._down) - int(np.count_nonzero(self._down))

    def tray_of(self, slot: int) -> int:
        return slot // self.fleet.gpus

    def is_down(self, tray: int) -> bool:
        return bool(self._down[tray * self.fleet.gpus : (tray + 1) * self.fleet.gpus].any())

    # -- what happens
    def strike(self, slots: range, *, hardware: bool) -> list[int]:
        """Who is there is gone. Returns the ranks among them."""
        at = slice(slots.start, slots.stop)
        held = self._holder[at]
        found: list[int] = held[held != NOBODY].tolist()
        self._holder[at] = NOBODY
        self._ready[at] = False
        self._states[at] = int(Fitness.BAD)
        self._stamp[at] += 1
        self._down[at] += hardware
        self.lost.update(dict.fromkeys(found))
        return found

    def repaired(self, slots: range) -> None:
        self._down[slots.start : slots.stop] -= 1

    def in_order(self, slots: Iterable[int]) -> list[int]:
        return [slot for slot in slots if not self._down[slot]]

    def stamps(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        """A worker starts on each: for `started`."""
        return [(slot, int(self._stamp[slot])) for slot in slots]

    def started(self, stamps: Iterable[tuple[int, int]]) -> int:
        """So many of them are spares now."""
        count = 0
        for slot, stamp in stamps:
            if self._stamp[slot] == stamp and self._holder[slot] == NOBODY and not self._down[slot]:
                self._ready[slot] = True
                self._states[slot] = int(Fitness.USABLE)
                count += 1
        return count

    # -- who takes over
    def staff(self) -> Staff | None:
        """For all lost ranks; None when spares are too few, or in the wrong racks."""
        question = self._question(self._states)
        if self._shortcut:
            if self._groups_that_fit(self._states == Fitness.USABLE) * self.job.group < self.ranks:
                return None
            found = self._near(question) if self.ranks > RANKS_MAX else None
            if found is not None:
                return Staff(found, {})
        try:
            seats = solve(question)
        except DoesNotFit:
            return None
        moved = np.flatnonzero(seats != self.seats).tolist()
        uprooted = {rank: int(seats[rank]) for rank in moved if rank not in self.lost}
        return Staff({rank: int(seats[rank]) for rank in self.lost}, uprooted)

    def take(self, staff: Staff) -> list[int]:
        """Slots that are left by it: workers start there."""
        left = [int(self.seats[rank]) for rank in staff.uprooted]
        self._leave(left)
        for rank, slot in (*staff.takeovers.items(), *staff.uprooted.items()):
            self.seats[rank] = slot
            self._holder[slot] = rank
            self._ready[slot] = False
            self._states[slot] = int(Fitness.USABLE)
            self._stamp[slot] += 1
        self.lost.clear()
        return [slot for slot in left if self._holder[slot] == NOBODY]

    # -- fewer, and more again
    def hit(self) -> list[int]:
        """Replicas with a lost rank."""
        return sorted({rank // self.job.replica for rank in self.lost})

    def drop(self, replicas: Collection[int]) -> list[int]:
        """The others go on, under new numbers. Returns the slots of those that lived: workers start there."""
        rows = self.seats.reshape(-1, self.job.replica)
        going = np.zeros(len(rows), bool)
        going[list(replicas)] = True
        slots = rows[going].ravel()
        freed: list[int] = slots[self._holder[slots] != NOBODY].tolist()
        self.seats = rows[~going].ravel()
        self._leave(freed)
        self.replicas = len(rows) - len(replicas)
        self.lost.clear()
        self._sit()
        return freed

    def joinable(self) -> int:
        """So many replicas could come back now: their groups find spares, each group in one rack."""
        room = self.full - self.replicas
        if room <= 0 or self.lost:
            return 0
        return min(room, self._groups_that_fit(self._ready) * self.job.group // self.job.replica)

    def join(self, replicas: int) -> None:
        of_rack = self._ready.reshape(self.fleet.racks, -1)
        wanted = replicas * self.job.replica
        taken: list[int] = []
        for rack in np.flatnonzero(of_rack.sum(1) >= self.job.group).tolist():
            free = (np.flatnonzero(of_rack[rack]) + rack * self.fleet.rack_gpus).tolist()
            taken += free[: len(free) // self.job.group * self.job.group][: wanted - len(taken)]
            if len(taken) == wanted:
                break
        self._ready[taken] = False
        self._stamp[taken] += 1
        self.seats = np.concatenate([self.seats, np.array(taken, np.int64)])
        self.replicas += replicas
        self._sit()

    # -- from nothing
    def may_begin(self) -> bool:
        """All ranks of the world as it is find a slot."""
        return self._groups_that_fit(self._down == 0) * self.job.group >= self.ranks

    def begin_again(self) -> None:
        """Every rank starts once more, on its own slot where that is in order; all other workers do too."""
        self._all_start(solve(self._question(self._in_order())))

    def relaunch(self) -> int:
        """As many replicas as fit now, all where the size is fixed; 0: too few do, and nothing has changed."""
        replicas = min(self.full, self._groups_that_fit(self._down == 0) * self.job.group // self.job.replica)
        enough = replicas * self.job.replica >= self.job.min_ranks if self.job.min_ranks else replicas == self.full
        if replicas and enough:
            self.replicas = replicas
            self._all_start(solve(Question(self.board, self._mesh(replicas), self._in_order(), self._lemons)))
            return replicas
        return 0

    def check(self) -> None:
        """What always holds."""
        held = np.flatnonzero(self._holder != NOBODY)
        assert not (self._ready[held]).any(), "a spare where a rank sits"
        assert not (self._down[held]).any(), "a rank on what is broken"
        assert not (self._ready & (self._down > 0)).any(), "a spare on what is broken"
        living = [rank for rank in range(self.ranks) if rank not in self.lost]
        assert (self._holder[self.seats[living]] == living).all(), "seats and slots differ"
        assert len(held) == len(living), "a slot of nobody"
        there = self._ready | (self._holder != NOBODY)
        assert ((self._states == int(Fitness.USABLE)) == there).all(), "what the solver is told is not so"
        assert self.starting == int(((self._down == 0) & ~there).sum()), "starting workers are miscounted"

    def _near(self, question: Question) -> dict[int, int] | None:
        """Each lost rank's slot in its own rack; None when a rack has too few."""
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

    def _question(self, states: Ints) -> Question:
        known = None
        if self._shortcut and self.job.group > 1:
            homes = self.board.clique[self.seats[:: self.job.group]]
            lost = np.array(sorted(self.lost), np.int64)
            known = Known(homes, lost[states[self.seats[lost]] == Fitness.BAD])
        return Question(self.board, self._mesh(self.replicas), states, self._lemons, previous=self.seats, known=known)

    def _all_start(self, seats: Ints) -> None:
        """Spares are there when the ranks are: they start together."""
        self.seats = seats.copy()
        self.lost.clear()
        self._sit()
        self._stamp += 1
        self._ready = (self._down == 0) & (self._holder == NOBODY)
        self._states = self._in_order()

    def _in_order(self) -> Ints:
        return np.where(self._down == 0, int(Fitness.USABLE), int(Fitness.BAD))

    def _leave(self, slots: list[int]) -> None:
        self._holder[slots] = NOBODY
        self._states[slots] = int(Fitness.BAD)
        self._stamp[slots] += 1

    def _sit(self) -> None:
        self._holder[:] = NOBODY
        living = np.ones(len(self.seats), bool)
        living[list(self.lost)] = False
        self._holder[self.seats[living]] = np.flatnonzero(living)

    def _groups_that_fit(self, slots: Bools) -> int:
        """On these slots, each in one rack. The solver finds room for so many, and for no more."""
        return int((np.count_nonzero(slots.reshape(self.fleet.racks, -1), axis=1) // self.job.group).sum())

    def _mesh(self, replicas: int) -> Mesh:
        return _mesh(self.job.group, self.job.replica, replicas)


@lru_cache(maxsize=8)
def _first(fleet: Fleet, job: Job) -> Ints:
    try:
        return place(board_of(fleet), job.mesh(job.replicas(fleet)), spares=job.spares_per_rack).seats
    except DoesNotFit as error:
        raise PlannerError(error.what, remedy="give fewer spares, or smaller groups (--group).") from error


@lru_cache(maxsize=8)
def _mesh(group: int, replica: int, replicas: int) -> Mesh:
    return Job(group=group, replica=replica).mesh(replicas)
