"""One worker process as its agent holds it, from before its start until its slot drops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from rackrun.agent.host import proc
from rackrun.agent.workers.agent_channel import AgentChannel
from rackrun.agent.workers.hang_detector import ProgressTimer
from rackrun.link import robust_mutex
from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.commands import StartWorker
from rackrun.protocol.commands import Worker as WorkerId
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, SlotId, Step
from rackrun.protocol.wire import UnitSealed

__all__ = ["HELD_S", "WorkerHandle"]

HELD_S = 1.0
"""Seconds that a message waits at most for a filler to end."""


class WorkerHandle:
    """A worker process with its channel, heartbeat page and snapshots."""

    def __init__(self, command: StartWorker, deliver: Callable[[WorkerHandle, bytes], None]) -> None:
        self.command = command
        self.slot: SlotId = command.slot
        self.incarnation: Incarnation = command.incarnation
        self.id = WorkerId(command.slot, command.incarnation)
        self.master = ""
        """``host:port`` of its generation's store, once it is found."""
        self.pid = 0
        self.reported = False
        """Whether its exit has been reported to the coordinator."""
        self.gone = False
        """Whether it was reaped, or never existed."""
        self.doomed = False
        """Whether it must be killed, if need be as soon as it exists."""
        self.progress_timer, self.silence = ProgressTimer(), ProgressTimer()
        """Times without progress of its main thread, and of its control thread."""
        self.stopped_ns = self.plain_ns = 0
        """Since when a process without rackrun's threads has been stopped, and when it is looked at again."""
        self.called_ns = 0
        """When it was last called to another generation that it has not joined yet; 0: it has joined."""
        self.called_to, self.called_with_plan = 0, False
        self.reported_unit: tuple[Generation, Position] = Generation(0), BEGIN
        """The last unit that it reported as committed, and its generation then."""
        name = f"rackrun-snapshot-{command.slot}-{command.incarnation}"
        with contextlib.ExitStack() as opened:  # closed again where a later one cannot be opened
            page_fd = HeartbeatPage.create(command.slot)
            opened.callback(os.close, page_fd)
            self.page = HeartbeatPage(page_fd)
            opened.callback(self.page.close)
            first = _memfd(f"{name}-a")
            opened.callback(os.close, first)
            second = _memfd(f"{name}-b")
            opened.callback(os.close, second)
            ours, theirs = socket.socketpair()
            opened.enter_context(ours)
            opened.enter_context(theirs)
            self.channel = AgentChannel(ours, lambda body: deliver(self, body))
            opened.pop_all()
        self.snapshot_fds = (first, second)
        self._birth_fds: tuple[int, ...] = (theirs.detach(), page_fd)
        self._held: list[bytes] = []
        self._releasing: asyncio.Task[None] | None = None
        self._pidfd = -1
        self._stat_fd = -1
        self._seen_exiting = False
        self._let_go = False
        self.tied = False
        """Whether a thread waits for its robust mutex, so that its end need not be polled."""

    @property
    def fds_for_birth(self) -> tuple[int, ...]:
        """Return the descriptors that its process receives: channel, page, snapshots."""
        return (*self._birth_fds, *self.snapshot_fds)

    def send(self, data: bytes, after: asyncio.Event | None = None) -> None:
        """Send a frame in order. ``after``: wait for this event first, but at most `HELD_S` seconds."""
        if self._held:
            self._held.append(data)
        elif after is None or after.is_set():
            self.channel.send(data)
        else:
            self._held.append(data)
            self._releasing = asyncio.get_running_loop().create_task(self._release(after))

    def called(self, generation: int, *, with_plan: bool) -> None:
        """Record that all members are called to another generation."""
        self.called_ns, self.called_to, self.called_with_plan = time.monotonic_ns(), generation, with_plan

    async def _release(self, after: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(after.wait(), HELD_S)
        held, self._held = self._held, []
        if not self.gone:
            for data in held:
                self.channel.send(data)

    def sent_off(self) -> None:
        """Close the descriptors meant for its process, which has its own now or will never exist."""
        for fd in self._birth_fds:
            os.close(fd)
        self._birth_fds = ()

    def born(self, pid: int, pidfd: int, ended: Callable[[WorkerHandle], None]) -> None:
        """Record its process."""
        self.pid = pid
        self._pidfd = pidfd
        with contextlib.suppress(OSError):  # already reaped: that will be told too; or hidden, then the pidfd tells
            self._stat_fd = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(pidfd, self._over, ended)
        if self.doomed:
            self.kill()

    def tie(self, ended: Callable[[WorkerHandle], None]) -> None:
        """Wait for its robust mutex, once there is one."""
        if self._let_go or self.tied or not robust_mutex.held(self.page):
            return
        self.tied = True
        loop = asyncio.get_running_loop()

        def released() -> None:
            with contextlib.suppress(RuntimeError):  # the agent itself has ended
                loop.call_soon_threadsafe(self._lifeline_released, ended)

        robust_mutex.wait_in_thread(self.page, f"rackrun-lifeline-{self.slot}", released)

    def ending(self) -> int | None:
        """Return its wait status if the kernel is tearing it down or has done so. None: it runs, as far as can be
        seen."""
        if self._stat_fd < 0:
            return None
        stat = proc.read_stat(self._stat_fd)
        if stat is None or not stat.exiting:
            return None
        # The flag is set an instant before the status: a zero counts when it is seen twice.
        if stat.status == 0 and not self._seen_exiting:
            self._seen_exiting = True
            return None
        return stat.status

    def stopped(self) -> bool:
        """Return whether the process is stopped by a signal (SIGSTOP or a debugger's)."""
        stat = proc.read_stat(self._stat_fd) if self._stat_fd >= 0 else None
        return stat is not None and stat.stopped

    def kill(self) -> None:
        """Send SIGKILL to its process alone. Its process group is killed when it is reaped."""
        self.doomed = True
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to its whole process group, or prevent its start."""
        if self._pidfd < 0:
            self.doomed = True
        elif not self.gone:
            self.page.end()
            try:
                os.killpg(self.pid, signal.SIGTERM)
            except ProcessLookupError:  # it has not created its group yet, or is gone
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def buried(self) -> None:
        """Close its channel and process descriptors after it was reaped. Page and snapshots stay."""
        self.sent_off()
        self.channel.close()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._stat_fd >= 0:
            os.close(self._stat_fd)
        self._pidfd = self._stat_fd = -1
        self.gone = True

    def close_memory(self) -> None:
        """Close its page and snapshots."""
        for fd in self.snapshot_fds:
            os.close(fd)
        self.snapshot_fds = (-1, -1)

    def step(self) -> Step:
        """The step that the worker is in; -1 before it has entered one."""
        return Step(self.page.at.step) if self.page.since_ns else Step(-1)

    def snapshots(self) -> tuple[Step, ...]:
        """The steps of which the worker has sealed snapshots, in order."""
        return tuple(Step(step) for step in sorted(self.page.snapshots()))

    def unreported_unit(self) -> UnitSealed | None:
        """Return the unit whose gate it may have passed without reporting it; None: there is none."""
        page = self.page
        at = page.at
        generation = Generation(page.ledger_generation(at))
        ids = page.ledger(at) if generation else None
        if ids is None or self.reported_unit == (generation, at):
            return None
        packed = ids.astype("<i8").tobytes()
        return UnitSealed(slot=self.slot, incarnation=self.incarnation, generation=generation, at=at, ids=packed)

    def _lifeline_released(self, ended: Callable[[WorkerHandle], None]) -> None:
        self._let_go = True
        self.tied = False  # should it not be dying after all, it is polled from now on
        ended(self)

    def _over(self, ended: Callable[[WorkerHandle], None]) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        ended(self)


def _memfd(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)
