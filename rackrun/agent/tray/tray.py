"""The workers of one tray: their starts and exits, and the messages between them and the coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import assert_never

import msgspec

from rackrun.agent.fillers.filler_runner import Fillers
from rackrun.agent.gpus.gpu_monitor import Devices
from rackrun.agent.host import proc
from rackrun.agent.snapshots.mirror import Holder
from rackrun.agent.snapshots.snapshot_parity import Set
from rackrun.agent.tray.uplink import Uplink, Urgency
from rackrun.agent.worker_start.fork_server import Forked, ForkServer, Reaped
from rackrun.agent.worker_start.tcp_stores import Stores, StoreUnreachable
from rackrun.agent.worker_start.torchrun_environment import worker_environment
from rackrun.agent.worker_start.worker_logs import Logs, Outputs
from rackrun.agent.workers.worker_handle import Worker
from rackrun.link.channel import frame
from rackrun.protocol import commands as c
from rackrun.protocol.agent_config import AgentConfig
from rackrun.protocol.boot import Boot, first_rank
from rackrun.protocol.events import Failure, WorkerEvent, WorkerExited, WorkerReady
from rackrun.protocol.ids import SlotId, TrayId, tray_of
from rackrun.protocol.wire import Logged, StateCopied, UnitCommitted, UnitSealed, Upward, decode_upward, encode

__all__ = ["Tray"]

_LEFT_IN_SLOT_MAX = 2
"""Number of exited workers with snapshots whose page and snapshots a slot keeps. The core counts in the same way
(`rackrun.core.generation.snapshot_locations.LEFT_IN_SLOT_MAX`)."""
_FAILED_GRACE_S = 1.0
_KILL_S = 10.0


class Tray:
    """Starts, watches and ends the workers of a tray."""

    def __init__(
        self,
        config: AgentConfig,
        server: ForkServer,
        stores: Stores,
        logs: Logs,
        devices: Devices,
        fillers: Fillers,
    ) -> None:
        self._config = config
        self._fillers = fillers
        fillers.others = lambda: (self._server.pid, *devices.pids)
        self._devices = devices
        self._server = server
        self._stores = stores
        self._logs = logs
        self._slots: list[deque[Worker]] = [deque() for _ in range(config.slots)]
        self._loop = asyncio.get_running_loop()
        self._starts: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._resume: c.ResumeGeneration | None = None
        """The latest plan. A first plan arrives before the workers that it names are started."""
        self._server_reaped = asyncio.Event()
        self.uplink: Uplink  # the agent sets these two before any event
        self.worker_is_new: Callable[[], None]
        self._loop.add_reader(server.fileno(), self._server_spoke)
        self._loop.add_signal_handler(signal.SIGCHLD, self._child_ended)

    # -- for the watch and the snapshot service
    def living(self) -> list[Worker]:
        return [worker for worker in self._current() if worker.pid and not worker.reported]

    def kept(self, index: int, incarnation: int) -> Worker | None:
        slot = self._slots[index] if 0 <= index < len(self._slots) else ()
        return next((worker for worker in slot if worker.incarnation == incarnation), None)

    def look(self, worker: Worker) -> None:
        """Report a worker's end if it can be seen."""
        status = worker.ending()
        if status is not None:
            self._ended(worker, status)

    def destination(self, worker: Worker) -> Holder | Set | None:
        """Return where a worker's snapshots are copied to, according to the latest plan; None: nowhere."""
        if self._resume is None:
            return None
        plan = self._resume.plan
        if holder := plan.mirrors.get(TrayId(self._config.tray)):
            address, _, tray = holder.partition("/")
            return Holder(plan.generation, tray, address)
        ranks = [m.rank for m in plan.members if (m.slot, m.incarnation) == (worker.slot, worker.incarnation)]
        sets = (of for of in plan.sets if any(keeper.rank in ranks for keeper in of))
        return next((Set(plan.generation, ranks[0], of, plan.parity) for of in sets), None)

    # -- commands
    def obey(self, command: c.WorkerCommand) -> None:
        """Carry out a command."""
        match command:
            case c.StartWorker():
                self._start(command)
            case c.FenceWorker():
                if worker := self._find(command.slot, command.incarnation):
                    self._fillers.clear(worker.slot, "the spare is fenced")
                    worker.kill()
            case c.BreakGeneration() | c.PauseWorkers() | c.DealShards() | c.DrainWorkers() | c.ReleaseWorkers():
                self._pass_on(command, [(worker.slot, worker.incarnation) for worker in command.workers])
            case c.ResumeGeneration():
                self._resume = command
                self._pass_on(command, [(member.slot, member.incarnation) for member in command.plan.members])
            case c.StopJob() | c.DismissTray():
                raise AssertionError(f"the agent carries out {type(command).__name__}")
            case _:
                assert_never(command)

    async def stop(self, *, failed: bool) -> None:
        """End every worker and all processes that they left."""
        self._stopping = True
        for task in tuple(self._starts):
            task.cancel()
        self._server.wake()
        for worker in self._current():
            worker.terminate()
        clearing = self._loop.create_task(self._fillers.stop())
        if not await self._emptied(_FAILED_GRACE_S if failed else self._config.grace_s):
            for worker in self._current():
                worker.kill()
            if not await self._emptied(_KILL_S):
                _say("some workers do not end, though killed: the kernel holds them (a driver?)")
        await clearing
        self._loop.remove_reader(self._server.fileno())
        self._server.close()
        try:
            await asyncio.wait_for(self._server_reaped.wait(), _KILL_S)
        except TimeoutError:
            _say("the fork server does not end; killed")
        self._loop.remove_signal_handler(signal.SIGCHLD)
        proc.kill_tree(os.getpid())
        for slot in self._slots:
            while slot:
                slot.popleft().forget()

    async def _emptied(self, timeout_s: float) -> bool:
        waits = [asyncio.ensure_future(worker.gone.wait()) for worker in self._current()]
        if not waits:
            return True
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
        for wait in pending:
            wait.cancel()
        return not pending

    # -- starts
    def _start(self, command: c.StartWorker) -> None:
        slot = self._slots[_index_of(command.slot)]
        previous = slot[-1] if slot else None
        if self._stopping or (previous is not None and previous.incarnation >= command.incarnation):
            return  # a repeated or outdated command
        if previous is not None and not previous.gone.is_set():
            previous.kill()
        worker = Worker(command, self._deliver)
        slot.append(worker)
        if self._resume and self._is_member(worker):
            worker.send(frame(self._resume))
        task = self._loop.create_task(self._bring_up(worker, previous))
        self._starts.add(task)
        task.add_done_callback(self._starts.discard)

    async def _bring_up(self, worker: Worker, previous: Worker | None) -> None:
        outputs: Outputs | None = None
        command = msgspec.structs.replace(worker.command, rank=first_rank(worker.command))
        try:
            if previous is not None:
                await previous.gone.wait()
                self._forget_old(self._slots[_index_of(command.slot)])
            master = await self._stores.master_soon(command.store, command.generation)
            if worker.doomed:
                self._never_born(worker, "")
                return
            index = _index_of(command.slot)
            outputs = self._logs.open(index, command.rank, command.restarts)
            environment = worker_environment(self._config, command, master, outputs.error_file)
            place = self._devices.binding(index)
            boot = Boot(
                slot=command.slot,
                incarnation=command.incarnation,
                spare=command.spare,
                rank=command.rank,
                local_rank=index,
                world_size=command.world_size,
                generation=command.generation,
                env=environment,
                exchange=command.store,
                restarts=command.restarts,
                cpus=place.cpus,
                numa=place.numa,
                advertise=self._config.advertise,
                token=self._config.token,
            )
            self._server.ask(boot, (*worker.fds_for_birth, outputs.stdout, outputs.stderr))
            worker.asked = True
        except asyncio.CancelledError:
            self._never_born(worker, "")
            raise
        except (StoreUnreachable, OSError) as error:
            self._never_born(worker, str(error))
        finally:
            worker.sent_off()
            if outputs is not None:
                outputs.close()

    def _never_born(self, worker: Worker, because: str) -> None:
        failure = None
        if because:
            _say(f"{worker.slot} cannot start: {because}")
            failure = Failure(type="rackrun.StartFailed", message=because, traceback="", where="rackrun.agent")
        self._report(worker, None, None if because else int(signal.SIGKILL), failure)
        worker.buried()

    def _forget_old(self, slot: deque[Worker]) -> None:
        """Drop exited workers of a slot that need not be kept. ``slot[-1]`` is the present worker."""
        before = [worker for worker in list(slot)[:-1] if worker.gone.is_set()]
        left = [worker for worker in before if worker.page.snapshots()]
        kept = left[-_LEFT_IN_SLOT_MAX:]
        for worker in before:
            if worker not in kept:
                slot.remove(worker)
                worker.forget()

    # -- what the fork server and the kernel tell
    def _server_spoke(self) -> None:
        told = self._server.answer()
        if told is None:
            self._server_lost()
            return
        answer, pidfd = told
        worker = next((worker for worker in self._current() if worker.incarnation == answer.incarnation), None)
        if worker is None:
            if pidfd >= 0:
                os.close(pidfd)
            return
        match answer:
            case Forked(pid=0):
                self._never_born(worker, answer.error)
            case Forked():
                worker.born(answer.pid, pidfd, self.look)
                self.worker_is_new()
            case Reaped():
                self._reaped(worker, answer.status)

    def _child_ended(self) -> None:
        """Reap children: the fork server, and processes adopted from one that died."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._server.pid:
                self._server_reaped.set()
            self._devices.reaped(pid, status)
            self._fillers.reaped(pid, status, usage.ru_utime + usage.ru_stime)
            for worker in self._current():
                if worker.pid == pid:
                    self._reaped(worker, status)

    def _server_lost(self) -> None:
        """Handle the death of the fork server, whose workers die with it. This process has threads and cannot fork
        another, so it starts a new interpreter."""
        self._loop.remove_reader(self._server.fileno())
        self._server.close()
        proc.kill_tree(os.getpid(), self._devices.pids)
        for worker in self._current():
            if worker.asked and not worker.pid:
                self._never_born(worker, "the fork server died")
        if self._stopping:
            self._server_reaped.set()
            return
        self._server_reaped.clear()
        _say("the fork server died, and its workers with it; another one is started")
        self._server = ForkServer.spawn(self._config.script)
        self._loop.add_reader(self._server.fileno(), self._server_spoke)

    # -- ends
    def _ended(self, worker: Worker, status: int) -> None:
        worker.channel.drain()  # its last messages come before its exit, and may explain it
        if not worker.reported:
            self._report(worker, *proc.exit_code_and_signal(status), None)

    def _reaped(self, worker: Worker, status: int) -> None:
        self._ended(worker, status)
        worker.buried()

    def _report(self, worker: Worker, exit_code: int | None, signal_: int | None, failure: Failure | None) -> None:
        worker.reported = True
        self._fillers.clear(worker.slot, "the spare is gone")
        if (sealed := worker.untold()) is not None:
            self.uplink.forward(Urgency.SOON, encode(sealed))
        self.uplink.event(
            WorkerExited(
                slot=worker.slot,
                incarnation=worker.incarnation,
                exit_code=exit_code,
                signal=signal_,
                failure=failure,
                early=worker.page.early,
                step=worker.step(),
                snapshots=worker.snapshots(),
            )
        )

    # -- messages
    def _deliver(self, worker: Worker, body: bytes) -> None:
        try:
            message: Upward = decode_upward(body)
        except msgspec.MsgspecError as error:
            _say(f"{worker.slot} sent what is no message, and is killed: {error}")
            worker.kill()
            return
        match message:
            case UnitCommitted():
                worker.told = message.generation, message.at
                self.uplink.forward(Urgency.SOON, body)
            case StateCopied():
                self.uplink.forward(Urgency.SOON, body)
            case Logged():
                self.uplink.forward(Urgency.MAYBE, body)
            case UnitSealed():
                pass  # the agent reports this itself
            case WorkerExited():
                if not worker.reported:  # the script is over; exit handlers may take a while, but not for ever
                    self._report(worker, message.exit_code, message.signal, message.failure)
                    self._loop.call_later(self._config.grace_s, self._end_of_grace, worker)
            case _ if isinstance(message, WorkerEvent) and not worker.reported:
                self.uplink.forward(Urgency.NOW, body)
                if isinstance(message, WorkerReady) and worker.command.spare and not self._is_member(worker):
                    self._fillers.spare_waits(worker.slot, worker.incarnation)
            case _:
                pass  # too late: its exit has been reported

    def _end_of_grace(self, worker: Worker) -> None:
        if not worker.gone.is_set():
            worker.kill()

    def _pass_on(self, command: c.WorkerCommand, to: list[tuple[SlotId, int]]) -> None:
        data = frame(command)
        for slot, incarnation in to:
            if tray_of(slot) == self._config.tray and (worker := self._find(slot, incarnation)):
                # Whatever the message is, the worker's wait is over.
                gone = self._fillers.clear(slot, "the spare is needed", hold=True)
                worker.send(data, after=gone if self._fillers.in_the_way else None)
                if isinstance(command, c.BreakGeneration):
                    worker.called(command.generation, with_plan=False)
                elif isinstance(command, c.ResumeGeneration):
                    worker.called(command.plan.generation, with_plan=True)

    # -- who is here
    def _is_member(self, worker: Worker) -> bool:
        """Return whether a worker is a member of the latest generation."""
        members = self._resume.plan.members if self._resume else ()
        return any((member.slot, member.incarnation) == (worker.slot, worker.incarnation) for member in members)

    def _find(self, slot: SlotId, incarnation: int) -> Worker | None:
        worker = self.kept(_index_of(slot), incarnation)
        return None if worker is None or worker.gone.is_set() else worker

    def _current(self) -> list[Worker]:
        return [worker for slot in self._slots for worker in slot if not worker.gone.is_set()]


def _index_of(slot: SlotId) -> int:
    return int(slot.rpartition("/")[2])


def _say(text: str) -> None:
    print(f"rackrun: agent: {text}", file=sys.stderr)
