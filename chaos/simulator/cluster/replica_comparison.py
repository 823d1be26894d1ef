"""Model of what workers know of their replicas, and of ``--check-replicas``.

The latter is as in `rackrun.worker.integrity.silent_corruption`.

Ranks compare digests right before the update of a step, and all come to the same conclusion. Which rank is wrong is
decided by `rackrun.core.faults.divergence` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rackrun.chaos.simulator.base.ground_truth import must
from rackrun.core.faults.divergence import culprits
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import ReplicasDiffer
from rackrun.protocol.ids import Generation, Position, Rank

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.generations import SimulatedGeneration
    from rackrun.chaos.simulator.cluster.simulation import Simulation
    from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker

__all__ = ["Comparing", "KnownReplicas", "ReplicaDifference", "compare", "goes_back", "is_due", "record_resumed"]

_START = "start "
_MAJORITY = 3
"""The number of ranks with the same shard from which one of them can be outvoted."""


@dataclass(slots=True)
class Comparing:
    """The memory of one rank for comparisons."""

    good: int | None = None
    """The last unit after which it knows that all replicas were equal."""
    last: int = -1
    """The unit before whose update they were equal."""
    seen: dict[int, int] = field(default_factory=dict)
    """Unit -> its digest before the update, since then."""
    before: dict[Rank, dict[int, int]] = field(default_factory=dict)
    """The digests of all ranks when a comparison could not tell which rank was wrong."""
    until: int = -1
    went_back: bool = False
    filled: int = 0
    """How many times its state was restored."""
    filled_then: int = -1
    """The value of ``filled`` when the replicas differed."""
    flipped: list[str] = field(default_factory=list)
    """Flaws made by its own GPU."""
    taken: frozenset[str] = frozenset()
    """Flaws of the state that it took from another rank or from a snapshot."""

    def begins(self, at: int, passed: int, began: int, world: int) -> None:
        """Prepare for the gate of unit ``at``."""
        self.good = min(began if self.good is None else self.good, passed)
        if at <= self.last:
            self.last = -1
        self.went_back |= at < self.until or (at == self.until and self.filled > self.filled_then)
        if not self.went_back or len(self.before) != world:
            self.before = {}


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """The conclusion that all ranks of a generation draw and report."""

    generation: Generation
    at: int
    culprits: tuple[Rank, ...]
    good: int
    again: bool
    differing: tuple[Rank, ...]
    flaws: frozenset[str]
    """Flaws that no state may have any more."""

    def event(self, of: SimulatedWorker) -> ReplicasDiffer:
        """Return the difference as the event that ``of`` reports."""
        return ReplicasDiffer(
            slot=of.slot,
            incarnation=of.incarnation,  # type: ignore[arg-type]
            generation=self.generation,
            at=Position(self.at),
            culprits=self.culprits,
            good=Position(self.good),
            again=self.again,
            differing=self.differing,
        )


def compares(sim: Simulation, era: SimulatedGeneration, unit: int) -> bool:
    """Whether ``unit`` can be compared: the ranks know which of them are replicas, and each has one."""
    known = unit > era.since + 2
    return bool(sim.job.check_replicas) and known and not sim.some_are_alone(era.world)


def is_due(sim: Simulation, era: SimulatedGeneration, unit: int) -> bool:
    last = unit == sim.truth.units - 1
    due = last or unit in (era.since + 3, era.compares_soon) or unit % sim.job.check_replicas == 0
    return compares(sim, era, unit) and due


def goes_back(sim: Simulation, era: SimulatedGeneration) -> bool:
    """Whether a snapshot of the state that is compared may ever be needed."""
    return sim.job.check_replicas > 1 or len(_kinds(sim, era.world)[0]) < _MAJORITY


def compare(
    sim: Simulation, era: SimulatedGeneration, unit: int, members: Sequence[SimulatedWorker]
) -> ReplicaDifference | None:
    """Compare the states of all ranks at the gate of ``unit``; None if they pass it.

    ``members``: all ranks of the generation, in order.
    """
    if not compares(sim, era, unit):
        if sim.job.check_replicas and sim.some_are_alone(era.world):
            for one in members:
                one.comparing.good = None
        return None
    kinds, due = _kinds(sim, era.world), is_due(sim, era, unit)
    for one in members:
        one.comparing.begins(unit, one.passed, sim.began(era.generation), era.world)
        if due or any(len(kind) < _MAJORITY for kind in kinds if one.its_rank in kind):
            one.comparing.seen[unit] = one.state_now.digest
    if not due:
        return None
    if not _apart(kinds, members):
        for after in (unit - 1, unit):  # an update of equal states gives equal states
            sim.truth.equal_after(after, [one.state_now for one in members])
    found = _judge(era, unit, kinds, members)
    if found is None:
        for one in members:
            kept = one.comparing
            kept.good, kept.last = unit - 1, unit
            kept.seen = {step: digest for step, digest in kept.seen.items() if step > unit}
    return found


def record_resumed(sim: Simulation, era: SimulatedGeneration) -> None:
    """Note what no comparison can find from now on, if all ranks of a generation go on with states equal to those of
    their replicas: a wrong bit of a rank from which all its replicas have taken their state."""
    members = [era.members[rank] for rank in range(era.world) if rank in era.members]
    all_go_on = len(members) == era.world and all(
        one.state == "running" and one.generation == era.generation for one in members
    )
    if sim.job.check_replicas and all_go_on and not _apart(_kinds(sim, era.world), members):
        sim.truth.equal_after(members[0].passed, [one.state_now for one in members])


def _apart(kinds: list[list[Rank]], members: Sequence[SimulatedWorker]) -> list[list[Rank]]:
    """Return the kinds whose ranks have different states."""
    return [kind for kind in kinds if len({members[rank].state_now.digest for rank in kind}) > 1]


def _kinds(sim: Simulation, world: int) -> list[list[Rank]]:
    found: dict[str, list[Rank]] = {}
    for rank in range(world):
        found.setdefault(sim.class_of(rank), []).append(Rank(rank))
    return list(found.values())


def _judge(
    era: SimulatedGeneration, unit: int, kinds: list[list[Rank]], members: Sequence[SimulatedWorker]
) -> ReplicaDifference | None:
    all_kept = [one.comparing for one in members]
    good, last = max(-1 if kept.good is None else kept.good for kept in all_kept), max(kept.last for kept in all_kept)
    twice, until = all(kept.before for kept in all_kept), max(kept.until for kept in all_kept)
    for kept in all_kept:  # a rank that has just joined does not know
        kept.good, kept.last = good, last
        kept.before = kept.before if twice else {}
    apart = _apart(kinds, members)
    if not apart and not twice:
        return None
    now = {
        Rank(one.its_rank): {step: digest for step, digest in one.comparing.seen.items() if last < step <= unit}
        for one in members
    }
    before = all_kept[0].before
    first = {rank: {step: digest for step, digest in seen.items() if step <= unit} for rank, seen in before.items()}
    found = culprits(kinds, [first, now] if twice else [now])
    if found:
        fresh = not twice and unit - 1 == last  # the wrong gradients are in no state yet
        right = [rank for rank in found if not members[rank].comparing.flipped]
        for rank in right:
            must(_taken(kinds, members, rank), f"rank {rank} is to blame, and its GPU has never been wrong")
        for kept in all_kept:
            kept.before = {}
        how = "found by computing again" if twice else "outvoted"
        era.sim.marks.sometimes(f"a corrupt rank was {how}")
        good = unit - 1 if fresh or not apart else good
        difference = _difference(era, unit, members, found, good)
        believed = frozenset[str]().union(*(_taken(kinds, members, rank) for rank in right))
        return replace(difference, flaws=difference.flaws - believed)
    if not apart:
        if unit >= until:
            for kept in all_kept:
                kept.before = {}
        return None
    if twice and unit >= until:
        differing = tuple(rank for kind in apart for rank in kind)
        era.sim.marks.sometimes("replicas differed twice")
        return _difference(era, unit, members, (), good, differing)
    for kept in all_kept:
        kept.before, kept.until, kept.went_back, kept.filled_then = now, unit, False, kept.filled
    era.sim.marks.sometimes("replicas differed, and all computed again")
    return _difference(era, unit, members, (), good)


def _taken(kinds: list[list[Rank]], members: Sequence[SimulatedWorker], rank: Rank) -> frozenset[str]:
    """Return the flaws by which replicas of a rank whose state is right outvote it: one of them became wrong, and
    others took its state."""
    others = [members[other] for kind in kinds if rank in kind for other in kind if other != rank]
    taken = frozenset[str]().union(*(one.comparing.taken & one.state_now.flaws for one in others))
    return taken - members[rank].state_now.flaws


def _difference(
    era: SimulatedGeneration,
    unit: int,
    members: Sequence[SimulatedWorker],
    found: tuple[Rank, ...],
    good: int,
    differing: tuple[Rank, ...] = (),
) -> ReplicaDifference:
    flaws = frozenset[str]().union(*(one.state_now.flaws for one in members))
    flaws -= era.sim.truth.flaws_then(good, era.sim.disk.began_with(era.sim.life(era.generation)))
    return ReplicaDifference(Generation(era.generation), unit, found, good, bool(differing), differing, flaws)


class KnownReplicas:
    """The replica class of one worker, as the worker knows it: `rackrun.worker.integrity.replicas`.

    A world that begins knows at once which ranks hold the same state. One that has entered ``main`` again compares
    anew: its ranks begin with equal state, and whether they stay equal is known when they begin the second unit after
    that. Until then none counts as a replica of another.
    """

    def __init__(self, of: SimulatedWorker) -> None:
        self._of = of
        self.name = ""

    def begins(self) -> None:
        """Begin a world."""
        self.name = self._real

    def leaves_main(self, plan: GenerationPlan) -> None:
        """Leave ``main`` to enter it again, with other shards."""
        self.name = f"none yet, as rank {self._of.rank} in generation {plan.generation}" if self._real else ""

    def fills(self) -> None:
        """Record that the state has been filled anew from those of all old ranks, in ``main``."""
        self.name = f"{_START}{self._real}" if self._real else ""

    def takes_over(self, plan: GenerationPlan, unit: int) -> None:
        """Take over what the source of the state of ``unit`` knew: a rank of the same generation, or a snapshot."""
        of = self._of
        sources = [source for restore in plan.restores if restore.rank == of.rank for source in restore.sources]
        peers = [plan.members[source] for source in sources]
        known = [of.sim.processes[peer.slot, int(peer.incarnation)].replicas.name for peer in peers]
        if known:
            self.name = known[0]
        elif unit > self._entered + 1:
            self.name = self._real
        else:
            self.fills()

    def compares(self) -> bool:
        """Compare with the other ranks before the next unit, if that is due. Return whether it was."""
        due = self._entered >= 0 and self._of.passed == self._entered + 1
        if due:
            self.name = self._real
        return due

    def to_report(self, entered: int) -> str:
        """Return the class that a worker that parks reports. ``entered``: the last unit whose gate it has entered."""
        if self.name.startswith(_START) and entered > self._entered:
            return f"unchecked rank {self._of.rank}"
        return self.name

    @property
    def _real(self) -> str:
        return self._of.sim.class_of(self._of.rank)

    @property
    def _entered(self) -> int:
        """The unit that was committed when all ranks last entered ``main`` again; -1: they never did."""
        return self._of.sim.eras[self._of.generation].entered
