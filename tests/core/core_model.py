"""A small, faithful model of what the core commands: agents, workers, gates, snapshots and their parity, wires.

Messages are first in, first out for each worker, and in any order between workers. `ModelWorkers` says what workers do,
`ModelSnapshots` what they have sealed; here are the wires, the trays, the time, and what must hold of every command.
"""

from __future__ import annotations

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.recovery.fencing import FENCE_WAIT_MS
from rackrun.core.resize.rented_rack import RackStage
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
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
    Worker,
)
from rackrun.protocol.events import Event, PolicyRequested, RackDelivered, TimerFired, TrayJoined, TrayLost
from rackrun.protocol.ids import Position, SlotId, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import timer_named
from tests.core.core_harness import topology_of
from tests.core.model_process import Chain, Process
from tests.core.model_snapshots import ModelSnapshots
from tests.core.model_workers import ModelWorkers

SHORT = ("gather", "stalled", "judge", "last-call", "failed", "fence")
TIMEOUTS = ("park", "owed", "resume")


class Cluster:
    """Trays, processes and one control plane; every method is one thing that can happen."""

    def __init__(self, config: JobConfig, slots: int, units: int, shards: str, *, racks: bool = False) -> None:
        """``racks``: trays tell of their GPUs, two trays to an NVLink clique."""
        self.racks, self.core_config = racks, config
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
        self.slots, self.units = slots, units
        self.now = 0
        self.timers: list[tuple[int, int, str]] = []
        self.up_trays: dict[TrayId, bool] = {}  # False: dead, its lease has not lapsed
        self.processes: dict[tuple[SlotId, int], Process] = {}
        self.plans: dict[int, GenerationPlan] = {}
        self.snapshots = ModelSnapshots(self.processes, self.up_trays)
        self.workers = ModelWorkers(units, shards, config.mesh, self.processes, self.plans, self.snapshots)
        self.condemned: dict[tuple[SlotId, int], int] = {}
        """Since when."""
        self.announced = 0
        self.stopped: StopJob | None = None
        self.log: list[str] = []

    # -- the wire ------------------------------------------------------------------------------------------------------
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

    def _start(self, command: StartWorker) -> None:
        assert not self.withdrawn(command.slot), "a worker starts in a place that is drained"
        assert tray_of(command.slot) not in self.taken_back, "a worker starts on a rack that was released"
        if not self.up_trays.get(tray_of(command.slot), False):
            return
        self.workers.start(command)

    def _fence(self, command: FenceWorker) -> None:
        process = self.processes.get((command.slot, command.incarnation))
        if process is not None and process.alive:
            self._check_fence(process, command)
            self.workers.end(process, signal=9)

    # -- what must hold of commands ------------------------------------------------------------------------------------
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

    # -- trays ---------------------------------------------------------------------------------------------------------
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
        self.snapshots.lose_tray(tray)

    def lease_lapses(self, tray: TrayId) -> None:
        """What its agent had still to deliver is never heard of."""
        del self.up_trays[tray]
        self.departing.discard(tray)
        self.unfit = {slot for slot in self.unfit if tray_of(slot) != tray}
        for process in self.processes.values():
            if tray_of(process.slot) == tray:
                process.up.clear()
        self.tell(TrayLost(tray=tray, because="lease lapsed", returns=self.agents_return and tray[-1] in "024"))

    # -- what can happen without a fault -------------------------------------------------------------------------------
    def actions(self) -> list[tuple[str, Process]]:
        """Everything that can happen without a fault, in a fixed order."""
        out = []
        for process in self.processes.values():
            if process.up:
                out.append(("deliver", process))
            if process.alive:
                out += [(name, process) for name in self.workers.actions_of(process)]
        return out

    def do(self, name: str, process: Process) -> None:
        if name == "deliver":
            self.tell(process.up.popleft())
        else:
            self.workers.do(name, process)

    # -- time ----------------------------------------------------------------------------------------------------------
    def pending(self, *kinds: str) -> list[tuple[int, int, str]]:
        return sorted(t for t in self.timers if not kinds or t[2].partition(":")[0] in kinds)

    def fire(self, timer: tuple[int, int, str]) -> None:
        self.timers[timer[1]] = (0, timer[1], "fired")
        self.now = max(self.now, timer[0])
        self.tell(TimerFired(timer=timer_named(timer[2])))

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
                self.workers.runs_again(process)
            else:
                self.workers.end(process, signal=9)
            return
        missing = next((tray for n in range(5) if (tray := TrayId(f"tray-{n}")) not in self.up_trays), None)
        if held and missing is not None and self.now % 2:
            self.join(missing)
        elif held:
            policy = ("swap,shrink,restart", "swap,restart", "stop")[self.now % 3]
            self.tell(PolicyRequested(request=f"end of a hold {len(self.answers)}", policy=policy))

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


def _stamped(event: Event, at_ms: int) -> Event:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return type(event)(**fields | {"at_ms": at_ms})


__all__ = ["SHORT", "TIMEOUTS", "Cluster", "Process"]
