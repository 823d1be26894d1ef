"""A small, faithful model of what the core commands: agents, workers, gates, snapshots and their parity, wires.

Messages are first in, first out for each worker, and in any order between workers. Training state is a chain of the
units that were applied, each with the generation whose gate it passed: if two members ever took different histories for
the same, their chains differ for good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.recovery.fencing import FENCE_WAIT_MS
from rackrun.core.resize.rented_rack import RackStage
from rackrun.core.stragglers.shares import sharing
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    BreakGeneration,
    Command,
    CondemnWorker,
    DealShards,
    Decided,
    DismissTray,
    DrainWorkers,
    FenceWorker,
    GenerationPlan,
    Notice,
    PauseWorkers,
    ReleaseRack,
    ReleaseWorkers,
    RequestRack,
    Reshard,
    Restore,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
    Worker,
)
from rackrun.protocol.events import (
    Event,
    PolicyRequested,
    RackDelivered,
    ScriptFailure,
    SnapshotDamaged,
    SnapshotStriped,
    TimerFired,
    TrayJoined,
    TrayLost,
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
from rackrun.protocol.ids import (
    BEGIN,
    Generation,
    Incarnation,
    Position,
    Rank,
    SlotId,
    Step,
    TrayId,
    snapshot_id,
    tray_of,
)
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import timer_named
from rackrun.worker.batch.share_changes import ShareChanges
from tests.core.core_harness import topology_of

Chain = tuple[tuple[int, int], ...]
"""(unit, generation whose gate it passed), ..."""

SHARDS = 37
"""Micro-batches of a unit."""
SHORT = ("gather", "stalled", "judge", "last-call", "failed", "fence")
TIMEOUTS = ("park", "owed", "resume")


@dataclass
class Process:
    """One worker, as it is; the core only knows what it hears."""

    slot: SlotId
    incarnation: Incarnation
    rank: int | None
    generation: int
    state: str = "starting"  # starting, waiting, running, parked, resuming, dead
    stateful: bool = False
    chain: Chain = ()
    entered_in: int | None = None
    """Generation in which it entered the unit after its chain, whose gate it has not seen pass."""
    told: int = -1
    """The last unit that any plan told it is committed."""
    plan: GenerationPlan | None = None
    hung: str = ""  # "", "code" (parks, but never computes), "silent"
    reported: bool = False
    finished: bool = False
    resumed: Generation = Generation(0)
    told_to_pause: int = -1
    """The generation in which it was."""
    paused: bool = False
    torn: bool = False
    """It began to go back to its snapshot: until it resumes, its memory is neither the old state nor the new one."""
    sealed: tuple[int, int] = (0, -1)
    """Generation and id of its newest snapshot."""
    layout: int = 0
    """Of its state, and of the snapshots that it takes."""
    deals: ShareChanges = field(default_factory=ShareChanges)
    given: set[tuple[int, int]] = field(default_factory=lambda: {(0, -1)})
    """Of those of which its agent has sent stripes, with success or not."""
    up: deque[Event] = field(default_factory=deque)
    down: deque[Command] = field(default_factory=deque)

    @property
    def alive(self) -> bool:
        return self.state != "dead"

    @property
    def passed(self) -> int:
        return len(self.chain) - 1


class Cluster:
    """Trays, processes and one control plane; every method is one thing that can happen."""

    def __init__(self, config: JobConfig, slots: int, units: int, shards: str, *, racks: bool = False) -> None:
        """``racks``: trays tell of their GPUs, two trays to an NVLink clique."""
        self.racks, self.core_config = racks, config
        self.exact = True
        self.reenters = False
        """Sharded worlds may change their size: all enter main again."""
        self.reshards = 0
        self.planned_swaps = 0
        self.unfit: set[SlotId] = set()
        self.drained: set[SlotId] = set()
        self.departing: set[TrayId] = set()
        self.answers: dict[str, list[Answer]] = {}
        """To each request, in order."""
        self.dismissed = 0
        self.wanted: dict[int, RequestRack] = {}
        """Racks that were asked for, and not released."""
        self.rented: dict[int, tuple[TrayId, ...]] = {}
        """Trays of each rack that has come, or will."""
        self.asked = 0
        self.trays_come = True
        """By themselves: back, or new ones."""
        self.agents_return = False
        """It is said of half of those that are lost that their agents are started again, whatever comes of it."""
        self.named: set[TrayId] = set()
        """Those that the core has been told of as a rack's."""
        self.taken_back: set[TrayId] = set()
        self.core = ControlPlane(config)
        self.slots, self.units, self.shards = slots, units, shards
        self.now = 0
        self.timers: list[tuple[int, int, str]] = []
        self.up_trays: dict[TrayId, bool] = {}  # False: dead, its lease has not lapsed
        self.processes: dict[tuple[SlotId, int], Process] = {}
        self.arenas: dict[tuple[SlotId, int], dict[int, Chain]] = {}
        self.rotten: set[tuple[SlotId, int, int]] = set()
        """Snapshots of which a bit has flipped: slot, incarnation, step."""
        self.files: dict[tuple[SlotId, int], dict[int, int]] = {}
        """Beside ``arenas``: no two snapshots are the same bytes. Both are by `snapshot_id`."""
        self.rows: dict[tuple[TrayId, int, int, int], dict[int, tuple[int, Chain]]] = {}
        """(tray, generation, keeper, step) -> whose stripes are in it, and of which file."""
        self.plans: dict[int, GenerationPlan] = {}
        self.gates: dict[tuple[int, int], set[int]] = {}
        self.pausing: set[tuple[int, int]] = set()
        """Generation and unit whose gate says that all are to pause after it."""
        self.heard: dict[tuple[int, int], int] = {}
        """Generation and unit -> how many say in its gate that they have heard of the next deal."""
        self.shares: dict[tuple[int, int], tuple[int, ...]] = {}
        """With which it was computed."""
        self.jammed: set[int] = set()
        """Generations whose collectives hang for everyone."""
        self.condemned: dict[tuple[SlotId, int], int] = {}
        """Since when."""
        self.announced = 0
        self.stopped: StopJob | None = None
        self.log: list[str] = []

    # -- the wire --------------------------------------------------------------------------------------------------
    def tell(self, event: Event) -> None:
        self.now += 1
        if isinstance(event, RackDelivered):
            self.named.update(event.trays)
        event = _stamped(event, self.now)
        commands = self.core.handle(event)
        self.log.append(f"{event} -> {commands}")
        self.core.check_invariants()
        self._check_racks()
        for number, command in enumerate(commands):
            assert self.stopped is None, f"after the end: {command}"
            self._carry_out(command)
            assert not isinstance(command, StopJob) or number == len(commands) - 1

    def _carry_out(self, command: Command) -> None:
        match command:
            case SetTimer():
                self.timers.append((command.at_ms, len(self.timers), str(command.timer)))
            case StartWorker():
                self._start(command)
            case CondemnWorker():
                key = (command.slot, command.incarnation)
                assert key not in self.condemned, "condemned twice"
                self.condemned[key] = self.now
            case FenceWorker():
                self._fence(command)
            case BreakGeneration():
                running = [p for p in self.processes.values() if p.alive and p.state == "running"]
                self.planned_swaps += any(p.paused for p in running) and all(p.paused for p in running)
                assert command.generation > self.announced, "generations are strictly monotone"
                self.announced = command.generation
                assert command.because
                self._send(command.workers, command)
            case ResumeGeneration():
                self._check_plan(command)
                self._send([Worker(m.slot, m.incarnation) for m in command.plan.members], command)
            case Notice():
                assert command.text
            case Answer():
                self._hear(command)
            case DismissTray():
                self.dismissed += 1
                self.tray_dies(command.tray)
            case RequestRack():
                assert command.request not in self.wanted, "asked twice"
                assert command.trays > 0 < command.slots
                most, there = self.core.view().most, len(self.core._job.world.members)
                assert command.trays <= max(most - there, 1), "more than is missing"
                self.wanted[command.request] = command
                self.asked += 1
            case ReleaseRack():
                self.wanted.pop(command.request, None)
                self._take_back(self.rented.get(command.request, ()))
            case ReleaseWorkers() | DrainWorkers() | PauseWorkers() | DealShards():
                self._send(command.workers, command)
            case StopJob():
                assert command.because
                self.stopped = command
            case Decided() | AskPolicy():
                pass

    def _take_back(self, trays: tuple[TrayId, ...]) -> None:
        self.taken_back.update(self.named.intersection(trays))
        for tray in trays:
            if self.up_trays.get(tray):
                self.tray_dies(tray)

    def _hear(self, answer: Answer) -> None:
        self.drained, self.departing = set(answer.drained), set(answer.departing)
        said = self.answers.setdefault(answer.request, [])
        assert answer.text
        assert all(one.outcome == "begun" for one in said), "an answer after the last one"
        assert bool(answer.refusal) == (answer.outcome == "refused")
        said.append(answer)
        if answer.outcome == "done" and answer.request.startswith("drain"):
            target = answer.request.split()[-1]
            here = [p for p in self.processes.values() if p.alive and target in (p.slot, tray_of(p.slot))]
            assert not here, "a drained place with somebody in it"

    def withdrawn(self, slot: SlotId) -> bool:
        return slot in self.drained or tray_of(slot) in self.departing

    def _send(self, workers: list[Worker] | tuple[Worker, ...], command: Command) -> None:
        for worker in workers:
            process = self.processes.get((worker.slot, worker.incarnation))
            if process is not None and process.alive:
                process.down.append(command)

    def _check_racks(self) -> None:
        """Nobody pays for what nobody needs."""
        view, racks = self.core.view(), self.core._job.acquiring
        if view.phase == "training" and view.world_size >= view.most and not self.core._job.world.ending():
            waits = [one for one in racks.rented.values() if one.stage in (RackStage.ASKED, RackStage.DELIVERED)]
            assert not waits, "a rack is waited for, and every rank that is wanted has a worker"

    def _check_plan(self, command: ResumeGeneration) -> None:
        plan = command.plan
        before = self.plans[max(self.plans)].members if self.plans else ()
        new = [m.slot for m in plan.members if (m.slot, m.incarnation) not in [(b.slot, b.incarnation) for b in before]]
        assert not self.unfit.intersection(new), "a rank on a GPU that may not be used"
        assert not any(map(self.withdrawn, new)), "a rank in a place that is drained"
        assert not before or plan.world_size <= max(len(before), self.core.view().most), "larger than is wanted"
        assert plan.generation not in self.plans
        assert plan.generation >= self.announced
        self.announced = plan.generation
        self.plans[plan.generation] = plan
        assert command.because
        assert [m.rank for m in plan.members] == list(range(plan.world_size))
        assert len({m.slot for m in plan.members}) == plan.world_size == len({m.incarnation for m in plan.members})
        if plan.reshard is not None:
            self.reshards += 1
            assert not plan.restores
            assert all(plan.reshard.images)
            trusted = self.core._job.world.trusted
            assert trusted is None or plan.committed <= trusted, "shards are cut of a state that is not to be trusted"
            assert plan.rollback is not None or not self.core._job.world.unsure, (
                "shards are cut of memory that may be wrong"
            )
            return
        trusted, unsure = self.core._job.world.trusted, self.core._job.world.unsure
        assert plan.rollback is not None or not unsure, "nobody can say whose memory is right, and memory is used"
        if trusted is not None and plan.committed > trusted:
            assert plan.rollback is not None, "a state that is not to be trusted goes on"
            assert Position(plan.rollback) <= trusted, "all go back to a state that is not to be trusted"
        restored = {restore.rank for restore in plan.restores}
        assert restored == {m.rank for m in plan.members if m.fresh}
        for restore in plan.restores:
            assert [bool(restore.sources), bool(restore.snapshot), bool(restore.rebuild)].count(True) == 1
            assert not set(restore.sources) & restored, "a source without state"

    def _start(self, command: StartWorker) -> None:
        assert not self.withdrawn(command.slot), "a worker starts in a place that is drained"
        assert tray_of(command.slot) not in self.taken_back, "a worker starts on a rack that was released"
        if not self.up_trays.get(tray_of(command.slot), False):
            return
        here = [p for p in self.processes.values() if p.slot == command.slot and p.alive]
        assert not here, "two processes in one slot"
        rank = None if command.spare else command.rank
        process = Process(command.slot, command.incarnation, rank, command.generation)
        assert (process.slot, process.incarnation) not in self.processes, "an incarnation twice"
        self.processes[process.slot, process.incarnation] = process

    def _fence(self, command: FenceWorker) -> None:
        process = self.processes.get((command.slot, command.incarnation))
        if process is not None and process.alive:
            self._check_fence(process, command)
            self.end(process, signal=9)

    def _check_fence(self, process: Process, command: FenceWorker) -> None:
        """GPU memory is shared: who is killed has no peer in a collective, unless one has not left it for half a second."""
        if not self.racks or process.finished or command.swept_along or process.state not in ("running", "resuming"):
            return
        key = (process.slot, process.incarnation)
        inside = [
            peer
            for peer in self.processes.values()
            if peer.alive
            and peer.generation == process.generation
            and peer.state in ("running", "resuming")
            and peer is not process
            and (peer.slot, peer.incarnation) not in self.condemned
        ]
        if inside and self.core.view().phase in ("parking", "training", "resuming"):
            assert key in self.condemned, f"{process.slot} is killed while {inside[0].slot} computes with it"
            assert self.now >= self.condemned[key] + FENCE_WAIT_MS, "it was not waited for"

    # -- trays -----------------------------------------------------------------------------------------------------
    def join(self, tray: TrayId, *, slots: int | None = None, lies: bool = False) -> None:
        """``slots``: it has come back with fewer; ``lies``: of its GPUs it says that they are another tray's."""
        self.up_trays[tray] = True
        slots = slots or self.slots
        clique = f"clique-{int(tray.rpartition('-')[2]) // 2}"
        self.tell(
            TrayJoined(
                tray=tray,
                host=tray,
                slots=slots,
                store=f"{tray}:1",
                snapshots=f"{tray}:2",
                codec=True,
                topology=topology_of("tray-0" if lies else tray, slots, clique).replace(
                    b'"host":"tray-0"', f'"host":"{tray}"'.encode()
                )
                if self.racks
                else b"",
            )
        )

    def tray_dies(self, tray: TrayId) -> None:
        self.up_trays[tray] = False
        for process in self.processes.values():
            if tray_of(process.slot) == tray:
                process.state = "dead"
        self.arenas = {key: arena for key, arena in self.arenas.items() if tray_of(key[0]) != tray}
        self.rows = {key: row for key, row in self.rows.items() if key[0] != tray}

    def lease_lapses(self, tray: TrayId) -> None:
        """What its agent had still to deliver is never heard of."""
        del self.up_trays[tray]
        self.departing.discard(tray)
        self.unfit = {slot for slot in self.unfit if tray_of(slot) != tray}
        for process in self.processes.values():
            if tray_of(process.slot) == tray:
                process.up.clear()
        self.tell(TrayLost(tray=tray, because="lease lapsed", returns=self.agents_return and tray[-1] in "024"))

    # -- what processes do -----------------------------------------------------------------------------------------
    def end(self, process: Process, *, signal: int | None = None, code: int | None = None, bug: str = "") -> None:
        process.state = "dead"
        process.down.clear()
        arena = self.arenas.get((process.slot, process.incarnation), {})
        failure = ScriptFailure(type="ValueError", message=bug, traceback="", where=bug) if bug else None
        process.up.append(
            WorkerExited(
                slot=process.slot,
                incarnation=process.incarnation,
                signal=signal,
                exit_code=code,
                failure=failure,
                step=Step(process.passed + 1),
                snapshots=tuple(Step(step) for step in sorted(arena)),
            )
        )

    def actions(self) -> list[tuple[str, Process]]:
        """Everything that can happen without a fault, in a fixed order."""
        out = []
        for process in self.processes.values():
            if process.up:
                out.append(("deliver", process))
            if process.alive:
                out += [(name, process) for name in self._own_actions(process)]
        return out

    def _own_actions(self, process: Process) -> list[str]:
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
            and self._restored(process) is not None
        ):
            out.append("resume")
        elif process.state == "running" and not process.paused:
            out += self._training_actions(process)
        return out

    def _training_actions(self, process: Process) -> list[str]:
        out = []
        if process.entered_in is not None:
            full = len(self.gates[process.generation, process.passed + 1]) == self.plans[process.generation].world_size
            if full and process.generation not in self.jammed:
                out.append("see")
            elif self._stuck(process.generation) and not process.reported:
                out.append("report")
                if process.generation in self.jammed:
                    out.append("sever")
        elif process.passed + 1 < self.units:
            out.append("enter")
        elif not process.finished:
            out.append("finish")
        if process.entered_in is None and process.passed >= 0 and process.passed % 2 == 1:
            arena = self.arenas.get((process.slot, process.incarnation), {})
            if _id(process) not in arena:
                out.append("seal")
        if process.sealed not in process.given and self._set_of(process):
            out.append("stripe")
        return out

    def _set_of(self, process: Process) -> list[tuple[int, TrayId]]:
        """Rank and tray of the members of its XOR set."""
        sets = [of for of in self.plans[process.generation].sets if process.rank in [keeper.rank for keeper in of]]
        return [(keeper.rank, keeper.tray) for of in sets for keeper in of]

    def _stuck(self, generation: int) -> bool:
        hung = any(p.hung and p.alive and p.generation == generation for p in self.processes.values())
        return hung or generation in self.jammed

    def do(self, name: str, process: Process) -> None:
        match name:
            case "deliver":
                self.tell(process.up.popleft())
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
                self.gates.setdefault(unit, set()).add(_rank(process))
                self._compute(process, unit)
                if process.told_to_pause == process.generation:
                    self.pausing.add(unit)
            case "see":
                self._see(process)
            case "finish":
                process.finished = True
                self._say(process, WorkerFinished)
            case "seal":
                self._seal(process)
            case "stripe":
                self._stripe(process)
            case "resume":
                if (bad := self._rotten_source(process)) is None:
                    self._resume(process)
                else:
                    self._tell_of_damage(process, *bad)
            case _:
                raise AssertionError(name)

    def _see(self, process: Process) -> None:
        self._apply(process)
        unit = (process.generation, process.passed)
        if self.heard[unit] == self.plans[process.generation].world_size:
            process.deals.agree()
        if unit in self.pausing:
            self._pause(process)

    def _compute(self, process: Process, unit: tuple[int, int]) -> None:
        """Its share of the micro-batches: all ranks by the same deal, or a sample would be lost, or used twice."""
        process.deals.take_effect()
        shares = self.shares.setdefault(unit, process.deals.shares)
        assert shares == process.deals.shares, "two deals in one unit"
        if shares:
            places = sharing(self.core_config.mesh, self.plans[process.generation].world_size)
            assert (len(shares), sum(shares)) == (len(places), SHARDS)
            assert min(shares) > 0
        self.heard[unit] = self.heard.get(unit, 0) + process.deals.has_next

    def _pause(self, process: Process) -> None:
        if self._some_are_alone(process):
            self._seal(process)
        process.paused = True
        self._say(process, WorkerPaused, generation=process.generation)

    def _some_are_alone(self, process: Process) -> bool:
        """Some rank has no replica: all have a snapshot of where they pause."""
        classes = [self._class(rank) for rank in range(self.plans[process.generation].world_size)]
        return any(classes.count(one) == 1 or not one for one in classes)

    def _seal(self, process: Process, *, besides: int = -1) -> None:
        """There is room for two: this one, and ``besides`` or the newest other."""
        arena = self.arenas.setdefault((process.slot, process.incarnation), {})
        arena[_id(process)] = process.chain
        self.files.setdefault((process.slot, process.incarnation), {})[_id(process)] = len(self.log)
        process.sealed = (process.generation, _id(process))
        others = sorted(named for named in arena if named != _id(process))
        for named in [one for one in others if one != (besides if besides in arena else others[-1])]:
            del arena[named]

    def _stripe(self, process: Process) -> None:
        process.given.add(process.sealed)
        (generation, step), rank = process.sealed, _rank(process)
        if generation != process.generation:
            return
        others = [(keeper, tray) for keeper, tray in self._set_of(process) if keeper != rank]
        for keeper, tray in others:
            if not self.up_trays.get(tray, False):
                return
            who = process.slot, process.incarnation
            of = self.files[who][step], self.arenas[who][step]
            self.rows.setdefault((tray, generation, keeper, step), {})[rank] = of
        self._say(process, SnapshotStriped, generation=Generation(generation), step=Step(step))

    def _say(self, process: Process, kind: Callable[..., Event], **fields: Any) -> None:
        process.up.append(kind(slot=process.slot, incarnation=process.incarnation, **fields))

    def _class(self, rank: int | None) -> str:
        if rank is None or self.shards == "unique":
            return ""
        return "all" if self.shards == "replicas" else f"class {rank % 2}"

    def _apply(self, process: Process) -> None:
        assert process.entered_in is not None
        process.chain = (*process.chain, (process.passed + 1, process.entered_in))
        process.entered_in = None

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
        arena = self.arenas.get((process.slot, process.incarnation), {})
        passed = process.passed if process.stateful else -1
        entered = passed + (process.stateful and process.entered_in is not None)
        self._say(
            process,
            WorkerParked,
            generation=generation,
            passed=Position(passed),
            entered=Position(entered),
            gate=(float(passed),),
            snapshots=tuple(Step(step) for step in sorted(arena)),
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
        self._seal(process)

    def _from_images(self, plan: GenerationPlan, of: Reshard) -> Chain | None:
        """What all the old ranks had, in one history; None as long as somebody has still to seal."""
        found: set[Chain] = set()
        named = snapshot_id(of.layout, Step(plan.committed.step))
        for where in of.images:
            _, tray, index, incarnation = where.split("/")
            key = (SlotId(f"{tray}/{index}"), int(incarnation))
            if named not in self.arenas.get(key, {}):
                owner = self.processes[key]
                waits = owner.alive and owner.generation < plan.generation
                assert waits or not owner.alive, "a snapshot that nobody keeps"
                return None
            found.add(self.arenas[key][named])
        assert len(found) == 1, "the old ranks have two histories"
        return found.pop()

    def _restored(self, process: Process) -> Chain | None:
        """The state that the plan means for this member; None as long as it cannot be had."""
        plan = process.plan
        assert plan is not None
        if plan.reshard is not None:
            return self._from_images(plan, plan.reshard)
        at = plan.committed.step if plan.rollback is None else plan.rollback
        if process.stateful:
            assert process.layout == plan.layout, "shards of another layout"
            if plan.rollback is not None:
                return self.arenas[process.slot, process.incarnation][_named(plan, at)]
            assert not process.torn, "a state that is half gone back is taken for a clean one"
            if process.passed < at:
                assert process.entered_in is not None
                return (*process.chain, (at, process.entered_in))
            return process.chain
        restore = next(r for r in plan.restores if r.rank == process.rank)
        return self._fetch(restore, plan, at)

    def _rotten_source(self, process: Process) -> tuple[int, str] | None:
        """Step and place, when the snapshot that this member goes back to is not what it was."""
        plan = process.plan
        assert plan is not None
        if plan.reshard is not None:
            named = snapshot_id(plan.reshard.layout, Step(plan.committed.step))
            for where in plan.reshard.images:
                _, tray, index, incarnation = where.split("/")
                if (SlotId(f"{tray}/{index}"), int(incarnation), named) in self.rotten:
                    return named, where
            return None
        step = _named(plan, plan.committed.step if plan.rollback is None else plan.rollback)
        if plan.rollback is None and process.stateful:
            return None
        where, key = "", (process.slot, process.incarnation, step)
        if not process.stateful:
            restore = next(r for r in plan.restores if r.rank == process.rank)
            where = restore.snapshot
            if restore.rebuild:
                inputs = [one.snapshot.split("/") for one in restore.rebuild]
                bad = [(SlotId(f"{i[1]}/{i[2]}"), int(i[3]), step) in self.rotten for i in inputs]
                return (step, restore.rebuild[0].row) if any(bad) else None
            if not where:
                return None
            _, tray, index, incarnation = where.split("/")
            key = (SlotId(f"{tray}/{index}"), Incarnation(int(incarnation)), step)
        return (step, where) if key in self.rotten else None

    def _tell_of_damage(self, process: Process, step: int, where: str) -> None:
        process.reported = True
        if not where:
            del self.arenas[process.slot, process.incarnation][step]
        generation = Generation(process.generation)
        self._say(process, SnapshotDamaged, generation=generation, step=Step(step), where=where, because="chunk 0")

    def _fetch(self, restore: Restore, plan: GenerationPlan, at: int) -> Chain | None:
        if restore.snapshot:
            _, tray, index, incarnation = restore.snapshot.split("/")
            arena = self.arenas.get((SlotId(f"{tray}/{index}"), int(incarnation)))
            assert arena is not None or not self.up_trays.get(TrayId(tray)), "a snapshot that nobody keeps"
            return arena[_named(plan, at)] if arena else None
        if restore.rebuild:
            return self._rebuild(restore, _named(plan, at))
        for source in restore.sources:
            member = plan.members[source]
            peer = self.processes[member.slot, member.incarnation]
            if peer.alive and peer.state == "running" and peer.generation == plan.generation:
                assert peer.passed == at, "a source that has gone on"
                return peer.chain
        return None

    def _rebuild(self, restore: Restore, at: int) -> Chain | None:
        """From each member that is left its row, with everybody's stripes, and the very file that it gave stripes of."""
        lost: set[tuple[int, Chain]] = set()
        rows, files = [], {}
        for one in restore.rebuild:
            _, tray, index, incarnation = one.snapshot.split("/")
            address, generation, keeper = one.row.split("/")
            assert (address, int(keeper)) == (f"{tray}:2", one.rank)
            if not self.up_trays.get(TrayId(tray), False):
                return None
            key = (SlotId(f"{tray}/{index}"), int(incarnation))
            if at not in self.arenas[key] and (*key, at) in self.rotten:
                return None  # that member has seen it too, and says so
            assert at in self.arenas[key], "a snapshot that nobody keeps"
            files[int(one.rank)] = self.files[key][at]
            rows.append((int(keeper), self.rows[TrayId(tray), int(generation), int(keeper), at]))
        for whose, row in rows:
            assert row.keys() == {*restore.members} - {whose}, "a row that is not whole"
            assert all(row[rank][0] == file for rank, file in files.items() if rank != whose), "other bytes"
            lost.add(row[restore.rank])
        assert {restore.rank, *files} <= {*restore.members}
        assert len(files) >= len(restore.members) - restore.parity, "too few to rebuild from"
        assert len(lost) == 1, "stripes of two files"
        return lost.pop()[1]

    def _resume(self, process: Process) -> None:
        chain = self._restored(process)
        plan = process.plan
        assert chain is not None
        assert plan is not None
        process.chain, process.layout = chain, plan.layout
        process.deals.begin(plan.shares)
        if plan.reshard is not None:
            self._seal(process, besides=snapshot_id(plan.reshard.layout, Step(plan.committed.step)))
        elif plan.rollback is not None:
            arena = self.arenas.get((process.slot, process.incarnation), {})
            for step in [step for step in arena if step > _named(plan, plan.rollback)]:
                del arena[step]
        process.entered_in = None
        process.torn = False
        process.stateful = True
        process.state, process.resumed = "running", plan.generation
        self._say(process, WorkerResumed, generation=plan.generation)

    # -- time ------------------------------------------------------------------------------------------------------
    def pending(self, *kinds: str) -> list[tuple[int, int, str]]:
        return sorted(t for t in self.timers if not kinds or t[2].partition(":")[0] in kinds)

    def fire(self, timer: tuple[int, int, str]) -> None:
        self.timers[timer[1]] = (0, timer[1], "fired")
        self.now = max(self.now, timer[0])
        self.tell(TimerFired(timer=timer_named(timer[2])))

    # -- what must hold --------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Members of one generation at one position have one history."""
        seen: dict[tuple[int, int], Chain] = {}
        for process in self.processes.values():
            if process.alive and process.stateful and process.state == "running":
                chain = seen.setdefault((process.generation, process.passed), process.chain)
                assert process.chain == chain, "two histories in one generation"
                assert [unit for unit, _ in process.chain] == list(range(process.passed + 1)), "lost or doubled units"

    def _end_hold(self) -> None:
        """A tray comes, or an operator ends the hold, if there is one: nothing else does."""
        held, silent = self.core._job.recovery.hold.holds, self.core._job.recovery.hold.silent
        for process in [one for one in self.processes.values() if held and one.alive and one.rank in silent]:
            if self.now % 5:
                self._runs_again(process)
            else:
                self.end(process, signal=9)
            return
        missing = next((tray for n in range(5) if (tray := TrayId(f"tray-{n}")) not in self.up_trays), None)
        if held and missing is not None and self.now % 2:
            self.join(missing)
        elif held:
            policy = ("swap,shrink,restart", "swap,restart", "stop")[self.now % 3]
            self.tell(PolicyRequested(request=f"end of a hold {len(self.answers)}", policy=policy))

    def _runs_again(self, process: Process) -> None:
        process.hung, process.reported = "", False
        told = {"step": Step(process.passed + 1), "collective": 0, "silent": False, "for_ms": 0, "over": True}
        self._say(process, WorkerStalled, **told)

    def run_to_the_end(self, limit: int = 20_000) -> StopJob:
        """No more faults: everything is delivered, time passes only when nothing else can happen."""
        turn = 0
        while self.stopped is None:
            turn += 1
            assert turn < limit, "it never ends"
            for tray in [tray for tray, up in self.up_trays.items() if not up]:
                self.lease_lapses(tray)
            actions = self.actions()
            if actions:
                self.do(*actions[turn % len(actions)])
                self.check()
                continue
            live = [t for t in self.pending() if t[2] != "fired"]
            assert live, "nothing can happen any more"
            if live[0][2].startswith("hold:"):
                self._end_hold()
            self.fire(live[0])
        if self.stopped.exit_code == 0:
            chains = {p.chain for p in self.processes.values() if p.finished and p.generation == max(self.plans)}
            assert len(chains) == 1
            assert len(chains.pop()) == self.units
        return self.stopped


def _id(process: Process) -> int:
    """Of the snapshot that it would take now."""
    return snapshot_id(Generation(process.layout), Step(process.passed))


def _named(plan: GenerationPlan, step: int) -> Step:
    return snapshot_id(plan.layout, Step(step))


def _rank(process: Process) -> int:
    assert process.rank is not None
    return process.rank


def _stamped(event: Event, at_ms: int) -> Event:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return type(event)(**fields | {"at_ms": at_ms})


__all__ = ["BEGIN", "SHORT", "TIMEOUTS", "Cluster", "Process", "Rank"]
