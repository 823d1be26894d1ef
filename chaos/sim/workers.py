"""One worker: it starts, computes units and enters their gates, seals snapshots, parks, restores, and is watched by its agent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rackrun.chaos.sim.memory import Damaged, named
from rackrun.chaos.sim.truth import History, must
from rackrun.core.commands import (
    BreakGeneration,
    DealShards,
    DrainWorkers,
    PauseWorkers,
    Plan,
    ReleaseWorkers,
    Reshard,
    ResumeGeneration,
    StartWorker,
)
from rackrun.core.events import (
    Event,
    Failure,
    SnapshotDamaged,
    SnapshotMirrored,
    SnapshotStriped,
    WorkerElastic,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WorkerSevered,
    WorkerStalled,
)
from rackrun.core.ids import Generation, Position, Step, TrayId, snapshot_id

if TYPE_CHECKING:
    from rackrun.chaos.sim.agents import Agent
    from rackrun.chaos.sim.memory import Owner

__all__ = ["POINTS", "Process"]

POINTS = (
    "agent: joining",
    "worker: ready",
    "worker: entering",
    "worker: applied",
    "worker: sealing",
    "worker: parking",
    "worker: planned",
    "worker: restoring",
    "worker: resuming",
    "worker: pausing",
    "worker: finishing",
)
"""Where `rackrun.chaos.faults.CrashAt` can strike in the model."""
POLL_S = 0.1
PATIENCE_MAX = 8


class Process:
    """As it is; the core only knows what it hears."""

    def __init__(self, agent: Agent, command: StartWorker) -> None:
        self.agent, self.sim = agent, agent.sim
        self.slot, self.incarnation = command.slot, int(command.incarnation)
        self.owner: Owner = (self.slot, self.incarnation)
        self.rank: int | None = None if command.spare else int(command.rank)
        self.generation = int(command.generation)
        self.state = "starting"  # starting, waiting, running, parked, resuming, dead
        self.history: History | None = None
        """None: it has no state."""
        self.entered_in: int | None = None
        """The generation in which it entered the unit after its history, whose gate it has not seen pass."""
        self.entered_world = 0
        self.layout, self.torn, self.finished = 0, False, False
        self.plan: Plan | None = None
        self.between_units = False
        """It pauses."""
        self.own_pause, self.late_s, self.slow = 0, 0.0, 1.0
        self.progress_ns = self.silent_ns = agent.sim.engine.now_ns
        self.damaged: set[int] = set()
        """Snapshots of its own that it has found damaged."""
        self._told_to_pause = self._told_to_drain = -1
        self._floor = -1
        """The last unit that any plan told it is committed."""
        self._turn = self._seals = 0
        self._sealing = -1
        """What was to come in an older turn does not."""
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._felt = -1
        self._patience, self._came_in = 1, -1

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
        """Unless it is broken off before."""
        self.sim.engine.after(seconds, self._due, self._turn, do, *args)

    def _due(self, turn: int, do: Callable[..., None], *args: object) -> None:
        if turn == self._turn:
            self.do(do, *args) if not self.paused else self._backlog.append((self._due, (turn, do, *args)))

    def do(self, do: Callable[..., None], *args: object) -> None:
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
        self.own_pause -= 1
        if self.paused or not self.alive:
            return
        newest = max(self.sim.truth.plans, default=0)
        if self.rank is not None and self.generation < newest:
            self.sim.marks.sometimes("somebody woke up in an older generation")
        backlog, self._backlog = self._backlog, deque()
        for do, args in backlog:
            self.do(do, *args)
        self.sim.look_at_eras()

    def told(self, command: object) -> None:
        self.sim.engine.after(1e-5, self.do, self._obey, command)

    def say(self, kind: Callable[..., Event], **fields: object) -> None:
        self.agent.do(self.agent.say, kind(slot=self.slot, incarnation=self.incarnation, **fields))

    # -- its beginning and its end
    def start(self) -> None:
        costs, draw = self.sim.costs, self.sim.draw["starts"]
        late_s = 0.0
        if self.sim.buggify("worker: a slow start"):
            late_s = 60 * draw.random()
            self.sim.marks.sometimes("a slow start was waited for")
        self.later(costs.of(costs.start_s, draw) + late_s, self._ready)
        self.agent.later(costs.stall_s, self._watch)

    def _ready(self) -> None:
        if self.sim.crashes("worker: ready", self):
            return
        job = self.sim.job
        self.say(WorkerElastic)
        sharded = job.shards != "replicas"
        self.say(
            WorkerReady,
            replica_class=self.sim.class_of(self.rank),
            fixed="it is sharded" if sharded and not job.reenters else "",
            reenters=sharded and job.reenters,
            exact=job.exact,
        )
        self.state = "waiting" if self.rank is None else "running"
        if self.rank is not None:
            self.history = self.sim.truth.began
            self.sim.eras[self.generation].takes_part(self, self.rank)
            self._compute()

    def end(
        self, *, signal: int | None = None, code: int | None = None, bug: str = "", kind: str = "ValueError"
    ) -> None:
        """Its agent lives, and sees it."""
        if not self.alive:
            return
        step, name = (
            Step(self.passed + 1),
            tuple(Step(one) for one in sorted(self.sim.memory.of(self.agent.tray, self.owner))),
        )
        self.dies()
        failure = Failure(type=kind, message=bug, traceback="", where=bug) if bug else None
        event = WorkerExited(
            slot=self.slot,
            incarnation=self.incarnation,  # type: ignore[arg-type]
            signal=signal,
            exit_code=code,
            failure=failure,
            step=step,
            snapshots=name,
        )
        self.agent.do(self.agent.tell_exit, event)
        self.sim.stir()

    def dies(self) -> None:
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
        era = self.sim.eras[generation]
        gate = era.sees(self)
        if gate is None or self.entered_in != generation or self.generation != generation:
            return
        self._apply()
        if self.sim.crashes("worker: applied", self):
            return
        self.sim.passed(self)
        if self.passed % self.sim.job.snapshot_every == self.sim.job.snapshot_every - 1:
            self._seal_soon()
        if gate.draining:
            self._finish()
        elif gate.pausing:
            self._pause()
        else:
            self._compute()

    def _apply(self) -> None:
        must(self.history is not None and self.entered_in is not None, "a unit applied that was not entered")
        self.history = self.state_after()
        self.entered_in = None
        self.sim.truth.state(self.generation, self.history)

    @property
    def state_now(self) -> History:
        assert self.history is not None
        return self.history

    def state_after(self) -> History:
        assert self.entered_in is not None
        return self.state_now.then(self.entered_in, self.entered_world)

    def _finish(self) -> None:
        if self.sim.crashes("worker: finishing", self):
            return
        self.finished = True
        self.say(WorkerFinished)

    def _pause(self) -> None:
        if self.sim.crashes("worker: pausing", self):
            return
        if self.sim.some_are_alone(self.sim.eras[self.generation].world):
            self.seal()
        self.between_units = True
        self.say(WorkerPaused, generation=Generation(self.generation))

    # -- snapshots
    def _seal_soon(self) -> None:
        """One at a time. There is room for two, so what is older than the newest is overwritten from now on."""
        if self._sealing == self._seals:
            return
        self._seals += 1
        self._sealing = self._seals
        arena = self.sim.memory.of(self.agent.tray, self.owner)
        for name in sorted(arena)[:-1]:
            del arena[name]
        costs, draw = self.sim.costs, self.sim.draw["snapshots"]
        late_s = 5 * draw.random() if self.sim.buggify("worker: a slow seal") else 0.0
        what = (self._seals, self.history, self.layout, self.generation)
        self.sim.engine.after(costs.of(costs.seal_s, draw) + late_s, self.do, self._sealed, *what)

    def _sealed(self, seals: int, history: History, layout: int, generation: int) -> None:
        if seals == self._seals and not self.sim.crashes("worker: sealing", self):
            self._keep(history, layout, generation)

    def seal(self, *, besides: int = -1) -> None:
        """Now, of what it is."""
        self._seals += 1
        self._keep(self.state_now, self.layout, self.generation, besides)

    def _keep(self, history: History, layout: int, generation: int, besides: int = -1) -> None:
        """There is room for two: this one, and ``besides`` or the newest other."""
        name = int(snapshot_id(Generation(layout), Step(history.unit)))
        tray, memory = self.agent.tray, self.sim.memory
        memory.seal(tray, self.owner, name, history)
        self.damaged.discard(name)
        arena = memory.of(tray, self.owner)
        others = sorted(one for one in arena if one != name)
        kept = besides if besides in arena else (others[-1] if others else name)
        for one in others:
            if one != kept:
                del arena[one]
        self._seals += 1
        costs = self.sim.costs
        seconds = costs.of(costs.copy_s, self.sim.draw["snapshots"])
        self.agent.later(seconds, self._copy, name, history, generation, tuple(arena), memory.files[self.owner, name])

    def _copy(self, name: int, history: History, generation: int, besides: tuple[int, ...], file: int) -> None:
        """Its agent gives other trays what was sealed: also of a worker that is gone by now."""
        plan, memory = self.agent.plan, self.sim.memory
        if plan is None or plan.generation != generation or name not in memory.of(self.agent.tray, self.owner):
            return
        if (
            not self.alive
            or self.sim.cuts[self.agent.tray].peers
            or (self.agent.tray, self.owner, name) in memory.rotten
        ):
            return
        if (holder := plan.mirrors.get(self.agent.tray)) is not None:
            self._mirror(TrayId(holder.partition("/")[2]), name, history, generation, besides)
        elif self.rank is not None:
            self._stripe(plan, name, history, file)

    def _mirror(self, holder: TrayId, name: int, history: History, generation: int, besides: tuple[int, ...]) -> None:
        agent, memory = self.sim.agents.get(holder), self.sim.memory
        if agent is None or not agent.alive or agent.paused or self.sim.cuts[holder].peers:
            return
        before = memory.of(holder, self.owner)
        kept = {one: state for one, state in before.items() if one in besides} | {name: history}
        memory.kept[holder, self.owner] = kept
        where = f"{holder}:2/{self.slot}/{self.incarnation}"
        steps = tuple(Step(one) for one in sorted(kept))
        self.say(SnapshotMirrored, generation=Generation(generation), holder=holder, where=where, steps=steps)

    def _stripe(self, plan: Plan, name: int, history: History, file: int) -> None:
        sets = [of for of in plan.sets if self.rank in [keeper.rank for keeper in of]]
        others = [keeper for of in sets for keeper in of if keeper.rank != self.rank]
        agents = [self.sim.agents.get(keeper.tray) for keeper in others]
        away = (agent is None or not agent.alive or agent.paused or self.sim.cuts[agent.tray].peers for agent in agents)
        if not others or any(away):
            return
        for keeper in others:
            key = (keeper.tray, int(plan.generation), int(keeper.rank), name)
            self.sim.memory.rows.setdefault(key, {})[self.its_rank] = (file, history)
        self.say(SnapshotStriped, generation=plan.generation, step=Step(name))

    # -- recovery
    def feels_broken(self) -> None:
        """A collective of its generation fails; if nobody says why for a while, it does."""
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
                late_s = 8 * draw.random() if self.sim.buggify("worker: parks late") else 0.0
                self.later(costs.of(costs.park_s, draw) + late_s, self._park, command.generation)
            case ResumeGeneration():
                self._take(command.plan)
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
            replica_class=self.sim.class_of(self.rank),
        )

    def _take(self, plan: Plan) -> None:
        """A plan arrives: from here on, who is fresh has nothing to lose."""
        if self.state in ("starting", "running"):
            return  # of the world that it is started in
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
        self.finished = self.finished and self.stateful and plan.rollback is None
        self.torn = self.stateful and (self.torn or plan.rollback is not None)
        if me.fresh or plan.reshard is not None or plan.rollback is not None:
            self._seals += 1
        if not self.sim.crashes("worker: planned", self):
            self.sim.eras[self.generation].arrive(self, self.its_rank)

    def _hand_over(self, plan: Plan, of: Reshard) -> None:
        """Who has its old state still, and is asked for it, seals it, and leaves main."""
        here = f"{self.agent.tray}:2/{self.slot}/{self.incarnation}"
        if not (self.stateful and self.layout == of.layout and plan.rollback is None and here in of.images):
            return
        at = plan.committed.step
        has = self.passed + (self.entered_in is not None)
        must(self.passed <= at <= has, f"a plan that {self} cannot follow")
        if self.passed < at:
            self.history, self.entered_in = self.state_after(), None
        self.seal()

    def met(self) -> None:
        """All have come, and groups are built."""
        costs, draw, plan = self.sim.costs, self.sim.draw["recoveries"], self.plan
        assert plan is not None
        seconds = costs.reenter_s if plan.reshard is not None else costs.regroup_s
        late_s = 20 * draw.random() if self.sim.buggify("worker: resumes late") else 0.0
        self.later(costs.of(seconds, draw) + late_s, self._restore)

    def _restore(self) -> None:
        if self.sim.crashes("worker: restoring", self):
            return
        found = self._find()
        if found is None:
            self.later(POLL_S, self._restore)
        elif found is not False:
            costs, plan = self.sim.costs, self.plan
            assert plan is not None
            reads = not self.stateful or plan.rollback is not None
            self.later(costs.of(costs.takeover_s, self.sim.draw["recoveries"]) if reads else 0.0, self._resume)

    def _find(self) -> History | bool | None:
        """None: not yet. False: it is damaged, and that is said."""
        assert self.plan is not None
        try:
            return self.sim.memory.for_member(self, self.plan)
        except Damaged as bad:
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
        if not isinstance(found, History):
            if found is None:
                self.later(POLL_S, self._restore)
            return
        self.history, self.layout = found, int(plan.layout)
        self.entered_in, self.torn, self.state = None, False, "running"
        if plan.reshard is not None:
            self.seal(besides=int(snapshot_id(plan.reshard.layout, Step(plan.committed.step))))
        elif plan.rollback is not None:
            arena = self.sim.memory.of(self.agent.tray, self.owner)
            for step in [step for step in arena if step > named(plan, int(plan.rollback))]:
                del arena[step]
        self._came_in = self.passed
        if not any(member.fresh for member in plan.members):
            self._patience = min(2 * self._patience, PATIENCE_MAX)  # what looked like a hang was slowness
        self.sim.truth.state(self.generation, self.history)
        self.say(WorkerResumed, generation=plan.generation)
        if not self.finished:
            self._compute()

    # -- its agent's watch
    def _watch(self) -> None:
        """Again and again: is there progress? It does not look while the agent itself is held up."""
        if not self.alive:
            return
        costs, now_ns = self.sim.costs, self.sim.engine.now_ns
        self.agent.later(costs.stall_s / 2, self._watch)
        if self.paused and now_ns - self.silent_ns > costs.silence_s * 1e9:
            self._stalled(now_ns - self.silent_ns, silent=True)
        elif self.state != "running" or self.finished or self.between_units or self.paused:
            return
        elif self.passed < 0:
            if self.entered_in is not None and now_ns - self.progress_ns > costs.connect_s * 1e9:
                self.end(code=1, bug="torch", kind="torch.distributed.DistNetworkError")
        else:
            floor_s = costs.stall_s if self.passed - self._came_in >= 2 else max(costs.unsure_s, costs.stall_s)
            deadline_s = self._patience * floor_s + costs.step_s * self.slow
            if now_ns - self.progress_ns > deadline_s * 1e9:
                for_ns, self.progress_ns = now_ns - self.progress_ns, now_ns
                self._stalled(for_ns, silent=False)

    def _stalled(self, for_ns: int, *, silent: bool) -> None:
        collective = 2 * self.passed + (self.entered_in is not None)
        for_ms = for_ns // 1_000_000
        self.say(WorkerStalled, step=Step(self.passed + 1), collective=collective, silent=silent, for_ms=for_ms)
