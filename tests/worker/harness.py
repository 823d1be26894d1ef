"""A whole world without launcher and agent: workers forked from the test, and the real core as their coordinator.

`TinyCluster` plays the shell: it forks a worker for every `StartWorker`, carries messages over socket pairs, serves the
snapshots of the dead, and keeps the core's timers. Everything runs in one thread of the test, in one loop.

A worker dies at a *moment*: the n-th time that it enters a collective, is given a batch, sees a gate pass or has
committed a unit. Moments are counted alike in every run of a script, so a run without a death tells where the next
may die.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.link.channel import frame, split_frames
from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol import boot
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
    WorkerCommand,
)
from rackrun.protocol.events import (
    Event,
    ScriptFailure,
    SlowRank,
    SlowRanksChanged,
    StopRequested,
    TimerFired,
    TrayJoined,
    WorkerExited,
    WorkerPaused,
    WorkerReady,
    WorkerSevered,
)
from rackrun.protocol.ids import Generation, Position, Rank, Step, TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import timer_named
from rackrun.protocol.wire import FillerState, Logged, StateCopied, UnitCommitted, UnitSealed, decode_upward
from rackrun.worker.loop.run import Run
from rackrun.worker.script.syntax_tree import syntax_tree
from tests.worker.agent_double import Child, ExchangeProcess, SnapshotServer
from tests.worker.ended import CommittedUnits, Ended, Paused, moments
from tests.worker.forked_worker import live, say

__all__ = ["HOSTS_ONLY", "TRACED", "Ended", "Paused", "Swap", "TinyCluster", "moments", "say"]
"""Also what tests need beside it: how a job ended, and what scripts say."""

TRAY = TrayId("t")
DEADLINE_S = 100.0
TRACED = pytest.mark.skipif(
    "RACKRUN_NCCL_DOUBLE" in os.environ, reason="dynamo traces nothing under a dispatch mode, as the double's is"
)
HOSTS_ONLY = pytest.mark.skipif("RACKRUN_NCCL_DOUBLE" in os.environ, reason="of hosts' memory, which a GPU's is not")


@dataclass(frozen=True)
class Swap:
    """The core's part in a planned swap: all ranks are told to pause when somebody tells of ``told_after`` as
    committed, and begin nothing before they know; when ``answers`` of them (None: all) have paused, the job is told to
    end (``drain``), and ``lost`` is killed; None: the generation is broken though nobody is lost."""

    told_after: Position
    lost: int | None = None
    answers: int | None = None
    drain: bool = False


class TinyCluster:
    """``kill``: rank -> the moment at which its first worker dies: its number, or how it begins. ``ranks`` workers
    train and ``spares`` wait. ``mark`` is made when the coordinator has heard that a spare is ready. ``tainted``: what
    was committed may have been wrong, and be computed again with other bits. ``batch``: the global one and a
    micro-batch; ``scale``: `rackrun.elastic`'s ``batch``. ``slow``: when somebody tells of a unit as committed, which
    ranks are found to be slow from then on, and how many times: they get fewer micro-batches."""

    turn_ms = 60_000
    """Nothing is waited for longer than that in one turn."""

    def __init__(
        self,
        main: Callable[[Run], None],
        *,
        ranks: int = 3,
        spares: int = 1,
        kill: Mapping[int, int | str] | None = None,
        batch: tuple[int, int] = (12, 2),
        deadline_s: float = DEADLINE_S,
        max_restarts: int = 3,
        start_over: bool = False,
        drain_at: int | None = None,
        swap: Swap | None = None,
        min_ranks: int = 0,
        policy: str = "",
        slow: Mapping[Position, Mapping[int, float]] | None = None,
        mark: Path | None = None,
        scale: Any = None,
        tainted: bool = False,
        **elastic: Any,
    ) -> None:
        self._main, self._kill, self._deadline_s, self._drain_at = main, dict(kill or {}), deadline_s, drain_at
        self._swap, self._ranks, self._told_to_pause = swap, ranks, False
        self._mark, self._slow = mark, dict(slow or {})
        self._elastic: dict[str, Any] = {
            "global_batch_size": batch[0],
            "micro_batch_size": batch[1],
            "seed": 7,
            **elastic,
        }
        if scale is not None:
            self._elastic["batch"] = scale
        if isinstance(main, types.FunctionType):
            # every worker asks for it: it is parsed here, before they are forked
            syntax_tree(main.__code__.co_filename)
        self._slots = ranks + spares
        self._core = ControlPlane(
            JobConfig(
                trays_min=1,
                trays_max=1,
                spares=spares,
                max_restarts=max_restarts,
                start_over=start_over or "RACKRUN_CHECKPOINT_DIR" in os.environ,
                join_timeout_ms=30_000,
                min_ranks=min_ranks,
                rules=parse_rules(policy),
                slow_ranks="shift",
            )
        )
        self._children: dict[Worker, Child] = {}
        self._dead: dict[Worker, Child] = {}
        self._held_plan: ResumeGeneration | None = None
        self._timers: list[tuple[int, str]] = []
        self._service = SnapshotServer()
        self._exchange: ExchangeProcess | None = None
        self._ended = Ended()
        exact = self._elastic.get("reduction", "fast") != "fast"
        self._committed_units = CommittedUnits(
            self._ended, tainted=tainted, scaled="batch" in self._elastic, exact=exact
        )
        self._over = False
        self._began = time.monotonic()

    def run(self) -> Ended:
        """Until the core says how it ended. AssertionError when it does not within the deadline."""
        self._exchange = ExchangeProcess()
        store, snapshots = self._exchange.address, self._service.address
        self._event(TrayJoined(tray=TRAY, host="here", slots=self._slots, store=store, snapshots=snapshots))
        while not self._over:
            self._turn()
            if time.monotonic() - self._began > self._deadline_s:
                self._show_stacks()
                raise AssertionError(f"not over after {self._deadline_s} s\n{self._ended}")
        self.close()
        return self._ended

    def close(self) -> None:
        for child in list(self._children.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
                os.killpg(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.close()
        for child in self._dead.values():
            child.close()
        self._children.clear()
        self._dead.clear()
        self._service.close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    # -- one turn of the loop
    def _turn(self) -> None:
        poll = select.poll()
        sources: dict[int, Callable[[], None]] = {self._service.fileno(): self._serve}
        for child in self._children.values():
            sources[child.channel.fileno()] = lambda child=child: self._read(child)  # type: ignore[misc]
        exits = {child.pidfd: child for child in self._children.values()}
        for fd in (*sources, *exits):
            poll.register(fd, select.POLLIN)
        now = self._now_ms()
        next_ms = max(self._timers[0][0] - now, 0) if self._timers else 100
        ready = [fd for fd, _ in poll.poll(min(next_ms, self.turn_ms))]
        for fd in ready:
            if fd in sources:
                sources[fd]()
        for fd in ready:
            if fd in exits and exits[fd].worker in self._children:
                self._exited(exits[fd])
        while self._timers and self._timers[0][0] <= self._now_ms():
            self._event(TimerFired(timer=timer_named(heapq.heappop(self._timers)[1])))

    def _now_ms(self) -> int:
        return int((time.monotonic() - self._began) * 1000)

    def _event(self, event: Event) -> None:
        if self._over:
            return
        event = type(event)(
            **{name: getattr(event, name) for name in event.__struct_fields__} | {"at_ms": self._now_ms()}
        )
        commands = self._core.handle(event)
        self._core.check_invariants()
        if not isinstance(event, TimerFired):
            self._tell(f"{type(event).__name__} {getattr(event, 'slot', '')}")
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case SetTimer():
                heapq.heappush(self._timers, (command.at_ms, str(command.timer)))
            case StartWorker():
                self._fork(command)
            case FenceWorker():
                self._tell(f"fence {command.slot}: {command.because}")
                with contextlib.suppress(KeyError):
                    os.kill(self._children[Worker(command.slot, command.incarnation)].pid, signal.SIGKILL)
            case BreakGeneration():
                self._tell(f"break for generation {command.generation}: {command.because}")
                self._send(command.workers, command)
            case ResumeGeneration():
                self._resume(command)
            case Notice():
                self._tell(command.text)
            case PauseWorkers() | DealShards() | DrainWorkers() | ReleaseWorkers():
                self._send(command.workers, command)
            case StopJob():
                self._tell(f"stop {command.exit_code}: {command.because}")
                ended = self._ended
                ended.exit_code, ended.because, ended.failure, self._over = (
                    command.exit_code,
                    command.because,
                    command.failure,
                    True,
                )
            case DismissTray() | Answer() | Decided() | AskPolicy() | RequestRack() | ReleaseRack() | CondemnWorker():
                pass  # there is no agent, nobody asks, and the policy is the core's own

    def _resume(self, command: ResumeGeneration) -> None:
        plan = command.plan
        self._tell(
            f"generation {plan.generation}: {command.because}; committed {plan.committed}, rollback {plan.rollback}, "
            f"{plan.restores}"
        )
        if plan.generation > 1:
            self._ended.plans.append(plan)
            self._committed_units.resized |= plan.world_size != self._ranks or bool(plan.shares)
        workers = tuple(Worker(member.slot, member.incarnation) for member in plan.members)
        if all(worker in self._children for worker in workers):
            self._send(workers, command)
        else:
            self._held_plan = command  # its members are started next

    def _send(self, workers: tuple[Worker, ...], command: WorkerCommand) -> None:
        for worker in workers:
            if worker in self._children:
                with contextlib.suppress(OSError):
                    self._children[worker].channel.sendall(frame(command))

    def _read(self, child: Child) -> None:
        try:
            data = child.channel.recv(1 << 20)
        except OSError:
            data = b""
        child.buffer += data
        for part in split_frames(child.buffer):
            message = decode_upward(part)
            if isinstance(message, UnitCommitted):
                self._committed(message)
            elif isinstance(message, Logged):
                self._ended.logs.setdefault(message.at, {}).update(message.values)
            elif isinstance(message, StateCopied):
                self._ended.copied.append(message)
            else:
                assert not isinstance(message, UnitSealed | FillerState), "agents say that"
                self._event(message)
            if isinstance(message, WorkerPaused):
                self._paused(child, message)
            elif isinstance(message, WorkerReady):
                self._ended.ready[int(child.worker.slot.rpartition("/")[2])] = message
                if child.spare and self._mark is not None:
                    with self._mark.open("a") as mark:
                        mark.write(".")

    def _tell_to_pause(self, generation: Generation) -> None:
        workers = tuple(self._children)  # spares too, which do not listen
        self._carry_out(PauseWorkers(generation=generation, workers=workers, because="the test wants it"))

    def _paused(self, child: Child, message: WorkerPaused) -> None:
        page, ended, folder = child.page, self._ended, os.environ.get("RACKRUN_CHECKPOINT_DIR")
        saved = len(DurableStore(Path(folder), "run").checkpoints()) if folder else 0
        rank = self._rank_of(child.worker)
        if rank is None and not child.spare:
            rank = child.rank  # no plan has named it since the start
        assert rank is not None
        ended.paused.setdefault(rank, Paused(page.at, page.activity, tuple(sorted(page.snapshots())), saved))
        swap = self._swap
        if swap is None or len(ended.paused) < (swap.answers or self._ranks):
            return
        self._swap = None
        if swap.drain:
            self._event(StopRequested(because="the test wants it", exit_code=0))
        if swap.lost is None:
            self._event(
                WorkerSevered(
                    slot=message.slot,
                    incarnation=message.incarnation,
                    generation=message.generation,
                    because="the test wants it",
                )
            )
        else:
            os.kill(next(c.pid for c in self._children.values() if c.rank == swap.lost and not c.spare), signal.SIGKILL)

    def _committed(self, message: UnitCommitted) -> None:
        if self._swap is not None and self._swap.told_after == message.at and not self._told_to_pause:
            self._told_to_pause = True
            self._tell_to_pause(message.generation)
        self._committed_units.record(message)
        if message.at in self._slow:
            self._find_slow(self._slow.pop(message.at))
        if self._drain_at == message.at.step:
            self._drain_at = None
            self._event(StopRequested(because="the test wants it", exit_code=0))

    def _find_slow(self, times: Mapping[int, float]) -> None:
        view = self._core.view()
        slow = tuple(
            SlowRank(rank=Rank(rank), slot=view.ranks[rank].slot, times=how, own_ms=1, past=1, rows=20, window=20)
            for rank, how in times.items()
        )
        self._event(SlowRanksChanged(generation=view.generation, slow=slow))

    def _exited(self, child: Child) -> None:
        child.channel.setblocking(False)
        self._read(child)
        if child.worker not in self._children:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # as an agent does: what a loader has started dies with its rank
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.worker]
        self._dead[child.worker] = child
        result = child.result
        if "state" in result:
            rank = result["rank"]
            self._ended.state[rank], self._ended.moments[rank] = result["state"], result["moments"]
            self._ended.said[rank] = result["said"]
        self._remember_delivered(child)
        failure = ScriptFailure(**result["failure"]) if "failure" in result else None
        self._event(
            WorkerExited(
                slot=child.worker.slot,
                incarnation=child.worker.incarnation,
                exit_code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                failure=failure,
                step=Step(child.page.at.step),
                snapshots=tuple(Step(step) for step in sorted(child.page.snapshots())),
            )
        )

    def _remember_delivered(self, child: Child) -> None:
        """What it has recorded in its page before a gate that it perhaps did not live to report."""
        rank = self._rank_of(child.worker)
        if rank is None and not child.spare:
            rank = child.rank  # no plan has named it since the start
        for step in (child.page.at.step, child.page.at.step - 1):
            ids = child.page.ledger(Position(step)) if step >= 0 else None
            if ids is not None and rank is not None:
                self._ended.sealed.setdefault(Position(step), {}).setdefault(rank, tuple(map(int, ids)))

    def _rank_of(self, worker: Worker) -> int | None:
        for plan in reversed(self._ended.plans):
            for member in plan.members:
                if (member.slot, member.incarnation) == (worker.slot, worker.incarnation):
                    return member.rank
        return None

    def _serve(self) -> None:
        self._service.serve({**self._children, **self._dead})

    def _tell(self, what: str) -> None:
        self._ended.story.append(f"{time.monotonic() - self._began:7.3f} {what}")

    def _show_stacks(self) -> None:
        for child in self._children.values():
            print(f"-- stack of {child.worker}", file=sys.stderr, flush=True)
            os.kill(child.pid, signal.SIGUSR1)
            time.sleep(0.3)

    # -- processes
    def _fork(self, command: StartWorker) -> None:
        worker = Worker(command.slot, command.incarnation)
        ours, theirs = socket.socketpair()
        fds = (HeartbeatPage.create("test"), os.memfd_create("a"), os.memfd_create("b"), os.memfd_create("result"))
        booted = boot.Boot(
            slot=command.slot,
            incarnation=command.incarnation,
            spare=command.spare,
            rank=boot.first_rank(command),
            local_rank=int(command.slot.rpartition("/")[2]),
            world_size=command.world_size,
            generation=command.generation,
            env={},
            exchange=command.store,
            restarts=command.restarts,
            channel_fd=theirs.fileno(),
            page_fd=fds[0],
            snapshot_fds=(fds[1], fds[2]),
        )
        first = not command.spare and not command.restarts
        dies_at = self._kill.get(command.rank) if first else None
        pid = os.fork()
        if pid == 0:
            os.setsid()
            ours.close()
            if self._exchange is not None:
                self._exchange.leave()
            self._service.close()
            for other in (*self._children.values(), *self._dead.values()):
                other.channel.close()
            hold = self._swap.told_after if self._swap is not None and not self._told_to_pause else None
            live(self._main, self._elastic, booted, dies_at, hold, fds[3])
        theirs.close()
        self._children[worker] = Child(
            worker, command.rank, command.spare, pid, os.pidfd_open(pid), ours, HeartbeatPage(fds[0]), fds
        )
        if self._held_plan is not None:
            members = tuple(Worker(m.slot, m.incarnation) for m in self._held_plan.plan.members)
            if all(member in self._children for member in members):
                self._send(members, self._held_plan)
                self._held_plan = None
