"""A world of ranks that run the real membership machine, in every order in which main threads, control threads, losses and
the coordinator can act. The coordinator decides what is committed with the core's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial

from rackrun.core.generation.restore_plan import ParkReport, committed
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import BEGIN, Generation, Position, Rank
from rackrun.worker.membership.decisions.gate_sums import ZERO_SUMS, GateSums
from rackrun.worker.membership.decisions.membership_machine import MembershipMachine
from rackrun.worker.membership.decisions.membership_states import MembershipState

Gate = tuple[int, int, int]
"""One all-reduce: generation, step, and how often the step was refused in this generation."""
Report = tuple[Position, Position, GateSums | None]
"""Of one parked rank: passed, entered, gate."""


class Wrong(AssertionError):
    """A rule of the gate is broken. ``args``: what is wrong, and the actions that led there."""


class Main(Enum):
    """Where the main thread is."""

    COMPUTES = auto()
    SUMS = auto()
    """Its part of the gate's sum is on its way."""
    ASKS = auto()
    """The gate broke: it waits for a plan that says whether the unit counts."""
    RECOVERS = auto()
    """It has left its unit, or begins, and waits for a plan to join."""


def plan_of(generation: int, upto: Position = BEGIN, gate: tuple[float, ...] = ()) -> GenerationPlan:
    return GenerationPlan(
        generation=Generation(generation),
        world_size=1,
        members=(),
        store="",
        committed=upto,
        gate=gate,
        layout=Generation(0),
        full=1,
    )


def sums_of(gate: Gate) -> GateSums:
    """Sums by which the gates of a test differ."""
    return GateSums.of([*map(float, gate), *ZERO_SUMS.values[len(gate) :]])


@dataclass
class Worker:
    """One process with a rank."""

    machine: MembershipMachine
    main: Main = Main.COMPUTES
    gate: Gate | None = None
    """The gate that it entered last."""
    refused: int = 0
    """How often this step was refused in this generation."""
    applied: tuple[Gate, ...] = ()
    """Its training state: the gates of the units that it has applied."""
    commands: tuple[int | GenerationPlan, ...] = ()
    """Those that it has not read: the generation of a break, or a plan."""
    report: Report | None = None
    """What it has reported, until a plan or a newer break."""
    fresh: bool = False
    """Whether it is a newcomer that has no state yet."""
    garbage: bool = False
    """Whether a collective of its unit failed, so that its gradients are of no use."""

    def copied(self) -> Worker:
        machine = object.__new__(type(self.machine))
        for name in MembershipMachine.__slots__:
            setattr(machine, name, getattr(self.machine, name))
        return replace(self, machine=machine)

    def key(self) -> object:
        machine = self.machine
        of = (machine.generation, machine.announced, machine.state, machine.unit, machine.passed, machine.entered)
        plan = machine.plan and machine.plan.generation
        commands = tuple(one if isinstance(one, int) else (one.generation, one.committed) for one in self.commands)
        gate = machine.gate
        main = self.main, self.gate, self.refused, self.applied, self.fresh, self.garbage
        return of, plan, gate, main, commands, self.report

    @property
    def at(self) -> int:
        """The step that it computes."""
        return len(self.applied)


@dataclass
class World:
    """A whole job. ``steps``: how many it has. ``losses``, ``cuts``: how many ranks and connections are yet to be lost."""

    workers: list[Worker | None]
    steps: int
    losses: int
    cuts: int = 0
    refuses: bool = False
    """Whether all ranks refuse the first attempt at step 0."""
    replaces: bool = False
    """Whether a newcomer takes the place of a lost rank."""
    announced: int = 1
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Generation -> its ranks."""
    entered: frozenset[tuple[Gate, int]] = frozenset()
    cut: frozenset[int] = frozenset()
    """Generations in which a connection was cut."""
    parking: bool = False
    reports: dict[int, Report] = field(default_factory=dict)
    """Those of the present break, by rank; a lost rank's too, until the coordinator notices its loss."""
    floor: tuple[Position, tuple[float, ...]] = (BEGIN, ())
    floors: bool = True
    """Whether the coordinator remembers what its last plan said; False: a mistake that must be found."""

    @classmethod
    def of(cls, ranks: int, machine: Callable[[], MembershipMachine] = MembershipMachine, **how: int | bool) -> World:
        """A world in generation 1."""
        workers: list[Worker | None] = []
        for _ in range(ranks):
            one = machine()
            one.take_plan(plan_of(1))
            one.join(plan_of(1))
            workers.append(Worker(one))
        return cls(workers, members={1: tuple(range(ranks))}, **how)  # type: ignore[arg-type]

    def copied(self) -> World:
        workers = [worker and worker.copied() for worker in self.workers]
        return replace(self, workers=workers, members=dict(self.members), reports=dict(self.reports))

    def key(self) -> object:
        workers = tuple(worker and worker.key() for worker in self.workers)
        coordinator = self.announced, self.parking, tuple(sorted(self.reports.items())), self.floor
        members = tuple(self.members.items())
        return workers, coordinator, members, self.entered, self.cut, self.losses, self.cuts

    def live(self) -> Iterator[tuple[int, Worker]]:
        for rank, worker in enumerate(self.workers):
            if worker is not None:
                yield rank, worker

    # -- what can happen next
    def actions(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """What can happen now: a name, and what does it to a copy of this world."""
        for rank, worker in self.live():
            yield from self._of_worker(rank, worker)
            if self.losses:
                yield f"rank {rank} is lost", partial(World.lose, rank=rank)
        if self.cuts and not self.parking:
            yield "a connection is cut", World.cut_connection
        newest = [self.workers[rank] for rank in self.members.get(self.announced, ())]
        if not self.parking and any(worker is None or self._reports_failure(worker) for worker in newest):
            yield "a break is announced", World.announce
        if self.parking and all(rank in self.reports for rank, worker in self.live() if not worker.fresh):
            yield "the coordinator decides", World.decide
            for rank in self.reports:
                if self.workers[rank] is None:
                    yield (
                        f"the coordinator decides, and has not noticed that rank {rank} is lost",
                        partial(World.decide, unnoticed=rank),
                    )

    def _of_worker(self, rank: int, worker: Worker) -> Iterator[tuple[str, Callable[[World], None]]]:
        machine, name = worker.machine, f"rank {rank}"
        match worker.main:
            case Main.COMPUTES if worker.at < self.steps or machine.broken:
                yield f"{name} enters the gate", lambda world: world.enter(rank)
            case Main.SUMS if machine.broken or self._all_entered(worker):
                yield f"{name} has its sums", lambda world: world.take_sums(rank)
            case Main.ASKS if machine.has_next_plan:
                yield f"{name} reads whether its unit counts", lambda world: world.ask(rank)
            case Main.RECOVERS if machine.has_next_plan and self._source(rank, worker) is not None:
                yield f"{name} joins", lambda world: world.join(rank)
        if machine.state is MembershipState.WHOLE and self._may_fail(machine.generation):
            yield f"a collective of {name} fails", lambda world: world.fail(rank)
        if worker.commands:
            yield f"{name} reads {_named(worker.commands[0])}", lambda world: world.read(rank)
            if not isinstance(worker.commands[0], int) and len(worker.commands) > 1:
                yield f"{name} never gets {_named(worker.commands[0])}", lambda world: world.miss(rank)

    def _all_entered(self, worker: Worker) -> bool:
        assert worker.gate is not None
        return all((worker.gate, peer) in self.entered for peer in self.members[worker.gate[0]])

    def _may_fail(self, generation: int) -> bool:
        """Whether some member is gone, or has left the generation, so that a collective of it can fail."""
        peers = [self.workers[rank] for rank in self.members[generation]]
        return generation in self.cut or any(
            peer is None
            or peer.machine.announced > generation
            or (peer.machine.broken and peer.machine.generation == generation)
            for peer in peers
        )

    def _reports_failure(self, worker: Worker) -> bool:
        """Whether a collective of the newest generation failed on the worker, and no break has come."""
        machine = worker.machine
        return machine.state is MembershipState.FAILED and machine.generation == self.announced

    def _source(self, rank: int, worker: Worker) -> Worker | None:
        """Who has the state that the worker needs for its plan: itself, or for a newcomer somebody who has joined."""
        if not worker.fresh:
            return worker
        assert worker.machine.plan is not None
        generation = worker.machine.plan.generation
        found = [one for other, one in self.live() if other != rank and one.machine.generation == generation]
        return next((one for one in found if one.at == worker.machine.plan.committed.step + 1), None)

    # -- main threads, as `WorkerMembership.pass_gate` and `Rejoin.run` go
    def enter(self, rank: int) -> None:
        worker = self[rank]
        worker.machine.begin_unit()
        gate = worker.machine.generation, worker.at, worker.refused
        if not worker.machine.enter_gate(Position(worker.at)):
            worker.main = Main.RECOVERS
            return
        self._check(not worker.garbage, f"rank {rank} enters a gate with garbage")
        worker.main, worker.gate = Main.SUMS, gate
        self.entered |= {(gate, rank)}

    def take_sums(self, rank: int) -> None:
        worker = self[rank]
        assert worker.gate is not None
        if worker.machine.broken:
            worker.main = Main.ASKS
        elif self.refuses and worker.gate == (1, 0, 0):
            worker.machine.refuse_gate()
            worker.main, worker.refused = Main.COMPUTES, 1
        else:
            worker.machine.pass_gate(sums_of(worker.gate))
            self._applies(rank)
            worker.main, worker.refused = Main.COMPUTES, 0

    def ask(self, rank: int) -> None:
        worker = self[rank]
        if worker.machine.count_by_plan(Position(worker.at)):
            self._applies(rank)
        worker.main = Main.RECOVERS

    def _applies(self, rank: int) -> None:
        worker = self[rank]
        assert worker.gate is not None
        self._check(worker.machine.unit_passed, "the main thread does not know that its unit counts")
        self._check(worker.gate[1] == worker.at, f"rank {rank} applies another step than it computed")
        worker.applied = (*worker.applied, worker.gate)
        for other, peer in self.live():
            same = all(mine == its for mine, its in zip(worker.applied, peer.applied, strict=False))
            self._check(same, f"ranks {rank} and {other} apply a step from different gates")

    def join(self, rank: int) -> None:
        worker = self[rank]
        plan, source = worker.machine.plan, self._source(rank, worker)
        assert plan is not None
        assert source is not None
        worker.machine.join(plan)
        if worker.fresh:
            worker.machine.place(plan.committed, plan.gate)
            worker.applied, worker.fresh = source.applied, False
        self._check(worker.machine.passed == plan.committed, f"rank {rank} goes on from another unit than the plan's")
        self._check(worker.at == plan.committed.step + 1, f"rank {rank} has other units than the plan says")
        worker.main, worker.refused, worker.garbage = Main.COMPUTES, 0, False

    # -- other threads
    def fail(self, rank: int) -> None:
        machine = self[rank].machine
        self[rank].garbage = self[rank].main is Main.COMPUTES
        machine.fail_collective(machine.generation, "connection reset", 0.0)

    def read(self, rank: int) -> None:
        worker = self[rank]
        command, worker.commands = worker.commands[0], worker.commands[1:]
        machine = worker.machine
        if isinstance(command, int):
            if machine.announce_break(Generation(command)):
                worker.report = machine.passed, machine.entered, machine.gate
                if not worker.fresh:
                    self.reports[rank] = worker.report
        else:
            before = machine.passed
            self._check(machine.take_plan(command), "a plan in its turn is refused")
            self._check(machine.passed >= before, f"rank {rank} takes a unit back that it saw pass")
            worker.report = None

    def miss(self, rank: int) -> None:
        self[rank].commands = self[rank].commands[1:]

    # -- losses
    def lose(self, rank: int) -> None:
        self.workers[rank] = None
        self.losses -= 1

    def cut_connection(self) -> None:
        self.cut |= {self.announced}
        self.cuts -= 1

    # -- the coordinator
    def announce(self) -> None:
        self.announced += 1
        self.parking, self.reports = True, {}
        for _, worker in self.live():
            worker.commands = (*worker.commands, self.announced)

    def decide(self, unnoticed: int | None = None) -> None:
        known = {
            Rank(rank): ParkReport(passed=passed, entered=entered, gate=gate.values if gate else ())
            for rank, (passed, entered, gate) in self.reports.items()
            if self.workers[rank] is not None or rank == unnoticed
        }
        self.parking, self.reports = False, {}
        declared, _ = self.floor
        self.floor = upto, gate = committed(known, *(self.floor if self.floors else (BEGIN, ())))
        self._check(upto >= declared, "the plan takes a unit back that the last plan has declared committed")
        undone = [rank for rank, worker in self.live() if worker.machine.passed > upto]
        self._check(not undone, f"the plan takes a unit back that rank {undone} saw pass")
        ranks = [rank for rank, _ in self.live()] + ([] if unnoticed is None else [unnoticed])
        if self.replaces and ranks:
            for rank, worker in enumerate(self.workers):
                if worker is None and rank != unnoticed:
                    self.workers[rank] = Worker(MembershipMachine(), Main.RECOVERS, fresh=True)
            ranks = list(range(len(self.workers)))
        self.members[self.announced] = tuple(sorted(ranks))
        for _, worker in self.live():
            worker.commands = (*worker.commands, plan_of(self.announced, upto, gate))

    # -- rules that hold after everything that happens
    def check(self) -> None:
        for rank, worker in self.live():
            machine = worker.machine
            if worker.report is not None:
                final = worker.report == (machine.passed, machine.entered, machine.gate)
                self._check(final, f"what rank {rank} has reported is not true any more")
            self._check(machine.passed <= machine.entered, f"rank {rank} passed a gate that it did not enter")

    def check_end(self) -> None:
        """Nothing can happen any more: all that is left is through."""
        for rank, worker in self.live():
            done = worker.main is Main.COMPUTES and worker.at == self.steps and not worker.machine.broken
            self._check(done, f"rank {rank} stands still")

    def _check(self, true: bool, what: str) -> None:
        if not true:
            raise Wrong(what)

    def __getitem__(self, rank: int) -> Worker:
        worker = self.workers[rank]
        assert worker is not None, "it is lost"
        return worker


def _named(command: int | GenerationPlan) -> str:
    return f"the break for {command}" if isinstance(command, int) else f"the plan of {command.generation}"


def explore(start: World) -> int:
    """Go through all orders from ``start``, and return the number of different states. Raises `Wrong` with the actions
    that lead to a state that breaks a rule."""
    seen = {start.key()}
    ways: list[tuple[World, tuple[object, ...]]] = [(start, ())]
    while ways:
        world, way = ways.pop()
        last = True
        for name, act in world.actions():
            last = False
            following, there = world.copied(), (way, name)
            try:
                act(following)
                following.check()
            except Exception as error:
                raise Wrong(f"{error}: " + ", then ".join(_flat(there))) from error
            key = following.key()
            if key not in seen:
                seen.add(key)
                ways.append((following, there))
        if last:
            try:
                world.check_end()
            except Wrong as error:
                raise Wrong(f"{error}: " + ", then ".join(_flat(way))) from error
    return len(seen)


def _flat(way: tuple[object, ...]) -> list[str]:
    """The names of a chain of actions, first to last."""
    names: list[str] = []
    while way:
        way, name = way  # type: ignore[assignment]
        names.append(str(name))
    return names[::-1]
