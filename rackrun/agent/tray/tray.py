"""The workers of one tray: their starts and exits, and the messages between them and the coordinator.

What is decided here, `rackrun.agent.tray.tray_machine` decides. This module tells it what has happened, and carries out
what it answers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import assert_never

import msgspec

from rackrun.agent.fillers.filler_runner import Fillers
from rackrun.agent.gpus.gpu_monitor import GpuMonitor
from rackrun.agent.host import proc
from rackrun.agent.snapshots.mirror import CopyHolder
from rackrun.agent.snapshots.snapshot_parity import RankParitySet
from rackrun.agent.tray import tray_facts as t
from rackrun.agent.tray.tray_machine import TrayMachine
from rackrun.agent.tray.uplink import Uplink
from rackrun.agent.worker_start.fork_server import Forked, ForkServer, Reaped
from rackrun.agent.worker_start.tcp_stores import StoreUnreachable, TcpStores
from rackrun.agent.worker_start.torchrun_environment import worker_environment
from rackrun.agent.worker_start.worker_logs import WorkerLogs, WorkerStreams
from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.link.channel import frame
from rackrun.protocol import commands as c
from rackrun.protocol.agent_config import AgentConfig
from rackrun.protocol.boot import Boot, first_rank
from rackrun.protocol.events import WorkerExited
from rackrun.protocol.ids import Incarnation, SlotId, TrayId, slot_id
from rackrun.protocol.wire import UnitCommitted, Upward, decode_upward, encode

__all__ = ["TrayAgent"]

_SERVER_S = 10.0
"""Longest wait for the fork server to end."""


class TrayAgent:
    """Carries out what the tray's machine decides: starts, signals, reports and messages."""

    def __init__(
        self,
        config: AgentConfig,
        server: ForkServer,
        stores: TcpStores,
        logs: WorkerLogs,
        devices: GpuMonitor,
        fillers: Fillers,
    ) -> None:
        self._config = config
        self._fillers = fillers
        fillers.others = lambda: (self._server.pid, *devices.pids)
        self._devices = devices
        self._server = server
        self._stores = stores
        self._logs = logs
        self._machine = TrayMachine(config.tray, config.grace_s)
        self._workers: dict[c.Worker, WorkerHandle] = {}
        """All workers that were started and not forgotten. Those that are gone have left snapshots, or their slot has
        not been used again."""
        self._loop = asyncio.get_running_loop()
        self._starts: dict[c.Worker, asyncio.Task[None]] = {}
        """Starts for which a store is being found."""
        self._empty = asyncio.Event()
        self._server_reaped = asyncio.Event()
        self.uplink: Uplink  # the agent sets these three before any event
        self.worker_is_new: Callable[[], None]
        self.leave: Callable[[bool], None]
        self._loop.add_reader(server.fileno(), self._server_spoke)
        self._loop.add_signal_handler(signal.SIGCHLD, self._child_ended)

    # -- for the watch and the snapshot service
    def living(self) -> list[WorkerHandle]:
        """Return the current workers that have a process and no reported exit."""
        return [worker for worker in self._current() if worker.pid and not worker.reported]

    def kept(self, index: int, incarnation: int) -> WorkerHandle | None:
        """Return one start of a worker, ended or not; None if it was forgotten."""
        return self._workers.get(c.Worker(slot_id(self._config.tray, index), Incarnation(incarnation)))

    def check_end(self, worker: WorkerHandle) -> None:
        """Report a worker's end if it can be seen."""
        status = worker.ending()
        if status is not None:
            worker.channel.drain()  # its last messages come before its exit, and may explain it
            self._handle(t.EndSeen(worker.id, *proc.exit_code_and_signal(status)))

    def destination(self, worker: WorkerHandle) -> CopyHolder | RankParitySet | None:
        """Return where a worker's snapshots are copied to, according to the latest plan; None: nowhere."""
        if self._machine.resume is None:
            return None
        plan = self._machine.resume.plan
        if holder := plan.mirrors.get(TrayId(self._config.tray)):
            address, _, tray = holder.partition("/")
            return CopyHolder(plan.generation, tray, address)
        ranks = [m.rank for m in plan.members if (m.slot, m.incarnation) == (worker.slot, worker.incarnation)]
        sets = (of for of in plan.sets if any(keeper.rank in ranks for keeper in of))
        return next((RankParitySet(plan.generation, ranks[0], of, plan.parity) for of in sets), None)

    # -- facts and effects
    def obey(self, command: c.WorkerCommand) -> None:
        """Carry out a command. Raises OSError if this host cannot."""
        self._handle(t.CommandArrived(command))

    def leave_soon(self, because: str, exit_code: int) -> None:
        """Announce that the tray leaves; at the second call, leave."""
        self._handle(t.LeaveAsked(because, exit_code))

    def job_is_over(self, *, connected: bool) -> None:
        """Handle the end of the job. ``connected``: the coordinator will say how it ended."""
        self._handle(t.JobOver(connected))

    def stood_still(self, for_ms: int, *, workers_ran: bool | None) -> None:
        """Report that the agent did not run for ``for_ms`` milliseconds."""
        self._handle(t.StoodStill(for_ms, workers_ran))

    def _handle(self, fact: t.TrayFact, body: bytes = b"") -> None:
        """Tell the machine a fact, and carry out what it answers. ``body``: the message that a worker said."""
        for effect in self._machine.handle(fact, self._loop.time()):
            self._carry_out(effect, body)

    def _carry_out(self, effect: t.TrayEffect, body: bytes) -> None:
        match effect:
            case t.PassOn():
                self._pass_on(effect)
            case t.Forward():
                self.uplink.forward(effect.urgency, body)
            case t.SendEvent():
                self.uplink.event(effect.event)
            case t.SpareWaits():
                self._fillers.spare_waits(effect.worker.slot, effect.worker.incarnation)
            case t.SpareLeaves():
                self._fillers.clear(effect.worker.slot, effect.because)
            case t.SetDeadline():
                self._loop.call_at(effect.at_s, self._handle, t.DeadlinePassed(effect.deadline))
            case t.PrintLine():
                _say(effect.text)
            case t.Leave():
                self.leave(effect.failed)
            case t.Emptied():
                self._empty.set()
            case _:
                self._carry_out_on_process(effect)

    def _carry_out_on_process(self, effect: t.ProcessEffect) -> None:
        match effect:
            case t.AdmitWorker():
                self._start(effect)
            case t.FindStore():
                if worker := self._workers.get(_id_of(effect.command)):  # else this host could not hold it
                    self._starts[worker.id] = self._loop.create_task(self._bring_up(worker))
            case t.ForkWorker():
                self._ask_for(self._workers[_id_of(effect.command)])
            case t.KillWorker():
                if effect.worker in self._workers:  # none is left after `stop`
                    self._workers[effect.worker].kill()
            case t.TerminateWorker():
                if effect.worker in self._workers:
                    self._workers[effect.worker].terminate()
            case t.ReportExit():
                self._report(effect)
            case t.BuryWorker():
                self._close_process(effect.worker)
            case t.ForgetWorker():
                if worker := self._workers.pop(effect.worker, None):
                    worker.close_memory()
            case _:
                assert_never(effect)

    async def stop(self, *, failed: bool) -> None:
        """End every worker and all processes that they left."""
        self._server.wake()
        self._handle(t.StopBegun(failed))
        clearing = self._loop.create_task(self._fillers.stop())
        await self._empty.wait()
        await clearing
        self._loop.remove_reader(self._server.fileno())
        self._server.close()
        try:
            await asyncio.wait_for(self._server_reaped.wait(), _SERVER_S)
        except TimeoutError:
            _say("the fork server does not end; killed")
        self._loop.remove_signal_handler(signal.SIGCHLD)
        proc.kill_tree(os.getpid())
        for worker in self._workers.values():
            worker.close_memory()
        self._workers.clear()

    # -- starts
    def _start(self, admit: t.AdmitWorker) -> None:
        worker_id = _id_of(admit.command)
        try:
            worker = self._workers[worker_id] = WorkerHandle(admit.command, self._deliver)
        except OSError as error:
            self._handle(t.WorkerStartFailed(worker_id, str(error)))
            return
        if admit.plan is not None:
            worker.send(frame(admit.plan))

    async def _bring_up(self, worker: WorkerHandle) -> None:
        because = ""
        try:
            worker.master = await self._stores.master_soon(worker.command.store, worker.command.generation)
        except (StoreUnreachable, OSError) as error:
            because = str(error)
        self._starts.pop(worker.id)
        self._handle(t.WorkerStartFailed(worker.id, because) if because else t.StoreFound(worker.id))

    def _ask_for(self, worker: WorkerHandle) -> None:
        """Ask the fork server for a worker's process."""
        outputs: WorkerStreams | None = None
        command = msgspec.structs.replace(worker.command, rank=first_rank(worker.command))
        try:
            index = _index_of(command.slot)
            outputs = self._logs.open(index, command.rank, command.restarts)
            environment = worker_environment(self._config, command, worker.master, outputs.error_file)
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
        except OSError as error:
            self._handle(t.WorkerStartFailed(worker.id, str(error)))
        finally:
            worker.sent_off()
            if outputs is not None:
                outputs.close()

    # -- what the fork server and the kernel tell
    def _server_spoke(self) -> None:
        told = self._server.answer()
        if told is None:
            self._server_lost()
            return
        answer, pidfd = told
        worker = next((worker for worker in self._current() if worker.id == answer.worker), None)
        if worker is None:
            if pidfd >= 0:
                os.close(pidfd)
            return
        match answer:
            case Forked(pid=0):
                self._handle(t.WorkerStartFailed(worker.id, answer.error))
            case Forked():
                self._handle(t.WorkerBorn(worker.id))
                worker.born(answer.pid, pidfd, self.check_end)
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
        self._handle(t.ForkServerDied())
        if self._machine.stopping:
            self._server_reaped.set()
            return
        self._server_reaped.clear()
        _say("the fork server died, and its workers with it; another one is started")
        self._server = ForkServer.spawn(self._config.script)
        self._loop.add_reader(self._server.fileno(), self._server_spoke)

    # -- ends
    def _reaped(self, worker: WorkerHandle, status: int) -> None:
        worker.channel.drain()
        self._handle(
            t.ProcessReaped(worker.id, *proc.exit_code_and_signal(status), keeps=bool(worker.page.snapshots()))
        )

    def _report(self, ended: t.ReportExit) -> None:
        worker = self._workers.get(ended.worker)
        if worker is None:  # this host could not hold it, because it has no descriptor left, say
            at = ended.worker
            self.uplink.event(WorkerExited(slot=at.slot, incarnation=at.incarnation, failure=ended.failure))
            return
        worker.reported = True
        if (sealed := worker.unreported_unit()) is not None:
            self.uplink.forward(t.Urgency.SOON, encode(sealed))
        self.uplink.event(
            WorkerExited(
                slot=worker.slot,
                incarnation=worker.incarnation,
                exit_code=ended.exit_code,
                signal=ended.signal,
                failure=ended.failure,
                early=worker.page.early,
                step=worker.step(),
                snapshots=worker.snapshots(),
            )
        )

    def _close_process(self, worker_id: c.Worker) -> None:
        if start := self._starts.pop(worker_id, None):
            start.cancel()
        if worker := self._workers.get(worker_id):
            worker.buried()

    # -- messages
    def _deliver(self, worker: WorkerHandle, body: bytes) -> None:
        try:
            message: Upward = decode_upward(body)
        except msgspec.MsgspecError as error:
            self._handle(t.WorkerGarbled(worker.id, str(error)))
            return
        if isinstance(message, UnitCommitted):
            worker.reported_unit = message.generation, message.at
        self._handle(t.WorkerSaid(worker.id, message), body)

    def _pass_on(self, effect: t.PassOn) -> None:
        data, command = frame(effect.command), effect.command
        for worker in map(self._workers.__getitem__, effect.workers):
            # Whatever the message is, the worker's wait is over.
            gone = self._fillers.clear(worker.slot, "the spare is needed", hold=True)
            worker.send(data, after=gone if self._fillers.in_the_way else None)
            if isinstance(command, c.BreakGeneration):
                worker.called(command.generation, with_plan=False)
            elif isinstance(command, c.ResumeGeneration):
                worker.called(command.plan.generation, with_plan=True)

    def _current(self) -> list[WorkerHandle]:
        return [worker for worker in self._workers.values() if not worker.gone]


def _id_of(command: c.StartWorker) -> c.Worker:
    return c.Worker(command.slot, command.incarnation)


def _index_of(slot: SlotId) -> int:
    return int(slot.rpartition("/")[2])


def _say(text: str) -> None:
    print(f"rackrun: agent: {text}", file=sys.stderr)
