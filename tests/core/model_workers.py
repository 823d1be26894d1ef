"""The workers in the model of a job: how they start, train, meet in gates, park, take a plan and resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rackrun.core.stragglers.shares import sharing
from rackrun.protocol.commands import (
    BreakGeneration,
    Command,
    DealShards,
    GenerationPlan,
    PauseWorkers,
    ReleaseWorkers,
    Reshard,
    ResumeGeneration,
    StartWorker,
)
from rackrun.protocol.events import (
    Event,
    ScriptFailure,
    SnapshotDamaged,
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
from rackrun.protocol.ids import Generation, Position, SlotId, Step, TrayId, snapshot_id, tray_of
from tests.core.model_process import Process
from tests.core.model_snapshots import ModelSnapshots, snapshot_in

SHARDS = 37
"""Micro-batches of a unit."""


class ModelWorkers:
    """The processes, their gates and their collectives; every method is one thing that a process does or suffers."""

    def __init__(
        self,
        units: int,
        shards: str,
        mesh: tuple[tuple[str, int], ...],
        processes: dict[tuple[SlotId, int], Process],
        plans: Mapping[int, GenerationPlan],
        snapshots: ModelSnapshots,
    ) -> None:
        """``processes`` and ``plans`` belong to the model, which adds plans; ``shards``: replicas, pairs or unique."""
        self._units, self.shards, self._mesh = units, shards, mesh
        self._processes, self._plans, self.snapshots = processes, plans, snapshots
        self.exact = True
        self.reenters = False
        """Sharded worlds may change their size: all enter main again."""
        self.gates: dict[tuple[int, int], set[int]] = {}
        self.pausing: set[tuple[int, int]] = set()
        """Generation and unit whose gate says that all are to pause after it."""
        self.heard: dict[tuple[int, int], int] = {}
        """Generation and unit -> how many say in its gate that they have heard of the next deal."""
        self.shares: dict[tuple[int, int], tuple[int, ...]] = {}
        """With which it was computed."""
        self.jammed: set[int] = set()
        """Generations whose collectives hang for everyone."""

    # -- they begin and end ----------------------------------------------------------------------------------------
    def start(self, command: StartWorker) -> None:
        here = [p for p in self._processes.values() if p.slot == command.slot and p.alive]
        assert not here, "two processes in one slot"
        rank = None if command.spare else command.rank
        process = Process(command.slot, command.incarnation, rank, command.generation)
        assert (process.slot, process.incarnation) not in self._processes, "an incarnation twice"
        self._processes[process.slot, process.incarnation] = process

    def end(self, process: Process, *, signal: int | None = None, code: int | None = None, bug: str = "") -> None:
        process.state = "dead"
        process.down.clear()
        failure = ScriptFailure(type="ValueError", message=bug, traceback="", where=bug) if bug else None
        process.up.append(
            WorkerExited(
                slot=process.slot,
                incarnation=process.incarnation,
                signal=signal,
                exit_code=code,
                failure=failure,
                step=Step(process.passed + 1),
                snapshots=self.snapshots.steps_of(process),
            )
        )

    # -- they train ------------------------------------------------------------------------------------------------
    def actions_of(self, process: Process) -> list[str]:
        """What a living process can do next without a fault, in a fixed order."""
        if process.hung == "silent":
            return [] if process.reported else ["report"]
        out = ["obey"] if process.down else []
        if process.hung:
            return out if process.reported or process.state != "running" else [*out, "report"]
        if process.state == "starting":
            out.append("start")
        elif (
            process.state == "resuming"
            and not process.down
            and not process.reported
            and self.snapshots.restored(process) is not None
        ):
            out.append("resume")
        elif process.state == "running" and not process.paused:
            out += self._training_actions(process)
        return out

    def _training_actions(self, process: Process) -> list[str]:
        out = []
        if process.entered_in is not None:
            full = len(self.gates[process.generation, process.passed + 1]) == self._plans[process.generation].world_size
            if full and process.generation not in self.jammed:
                out.append("see")
            elif self._stuck(process.generation) and not process.reported:
                out.append("report")
                if process.generation in self.jammed:
                    out.append("sever")
        elif process.passed + 1 < self._units:
            out.append("enter")
        elif not process.finished:
            out.append("finish")
        seals = process.entered_in is None and process.passed >= 0 and process.passed % 2 == 1
        if seals and process.snapshot_now not in self.snapshots.arena_of(process):
            out.append("seal")
        if process.sealed not in process.given and self._set_of(process):
            out.append("stripe")
        return out

    def do(self, name: str, process: Process) -> None:
        match name:
            case "obey":
                self._obey(process, process.down.popleft())
            case "report":
                process.reported = True
                behind = 0 if process.entered_in is None else 1
                self._say(
                    process,
                    WorkerStalled,
                    step=Step(process.passed + 1),
                    collective=2 * process.passed + behind,
                    silent=process.hung == "silent",
                    for_ms=100,
                )
            case "sever":
                process.reported = True
                self._say(process, WorkerSevered, generation=process.generation, because="connection reset")
            case "start":
                self._say(process, WorkerElastic)
                reenters = self.shards != "replicas" and self.reenters
                self._say(
                    process,
                    WorkerReady,
                    replica_class=self._class(process.rank),
                    fixed="" if self.shards == "replicas" or reenters else "it is sharded",
                    reenters=reenters,
                    exact=self.exact,
                    shards=SHARDS,
                )
                process.state = "waiting" if process.rank is None else "running"
                process.stateful = process.rank is not None
            case "enter":
                process.entered_in = process.generation
                unit = (process.generation, process.passed + 1)
                self.gates.setdefault(unit, set()).add(process.rank_held)
                self._compute(process, unit)
                if process.told_to_pause == process.generation:
                    self.pausing.add(unit)
            case "see":
                self._see(process)
            case "finish":
                process.finished = True
                self._say(process, WorkerFinished)
            case "seal":
                self.snapshots.seal(process)
            case "stripe":
                if self.snapshots.stripe(process, self._set_of(process)):
                    generation, step = process.sealed
                    self._say(process, SnapshotStriped, generation=Generation(generation), step=Step(step))
            case "resume":
                if (bad := self.snapshots.rotten_source(process)) is None:
                    self._resume(process)
                else:
                    self._tell_of_damage(process, *bad)
            case _:
                raise AssertionError(name)

    def _see(self, process: Process) -> None:
        self._apply(process)
        unit = (process.generation, process.passed)
        if self.heard[unit] == self._plans[process.generation].world_size:
            process.deals.agree()
        if unit in self.pausing:
            self._pause(process)

    def _compute(self, process: Process, unit: tuple[int, int]) -> None:
        """Its share of the micro-batches: all ranks by the same deal, or a sample would be lost, or used twice."""
        process.deals.take_effect()
        shares = self.shares.setdefault(unit, process.deals.shares)
        assert shares == process.deals.shares, "two deals in one unit"
        if shares:
            places = sharing(self._mesh, self._plans[process.generation].world_size)
            assert (len(shares), sum(shares)) == (len(places), SHARDS)
            assert min(shares) > 0
        self.heard[unit] = self.heard.get(unit, 0) + process.deals.has_next

    def _pause(self, process: Process) -> None:
        if self._some_are_alone(process):
            self.snapshots.seal(process)
        process.paused = True
        self._say(process, WorkerPaused, generation=process.generation)

    def _some_are_alone(self, process: Process) -> bool:
        """Some rank has no replica: all have a snapshot of where they pause."""
        classes = [self._class(rank) for rank in range(self._plans[process.generation].world_size)]
        return any(classes.count(one) == 1 or not one for one in classes)

    def _set_of(self, process: Process) -> list[tuple[int, TrayId]]:
        """Rank and tray of the members of its XOR set."""
        sets = [of for of in self._plans[process.generation].sets if process.rank in [keeper.rank for keeper in of]]
        return [(keeper.rank, keeper.tray) for of in sets for keeper in of]

    def _stuck(self, generation: int) -> bool:
        hung = any(p.hung and p.alive and p.generation == generation for p in self._processes.values())
        return hung or generation in self.jammed

    def _class(self, rank: int | None) -> str:
        if rank is None or self.shards == "unique":
            return ""
        return "all" if self.shards == "replicas" else f"class {rank % 2}"

    def _apply(self, process: Process) -> None:
        assert process.entered_in is not None
        process.chain = (*process.chain, (process.passed + 1, process.entered_in))
        process.entered_in = None

    def runs_again(self, process: Process) -> None:
        """Let a silent process go on, and its agent say so."""
        process.hung, process.reported = "", False
        told = {"step": Step(process.passed + 1), "collective": 0, "silent": False, "for_ms": 0, "over": True}
        self._say(process, WorkerStalled, **told)

    def _say(self, process: Process, kind: Callable[..., Event], **fields: Any) -> None:
        process.up.append(kind(slot=process.slot, incarnation=process.incarnation, **fields))

    # -- they obey -------------------------------------------------------------------------------------------------
    def _obey(self, process: Process, command: Command) -> None:
        match command:
            case BreakGeneration():
                process.state, process.paused = "parked", False
                self._park(process, command.generation)
            case ResumeGeneration():
                self._take(process, command.plan)
            case PauseWorkers():
                process.told_to_pause = command.generation
            case DealShards():
                assert (process.state, process.generation) == ("running", command.generation), "a deal for nobody"
                process.deals.receive(command.number, command.shares)
            case ReleaseWorkers():
                self.end(process, code=0)
            case _:
                raise AssertionError(command)

    def _park(self, process: Process, generation: Generation) -> None:
        passed = process.passed if process.stateful else -1
        entered = passed + (process.stateful and process.entered_in is not None)
        self._say(
            process,
            WorkerParked,
            generation=generation,
            passed=Position(passed),
            entered=Position(entered),
            gate=(float(passed),),
            snapshots=self.snapshots.steps_of(process),
            layout=Generation(process.layout) if process.stateful else None,
            replica_class=self._class(process.rank),
            resumed=process.resumed,
        )

    def _take(self, process: Process, plan: GenerationPlan) -> None:
        """A plan arrives: from here on, who is fresh has nothing to lose."""
        me = next(m for m in plan.members if (m.slot, m.incarnation) == (process.slot, process.incarnation))
        assert plan.generation > process.generation, "an old plan"
        if plan.reshard is not None:
            self._hand_over(process, plan, plan.reshard)
        elif not me.fresh:
            assert process.stateful, "state is expected of a member that has none"
            if plan.rollback is None:
                assert plan.committed.step >= process.told, "what was committed is committed no more"
                has = process.passed + (process.entered_in is not None)
                assert process.passed <= plan.committed.step <= has, "a plan that this survivor cannot follow"
        process.told = plan.committed.step if plan.rollback is None else plan.rollback
        process.state, process.plan, process.rank = "resuming", plan, me.rank
        process.stateful = process.stateful and not me.fresh and plan.reshard is None
        process.finished = False
        process.generation = plan.generation
        process.reported = False
        process.torn = process.stateful and (process.torn or plan.rollback is not None)

    def _hand_over(self, process: Process, plan: GenerationPlan, of: Reshard) -> None:
        """Who has its old state still, and is asked for it, seals it, and leaves main."""
        here = f"{tray_of(process.slot)}:2/{process.slot}/{process.incarnation}"
        stands = process.stateful and process.layout == of.layout and plan.rollback is None
        if not (stands and here in of.images):
            return
        at = plan.committed.step
        has = process.passed + (process.entered_in is not None)
        assert process.passed <= at <= has, "a plan that this survivor cannot follow"
        if process.passed < at:
            self._apply(process)
        self.snapshots.seal(process)

    def _resume(self, process: Process) -> None:
        chain = self.snapshots.restored(process)
        plan = process.plan
        assert chain is not None
        assert plan is not None
        process.chain, process.layout = chain, plan.layout
        process.deals.begin(plan.shares)
        if plan.reshard is not None:
            self.snapshots.seal(process, besides=snapshot_id(plan.reshard.layout, Step(plan.committed.step)))
        elif plan.rollback is not None:
            self.snapshots.drop_after(process, snapshot_in(plan, plan.rollback))
        process.entered_in = None
        process.torn = False
        process.stateful = True
        process.state, process.resumed = "running", plan.generation
        self._say(process, WorkerResumed, generation=plan.generation)

    def _tell_of_damage(self, process: Process, step: int, where: str) -> None:
        process.reported = True
        if not where:
            del self.snapshots.arenas[process.slot, process.incarnation][step]
        generation = Generation(process.generation)
        self._say(process, SnapshotDamaged, generation=generation, step=Step(step), where=where, because="chunk 0")
