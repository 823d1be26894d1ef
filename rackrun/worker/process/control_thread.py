"""The control thread of a worker: listens to the agent, answers for the worker, and updates the heartbeat page.

It never waits for the main thread. When the agent is gone the process ends at once, because nobody could fence it any
more.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import assert_never

from rackrun.link.channel import WorkerChannel
from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.boot import Boot
from rackrun.protocol.commands import (
    BreakGeneration,
    DealShards,
    DismissTray,
    DrainWorkers,
    FenceWorker,
    PauseWorkers,
    ReleaseWorkers,
    ResumeGeneration,
    StartWorker,
    StopJob,
    WorkerCommand,
)
from rackrun.protocol.ids import Step
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.main_thread_line import place_of_main_thread
from rackrun.worker.process.spin_loops import SpinDetector

__all__ = ["ControlThread"]

TICK_MS = 100
_WATCHED_NS = 2_500_000_000
"""How long, in ns, each tick checks the main thread after the agent has asked where it is."""


class ControlThread(threading.Thread):
    """Receives commands of the coordinator from the agent, ticks ten times a second, and runs the checks that need no
    main thread."""

    def __init__(
        self,
        boot: Boot,
        channel: WorkerChannel,
        page: HeartbeatPage,
        world: WorkerMembership,
        snapshots: Callable[[], tuple[Step, ...]],
    ) -> None:
        super().__init__(name="rackrun-control", daemon=True)
        self._boot, self._channel, self._page, self._world, self._snapshots = boot, channel, page, world, snapshots

    def run(self) -> None:
        self._world.queue.use()
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        spins, watched_until_ns = SpinDetector(threading.main_thread().ident or 0), 0
        while True:
            self._page.tick()
            if self._page.place_asked:
                self._page.tell_place(place_of_main_thread())
                watched_until_ns = time.monotonic_ns() + _WATCHED_NS
            if watched_until_ns:
                now_ns = time.monotonic_ns()
                watched_until_ns = watched_until_ns if now_ns < watched_until_ns else 0
                since_ns = self._world.device_wait_since_ns or spins.poll(now_ns)
                self._page.tell_spins(since_ns if watched_until_ns else 0, now_ns)
            if not poll.poll(TICK_MS):
                self._world.look_at_device()
                self._world.inflight.abandon_overdue()
                if (severed := self._world.unreported_failure()) is not None:
                    self._channel.send(severed)
                continue
            command = self._channel.receive()
            if command is None:
                os._exit(1)
            self._obey(command)

    def _obey(self, command: WorkerCommand) -> None:
        match command:
            case BreakGeneration():
                report = self._world.on_break(command, self._snapshots)
                if report is not None:
                    self._channel.send(report)
            case ResumeGeneration(plan=plan):
                mine = [m for m in plan.members if (m.slot, m.incarnation) == (self._boot.slot, self._boot.incarnation)]
                if mine:
                    self._world.on_plan(plan, mine[0])
            case ReleaseWorkers():
                self._world.on_release()
            case PauseWorkers(generation=generation):
                self._world.on_pause(generation)
            case DealShards():
                self._world.on_share_change(command)
            case DrainWorkers():
                self._world.drain = True
            case StartWorker() | FenceWorker() | DismissTray() | StopJob():
                pass  # for the agent
            case _:
                assert_never(command)
