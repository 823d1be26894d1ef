"""Monitor of a tray's GPUs: NVML in a child process, and the kernel's log.

If there is no NVML library, or workers see no GPU, nothing is started. If NVML reports that it cannot serve, the agent
says so once, and the job goes on without monitoring. If NVML has worked and then stops answering, no slot of the tray
may be used until it answers again, because the health of its GPUs is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import torch

from rackrun.agent.gpus.gpu_verdicts import DeviceEvent, GpuVerdicts
from rackrun.agent.gpus.start_checks import check_start
from rackrun.agent.gpus.tray_description import by_driver, is_of, named_cliques, reconciled
from rackrun.agent.gpus.visible_gpus import visible_gpus
from rackrun.agent.host.numa_binding import NOWHERE, bindings, cores_here
from rackrun.protocol.agent_config import AgentConfig
from rackrun.protocol.events import DeviceJudged, TrayDescribed
from rackrun.topology.gpu_driver.kernel_log import KernelLog
from rackrun.topology.gpu_driver.nvml_watch import START_MS, NvmlWatch
from rackrun.topology.gpu_driver.readings import NvmlUnavailable, TrayReading
from rackrun.topology.health.ignored_checks import ignored_by
from rackrun.topology.health.tray_health import Said
from rackrun.topology.model.errors import SourcesDisagree, TopologyError
from rackrun.topology.placement.rank_environment import Binding
from rackrun.topology.sources.partial_topology import PartialTopology, merge

__all__ = ["GpuMonitor", "GpuMonitorTimes"]

_LIBRARY = "libnvidia-ml.so.1"


class GpuMonitorTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the monitor."""

    period_ms: int = 200
    """Milliseconds between readings. What NVML does not report as an event is seen after at most this time plus that of
    a reading."""
    patience_ms: int = 5_000
    start_ms: int = START_MS
    pause_s: tuple[float, float] = (1.0, 60.0)
    """Seconds before NVML is tried again: at first and at most. Each pause is twice as long as the one before."""


class GpuMonitor:
    """The monitor, on the running loop. Call `joined` first, then `report_to`, and `close` at the end.

    ``env``: variables for NVML's process, in addition to this process's. ``kernel_log``: path of the log; "": none.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        pace: GpuMonitorTimes | None = None,
        env: Mapping[str, str] | None = None,
        kernel_log: str = "/dev/kmsg",
    ) -> None:
        self._config = config
        self._pace = pace or GpuMonitorTimes()
        self._env = {**(env or {}), "RACKRUN_TRAY": config.tray}
        self._environment = {**os.environ, **config.env, **(env or {})}
        self._kernel_log = kernel_log
        self._loop = asyncio.get_running_loop()
        self._files: list[PartialTopology] = (
            msgspec.json.decode(config.topology, type=list[PartialTopology]) if config.topology else []
        )
        self.partials = list(self._files)
        """All that is known of this tray."""
        self.contradiction = ""
        """Why this cannot be one tray: two sources disagree. "": they agree."""
        self.refusal = ""
        """Why no worker can compute here (`rackrun.agent.gpus.start_checks`); "": workers can."""
        self._bindings: dict[int, Binding] = {}
        self._judge = GpuVerdicts(config.tray, config.slots, named_cliques(self._files), ignored_by(self._environment))
        self._watch: NvmlWatch | None = None
        self._log: KernelLog | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = self._pace.pause_s[0]
        self._silent = False
        self._heard_first = asyncio.Event()
        self._early: list[DeviceEvent] = []
        """Events from before `report_to` was called."""
        self._tell: Callable[[DeviceEvent], None] = self._early.append
        self._has_joined = False
        self._closing: set[asyncio.Future[None]] = set()
        described = bool(self._files) or not config.simulated
        visible = self._environment.get("CUDA_VISIBLE_DEVICES", "all").strip() != ""
        if described and visible and _library_here(self._environment):
            self._open()
        else:
            self._go_unwatched()

    # -- for the agent
    async def joined(self) -> dict[int, tuple[str, ...]]:
        """Wait for NVML's first answer, at most as long as it may take to start. Return why each unfit slot is
        unfit."""
        await self._heard_first.wait()
        self._has_joined = True
        self._early[:] = [event for event in self._early if isinstance(event, DeviceJudged)]
        return {slot: unfit for slot, unfit in self._judge.unfit.items() if unfit}

    @property
    def unjudged(self) -> str:
        """As `GpuVerdicts.unjudged`."""
        return self._judge.unjudged

    def report_to(self, tell: Callable[[DeviceEvent], None]) -> None:
        """Send events to ``tell`` from now on, beginning with those since `joined`."""
        self._tell = tell
        for event in self._early:
            tell(event)
        self._early.clear()

    def binding(self, index: int) -> Binding:
        """Return the cores and memory to which the worker of a slot should be bound."""
        return self._bindings.get(index, NOWHERE)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the monitor's children."""
        return (self._watch.pid,) if self._watch is not None else ()

    def reaped(self, pid: int, status: int) -> None:
        """Record that a child was reaped by the agent, which reaps all children of this process."""
        if self._watch is not None and self._watch.pid == pid:
            self._watch.reaped(status)

    def stop(self) -> None:
        """Stop monitoring and reporting."""
        self._stop_watching()
        self._stop_log()

    async def close(self) -> None:
        self.stop()
        if self._closing:
            await asyncio.wait(self._closing)

    # -- the watch
    def _open(self) -> None:
        pace = self._pace
        try:
            self._watch = NvmlWatch(
                period_ms=pace.period_ms, patience_ms=pace.patience_ms, start_ms=pace.start_ms, env=self._env
            )
        except OSError as error:
            what = f"the process that reads NVML cannot be started: {error.strerror}."
            self._restart_later(
                NvmlUnavailable(why="failed", what=what, remedy="see the limits of processes and memory.")
            )
            return
        self._loop.add_reader(self._watch.fileno(), self._listen)
        self._poll()

    def _poll(self) -> None:
        """Read NVML's answers regularly, because a silent process causes no event."""
        self._listen()
        if self._watch is not None:
            self._timer = self._loop.call_later(self._pace.period_ms / 1000, self._poll)

    def _listen(self) -> None:
        while (watch := self._watch) is not None and (said := watch.next(0)) is not None:
            if watch.ended is not None:
                self._restart_later(watch.ended)
            elif isinstance(said, NvmlUnavailable) and not self._judge.begun:
                _say(f"the GPUs of {self._config.tray} are not watched: {said}")
                self._go_unwatched()
            elif isinstance(said, TrayReading) and not self._judge.begun and not self._begin(said):
                self._go_unwatched()
            else:
                self._take_in_reading(said)

    def _take_in_reading(self, said: Said) -> None:
        if isinstance(said, NvmlUnavailable):
            self._fall_silent(said)
        elif isinstance(said, TrayReading):
            self._pause_s = self._pace.pause_s[0]
            if self._silent:
                self._silent = False
                _say(f"NVML answers again on {self._config.tray}")
        self._emit(self._judge.handle(int(self._loop.time() * 1000), said))
        self._heard_first.set()

    def _restart_later(self, why: NvmlUnavailable) -> None:
        self._stop_watching()
        self._take_in_reading(why)
        self._timer = self._loop.call_later(self._pause_s, self._open)
        self._pause_s = min(2 * self._pause_s, self._pace.pause_s[1])

    def _fall_silent(self, why: NvmlUnavailable) -> None:
        if not self._silent:
            self._silent = True
            _say(f"the GPUs of {self._config.tray} cannot be watched, and take nobody over until they can: {why}")

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        watch, self._watch = self._watch, None
        if watch is not None:
            self._loop.remove_reader(watch.fileno())
            # A child that the kernel holds is waited for, for a second; not on the loop.
            closing = self._loop.run_in_executor(None, watch.close)
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    # -- the kernel's log: what it adds is worth having, and never needed
    def _open_log(self) -> None:
        log = KernelLog.open(self._kernel_log) if self._kernel_log else None
        if isinstance(log, KernelLog):
            self._log = log
            self._loop.add_reader(log.fileno(), self._read_log)

    def _read_log(self) -> None:
        assert self._log is not None
        try:
            found = self._log.read()
        except OSError:
            self._stop_log()
            return
        for xid in found:
            self._take_in_reading(xid)

    def _stop_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            self._loop.remove_reader(log.fileno())
            log.close()

    # -- what is known
    def _begin(self, reading: TrayReading) -> bool:
        """Handle the first reading. Return False if it is of other GPUs than this tray's."""
        config = self._config
        if config.simulated and not is_of(reading, self._files):
            return False
        visible = visible_gpus(reading, self._environment, config.slots)
        start = check_start(
            reading,
            visible,
            slots=config.slots,
            cuda=torch.version.cuda,
            filler=bool(config.filler.command),
            environment=self._environment,
        )
        if not self._has_joined:  # later, workers have noticed it themselves
            self.refusal = start.refusal
        for note in (visible.note, *start.notes):
            if note:
                _say(f"{config.tray}: {note}")
        if not visible.gpus:
            return False
        self.partials = reconciled(self._files, by_driver(reading, config.tray, visible.gpus))
        self._judge.begin(visible.gpus)
        self._understand()
        if self._has_joined:
            self._emit([TrayDescribed(tray=config.tray, topology=msgspec.json.encode(self.partials))])
        self._open_log()
        return True

    def _go_unwatched(self) -> None:
        self._stop_watching()
        self._emit(self._judge.unwatched())
        self._understand()
        self._heard_first.set()

    def _understand(self) -> None:
        """Merge the sources, to find contradictions within this tray and the binding of its workers."""
        wanted = self._environment.get("RACKRUN_BIND", "1") != "0" and not self._config.simulated
        try:
            topology = merge(self.partials)
            if wanted:
                self._bindings = bindings(topology, self._config.tray, cores_here(), os.sched_getaffinity(0))
        except SourcesDisagree as error:
            self.contradiction = str(error)
        except TopologyError:
            self._bindings = {}  # no GPU is known by name

    def _emit(self, events: Iterable[DeviceEvent]) -> None:
        for event in events:
            self._tell(event)


def _library_here(environment: Mapping[str, str]) -> bool:
    """Return whether a process started now would find NVML. Its loader reads the present LD_LIBRARY_PATH; this
    process's loader read it at its start."""
    for folder in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if folder and (Path(folder) / _LIBRARY).exists():
            return True
    with contextlib.suppress(OSError):
        ctypes.CDLL(_LIBRARY)
        return True
    return False


def _say(text: str) -> None:
    print(f"rackrun: agent: {text}", file=sys.stderr)
