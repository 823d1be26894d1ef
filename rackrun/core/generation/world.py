"""The world: the ranks, their workers and the plan of the present generation, shared by all parts of the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter

from rackrun.core.generation.old_world import OldWorld
from rackrun.core.generation.world_pause import PauseState, PauseTrigger, WorldPause
from rackrun.core.members.transitions import STORY_MAX, check_transition
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.core.policy.active_policy import ActivePolicy
from rackrun.protocol.commands import GenerationPlan, Member, Worker
from rackrun.protocol.events import StopRequested
from rackrun.protocol.ids import BEGIN, Generation, Position, Rank, SlotId, Step, TrayId, tray_of

__all__ = ["IN_PLACE", "PHASES", "Phase", "World"]


class Phase(Enum):
    """The phase that the job is in. `PHASES` says which may follow which."""

    FORMING = "forming"
    SETUP = "setup"
    """Members start and run up to their first step. A plain script stays in this phase for its whole life."""
    TRAINING = "training"
    PARKING = "parking"
    """A generation is broken, and the next is not decided yet."""
    RESUMING = "resuming"
    RESTARTING = "restarting"
    """All workers are fenced; the world begins again when all have exited."""
    ENDING = "ending"
    """All ranks have finished, are released, and exit."""
    STOPPED = "stopped"


PHASES: Mapping[Phase, tuple[Phase, ...]] = {
    Phase.FORMING: (Phase.SETUP, Phase.STOPPED),
    Phase.SETUP: (Phase.TRAINING, Phase.RESTARTING, Phase.STOPPED),
    Phase.TRAINING: (Phase.PARKING, Phase.ENDING, Phase.STOPPED),
    Phase.PARKING: (Phase.RESUMING, Phase.RESTARTING, Phase.STOPPED),
    Phase.RESUMING: (Phase.TRAINING, Phase.PARKING, Phase.STOPPED),
    Phase.RESTARTING: (Phase.SETUP, Phase.STOPPED),
    Phase.ENDING: (Phase.STOPPED,),
    Phase.STOPPED: (Phase.STOPPED,),
}
"""The transition table: which phase may follow which. One event may give two reasons to stop."""

_TO_ANSWER = {
    Phase.SETUP: WorkerState.STARTING,
    Phase.PARKING: WorkerState.BREAKING,
    Phase.RESUMING: WorkerState.RESUMING,
}
"""For each phase, the state of members that have not answered yet."""


IN_PLACE = (Phase.TRAINING, Phase.PARKING, Phase.RESUMING)
"""Phases in which a loss is answered by a recovery in place."""


@dataclass(slots=True)
class World:
    """The ranks of the job, the workers that hold them, and the plan of the present generation."""

    phase: Phase = Phase.FORMING
    generation: Generation = Generation(0)
    elastic: bool = False
    size: int = 0
    full: int = 0
    """World size with which the job began, and up to which it grows again."""
    wanted: int = 0
    """Largest number of ranks that an operator asked for; 0: no operator asked for fewer."""
    policy: ActivePolicy = field(default_factory=ActivePolicy)
    spares: int = 0
    """Number of slots that are held back as spares, if there are that many."""
    seats: dict[Rank, SlotId] = field(default_factory=dict)
    """The slot in which each rank runs or last ran."""
    members: dict[Rank, WorkerRecord] = field(default_factory=dict)
    """The ranks with a living worker. Only the methods below change it, because they keep the indexes and ``awaited``
    up to date."""
    awaited: dict[Rank, None] = field(default_factory=dict)
    """Members that still have to answer the latest request: to be ready, to park, or to resume; in training, to finish.
    It is kept up to date with each answer, so that no answer requires a search over all members."""
    retired: dict[Rank, None] = field(default_factory=dict)
    """Ranks that had finished and whose workers have exited. They are needed only if the others have to recover once
    more."""
    _rank_at: dict[SlotId, Rank] = field(default_factory=dict)
    """The rank in each member's slot."""
    _lost: dict[Rank, None] = field(default_factory=dict)
    """Lost ranks, while any member is left."""
    _on_tray: dict[TrayId, dict[Rank, None]] = field(default_factory=dict)
    """The ranks that have their slot on each tray, once all ranks have one."""
    plan: GenerationPlan | None = None
    layout: Generation = Generation(0)
    """The generation in which the ranks received their shards; 0: as the world began."""
    old: OldWorld | None = None
    """The old world, if all ranks were told to enter ``main`` again and no gate has passed since."""
    trusted: Position | None = None
    """State from after this position is wrong (`ReplicasDiffer`); None: all state is good. Reset when all ranks compute
    again."""
    unsure: bool = False
    """Whether replicas differ and the right ones cannot be determined. Then no state in memory is trusted, however
    early its step."""
    doubted: bool = False
    """Whether a newcomer found that its sources differ. Then only state that the sources know to be good is trusted, if
    they know any."""
    learned: int = 0
    """Changes whenever a member reports its abilities."""
    restarts: int = 0
    reason: str = ""
    stopping: StopRequested | None = None
    """The request to end the job at the next step boundary; None: there is none."""
    stops_for_departure: bool = False
    """Whether ``stopping`` follows from the departure of all trays. An operator's request then still counts as the
    first."""
    pause: WorldPause = field(default_factory=WorldPause)
    """The pause of all ranks at a step boundary, in the training phase."""
    sizes: tuple[tuple[Step, int], ...] = ()
    """As `GenerationPlan.worlds`."""
    reached: Position = BEGIN
    """The last step that a worker was in when its exit was seen. As far as a restart knows, it may be committed."""
    _story: deque[str] = field(default_factory=lambda: deque([Phase.FORMING.value], STORY_MAX))
    """The latest phases."""
    _committed: int = -1
    """The last step that any plan has declared committed. Neither a rollback nor a restart takes it back."""

    def enter(self, phase: Phase, because: str) -> None:
        """Enter a phase, for a reason. Raises `InvalidTransition` if it cannot follow the present one."""
        check_transition("the job", self.phase, phase, PHASES, self._story)
        if self.pause.state is not PauseState.NONE:
            self.pause.move(PauseTrigger.END)
        self.phase, self.reason = phase, because
        self._story.append(phase.value)

    def next_generation(self) -> Generation:
        """Advance to the next generation and return it."""
        self.generation = Generation(self.generation + 1)
        return self.generation

    @property
    def most(self) -> int:
        """Number of ranks up to which the world grows by itself."""
        return min(self.wanted or self.full, self.full)

    @property
    def generation_ends(self) -> bool:
        """Whether the present generation or the job is about to end, because it was asked for."""
        return self.pause.state is not PauseState.NONE or self.stopping is not None

    def ending(self) -> str:
        """Return why the job is about to end; "": it is not."""
        if self.stopping is not None:
            return self.stopping.because
        return self.reason if self.phase is Phase.ENDING else ""

    def doubt(self) -> None:
        """Lower ``trusted`` to the last unit that members know to be good, if a newcomer found that its sources differ.
        Call it when all members have parked."""
        told = [record.parked.good for record in self.members.values() if record.parked is not None]
        known = max((good for good in told if good is not None), default=BEGIN)
        if self.doubted and self.trusted is None and known > BEGIN:
            self.trusted = known

    def trust(self) -> None:
        """Trust all state again, because all ranks compute from trusted state or the world begins anew."""
        self.trusted, self.unsure, self.doubted = None, False, False

    def ranks(self) -> list[Rank]:
        """Return all ranks, 0 to size - 1, whether or not they have a worker."""
        return [Rank(rank) for rank in range(self.size)]

    def lost(self) -> dict[Rank, SlotId]:
        """Return the ranks without a worker, and their last slots."""
        known = self.members or self.retired
        return {rank: self.seats[rank] for rank in (sorted(self._lost) if known else self.ranks())}

    @property
    def complete(self) -> bool:
        """Whether every rank has a living worker or has retired."""
        return len(self.members) + len(self.retired) == self.size

    def first_on(self, tray: TrayId) -> Rank:
        """Return the lowest rank with its slot on a tray; rank 0 if there is none."""
        return min(self._on_tray.get(tray, ()), default=Rank(0))

    def rank_at(self, slot: SlotId) -> Rank | None:
        """Return the rank of the member in a slot; None if there is none."""
        return self._rank_at.get(slot)

    def stateful(self) -> dict[Rank, WorkerRecord]:
        """Return the members that have training state, ordered by rank."""
        return {rank: record for rank, record in sorted(self.members.items()) if record.stateful}

    def workers(self) -> tuple[Worker, ...]:
        """Return the workers of all members, ordered by rank."""
        return tuple([record.worker for _, record in sorted(self.members.items())])

    def as_members(self, fresh: Collection[Rank] = ()) -> tuple[Member, ...]:
        """Return the members as a plan lists them, ordered by rank; those in ``fresh`` receive their state."""
        fresh = dict.fromkeys(fresh)
        return tuple(
            [
                Member(rank=rank, slot=record.worker.slot, incarnation=record.worker.incarnation, fresh=rank in fresh)
                for rank, record in sorted(self.members.items())
            ]
        )

    # -- who is in it ----------------------------------------------------------------------------------------------
    def seat(self, rank: Rank, record: WorkerRecord) -> None:
        """Give a rank to a worker."""
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
        """Remove the worker of a rank, which takes no part any more. The rank keeps its slot."""
        record = self.members.pop(rank)
        self._lost[rank] = None
        self.awaited.pop(rank, None)
        del self._rank_at[record.worker.slot]

    def retire(self, rank: Rank) -> None:
        """Remove the worker of a rank that has finished."""
        self.lose(rank)
        del self._lost[rank]
        self.retired[rank] = None

    def miss_retired(self) -> None:
        """Count retired ranks as lost, because a recovery needs all ranks."""
        self._lost.update(self.retired)
        self.retired.clear()

    def empty(self) -> None:
        """Remove all members."""
        for known in (self.members, self.retired, self.awaited, self._rank_at, self._lost, self._on_tray):
            known.clear()

    def renumber(self, ranks: Mapping[Rank, Rank]) -> None:
        """Give ranks their new numbers (old -> new), and remove the ranks that are not listed. All members are parked,
        so none is awaited."""
        members, seats = dict(self.members), dict(self.seats)
        self.empty()
        self.seats.clear()
        self.size = len(ranks)
        for old, new in sorted(ranks.items(), key=itemgetter(1)):
            self.seats[new] = seats[old]
            self.seat(new, members[old])

    # -- what all are told -----------------------------------------------------------------------------------------
    def await_all(self) -> None:
        """Expect an answer from every member."""
        self.awaited = dict.fromkeys(self.members)

    def answered(self, rank: Rank) -> bool:
        """Record the answer of a rank; return whether all ranks have answered."""
        self.awaited.pop(rank, None)
        return not self.awaited and self.complete

    def train(self) -> None:
        """Begin the training phase, because all ranks compute."""
        self.enter(Phase.TRAINING, self.reason)
        self.awaited = {rank: None for rank, record in self.members.items() if not record.finished}

    @property
    def some_have_finished(self) -> bool:
        """Whether some ranks have finished while others still train."""
        return self.phase is Phase.TRAINING and len(self.awaited) < self.size

    def go_on_after(self, committed: Position) -> tuple[tuple[Step, int], ...]:
        """Record that the present world commits the steps that were never committed before. Return `sizes`."""
        self._committed = max(self._committed, committed.step)
        first = Step(self._committed + 1)
        kept = tuple((since, size) for since, size in self.sizes if since < first)
        if not kept or kept[-1][1] != self.size:
            kept = (*kept, (first, self.size))
        self.sizes = kept
        return kept

    # -- what the last plan settled --------------------------------------------------------------------------------
    def rollback_incomplete(self) -> bool:
        """Return whether a rollback was interrupted before all ranks had gone back."""
        if self.plan is None or self.plan.rollback is None:
            return False
        return any(record.resumed_in != self.plan.generation for record in self.stateful().values())

    def floor(self) -> tuple[Position, tuple[float, ...]]:
        """Return the least position that is committed, and the values of its gate."""
        if self.plan is None:
            return BEGIN, ()
        if self.plan.rollback is not None and self.stateful() and not self.rollback_incomplete():
            return Position(self.plan.rollback), ()
        return self.plan.committed, self.plan.gate

    def check_invariants(self) -> None:
        """Raise AssertionError if the world contradicts itself."""
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
        assert self.pause.state is PauseState.NONE or self.phase is Phase.TRAINING, "a pause while not all train"
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
