"""A whole world without launcher and agent: workers forked from the test, and the real core as their coordinator.

`TinyCluster` plays the shell: it forks a worker for every `StartWorker`, carries messages over socket pairs, serves the
snapshots of the dead, and keeps the core's timers. Everything runs in one thread of the test, in one loop.

A worker dies at a *moment*: the n-th time that it enters a collective, is given a batch, sees a gate pass or has committed
a unit. Moments are counted alike in every run of a script, so a run without a death tells where the next may die.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads do not survive a fork
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import asyncio
import contextlib
import faulthandler
import hashlib
import heapq
import json
import random
import re
import select
import signal
import socket
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import rackrun
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.coordinator.journal.committed_units import RollbackEras
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.link.channel import frame, split_frames
from rackrun.link.exchange import ExchangeServer
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
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
from rackrun.worker.loop import elastic as _elastic  # noqa: F401 - here, not in every worker
from rackrun.worker.loop import main_entry as _main_entry  # noqa: F401
from rackrun.worker.loop.run import Run
from rackrun.worker.loop.unit_runner import UnitRunner
from rackrun.worker.membership.decisions.script_scope import Scope
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.script.syntax_tree import syntax_tree
from rackrun.worker.state.tracked_state import TrackedState
from tests.worker.nccl_double import install

__all__ = ["HOSTS_ONLY", "Ended", "Paused", "Swap", "TinyCluster", "moments"]

TRAY = TrayId("t")
DEADLINE_S = 100.0
TRACED = pytest.mark.skipif(
    "RACKRUN_NCCL_DOUBLE" in os.environ, reason="dynamo traces nothing under a dispatch mode, as the double's is"
)
HOSTS_ONLY = pytest.mark.skipif("RACKRUN_NCCL_DOUBLE" in os.environ, reason="of hosts' memory, which a GPU's is not")


@dataclass(frozen=True)
class Paused:
    """What the agent's side of a rank shows when it answers."""

    at: Position
    activity: Activity
    snapshots: tuple[int, ...]
    checkpoints: int
    """On disk."""


@dataclass(frozen=True)
class Swap:
    """The core's part in a planned swap: all ranks are told to pause when somebody tells of ``told_after`` as committed, and begin nothing before they know; when
    ``answers`` of them (None: all) have paused, the job is told to end (``drain``), and ``lost`` is killed; None: the generation is
    broken though nobody is lost."""

    told_after: Position
    lost: int | None = None
    answers: int | None = None
    drain: bool = False


@dataclass
class Ended:
    """How a run ended, and what it computed."""

    exit_code: int = -1
    because: str = ""
    failure: ScriptFailure | None = None
    state: dict[int, dict[str, str]] = field(default_factory=dict)
    """Rank -> what it holds when ``main`` has returned: path -> hash of the bits."""
    said: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> what its script handed to `say`."""
    moments: dict[int, list[str]] = field(default_factory=dict)
    """Rank -> the moments that it lived through."""
    gates: dict[Position, tuple[float, ...]] = field(default_factory=dict)
    counts: dict[Position, set[float]] = field(default_factory=dict)
    """How many samples a unit had, whenever it was told as committed."""
    ids: dict[Position, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    sealed: dict[Position, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    logs: dict[Position, dict[str, Any]] = field(default_factory=dict)
    copied: list[StateCopied] = field(default_factory=list)
    told: list[tuple[int, Position, int]] = field(default_factory=list)
    """Rank, unit, attempt: every commit, as often as it was told."""
    rescaled: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Rank, step, attempt, and in how many attempts before only a scale was missing or outgrown."""
    met: set[int] = field(default_factory=set)
    """Ranks that have met others in a micro-batch that was not their last."""
    paused: dict[int, Paused] = field(default_factory=dict)
    """By rank, when it was first told."""
    ready: dict[int, WorkerReady] = field(default_factory=dict)
    """By slot, the last."""
    plans: list[GenerationPlan] = field(default_factory=list)
    """Every plan after the first."""
    story: list[str] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        return {at.step: gate[0] for at, gate in self.gates.items() if not at.phase}

    @property
    def rolled_back(self) -> bool:
        return any(plan.rollback is not None for plan in self.plans)

    @property
    def restarted(self) -> bool:
        return any("restart" in line for line in self.story)

    def differences(self, other: Ended) -> list[str]:
        """What is not the same, bit for bit. Empty: nothing."""
        found = [] if self.exit_code == other.exit_code == 0 else [f"exit codes {self.exit_code}, {other.exit_code}"]
        for step in sorted(self.losses.keys() | other.losses.keys()):
            mine, theirs = self.losses.get(step), other.losses.get(step)
            if mine != theirs:
                found.append(f"loss of step {step}: {mine} and {theirs}")
        for rank in sorted(self.state.keys() | other.state.keys()):
            mine_, theirs_ = self.state.get(rank, {}), other.state.get(rank, {})
            found += [
                f"rank {rank}: {path}"
                for path in sorted(mine_.keys() | theirs_.keys())
                if mine_.get(path) != theirs_.get(path)
            ]
        for at in sorted(self.ids.keys() | other.ids.keys()):
            if self.samples(at) != other.samples(at):
                found.append(f"samples of {at}")
        return found

    def samples(self, at: Position) -> list[int]:
        """Of all ranks. What a rank that died right after its gate could not report, its page holds."""
        return sorted(sample for ids in {**self.sealed.get(at, {}), **self.ids.get(at, {})}.values() for sample in ids)

    def __str__(self) -> str:
        failure = f"\n{self.failure.traceback}" if self.failure else ""
        return "\n".join([f"exit code {self.exit_code}: {self.because}{failure}", *self.story])


def moments(reference: Ended, rank: int, seed: object, count: int = 1) -> list[int]:
    """``count`` moments of ``rank``'s life at which it may die, the earliest after the first committed steps."""
    lived = reference.moments[rank]
    first = [index for index, what in enumerate(lived) if what.startswith("committed")][1] + 1
    return sorted(random.Random(f"{seed}/{rank}").sample(range(first, len(lived)), count))


# -- the shell -------------------------------------------------------------------------------------------------------


@dataclass
class _Child:
    worker: Worker
    rank: int
    spare: bool
    pid: int
    pidfd: int
    channel: socket.socket
    page: HeartbeatPage
    fds: tuple[int, ...]
    """Page, two snapshots, result."""
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def result(self) -> dict[str, Any]:
        data = os.pread(self.fds[3], os.fstat(self.fds[3]).st_size, 0)
        found: dict[str, Any] = json.loads(data) if data else {}
        return found

    def close(self) -> None:
        self.channel.close()
        self.page.close()
        for fd in (self.pidfd, *self.fds):
            os.close(fd)


class TinyCluster:
    """``kill``: rank -> the moment at which its first worker dies: its number, or how it begins. ``ranks`` workers train and ``spares`` wait. ``mark`` is made when
    the coordinator has heard that a spare is ready. ``tainted``: what was committed may have been wrong, and be computed again with other bits. ``batch``: the global one and a micro-batch; ``scale``: `rackrun.elastic`'s ``batch``.
    ``slow``: when somebody tells of a unit as committed, which ranks are found to be slow from then on, and how many times: they get fewer
    micro-batches."""

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
        self._tainted = tainted
        self._resized = False
        self._told_in: dict[Position, Generation] = {}
        self._elastic: dict[str, Any] = {
            "global_batch_size": batch[0],
            "micro_batch_size": batch[1],
            "seed": 7,
            **elastic,
        }
        if scale is not None:
            self._elastic["batch"] = scale
        if isinstance(main, types.FunctionType):
            syntax_tree(
                main.__code__.co_filename
            )  # every worker asks for it: it is parsed here, before they are forked
        self._slots = ranks + spares
        self.distant = False
        """Snapshots seem to lie on another host."""
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
        self._children: dict[Worker, _Child] = {}
        self._dead: dict[Worker, _Child] = {}
        self._held_plan: ResumeGeneration | None = None
        self._timers: list[tuple[int, str]] = []
        self._service = socket.create_server(("127.0.0.1", 0))
        self._exchange_pid, self._exchange_pipe = 0, -1
        self._ended = Ended()
        self._over = False
        self._began = time.monotonic()

    def run(self) -> Ended:
        """Until the core says how it ended. AssertionError when it does not within the deadline."""
        store = self._start_exchange()
        host, port = self._service.getsockname()
        self._event(TrayJoined(tray=TRAY, host="here", slots=self._slots, store=store, snapshots=f"{host}:{port}"))
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
        if self._exchange_pid:
            os.close(self._exchange_pipe)
            os.waitpid(self._exchange_pid, 0)
            self._exchange_pid = 0

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
            f"generation {plan.generation}: {command.because}; committed {plan.committed}, rollback {plan.rollback}, {plan.restores}"
        )
        if plan.generation > 1:
            self._ended.plans.append(plan)
            self._resized |= plan.world_size != self._ranks or bool(plan.shares)
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

    def _read(self, child: _Child) -> None:
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

    def _paused(self, child: _Child, message: WorkerPaused) -> None:
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
        self._ended.told.append((message.rank, message.at, message.attempt))
        if message.rescaled:
            self._ended.rescaled.append((message.rank, message.at.step, message.attempt, message.rescaled))
        self._ended.met |= {message.rank} if message.meets else set()
        if self._swap is not None and self._swap.told_after == message.at and not self._told_to_pause:
            self._told_to_pause = True
            self._tell_to_pause(message.generation)
        self._ended.counts.setdefault(message.at, set()).add(message.gate[1])
        others = self._told_in.get(message.at, message.generation) != message.generation and self._resized
        if others and "batch" in self._elastic and not self._counts(message.at, self._told_in[message.at]):
            del self._ended.gates[
                message.at
            ]  # only ranks that are lost had seen it committed: it has another batch now
        if self._tainted and self._told_in.get(message.at, message.generation) < message.generation:
            self._ended.gates[message.at] = message.gate
        known = self._ended.gates.setdefault(message.at, message.gate)
        # A step that is computed again, after a rollback or a restart, has the same bits: timings excepted. On another number of
        # ranks the loss is rounded otherwise, unless it is reduced exactly.
        same = 1 if self._resized and self._elastic.get("reduction", "fast") == "fast" else 0
        assert known[same:3] == message.gate[same:3], f"{message.at}: {known} and then {message.gate}"
        ids = tuple(int(i) for i in np.frombuffer(message.ids, "<i8"))
        if others:
            self._ended.ids[message.at] = {}  # only ranks that are lost had seen it committed; it is dealt out anew
        self._told_in[message.at] = message.generation
        assert self._ended.ids.setdefault(message.at, {}).setdefault(message.rank, ids) == ids
        if message.at in self._slow:
            self._find_slow(self._slow.pop(message.at))
        if self._drain_at == message.at.step:
            self._drain_at = None
            self._event(StopRequested(because="the test wants it", exit_code=0))

    def _counts(self, at: Position, generation: int) -> bool:
        """Whether what was told as committed in that generation still is in the next."""
        return RollbackEras({plan.generation: plan for plan in self._ended.plans}).counts(at, generation)

    def _find_slow(self, times: Mapping[int, float]) -> None:
        view = self._core.view()
        slow = tuple(
            SlowRank(rank=Rank(rank), slot=view.ranks[rank].slot, times=how, own_ms=1, past=1, rows=20, window=20)
            for rank, how in times.items()
        )
        self._event(SlowRanksChanged(generation=view.generation, slow=slow))

    def _exited(self, child: _Child) -> None:
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

    def _remember_delivered(self, child: _Child) -> None:
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
        """One snapshot of a worker, living or dead: ``GET /snapshot/SLOT/INCARNATION/STEP``."""
        connection, _ = self._service.accept()
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            _, _, slot, index, incarnation, step = head.split(b" ")[1].decode().split("/")
            children = {**self._children, **self._dead}
            child = next(
                c for w, c in children.items() if (w.slot, w.incarnation) == (f"{slot}/{index}", int(incarnation))
            )
            held = child.page.snapshots().get(int(step))
            if held is None:
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            fd = child.fds[1 + held]
            first, last = 0, os.fstat(fd).st_size - 1
            if asked := re.search(rb"Range: bytes=(\d+)-(\d+)", head):
                first, last = map(int, asked.groups())
            data = os.pread(fd, last + 1 - first, first)
            status = b"206 Partial Content" if asked else b"200 OK"
            where = b"" if self.distant else b"X-Rackrun-Memory: %d/fd/%d\r\n" % (os.getpid(), fd)
            with contextlib.suppress(OSError):  # a reader that was overtaken does not stay for it
                connection.sendall(b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n" % (status, where, len(data)) + data)

    def _tell(self, what: str) -> None:
        self._ended.story.append(f"{time.monotonic() - self._began:7.3f} {what}")

    def _show_stacks(self) -> None:
        for child in self._children.values():
            print(f"-- stack of {child.worker}", file=sys.stderr, flush=True)
            os.kill(child.pid, signal.SIGUSR1)
            time.sleep(0.3)

    # -- processes
    def _start_exchange(self) -> str:
        """Where groups meet, in a process of its own, as an agent serves it; it ends when its pipe is closed."""
        theirs, self._exchange_pipe = os.pipe()
        told, tell = os.pipe()
        self._exchange_pid = os.fork()
        if self._exchange_pid == 0:
            os.close(self._exchange_pipe)
            asyncio.run(_serve_exchange(theirs, tell))
            os._exit(0)
        os.close(tell)
        os.close(theirs)
        address = os.read(told, 64).decode()
        os.close(told)
        return address

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
            os.close(self._exchange_pipe)
            self._service.close()
            for other in (*self._children.values(), *self._dead.values()):
                other.channel.close()
            hold = self._swap.told_after if self._swap is not None and not self._told_to_pause else None
            _live(self._main, self._elastic, booted, dies_at, hold, fds[3])
        theirs.close()
        self._children[worker] = _Child(
            worker, command.rank, command.spare, pid, os.pidfd_open(pid), ours, HeartbeatPage(fds[0]), fds
        )
        if self._held_plan is not None:
            members = tuple(Worker(m.slot, m.incarnation) for m in self._held_plan.plan.members)
            if all(member in self._children for member in members):
                self._send(members, self._held_plan)
                self._held_plan = None


async def _serve_exchange(until: int, tell: int) -> None:
    server = ExchangeServer("127.0.0.1", "")
    os.write(tell, (await server.start()).encode())
    os.close(tell)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(until, over.set)
    await over.wait()


# -- inside a worker -------------------------------------------------------------------------------------------------


def _live(
    main: Callable[[Run], None],
    elastic: dict[str, Any],
    booted: boot.Boot,
    dies_at: int | str | None,
    hold: Position | None,
    result_fd: int,
) -> None:
    """The whole life of a forked worker."""
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        os.environ |= {
            "RANK": str(booted.rank),
            "WORLD_SIZE": str(booted.world_size),
            "LOCAL_RANK": str(booted.local_rank),
        }
        boot.install(booted)
        result: dict[str, Any] = {}
        lived = _count_moments(dies_at)
        if hold is not None:
            _wait_to_pause(hold)

        @rackrun.elastic(**elastic)
        def started(run: Run) -> None:
            main(run)
            result.update(rank=run.rank, state=_bits(run._state), moments=lived, said=_said)

        mode = os.environ.get("RACKRUN_NCCL_DOUBLE")
        try:
            with install(mode) if mode else contextlib.nullcontext():
                started()
        except Exception as error:  # noqa: BLE001 - told to the core
            traceback.print_exc()
            frame_ = traceback.extract_tb(error.__traceback__)[-1]
            kind = type(error)
            result["failure"] = {
                "type": f"{kind.__module__}.{kind.__qualname__}",
                "message": str(error),
                "traceback": traceback.format_exc(),
                "where": f"{frame_.filename}:{frame_.lineno}",
            }
        else:
            code = 0
        os.write(result_fd, json.dumps(result).encode())
    except SystemExit:
        code = 0
    except BaseException:  # noqa: BLE001 - the child ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_said: dict[str, Any] = {}


def say(**values: Any) -> None:
    """For scripts: what the test shall see of this rank (`Ended.said`). Plain data."""
    _said.update(values)


def _count_moments(dies_at: int | str | None) -> list[str]:
    lived: list[str] = []

    def live(what: str) -> None:
        lived.append(what)
        if dies_at == len(lived) - 1 or (isinstance(dies_at, str) and what.startswith(dies_at)):
            print(f"dies at moment {dies_at}: {what}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def enter_collective(
        world: WorkerMembership, *args: Any, _original: Any = WorkerMembership.enter_collective
    ) -> int | None:
        if world.scope is Scope.UNIT:
            live(f"enters a collective after {world.passed}")
        generation: int | None = _original(world, *args)
        return generation

    def pass_gate(
        world: WorkerMembership, at: Position, *more: Any, _original: Any = WorkerMembership.pass_gate
    ) -> None:
        _original(world, at, *more)
        live(f"passed the gate of {at}")

    def begin_shard(run: Run, step: Any, shard: Any, _original: Any = Run._begin_shard, **more: Any) -> None:
        _original(run, step, shard, **more)
        live(f"batch {shard} of {step}")

    def committed(units: UnitRunner, at: Position, *more: Any, _original: Any = UnitRunner._committed) -> None:
        _original(units, at, *more)
        live(f"committed {at}")

    WorkerMembership.enter_collective = enter_collective  # type: ignore[method-assign,assignment]
    WorkerMembership.pass_gate = pass_gate  # type: ignore[method-assign,assignment]
    Run._begin_shard = begin_shard  # type: ignore[method-assign,assignment]
    UnitRunner._committed = committed  # type: ignore[method-assign,assignment]
    return lived


def _wait_to_pause(hold: Position) -> None:
    """Before the unit after ``hold`` each rank waits until it has been told to pause: a job so short would be over first."""

    def run(units: UnitRunner, *args: Any, _original: Any = UnitRunner.run, **more: Any) -> Any:
        while hold == units.passed and not units._world.pausing and units._world.generation == 1:
            time.sleep(0.001)  # the control thread hears of it, and tells nobody
        return _original(units, *args, **more)

    UnitRunner.run = run  # type: ignore[method-assign,assignment]


def _bits(state: TrackedState) -> dict[str, str]:
    """Path -> hash of every tensor, and of everything that is not a tensor."""
    tensors = {
        path: _hash(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for path, tensor in _by_path(state)
    }
    return {**tensors, "plain": _hash(state.encode_plain())}


def _by_path(state: TrackedState) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(state.tensors().items())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
