"""The agent of one tray: parent process of its workers, connected to the coordinator.

`run_agent` forks the fork server first, while the process has one thread and no sockets. Only then are stores, the
event loop and connections created.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import traceback

import msgspec
import torch

from rackrun.agent.fillers.filler_runner import Fillers
from rackrun.agent.gpus.gpu_monitor import GpuMonitor
from rackrun.agent.host import proc
from rackrun.agent.snapshots.mirror import Mirror
from rackrun.agent.snapshots.snapshot_service import SnapshotService
from rackrun.agent.tray.coordinator_lease import LeaseEnd
from rackrun.agent.tray.tray import TrayAgent
from rackrun.agent.tray.tray_facts import Urgency
from rackrun.agent.tray.uplink import Uplink
from rackrun.agent.tray.worker_liveness import LivenessWatch
from rackrun.agent.worker_start.fork_server import ForkServer, preload, unsound_because
from rackrun.agent.worker_start.tcp_stores import TcpStores
from rackrun.agent.worker_start.worker_logs import WorkerLogs
from rackrun.agent.worker_start.worker_main import open_standard_streams
from rackrun.checkpoint.redundancy import isal
from rackrun.link.exchange import ExchangeServer
from rackrun.link.listener import RESERVE
from rackrun.link.process import descriptor_limit
from rackrun.link.process.standard_streams import open_closed_streams, say_what_can_be_said
from rackrun.protocol.agent_config import JOB_IS_OVER, AgentConfig
from rackrun.protocol.events import StopRequested, TrayJoined
from rackrun.protocol.wire import encode

__all__ = ["EXIT_DONE", "EXIT_LOST", "EXIT_REFUSED", "run_agent"]

EXIT_DONE = 0
EXIT_REFUSED = LeaseEnd.REFUSED.value
EXIT_LOST = LeaseEnd.LOST.value
_ORPHAN_S = 30.0
_FLUSH_S = 2.0
_DESCRIPTORS_A_START = 12
"""Descriptors that a starting worker takes: channel, page, snapshots, output, pidfd."""


def run_agent(config: AgentConfig, *, parent: int | None = None, standalone: bool = False) -> int:
    """Serve the coordinator until the job ends. Return the exit code: 0 done, 2 refused, 3 coordinator lost.

    In a forked child, it must be called from the main thread. ``parent`` is the launcher's pid (default: the present
    parent), and the agent dies with it. ``standalone``: the agent is not a launcher's child, and passes Ctrl-C on to
    the coordinator instead of leaving it to the launcher. SIGTERM tells this tray to leave: when its ranks are
    elsewhere, or after ``config.grace_s`` seconds; a second SIGTERM: at once.
    """
    if not standalone:
        proc.die_with(os.getppid() if parent is None else parent)
    open_closed_streams()
    proc.adopt_orphans()
    gc.collect()
    gc.freeze()  # the launcher's objects must not be collected: their descriptors' numbers will be reused here
    proc.close_other_fds(())
    open_standard_streams()
    say_what_can_be_said()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    preload(config.script.preload)
    unsound = unsound_because()
    server = ForkServer.spawn(config.script) if unsound else ForkServer.fork(config.script)
    try:
        return asyncio.run(_Agent(config, standalone=standalone).run(server))
    except Exception:  # noqa: BLE001 - whatever it is, nobody may be left behind
        traceback.print_exc()
        server.close()
        proc.kill_tree(os.getpid())
        return EXIT_LOST
    finally:
        sys.stdout.flush()


class _Agent:
    def __init__(self, config: AgentConfig, *, standalone: bool) -> None:
        self._config = config
        self._standalone = standalone

    async def run(self, server: ForkServer) -> int:
        config = self._config
        loop = asyncio.get_running_loop()
        descriptor_limit.raise_limit()
        leave: asyncio.Future[bool] = loop.create_future()
        """Set when the agent has to leave: to whether the job failed, or its time is up."""
        devices = GpuMonitor(config)
        stores = TcpStores(config.advertise, config.tray, config.token)
        reserve = RESERVE + _DESCRIPTORS_A_START * config.slots
        exchange = ExchangeServer(config.advertise, config.token, reserve=reserve)
        logs = WorkerLogs(config.logs, config.run_id, config.slots, config.env.get("ROLE_NAME", "default"))
        fillers = Fillers(config.filler, config.slots, logs, devices.binding, gpus=torch.cuda.device_count())
        tray = TrayAgent(config, server, stores, logs, devices, fillers)
        snapshots = SnapshotService(config.tray, config.advertise, config.token, tray, reserve=reserve)
        joined = TrayJoined(
            tray=config.tray,
            host=socket.gethostname(),
            slots=config.slots,
            store=await exchange.start(),
            snapshots=await snapshots.start(),
            codec=isal.is_here(),
            unfit=await devices.joined(),
            topology=msgspec.json.encode(devices.partials) if devices.partials else b"",
            unjudged=devices.unjudged,
        )
        tray.uplink = uplink = Uplink(config, joined, tray.obey, _ORPHAN_S)
        devices.report_to(uplink.event)
        fillers.tell = lambda told: uplink.forward(Urgency.SOON, encode(told))
        mirror = Mirror(config.token, tray.destination, uplink.event)
        watch = LivenessWatch(tray, uplink, mirror, config.stall_floor_ms)
        tray.worker_is_new = watch.check_soon
        tray.leave = leave.set_result
        because = f"SIGTERM to the agent of {config.tray}"
        loop.add_signal_handler(signal.SIGTERM, tray.leave_soon, because, 128 + signal.SIGTERM)
        loop.add_signal_handler(JOB_IS_OVER, self._told_that_it_is_over, uplink, tray)
        if self._standalone:
            loop.add_signal_handler(signal.SIGINT, self._interrupted, uplink)
        because = devices.contradiction or devices.refusal
        connection = asyncio.create_task(_refuse(because) if because else uplink.run(), name="uplink")
        try:
            await asyncio.wait((connection, leave), return_when=asyncio.FIRST_COMPLETED)
            code = EXIT_DONE if leave.done() else connection.result().value
            devices.stop()  # before its process is killed with all others
            await tray.stop(failed=not leave.done() or leave.result())
            if not connection.done():
                await uplink.flush(_FLUSH_S)
            return code
        finally:
            watch.close()
            await devices.close()
            await mirror.close()
            connection.cancel()
            await asyncio.wait((connection,))
            await snapshots.close()
            await exchange.close()
            logs.close()
            stores.close()

    def _interrupted(self, uplink: Uplink) -> None:
        because = f"SIGINT to the agent of {self._config.tray}"
        uplink.event(StopRequested(because=because, exit_code=128 + signal.SIGINT))

    def _told_that_it_is_over(self, uplink: Uplink, tray: TrayAgent) -> None:
        """Handle the launcher's signal that the job is over. A connected agent learns from the coordinator how it
        ended; an unconnected one exits."""
        uplink.job_is_over()
        tray.job_is_over(connected=uplink.connected)


async def _refuse(because: str) -> LeaseEnd:
    """Refuse to join, because the tray's topology is contradictory or no worker can compute on it. The job must not be
    built on such a tray."""
    print(f"rackrun: agent: {because}", file=sys.stderr)
    return LeaseEnd.REFUSED
