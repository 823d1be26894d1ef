"""Start a rackrun job under test, observe it, and end it with all that it has started, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import rackrun
from rackrun.chaos.base.job_command import option
from rackrun.chaos.faults.targets import Scene, SlotOccupant
from rackrun.chaos.inprocess.inprocess_faults import FOLDER, POINTS
from rackrun.chaos.inprocess.state_recorder import FREE, STEP_BY_STEP, let_go_on
from rackrun.chaos.testbed.extra_processes import ExtraProcesses
from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack
from rackrun.chaos.testbed.machine.fake_clock import ClockPages
from rackrun.chaos.testbed.machine.leaked_resources import LeakedResources
from rackrun.chaos.testbed.machine.private_filesystem import mount
from rackrun.chaos.testbed.machine.processes import Process, marked
from rackrun.chaos.testbed.machine.undo_log import EndJob, UndoLog, Unmount, Watcher, heal_all
from rackrun.chaos.testbed.network.enter_host import AGENT_HOST, visit
from rackrun.chaos.testbed.network.hosts import HEAD, PORT, Hosts, HostSpread
from rackrun.chaos.testbed.network.proxy_control import Links
from rackrun.ctl.coordinator_client import ask
from rackrun.errors import UsageError

__all__ = ["JobResult", "JobUnderTest", "JobObservation", "checkpoints_in"]

MARK = "RACKRUN_CHAOS_JOB"
SETTLE_S = 20.0
"""Seconds for the kernel to tear down processes that have died."""
_ASK_S = 0.5
_GONE = ("fenced", "exited", "lost")
_PAGE = "/memfd:rackrun-page-"


@dataclass(frozen=True, slots=True)
class JobObservation:
    """What can be seen of the job at one moment."""

    step: int
    """The newest committed step; -1 if there is none."""
    scene: Scene


@dataclass(frozen=True, slots=True)
class JobResult:
    """How the job ended."""

    exit_code: int | None
    """The exit code as `subprocess` gives it; None if the job did not end by its deadline and was killed."""
    seconds: float
    left: tuple[str, ...]
    """Processes that were still alive some time after the exit, files that `LeakedResources` found, and network namespaces.

    All of them are gone by now.
    """


class JobUnderTest:
    """A job under test, whose ``--out-dir`` is ``folder/run``.

    Use it as a context manager: at its end no process of the job is alive, even if this process is killed.

    ``arguments``: rackrun's own options, the script, its arguments. ``points``: the crash points whose visits are
    counted. ``driver``: the fake driver of its GPUs. ``own_disk``: its checkpoints lie on a file system of their own
    (`rackrun.chaos.testbed.machine.private_filesystem`). ``own_clocks``: its processes have wall clocks that can be
    moved. ``spread``: its trays are on hosts of their own (`rackrun.chaos.testbed.network.hosts`); None: all trays are
    on this machine. ``step_by_step``: each step waits for `let_go_on` (`rackrun.chaos.inprocess.state_recorder`).
    """

    def __init__(  # noqa: PLR0913 - all but two have a default
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        points: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        driver: FakeRack | None = None,
        own_disk: bool = False,
        own_clocks: bool = False,
        spread: HostSpread | None = None,
        step_by_step: bool = False,
    ) -> None:
        self.folder, self.run, self.inside = folder, folder / "run", folder / "inside"
        self.driver = driver
        self.undo = UndoLog(folder / "undo")
        self.hosts: Hosts | None = None
        self.links: Links | None = None
        self._watcher = Watcher(self.undo.folder)  # before there is anything to undo
        try:
            self._prepare(arguments, spread, own_disk=own_disk, own_clocks=own_clocks)
        except BaseException:
            self._watcher.close()  # which undoes what was made
            raise
        for name in ("orders", "done", "points", "held", "agents", "witness"):
            (self.inside / name).mkdir(parents=True)
        self._step_by_step, self._may_begin = step_by_step, 0
        if step_by_step:
            let_go_on(self.inside, 0)
        name, _, value = self._mark.partition("=")
        root = str(Path(rackrun.__file__).resolve().parents[1])
        full_env = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
            **self._remains.env,
            **(env or {}),
            **(self.clocks.env if self.clocks is not None else {}),
            FOLDER: str(self.inside),
            POINTS: ",".join(points),
            STEP_BY_STEP: "1" if step_by_step else "",
            name: value,
        }
        python = [*self._remains.before, sys.executable, "-m"]
        self.beside = ExtraProcesses(
            folder, python, ["--out-dir", str(self.run), *arguments], full_env, self.inside / "agents"
        )
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.started_s = time.monotonic()
        try:
            if self.hosts is not None and spread is not None and spread.links:
                self.links = Links(self.hosts, full_env)
            for host, program, more in self._parts(arguments):
                self._launchers[host] = self._launch(host, program, full_env | more)
        except BaseException:
            self.close()
            raise
        self.process = self._launchers[HEAD]
        """The launcher with the coordinator."""

    def _prepare(
        self, arguments: Sequence[str], spread: HostSpread | None, *, own_disk: bool, own_clocks: bool
    ) -> None:
        """Prepare what has to exist before the job's first process. Raises `UsageError` and OSError."""
        folder = self.folder
        self._remains = LeakedResources(folder, arguments, self.undo)
        self.checkpoints = checkpoints_in(arguments)
        self.clocks = ClockPages(folder / "clocks") if own_clocks else None
        if own_disk and self.checkpoints is not None:
            self.undo.record(Unmount(str(self.checkpoints)))
            mount(self.checkpoints)
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        if spread is not None:
            self.hosts = Hosts(folder / "hosts", [f"tray-{index:02}" for index in range(spread.trays)], self.undo)
        self.undo.record(EndJob(self._mark, str(self._remains.shared or "")))  # undone before the hosts are

    def _parts(self, arguments: Sequence[str]) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Yield for each launcher its host, the words that Python runs, and its additional environment."""
        if self.hosts is None:
            yield HEAD, self._program(arguments), {}
            return
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        first, *others = self.hosts.trays
        there = f"{self.hosts[HEAD].address}:{PORT}"
        shared = ["--nnodes", str(1 + len(others)), "--rdzv-endpoint", there, "--rdzv-id", "chaos"]
        shared += ["--token-file", str(token)]
        local = ["--node-rank", "0", "--local-addr", self.hosts[first].address]
        agent = {AGENT_HOST: msgspec.json.encode(self.hosts[first]).decode()}
        yield HEAD, self._program([*shared, *local, *arguments]), agent
        for index, tray in enumerate(others, 1):
            yield tray, ["-m", "rackrun", *shared, "--node-rank", str(index), *arguments], {}

    def _launch(self, host: str, program: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        words, of = [sys.executable, *program], "" if host == HEAD else f"-{host}"
        if self.hosts is not None:
            words = self.hosts.command(host, words, sys.executable)
        with (self.folder / f"stdout{of}.txt").open("wb") as out, (self.folder / f"stderr{of}.txt").open("wb") as err:
            process = subprocess.Popen(
                [*self._remains.before, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
            )
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # faults on purpose need no core dumps
        return process

    def _program(self, arguments: Sequence[str]) -> list[str]:
        return ["-m", "rackrun", "--out-dir", str(self.run), *arguments]

    def __enter__(self) -> JobUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what can be seen
    @property
    def now_s(self) -> float:
        """Seconds since the job was started."""
        return time.monotonic() - self.started_s

    def sight(self) -> JobObservation | None:
        """Return what can be seen of the job; None if its coordinator does not answer, or not yet."""
        own = contextlib.nullcontext() if self.hosts is None else visit(self.hosts.space(HEAD))
        try:
            with own:
                status: dict[str, Any] = json.loads(ask(self.run, "/api/status", timeout_s=_ASK_S))
        except (UsageError, ValueError):
            return None
        core = status["core"]
        trays = {tray["tray"]: tray for tray in core["trays"]}
        there = [one for one in core["ranks"] if one["incarnation"] is not None and one["state"] not in _GONE]
        places = [_place(one, one["rank"], trays) for one in there]
        places += [_place(one, None, trays) for one in core["spares"] if one["state"] == "ready"]
        buddies = {name: tray["keepers"][0] for name, tray in trays.items() if tray["keepers"]}
        return JobObservation(int(status["progress"]["position"][0]), Scene(tuple(places), buddies))

    def joined(self) -> set[str]:
        """Return the trays whose agents the coordinator has accepted; empty if it does not answer."""
        try:
            return set(json.loads(ask(self.run, "/api/status", timeout_s=_ASK_S))["trays"])
        except (UsageError, ValueError):
            return set()

    def points(self) -> dict[str, int]:
        """Return how many times each point has been reached."""
        return {path.name: path.stat().st_size for path in (self.inside / "points").iterdir()}

    def let_go_on(self, step: int = FREE) -> None:
        """Let the steps up to ``step`` begin, in a step-by-step run."""
        if self._step_by_step and step != self._may_begin:
            self._may_begin = step
            let_go_on(self.inside, step)

    def processes(self) -> list[Process]:
        """Return all processes of the job that are alive."""
        return marked(self._mark, self._remains.shared)

    def launcher(self) -> Process | None:
        """Return the launcher that hosts the coordinator, or None if it has ended."""
        found = Process.of(self.process.pid) if self.process.poll() is None else None
        return found if found is not None and found.state else None

    def agents(self) -> dict[str, Process]:
        """Return tray -> its agent.

        An agent is recognized by the heartbeat pages of its workers, all of which it maps. An agent that waits for a
        tray to become free has no pages, and is not found.
        """
        above = {process.pid for process in self._launchers.values()}
        return {
            next(iter(slots)).partition("/")[0]: process
            for process, slots in self._pages().items()
            if process.parent in above or process.pid in self.beside.pids
        }

    def workers(self) -> dict[str, Process]:
        """Return slot -> its worker. A worker is a child of its agent's fork server, and maps only its own heartbeat
        page."""
        agents = {process.pid for process in self.agents().values()}
        found = {}
        for process, slots in self._pages().items():
            above = Process.of(process.parent)
            if len(slots) == 1 and process.pid not in agents and above is not None and above.parent in agents:
                found[next(iter(slots))] = process
        return found

    def tray(self, name: str) -> list[Process]:
        """Return all processes of a tray, the agent first; empty if it has no agent."""
        agent = self.agents().get(name)
        if agent is None:
            return []
        found, below = [agent], {agent.pid}
        rest = self.processes()
        while more := [process for process in rest if process.parent in below and process.pid not in below]:
            found += more
            below |= {process.pid for process in more}
        return found

    def _pages(self) -> dict[Process, set[str]]:
        """Return each process of the job that maps heartbeat pages, with the slots of these pages."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
                slots = {line.partition(_PAGE)[2].split(" ")[0] for line in text.splitlines() if _PAGE in line}
                if slots:
                    found[process] = slots
        return found

    # -- its end
    @property
    def over(self) -> bool:
        """Whether the job's launchers have ended, on all hosts; those that are cut off take time to notice."""
        return all(process.poll() is not None for process in self._launchers.values())

    def finish(self, timeout_s: float) -> JobResult:
        """Wait for the job's end, at most ``timeout_s`` seconds, then end all of its processes."""
        limit_s = self.now_s + timeout_s
        exit_code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = self.process.wait(max(0.0, timeout_s))
            for process in self._launchers.values():  # launchers on other hosts may take time to notice
                process.wait(max(0.0, limit_s - self.now_s))
        seconds, left = self.now_s, []
        deadline = time.monotonic() + SETTLE_S
        if self.links is not None:
            self.links.close()  # the proxy is no process of the job's
        while exit_code is not None and (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        told: tuple[str, ...] = ()
        if exit_code is not None:
            told = (*(f"process {process.pid}: {_command(process.pid)}" for process in left), *self._remains.found())
        self.close()
        return JobResult(exit_code, seconds, told + (self.hosts.left() if self.hosts is not None else ()))

    def close(self) -> None:
        """Undo the faults in force, and end every process of the job."""
        try:
            heal_all(self.undo.folder)
        finally:
            for process in self._launchers.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SETTLE_S)
            if self.links is not None:
                self.links.close()
            self.beside.close()
            self._watcher.close()

    def stop(self) -> None:
        """End the job as Ctrl-C does."""
        if not self.over:
            self.process.send_signal(signal.SIGTERM)


def checkpoints_in(arguments: Sequence[str]) -> Path | None:
    """Return the value of ``--checkpoint-dir`` among rackrun's own options, or None."""
    value = option(arguments, "--checkpoint-dir")
    return Path(value).absolute() if value else None


def _place(one: Mapping[str, Any], rank: int | None, trays: Mapping[str, Mapping[str, Any]]) -> SlotOccupant:
    """Build the place of one worker. Where racks and NVLink cliques are unknown, a host counts as one."""
    name = one["slot"].partition("/")[0]
    tray = trays.get(name, {})
    host = tray.get("host", "")
    return SlotOccupant(
        one["slot"], name, tray.get("clique") or host, tray.get("rack") or host, rank, int(one["incarnation"])
    )


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "(gone)"
