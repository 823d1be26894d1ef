"""One simulated job in virtual time, from its start to its end.

In the first phase faults strike as the plan says (*safety*). Then nothing strikes any more, part of what is broken
heals, and the rest stays broken (*liveness*). In the second phase the job must come to its end or stop for a reason.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.targets import Scene, SlotOccupant
from rackrun.chaos.plan.conductor import Conductor, Observation, Order, StrikeOrder
from rackrun.chaos.plan.definition import Plan as ChaosPlan
from rackrun.chaos.simulator.base.connections import TrayCuts
from rackrun.chaos.simulator.base.coordinator_checks import Halt
from rackrun.chaos.simulator.base.coverage_marks import Buggify, CoverageMarks
from rackrun.chaos.simulator.base.durations import SimCosts
from rackrun.chaos.simulator.base.ground_truth import GroundTruth, Violation, must
from rackrun.chaos.simulator.base.virtual_time import FIRST, LAST, NS, Engine
from rackrun.chaos.simulator.cluster.agent_model import Agent
from rackrun.chaos.simulator.cluster.checkpoint_storage import CheckpointStorage
from rackrun.chaos.simulator.cluster.coordinator_model import Coordinator
from rackrun.chaos.simulator.cluster.fault_models import Injectors
from rackrun.chaos.simulator.cluster.generations import SimulatedGeneration
from rackrun.chaos.simulator.cluster.operators import OperatorModel
from rackrun.chaos.simulator.cluster.rack_provider import SimulatedProvider
from rackrun.chaos.simulator.cluster.replica_comparison import ReplicaDifference
from rackrun.chaos.simulator.cluster.restore_sources import AgentMemory, Owner
from rackrun.chaos.simulator.cluster.rollback_bounds import Rollbacks
from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol.commands import GenerationPlan, StopJob
from rackrun.protocol.events import Event, ReplicasDiffer, SnapshotMirrored
from rackrun.protocol.ids import SlotId, TrayId, slot_id, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.partial_topology import FoundGpu, FoundTray, PartialTopology

__all__ = ["SimulatedJob", "SimulationOutcome", "Simulation"]

EVENTS_MAX = 400_000
LIVE_S_MAX = 4 * 3600.0
"""Seconds of virtual time after the last fault within which the job has to end.

The delays of ranks are added: a rank that is alone is waited for however late it is, because no other rank could
notice.
"""


_NO_END = f"no end {LIVE_S_MAX:.0f} s after the last fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """The job to simulate, and the faults to inject."""

    seed: int
    config: JobConfig
    trays: int
    slots: int
    units: int
    plan: ChaosPlan
    shards: str = "replicas"
    """``replicas``: all ranks have the same state; ``pairs``: every second rank has; ``unique``: no two ranks have."""
    exact: bool = True
    reenters: bool = False
    snapshot_every: int = 2
    checkpoint_every: int = 0
    """Units between two checkpoints; 0: there is no disk."""
    faults_s: float = 60.0
    """Seconds from the start during which faults strike."""
    requests: int = 0
    """The number of requests by operators in that time."""
    racks: bool = False
    """Whether trays report their GPUs; two trays then form an NVLink clique."""
    drift: float = 0.0
    """The largest rate by which agents' clocks run too fast or too slow."""
    must_survive: bool = False
    """Whether the faults are so few that the job has to end well."""
    check_replicas: int = 0
    """States are compared every this many units; 0: never."""
    wrong: dict[SlotId, int] = field(default_factory=dict)
    """GPUs that compute wrongly, always in the same way -> the unit from which on they do."""
    costs: SimCosts = field(default_factory=SimCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """The result of one simulated job."""

    seed: int
    trace: str
    stopped: StopJob | None
    violation: str
    """The invariant that did not hold; "" if all held."""
    core_events: int
    happened: int
    virtual_s: float
    marks: dict[str, int]
    last: tuple[str, ...] = ()
    """The last events and the core's answers, if an invariant did not hold."""
    resolved: ChaosPlan | None = None
    """The plan of what was done, by name and step."""


class Simulation:
    """One job, with all its models."""

    def __init__(self, job: SimulatedJob, core: type[ControlPlane] = ControlPlane) -> None:
        self.job, self.costs, self.drift = job, job.costs, job.drift
        self.engine, self.marks, self.buggify = Engine(), CoverageMarks(), Buggify(job.seed)
        self.draw = _Streams(job.seed)
        self.truth, self.memory, self.disk = GroundTruth(job.units), AgentMemory(self), CheckpointStorage(self)
        self.cuts: dict[TrayId, TrayCuts] = defaultdict(TrayCuts)
        self.agents: dict[TrayId, Agent] = {}
        """The newest agent of each tray."""
        self.processes: dict[Owner, SimulatedWorker] = {}
        self.eras: dict[int, SimulatedGeneration] = {}
        self.points: dict[str, int] = {}
        self.planned_ns = 0
        self.differences: dict[int, ReplicaDifference] = {}
        """Generation -> the conclusion that its ranks drew from comparing states."""
        self.rollbacks = Rollbacks(self)
        self.coordinator_asleep = False
        self.provider = SimulatedProvider(self)
        self.coordinator = Coordinator(self, job.config, core)
        self.operators = OperatorModel(self)
        self.injectors = Injectors(self, job.plan)
        self.conductor: Conductor | None = Conductor(job.plan)
        self._carried_out = self.conductor
        self._own_trays = [TrayId(f"tray-{number}") for number in range(job.trays)]
        self._slots: list[SlotId] = []
        self._slots_of: list[TrayId] = []
        """The trays whose slots these are."""
        self._live_until_s = math.inf
        self._stirred = False
        self._wake_ms = -1
        self._newest = -1
        self._lives: list[int] = []

    # -- from start to end
    def run(self) -> SimulationOutcome:
        """Simulate the job to its end. An invariant that does not hold is in the outcome, and is not raised."""
        violation = ""
        try:
            self._run()
        except Halt as found:
            violation = _described(found.because)
        except Exception as found:  # noqa: BLE001 - whatever it is, it is the seed's result, and the others go on
            violation = _described(found)
        shell = self.coordinator
        return SimulationOutcome(
            seed=self.job.seed,
            trace=shell.checked.trace(),
            stopped=shell.stopped,
            violation=violation,
            core_events=shell.checked.events,
            happened=self.engine.ran,
            virtual_s=self.engine.now_s,
            marks=dict(sorted(self.marks.items())),
            last=shell.checked.last() if violation else (),
            resolved=self._carried_out.resolved() if violation else None,
        )

    def _run(self) -> None:
        self.coordinator.driver.begin()
        for number in range(self.job.trays):
            self.engine.after(0.5 * self.draw["joins"].random(), self.switch_on, TrayId(f"tray-{number}"))
        self.operators.begin()
        self.engine.after(self.job.faults_s, self._heal, priority=FIRST)
        engine, end = self.engine, self.coordinator.driver.finished
        while end.stop is None:
            must(engine.ran < EVENTS_MAX, "it goes round in circles")
            must(engine.now_s < self._live_until_s, _NO_END)
            must(engine.step(), "nothing can happen any more")
        self._ended(end.stop)

    def _heal(self) -> None:
        """End the faults. What stays broken now stays so for good."""
        self.conductor = None
        draw = self.draw["healing"]
        self.injectors.end(lambda: draw.random() < 0.75 or self.job.must_survive)
        for tray, agent in self.agents.items():
            if not agent.alive and tray in self._trays() and draw.random() < 0.6:
                self.engine.after(60 * draw.random(), self.switch_on, tray)
        self._live_until_s = self.engine.now_s + LIVE_S_MAX + self.injectors.delayed_s

    def _ended(self, stop: StopJob) -> None:
        if stop.exit_code == 0:
            newest = max(self.truth.plans)
            ended = [p for p in self.processes.values() if p.finished and p.generation == newest and p.rank is not None]
            must(len({p.rank for p in ended}) == len(ended), "two workers finished as one rank")
            self.truth.ended_well({p.its_rank: p.history for p in ended}, clean=self.job.must_survive)
            self.marks.sometimes("all ended well")
            for name, seen in (
                ("a job of a thousand units ended well", self.job.units >= 1_000),
                ("a job recovered two dozen times and ended well", len(self.truth.plans) > 24),
                ("a corrupt rank came, and all ended well", bool(self.differences)),
            ):
                if seen:
                    self.marks.sometimes(name)
            return
        must(stop.exit_code in (1, 2, 3, 143), f"exit code {stop.exit_code}")
        must(
            stop.remedy or " Remedy: " in stop.because or stop.exit_code == 143,
            f"a stop without a remedy: {stop.because}",
        )
        must("contradicts" not in stop.because, stop.because)
        must(not self.job.must_survive, f"it had to survive, and stopped: {stop.because}")
        self.marks.sometimes("it stopped for a reason")

    # -- trays and workers
    def switch_on(self, tray: TrayId) -> None:
        """Start a new agent on an empty tray; do nothing where one is alive."""
        before = self.agents.get(tray)
        if before is not None and before.alive:
            return
        if before is not None:
            self.marks.sometimes("a tray came back")
        self.agents[tray] = Agent(self, tray, self.job.slots)
        self.agents[tray].join()
        self.check_generations()
        self.wake_conductor()

    def born(self, process: SimulatedWorker) -> None:
        must(process.owner not in self.processes, "an incarnation twice")
        self.processes[process.owner] = process
        self.wake_conductor()

    def _trays(self) -> list[TrayId]:
        return [*self._own_trays, *self.provider.trays()]

    def all_slots(self) -> list[SlotId]:
        trays = self._trays()
        if trays != self._slots_of:
            self._slots = [slot_id(tray, index) for tray in trays for index in range(self.job.slots)]
            self._slots_of = trays
        return self._slots

    @staticmethod
    def _clique(tray: TrayId) -> str:
        """Two trays form a clique; a rack from the provider has its own."""
        rack, _, number = tray.rpartition("-")
        return f"clique-{int(number) // 2}" if rack == "tray" else f"clique of {rack}"

    def describe(self, tray: TrayId, slots: int) -> bytes:
        """Return the tray's topology as its agent reports it."""
        if not self.job.racks:
            return b""
        clique = self._clique(tray)
        gpus = tuple(FoundGpu(index=index, uuid=f"GPU-{tray}-{index}") for index in range(slots))
        found = FoundTray(host=tray, rack=f"rack of {clique}", gpus=gpus, clique=CliqueId(clique, 1))
        return msgspec.json.encode([PartialTopology(kind="nvml", where=f"NVML on {tray}", trays=(found,))])

    def life(self, generation: int) -> int:
        """Return the generation in which the world that ``generation`` belongs to was last started: the newest start not
        after it."""
        return max(one for one in self._lives if one <= generation)

    def began(self, generation: int) -> int:
        """Return the unit after which the world of ``generation`` began."""
        return self.disk.began_with(self.life(generation)).unit

    def is_compared_no_more(self, process: SimulatedWorker) -> bool:
        """Whether a change in the state of ``process`` will never be found, because nothing is compared any more."""
        at_its_end = process.passed + 2 > self.truth.units
        last = process.comparing.last >= self.truth.units - 1
        return (
            not self.job.check_replicas
            or at_its_end
            or last
            or self.some_are_alone(self.eras[process.generation].world)
        )

    def class_of(self, rank: int | None) -> str:
        if rank is None or self.job.shards == "unique":
            return ""
        return "all" if self.job.shards == "replicas" else f"class {rank % 2}"

    def some_are_alone(self, world: int) -> bool:
        """Whether some rank has no replica."""
        classes = [self.class_of(rank) for rank in range(world)]
        return any(classes.count(one) == 1 or not one for one in classes)

    # -- what happens in it
    def on_event(self, event: Event) -> None:
        """Take in an event of the coordinator, right before the core does."""
        if isinstance(event, SnapshotMirrored):
            self.memory.record_copy(event)
        self.rollbacks.on_event(event)

    def flaws_found(self, event: ReplicasDiffer) -> Iterable[str]:
        """Return the flaws of the state of those who differ."""
        return self.differences[int(event.generation)].flaws

    def planned(self, plan: GenerationPlan, *, launch: bool) -> None:
        """Take in a new plan of the core: check it, and make its generation. ``launch``: a world begins with it."""
        before = self.truth.plans[max(self.truth.plans)] if self.truth.plans else None
        self.truth.planned(plan, launch=launch)
        self.rollbacks.planned(plan, launch=launch)
        self.memory.planned()
        era = self.eras[plan.generation] = SimulatedGeneration(self, plan)
        self.planned_ns = self.engine.now_ns
        if launch:
            self._newest = -1
            self._lives.append(plan.generation)
        else:
            era.entered = self.eras[max(self.eras.keys() - {plan.generation})].entered
            if plan.reshard is not None:
                era.entered = int(plan.committed.step)
        differed = None if before is None else self.differences.get(int(before.generation))
        for name, seen in (
            ("the world began again", launch and before is not None),
            ("replicas differed, and no snapshot was left", launch and differed is not None and not differed.culprits),
            ("a rollback was planned", plan.rollback is not None),
            ("all entered main again", plan.reshard is not None),
            ("the world shrank", before is not None and plan.world_size < before.world_size),
            ("the world grew", before is not None and plan.world_size > before.world_size),
            ("a unit was done again in place", not launch and not any(m.fresh for m in plan.members)),
            ("a planned swap was made", not launch and self._all_pause(before)),
        ):
            if seen:
                self.marks.sometimes(name)

    def _all_pause(self, before: GenerationPlan | None) -> bool:
        members = [self.processes.get((m.slot, int(m.incarnation))) for m in before.members] if before else []
        return any(m is not None and m.between_units for m in members)

    def passed(self, process: SimulatedWorker) -> None:
        """Note that a process has seen a gate pass."""
        if process.passed > self._newest:
            self._newest = process.passed
            self.coordinator.measured(process.passed)
            self.wake_conductor()

    def poisoned(self, process: SimulatedWorker) -> bool:
        """End the process if it computes a unit with a poisoned sample. Returns whether it has ended."""
        unit = process.passed + 1
        if unit in self.injectors.poison and process.rank == unit % self.eras[process.generation].world:
            process.end(code=1, bug="train.py:7")
            return True
        return False

    def crashes(self, point: str, who: SimulatedWorker | Agent) -> bool:
        """Count a visit of ``point``, and end ``who`` if a fault says so. Returns whether it has ended."""
        self.points[point] = self.points.get(point, 0) + 1
        return self.injectors.crash(point, who)

    def check_generations(self) -> None:
        for generation in sorted(self.eras)[-3:]:
            self.eras[generation].check()

    # -- the plan of faults
    def wake_conductor(self) -> None:
        """Let the conductor look again, because there is something new to see."""
        if not self._stirred and self.conductor is not None:
            self._stirred = True
            self.engine.after(0.0, self._look, priority=LAST)

    def _look(self) -> None:
        self._stirred = False
        self._see()

    def _see(self) -> None:
        if self.conductor is None or self.coordinator.stopped is not None:
            return
        seen = Observation(self.engine.now_ms / 1e3, self._newest, self.scene(), dict(self.points))
        self._carry_out(self.conductor.see(seen))
        wake_s = self.conductor.wake_s
        if wake_s is not None:
            wake_ms = max(math.ceil(wake_s * 1e3 - 1e-6), self.engine.now_ms + 1)
            if wake_ms != self._wake_ms:
                self._wake_ms = wake_ms
                self.engine.at(wake_ms * (NS // 1000), self._see, priority=FIRST)

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            if not isinstance(order, StrikeOrder):
                self.injectors.take_back(order.number)
                continue
            took, detail = self.injectors.strike(order)
            if self.conductor is not None:
                self._carry_out(self.conductor.confirm(order.number, took=took, detail=detail))

    def scene(self) -> Scene:
        """Return the state of the job, as faults resolve their targets from it."""
        newest = self.truth.plans[max(self.truth.plans)] if self.truth.plans else None
        ranks = {(m.slot, int(m.incarnation)): int(m.rank) for m in newest.members} if newest else {}
        places = []
        for slot in self.all_slots():
            tray = tray_of(slot)
            agent = self.agents.get(tray)
            process = agent.in_slot(slot) if agent is not None and agent.alive else None
            if process is None:
                continue
            rank = ranks.get(process.owner)
            if rank is None and process.rank is not None:
                continue  # it belongs to an earlier world
            place = SlotOccupant(slot, tray, self._clique(tray), "rack", rank, process.incarnation)
            places.append(place)
        mirrors = newest.mirrors if newest else {}
        return Scene(tuple(places), {str(tray): holder.partition("/")[2] for tray, holder in mirrors.items()})


def _described(error: Exception) -> str:
    """Describe what went wrong, as the seed's result."""
    if isinstance(error, Violation):
        return str(error)
    if isinstance(error, AssertionError):
        return f"the core contradicts itself: {error}"
    return f"{type(error).__name__}: {error}"


class _Streams(dict[str, random.Random]):
    """Random streams by name, from the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __missing__(self, name: str) -> random.Random:
        self[name] = stream(self._seed, "sim", name)
        return self[name]
