"""Model of one worker: it starts, computes units and enters their gates, parks and restores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rackrun.chaos.simulator.base.ground_truth import StateHistory, must
from rackrun.chaos.simulator.cluster.checkpoint_storage import Unusable
from rackrun.chaos.simulator.cluster.replica_comparison import (
    Comparing,
    KnownReplicas,
    ReplicaDifference,
    goes_back,
    is_due,
    record_resumed,
)
from rackrun.chaos.simulator.cluster.restore_sources import CorruptState, Unlike, named
from rackrun.chaos.simulator.cluster.snapshot_sealing import Sealing
from rackrun.chaos.simulator.cluster.worker_watchdog import WorkerWatchdog
from rackrun.protocol.commands import (
    BreakGeneration,
    DealShards,
    DrainWorkers,
    GenerationPlan,
    PauseWorkers,
    ReleaseWorkers,
    Reshard,
    ResumeGeneration,
    StartWorker,
    Worker,
)
from rackrun.protocol.events import (
    Event,
    LossNotRepeated,
    ScriptFailure,
    SnapshotDamaged,
    WorkerElastic,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WorkerSevered,
    WorkerUnbuilt,
)
from rackrun.protocol.ids import Generation, Position, Step, snapshot_id

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.agent_model import Agent
    from rackrun.chaos.simulator.cluster.generations import SimulatedGeneration
    from rackrun.chaos.simulator.cluster.restore_sources import Owner

__all__ = ["SimulatedWorker"]

POLL_S = 0.1


class SimulatedWorker:
    """One worker as it really is; the core only knows what is reported."""

    def __init__(self, agent: Agent, command: StartWorker) -> None:
        self.agent, self.sim = agent, agent.sim
        self.slot, self.incarnation = command.slot, int(command.incarnation)
        self.worker = Worker(command.slot, command.incarnation)
        self.owner: Owner = (self.slot, self.incarnation)
        self.rank: int | None = None if command.spare else int(command.rank)
        self.generation = int(command.generation)
        self.state = "starting"  # starting, waiting, running, parked, resuming, dead
        self.history: StateHistory | None = None
        """The training state; None if it has none."""
        self.entered_in: int | None = None
        """The generation in which it entered the unit after its history and has not seen the gate pass; None
        otherwise."""
        self.entered_world = 0
        self.layout, self.rollback_incomplete, self.finished = 0, False, False
        self.resumed = Generation(0)
        self.plan: GenerationPlan | None = None
        self.between_units = False
        """Whether it is paused between two units."""
        self.read_in = -1
        """The last generation whose state it has read."""
        self.own_pause, self.late_s, self.slow = 0, 0.0, 1.0
        self.progress_ns = self.silent_ns = agent.sim.engine.now_ns
        self.saved = -1
        """The last unit after which it began to write a checkpoint."""
        self.last_words = WorkerExited(slot=self.slot, incarnation=self.worker.incarnation)
        """What its page and its script say at its end, from then on; nothing of one that is ended before it starts."""
        self.damaged: set[int] = set()
        """Its own snapshots that it has found damaged."""
        self._told_to_pause = self._told_to_drain = -1
        self._floor = -1
        """The last unit that any plan has said to be committed."""
        self._turn = 0
        """A counter: calls that were scheduled in an older turn are dropped."""
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._felt = -1
        self.sealing, self._watch = Sealing(self), WorkerWatchdog(self)
        self.comparing, self.replicas = Comparing(), KnownReplicas(self)
        self.gate_states: dict[int, StateHistory] = {}
        """The states at the gate that it entered last."""
        self._once_more = False
        """Its loss was not finite, and all ranks compute the unit again."""

    def __repr__(self) -> str:
        return f"{self.slot}:{self.incarnation} (rank {self.rank}, {self.state}, {self.history})"

    # -- what it is
    @property
    def alive(self) -> bool:
        return self.state != "dead"

    @property
    def stateful(self) -> bool:
        return self.history is not None

    @property
    def passed(self) -> int:
        return -1 if self.history is None else self.history.unit

    @property
    def its_rank(self) -> int:
        assert self.rank is not None
        return self.rank

    @property
    def paused(self) -> bool:
        return self.own_pause > 0

    # -- time
    def later(self, seconds: float, do: Callable[..., None], *args: object) -> None:
        """Call ``do`` after ``seconds``, unless the worker is broken off before."""
        self.sim.engine.after(seconds, self._due, self._turn, do, *args)

    def _due(self, turn: int, do: Callable[..., None], *args: object) -> None:
        if turn == self._turn:
            self.do(do, *args) if not self.paused else self._backlog.append((self._due, (turn, do, *args)))

    def do(self, do: Callable[..., None], *args: object) -> None:
        """Call ``do`` now, or when the process goes on if it is stopped; never if it has ended."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((do, args))
        else:
            do(*args)

    def pause(self) -> None:
        self.own_pause += 1
        self.silent_ns = self.sim.engine.now_ns

    def go_on(self) -> None:
        """Go on after a stop, and do what has piled up meanwhile."""
        self.own_pause -= 1
        if self.paused or not self.alive:
            return
        newest = max(self.sim.truth.plans, default=0)
        if self.rank is not None and self.generation < newest:
            self.sim.marks.sometimes("somebody woke up in an older generation")
        backlog, self._backlog = self._backlog, deque()
        for do, args in backlog:
            self.do(do, *args)
        self.sim.check_generations()

    def receive(self, command: object) -> None:
        self.sim.engine.after(1e-5, self.do, self._obey, command)

    def say(self, kind: Callable[..., Event], **fields: object) -> None:
        self.agent.do(self.agent.hear_worker, self, kind(slot=self.slot, incarnation=self.incarnation, **fields))

    # -- its beginning and its end
    def start(self) -> None:
        """Start, which takes until the worker stands at its first step."""
        costs, draw = self.sim.costs, self.sim.draw["starts"]
        late_s = 0.0
        if self.sim.buggify("worker: a slow start"):
            late_s = 60 * draw.random()
            self.sim.marks.sometimes("a slow start was waited for")
        self.later(costs.of(costs.start_s, draw) + late_s, self._ready)
        self._watch.begin()

    def _ready(self) -> None:
        if self.sim.crashes("worker: ready", self):
            return
        if self.agent.tray in self.sim.provider.broken:
            self.end(signal=6)
            return
        self.say(WorkerElastic)
        if self.rank is not None and self.sim.job.checkpoint_every:
            self.later(self.sim.costs.of(self.sim.costs.read_s, self.sim.draw["disk"]), self._stand)
        else:
            self._stand()

    def _stand(self) -> None:
        """Begin the first step with the state that the world begins with; a spare waits."""
        if self.rank is not None:
            try:
                self.history = self.sim.disk.begins(self.generation)
            except Unusable:
                what = "no checkpoint can be used. Remedy: look at the disk."
                self.end(code=1, bug=what, kind="rackrun.errors.StateLost")
                return
            self.saved = self.passed
        self.replicas.begins()
        self._say_ready()
        self.state = "waiting" if self.rank is None else "running"
        if self.rank is not None:
            self.sim.eras[self.generation].takes_part(self, self.rank)
            self._compute()

    def _say_ready(self) -> None:
        job = self.sim.job
        sharded = job.shards != "replicas"
        self.say(
            WorkerReady,
            replica_class=self.replicas.name,
            fixed="it is sharded" if sharded and not job.reenters else "",
            reenters=sharded and job.reenters,
            exact=job.exact,
        )

    def end(
        self, *, signal: int | None = None, code: int | None = None, bug: str = "", kind: str = "ValueError"
    ) -> None:
        """End the process. Its agent is alive and sees it."""
        if not self.alive:
            return
        left = tuple(Step(one) for one in sorted(self.sim.memory.of(self.agent.tray, self.owner)))
        failure = ScriptFailure(type=kind, message=bug, traceback="", where=bug) if bug else None
        self.last_words = WorkerExited(
            slot=self.slot,
            incarnation=self.worker.incarnation,
            signal=signal,
            exit_code=code,
            failure=failure,
            step=Step(self.passed + 1),
            snapshots=left,
        )
        self.dies()
        self.agent.do(self.agent.see_exit, self)
        self.sim.wake_conductor()

    def dies(self) -> None:
        """End the process without a report."""
        if self.alive:
            self.state = "dead"
            era = self.sim.eras.get(self.generation)
            if era is not None:
                era.leave(self)

    # -- training
    def _compute(self) -> None:
        self.progress_ns = self.sim.engine.now_ns
        if self.passed + 1 >= self.sim.truth.units:
            self._finish()
            return
        if self.replicas.compares():
            self._say_ready()
        costs = self.sim.costs
        late_s, self.late_s = self.late_s, 0.0
        self.later(costs.of(costs.step_s, self.sim.draw["steps"]) * self.slow + late_s, self._enter)

    def _enter(self) -> None:
        if self.sim.crashes("worker: entering", self) or self.sim.poisoned(self):
            return
        self.progress_ns = self.sim.engine.now_ns
        era = self.sim.eras[self.generation]
        self.entered_in, self.entered_world = self.generation, era.world
        pausing, draining = self._told_to_pause == self.generation, self._told_to_drain == self.generation
        era.enter(self, pausing=pausing, draining=draining)

    def see(self, generation: int) -> None:
        """See the gate that was entered pass: apply the unit, and save what is due."""
        era = self.sim.eras[generation]
        gate = era.sees(self)
        if gate is None or self.entered_in != generation or self.generation != generation:
            return
        self._apply()
        if self._once_more:
            self._once_more = False
            self.sim.marks.sometimes("a loss was finite when it was computed once more")
            self.say(LossNotRepeated, at=Position(self.passed))
        if self.sim.crashes("worker: applied", self):
            return
        self.sim.passed(self)
        self._snapshot(era)
        every = self.sim.job.checkpoint_every
        if every and self.passed % every == every - 1 and self.passed > self.saved:  # else it is done again and saved
            self.saved = self.passed if self.sim.disk.save(self) else self.saved
        if gate.draining:
            self._finish()
        elif gate.pausing:
            self._pause()
        else:
            self._compute()

    def _snapshot(self, era: SimulatedGeneration) -> None:
        """Seal a snapshot: of state without a replica at the interval, or of state that is about to be compared."""
        sim = self.sim
        if sim.job.check_replicas and not sim.some_are_alone(era.world):
            if is_due(sim, era, self.passed + 1) and goes_back(sim, era):
                good = self.comparing.good
                self.sealing.to_compare(sim.began(self.generation) if good is None else good)
        elif self.passed % sim.job.snapshot_every == sim.job.snapshot_every - 1:
            self.sealing.soon()

    def differs(self, of: ReplicaDifference) -> None:
        """Report the difference that all ranks of the generation have found.

        The worker passes no gate any more, and waits until its generation is broken.
        """
        if self.state != "running" or self.entered_in != of.generation:
            return
        self.entered_in = None
        if of.good < self.passed:
            self.sim.disk.distrust(of.good, self.saved)
        self.say(lambda **_: of.event(self))

    def flip(self, flaw: str, bits: str = "") -> None:
        """Its GPU, or the GPU's memory, corrupts its state."""
        self.history = self.state_now.changed(flaw, bits)
        self.comparing.flipped.append(flaw)
        if self.sim.is_compared_no_more(self):
            self.sim.truth.late.add(flaw)

    def repeats_its_unit(self) -> None:
        """Its next loss is not finite, so all ranks compute the unit again; then the loss is finite."""
        self.late_s += self.sim.costs.step_s
        self._once_more = True

    def _apply(self) -> None:
        must(self.history is not None and self.entered_in is not None, "a unit applied that was not entered")
        self.history = self.state_after()
        self.entered_in = None
        self._computes_wrong()
        self.sim.truth.state(self.generation, self.history)

    @property
    def state_now(self) -> StateHistory:
        assert self.history is not None
        return self.history

    def state_after(self) -> StateHistory:
        assert self.entered_in is not None
        return self.state_now.then(self.entered_in, self.entered_world, self.gate_states.values())

    def _computes_wrong(self) -> None:
        """Corrupt the state if its GPU is one that computes wrongly, always in the same way."""
        if self.sim.job.wrong.get(self.slot, self.sim.truth.units) <= self.passed:
            self.flip(f"what {self.slot} computes in generation {self.generation}", f"what {self.slot} computes")

    def _finish(self) -> None:
        if self.sim.crashes("worker: finishing", self):
            return
        self.finished = True
        self.say(WorkerFinished)

    def _pause(self) -> None:
        if self.sim.crashes("worker: pausing", self):
            return
        if self.sim.some_are_alone(self.sim.eras[self.generation].world):
            self.sealing.now()
        self.between_units = True
        self.say(WorkerPaused, generation=Generation(self.generation))

    # -- recovery
    def collective_fails(self) -> None:
        """A collective of its generation fails; after a while without a reason from elsewhere, the worker
        reports it."""
        if self.alive and self.state == "running" and self._felt != self.generation:
            self._felt = self.generation
            self.later(
                self.sim.costs.of(self.sim.costs.sever_s, self.sim.draw["gates"]), self._severed, self.generation
            )

    def _severed(self, generation: int) -> None:
        if self.state == "running" and self.generation == generation and self.entered_in is not None:
            self.sim.marks.sometimes("a collective was severed")
            self.say(WorkerSevered, generation=Generation(generation), because="connection reset")

    def _obey(self, command: object) -> None:
        match command:
            case BreakGeneration():
                self._turn += 1
                self.state, self.between_units = "parked", False
                self.sim.eras[self.generation].leave(self)
                costs, draw = self.sim.costs, self.sim.draw["parks"]
                most_s = 4 if self.sim.job.must_survive else 8  # so late that it is given up: that is one more loss
                late_s = most_s * draw.random() if self.sim.buggify("worker: parks late") else 0.0
                self.later(costs.of(costs.park_s, draw) + late_s, self._park, command.generation)
            case ResumeGeneration():
                self._take_plan(command.plan)
            case PauseWorkers():
                self._told_to_pause = int(command.generation)
            case DealShards():
                pass  # how many micro-batches each computes has no model here
            case DrainWorkers():
                self._told_to_drain = self.generation
            case ReleaseWorkers():
                self._turn += 1
                self.later(0.05, lambda: self.end(code=0))
            case _:
                raise AssertionError(command)

    def _park(self, generation: Generation) -> None:
        if self.sim.crashes("worker: parking", self):
            return
        entered = self.passed + (self.stateful and self.entered_in is not None)
        snapshots = sorted(self.sim.memory.of(self.agent.tray, self.owner).keys() - self.damaged)
        self.say(
            WorkerParked,
            generation=generation,
            passed=Position(self.passed),
            entered=Position(entered),
            gate=(float(self.passed),),
            snapshots=tuple(Step(step) for step in snapshots),
            layout=Generation(self.layout) if self.stateful else None,
            replica_class=self.replicas.to_report(entered),
            resumed=self.resumed,
            good=None if self.comparing.good is None else Position(self.comparing.good),
        )

    def _take_plan(self, plan: GenerationPlan) -> None:
        """Take up a plan. From here on, a fresh member has no state to lose."""
        if self.state in ("starting", "running"):
            return  # the plan is of the world that it is started in
        must(plan.generation > self.generation, f"{self} is given an old plan")
        me = next(m for m in plan.members if (m.slot, int(m.incarnation)) == self.owner)
        if plan.reshard is not None:
            self._hand_over(plan, plan.reshard)
        elif not me.fresh:
            must(self.stateful, f"state is expected of {self}, which has none")
            if plan.rollback is None:
                must(plan.committed.step >= self._floor, "what was committed is committed no more")
                has = self.passed + (self.entered_in is not None)
                must(self.passed <= plan.committed.step <= has, f"a plan that {self} cannot follow: {plan.committed}")
        self._floor = plan.committed.step if plan.rollback is None else int(plan.rollback)
        self._turn += 1
        self.state, self.plan, self.rank, self.generation = "resuming", plan, int(me.rank), int(plan.generation)
        if me.fresh or plan.reshard is not None:
            self.history = None
        if plan.reshard is not None:
            self.replicas.leaves_main(plan)
        self.finished = False
        self.rollback_incomplete = self.stateful and (self.rollback_incomplete or plan.rollback is not None)
        if me.fresh or plan.reshard is not None or plan.rollback is not None:
            self.sealing.break_off()
        if not self.sim.crashes("worker: planned", self):
            self.sim.eras[self.generation].arrive(self, self.its_rank)
            if plan.generation > 1 and plan.reshard is None:  # otherwise the members wait longer
                costs = self.sim.costs
                self.later(costs.of(costs.handshake_s, self.sim.draw["recoveries"]), self._unbuilt, self.generation)

    def _unbuilt(self, generation: int) -> None:
        """Report that not all members have come together in time."""
        era = self.sim.eras[generation]
        if self.state == "resuming" and self.generation == generation and not era.met:
            cut_off = era.is_cut_off(self.agent.tray)
            self.sim.marks.sometimes("groups could not be built")
            self.say(WorkerUnbuilt, generation=Generation(generation), cut_off=cut_off, because="somebody did not come")

    def _hand_over(self, plan: GenerationPlan, of: Reshard) -> None:
        """Seal the old state and leave main, if the worker still has that state and is asked for it."""
        here = f"{self.agent.tray}:2/{self.slot}/{self.incarnation}"
        if not (self.stateful and self.layout == of.layout and plan.rollback is None and here in of.images):
            return
        at = plan.committed.step
        has = self.passed + (self.entered_in is not None)
        must(self.passed <= at <= has, f"a plan that {self} cannot follow")
        if self.passed < at:
            self.history, self.entered_in = self.state_after(), None
        self.sealing.now()

    def met(self) -> None:
        """All members have come, and groups are built."""
        costs, draw, plan = self.sim.costs, self.sim.draw["recoveries"], self.plan
        assert plan is not None
        seconds = costs.reenter_s if plan.reshard is not None else costs.regroup_s
        late_s = 20 * draw.random() if self.sim.buggify("worker: resumes late") else 0.0
        self.later(costs.of(seconds, draw) + late_s, self._restore)

    def _restore(self) -> None:
        if self.sim.crashes("worker: restoring", self):
            return
        if self.plan is not None and any(one.rank == self.rank and one.sources for one in self.plan.restores):
            self.sim.memory.forget_owner(self.agent.tray, self.owner)  # it is given another rank's state
        found = self._find()
        if found is None:
            self.later(POLL_S, self._restore)
        elif found is not False:
            costs, plan = self.sim.costs, self.plan
            assert plan is not None
            reads = not self.stateful or plan.rollback is not None
            self.later(costs.of(costs.takeover_s, self.sim.draw["recoveries"]) if reads else 0.0, self._resume)

    def _find(self) -> StateHistory | bool | None:
        """Return the state to restore; None: not yet available. False: it is damaged, which has been reported."""
        assert self.plan is not None
        try:
            return self.sim.memory.for_member(self, self.plan)
        except Unlike:
            self.sim.marks.sometimes("a newcomer found its sources unlike each other")
            what = "sources differ. Remedy: one of these GPUs computes wrongly."
            self.end(code=1, bug=what, kind="rackrun.errors.StateLost")
            return False
        except CorruptState as bad:
            generation = Generation(self.generation)
            if not bad.where:
                self.damaged.add(bad.step)
                self.sim.memory.of(self.agent.tray, self.owner).pop(bad.step)
            self.sim.marks.sometimes("a snapshot was damaged")
            fields: dict[str, Any] = {"step": Step(bad.step), "where": bad.where, "because": "chunk 0"}
            self.say(SnapshotDamaged, generation=generation, **fields)
            return False

    def _resume(self) -> None:
        if self.sim.crashes("worker: resuming", self):
            return
        found, plan = self._find(), self.plan
        assert plan is not None
        if not isinstance(found, StateHistory):
            if found is None:
                self.later(POLL_S, self._restore)
            return
        self.read_in = plan.generation
        self._go_on(plan, found)

    def _go_on(self, plan: GenerationPlan, found: StateHistory) -> None:
        """Go on with the restored state.

        Where every rank reads what all ranks had before, none makes room for a new snapshot until all have read.
        """
        owners = [(member.slot, member.incarnation) for member in plan.members] if plan.reshard is not None else []
        if any((one := self.sim.processes.get(owner)) is None or one.read_in != plan.generation for owner in owners):
            self.later(POLL_S, self._go_on, plan, found)
            return
        if not self.stateful or plan.rollback is not None:
            self.comparing.filled += 1
        if plan.reshard is not None:
            self.replicas.fills()
            self._say_ready()
        elif not self.stateful:
            self.replicas.takes_over(plan, found.unit)
            self.comparing.taken = found.flaws
        self.history, self.layout = found, int(plan.layout)
        self.sim.truth.trusts(found, self)
        self.entered_in, self.rollback_incomplete, self.state = None, False, "running"
        if plan.reshard is not None:
            self.sealing.now(besides=int(snapshot_id(plan.reshard.layout, Step(plan.committed.step))))
        elif plan.rollback is not None:
            arena = self.sim.memory.of(self.agent.tray, self.owner)
            for step in [step for step in arena if step > named(plan, int(plan.rollback))]:
                del arena[step]
        self._watch.resumed(nobody_was_lost=not any(member.fresh for member in plan.members))
        self.sim.truth.state(self.generation, self.history)
        self.resumed = plan.generation
        record_resumed(self.sim, self.sim.eras[self.generation])
        self.say(WorkerResumed, generation=plan.generation)
        if not self.finished:
            self._compute()
