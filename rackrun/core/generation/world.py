"""The world: what a generation is made of. Shared by the parts of the job's machine, owned by none of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter

from rackrun.core.generation.old_world import OldWorld
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.core.policy.active_policy import Mandate
from rackrun.protocol.commands import Member, Plan, Worker
from rackrun.protocol.ids import BEGIN, Generation, Position, Rank, SlotId, Step, TrayId, tray_of

__all__ = ["IN_PLACE", "Phase", "World"]


class Phase(Enum):
    """Where the job stands.

    ::

        FORMING --> SETUP --> TRAINING --> PARKING --> RESUMING --> TRAINING --> ENDING --> STOPPED
                      ^           |           ^ |          |
                      |           |           | +----------+  (a loss while resuming breaks again)
                      +-- RESTARTING <--------+
    """

    FORMING = "forming"
    SETUP = "setup"
    """Members start, up to their first step. A plain script stays here for its whole life."""
    TRAINING = "training"
    PARKING = "parking"
    """A generation is broken; the next is not decided yet."""
    RESUMING = "resuming"
    RESTARTING = "restarting"
    """Everyone is fenced; the world begins again when all have ended."""
    ENDING = "ending"
    """Released: everyone has finished and exits."""
    STOPPED = "stopped"


_TO_ANSWER = {
    Phase.SETUP: WorkerState.STARTING,
    Phase.PARKING: WorkerState.BREAKING,
    Phase.RESUMING: WorkerState.RESUMING,
}
"""In which state those are that have not answered yet."""


IN_PLACE = (Phase.TRAINING, Phase.PARKING, Phase.RESUMING)
"""Where a loss is a swap."""


@dataclass(slots=True)
class World:
    phase: Phase = Phase.FORMING
    generation: Generation = Generation(0)
    elastic: bool = False
    size: int = 0
    full: int = 0
    """Of the world as it began: what it grows back to."""
    wanted: int = 0
    """As many ranks as a person wants at the most; 0: nobody has asked for fewer."""
    policy: Mandate = field(default_factory=Mandate)
    spares: int = 0
    """Slots held back, as long as there are as many."""
    seats: dict[Rank, SlotId] = field(default_factory=dict)
    """Where each rank lives or last lived."""
    members: dict[Rank, WorkerRecord] = field(default_factory=dict)
    """The ranks that have a living worker. Changed by the methods below alone: who is where, and who is awaited, goes with it."""
    awaited: dict[Rank, None] = field(default_factory=dict)
    """Members that have still to answer what all were told last: to be ready, to park, to resume; while all train, to finish. Kept as
    the answers come, so that nobody has to look at all members for each of them."""
    retired: dict[Rank, None] = field(default_factory=dict)
    """Ranks that had finished, and whose workers are gone: nobody misses them, unless the others have to recover once more."""
    _rank_at: dict[SlotId, Rank] = field(default_factory=dict)
    """Of the members."""
    _lost: dict[Rank, None] = field(default_factory=dict)
    """While anybody is left."""
    _on_tray: dict[TrayId, dict[Rank, None]] = field(default_factory=dict)
    """Whose seats are there, once all have one."""
    plan: Plan | None = None
    layout: Generation = Generation(0)
    """The generation in which the ranks got the shards that they have; 0: as the world began."""
    old: OldWorld | None = None
    """All were told to enter ``main`` again, and no gate has passed since."""
    trusted: Position | None = None
    """State of later than this is not what it should be (`ReplicasDiffer`); None: all state is good. Until all compute again."""
    unsure: bool = False
    """Replicas differ, and nobody can say which are right: what is in memory is not to be trusted either, however early the step is."""
    doubted: bool = False
    """A newcomer has found its sources unlike each other: what is to be trusted is what they know to be good, if they know."""
    learned: int = 0
    """Changes whenever a member tells what it can do."""
    restarts: int = 0
    reason: str = ""
    sizes: tuple[tuple[Step, int], ...] = ()
    """`Plan.worlds`"""
    reached: Position = BEGIN
    """The last step in which a worker was whose end was seen: it may be committed, as far as a restart knows."""
    _committed: int = -1
    """The last step that any plan has declared committed: a rollback, or a restart, takes nothing of that back."""

    def next_generation(self) -> Generation:
        self.generation = Generation(self.generation + 1)
        return self.generation

    @property
    def most(self) -> int:
        """So far it grows by itself."""
        return min(self.wanted or self.full, self.full)

    def doubt(self) -> None:
        """All members have parked: is there less to be trusted than they have?"""
        told = [record.parked.good for record in self.members.values() if record.parked is not None]
        known = max((good for good in told if good is not None), default=BEGIN)
        if self.doubted and self.trusted is None and known > BEGIN:
            self.trusted = known

    def trust(self) -> None:
        """All compute again, from what was to be trusted, or begin anew."""
        self.trusted, self.unsure, self.doubted = None, False, False

    def ranks(self) -> list[Rank]:
        return [Rank(rank) for rank in range(self.size)]

    def lost(self) -> dict[Rank, SlotId]:
        """Ranks without a worker, and where they were."""
        known = self.members or self.retired
        return {rank: self.seats[rank] for rank in (sorted(self._lost) if known else self.ranks())}

    @property
    def complete(self) -> bool:
        return len(self.members) + len(self.retired) == self.size

    def first_on(self, tray: TrayId) -> Rank:
        """The lowest rank that has, or had, its seat on a tray; rank 0 where there is none."""
        return min(self._on_tray.get(tray, ()), default=Rank(0))

    def rank_at(self, slot: SlotId) -> Rank | None:
        """Which rank somebody holds there."""
        return self._rank_at.get(slot)

    def stateful(self) -> dict[Rank, WorkerRecord]:
        return {rank: record for rank, record in sorted(self.members.items()) if record.stateful}

    def workers(self) -> tuple[Worker, ...]:
        return tuple([record.worker for _, record in sorted(self.members.items())])

    def as_members(self, fresh: Collection[Rank] = ()) -> tuple[Member, ...]:
        fresh = dict.fromkeys(fresh)
        return tuple(
            [
                Member(rank=rank, slot=record.worker.slot, incarnation=record.worker.incarnation, fresh=rank in fresh)
                for rank, record in sorted(self.members.items())
            ]
        )

    # -- who is in it ----------------------------------------------------------------------------------------------
    def seat(self, rank: Rank, record: WorkerRecord) -> None:
        slot, before = record.worker.slot, self.seats.get(rank)
        if before is not None:
            self._on_tray.get(tray_of(before), {}).pop(rank, None)
        self._on_tray.setdefault(tray_of(slot), {})[rank] = None
        record.rank = rank
        self.members[rank] = record
        self.seats[rank] = slot
        self._rank_at[slot] = rank
        self._lost.pop(rank, None)

    def lose(self, rank: Rank) -> None:
        """Its worker takes no part any more; the seat stays the rank's."""
        record = self.members.pop(rank)
        self._lost[rank] = None
        self.awaited.pop(rank, None)
        del self._rank_at[record.worker.slot]

    def retire(self, rank: Rank) -> None:
        """Its worker is gone, and all that it had to do is done."""
        self.lose(rank)
        del self._lost[rank]
        self.retired[rank] = None

    def miss_retired(self) -> None:
        """There is something to recover: all ranks are needed for it."""
        self._lost.update(self.retired)
        self.retired.clear()

    def empty(self) -> None:
        """Nobody is in it any more."""
        for known in (self.members, self.retired, self.awaited, self._rank_at, self._lost, self._on_tray):
            known.clear()

    def renumber(self, ranks: Mapping[Rank, Rank]) -> None:
        """Old rank -> new rank: who is not among them is in it no more. All are parked, so nobody is awaited."""
        members, seats = dict(self.members), dict(self.seats)
        self.empty()
        self.seats.clear()
        self.size = len(ranks)
        for old, new in sorted(ranks.items(), key=itemgetter(1)):
            self.seats[new] = seats[old]
            self.seat(new, members[old])

    # -- what all are told -----------------------------------------------------------------------------------------
    def await_all(self) -> None:
        self.awaited = dict.fromkeys(self.members)

    def answered(self, rank: Rank) -> bool:
        """By one more. Whether by all."""
        self.awaited.pop(rank, None)
        return not self.awaited and self.complete

    def train(self) -> None:
        """All compute."""
        self.phase = Phase.TRAINING
        self.awaited = {rank: None for rank, record in self.members.items() if not record.finished}

    @property
    def some_have_finished(self) -> bool:
        return self.phase is Phase.TRAINING and len(self.awaited) < self.size

    def go_on_after(self, committed: Position) -> tuple[tuple[Step, int], ...]:
        """With the size that it has now, what was never committed. Returns `sizes`."""
        self._committed = max(self._committed, committed.step)
        first = Step(self._committed + 1)
        kept = tuple((since, size) for since, size in self.sizes if since < first)
        if not kept or kept[-1][1] != self.size:
            kept = (*kept, (first, self.size))
        self.sizes = kept
        return kept

    # -- what the last plan settled --------------------------------------------------------------------------------
    def torn(self) -> bool:
        """A rollback was broken off before everyone had gone back."""
        if self.plan is None or self.plan.rollback is None:
            return False
        return any(record.resumed_in != self.plan.generation for record in self.stateful().values())

    def floor(self) -> tuple[Position, tuple[float, ...]]:
        """What is committed at the least, and its gate."""
        if self.plan is None:
            return BEGIN, ()
        if self.plan.rollback is not None and self.stateful() and not self.torn():
            return Position(self.plan.rollback), ()
        return self.plan.committed, self.plan.gate

    def check_invariants(self) -> None:
        workers = self.workers()
        assert len(workers) == len(dict.fromkeys(workers)), "two ranks on one worker"
        slots = [worker.slot for worker in workers]
        assert len(slots) == len(dict.fromkeys(slots)), "two ranks on one slot"
        assert len(self.seats) == self.size, "a rank without a seat"
        assert self._rank_at == {record.worker.slot: rank for rank, record in self.members.items()}, "who is where"
        if self.members:
            on_tray = sorted((tray_of(slot), rank) for rank, slot in self.seats.items())
            assert sorted((tray, rank) for tray, ranks in self._on_tray.items() for rank in ranks) == on_tray, "seats"
        there = {**self.members, **self.retired}
        assert list(self.lost()) == [rank for rank in self.ranks() if rank not in there], "who is lost"
        assert not self.retired or self.phase in (Phase.TRAINING, Phase.ENDING, Phase.STOPPED), "who is missed"
        for rank, record in self.members.items():
            assert record.rank == rank, "a worker that is not what its rank says"
            assert record.alive, f"rank {rank} is held by a worker that is {record.state.value}"
            assert self.seats[rank] == record.worker.slot, "a rank that is not in its seat"
        if self.plan is not None:
            assert self.plan.generation <= self.generation, "a plan of a generation that is not yet"
        self._check_phase()

    def _check_phase(self) -> None:
        if self.phase in (Phase.TRAINING, Phase.RESUMING):
            assert self.complete, f"{self.phase.value} with {len(self.members)} of {self.size} ranks"
        if (answers := _TO_ANSWER.get(self.phase)) is not None:
            awaited = [rank for rank, record in self.members.items() if record.state is answers]
            assert sorted(self.awaited) == sorted(awaited), f"{self.phase.value}, and others are awaited"
        if self.phase is Phase.TRAINING:
            assert all(r.state is WorkerState.TRAINING for r in self.members.values()), "training without everyone"
            assert all(r.stateful for r in self.members.values()), "training without state"
            assert all((rank in self.awaited) != r.finished for rank, r in self.members.items()), "who has finished"
        if self.phase is Phase.PARKING:
            states = [r.state for r in self.members.values()]
            assert all(s in (WorkerState.BREAKING, WorkerState.PARKED) for s in states), "parking while others compute"
        if self.phase in (Phase.RESUMING, Phase.TRAINING) and self.plan is not None:
            assert self.plan.generation == self.generation, "on the way without a plan"
