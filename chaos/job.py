"""A rackrun job under test: started, looked at, and ended with all that it has started, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rackrun
from rackrun.chaos.inside import FOLDER, POINTS
from rackrun.chaos.processes import Process, marked
from rackrun.chaos.targets import Place, Scene
from rackrun.chaos.undo import EndJob, UndoLog, Watcher, heal_all
from rackrun.ctl.asking import ask
from rackrun.errors import UsageError

__all__ = ["Ended", "Job", "Sight"]

MARK = "RACKRUN_CHAOS_JOB"
SETTLE_S = 20.0
"""The kernel may still be tearing down what has died."""
_ASK_S = 0.5
_GONE = ("fenced", "exited", "lost")
_PAGE = "/memfd:rackrun-page-"


@dataclass(frozen=True, slots=True)
class Sight:
    step: int
    """The newest committed; -1: none."""
    scene: Scene


@dataclass(frozen=True, slots=True)
class Ended:
    exit_code: int | None
    """As `subprocess` has it; None: it did not end by its deadline, and was killed."""
    seconds: float
    left: tuple[str, ...]
    """Processes that still lived when it had exited, and time had passed; they are dead now."""


class Job:
    """``folder/run`` is its ``--out-dir``. Use it as a context: at its end nothing of the job lives, also when this process is killed.

    ``arguments``: rackrun's own options, the script, its arguments. ``points``: those that are counted.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        points: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.run, self.inside = folder, folder / "run", folder / "inside"
        self.undo = UndoLog(folder / "undo")
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self.undo.record(EndJob(self._mark))
        self._watcher = Watcher(self.undo.folder)
        for name in ("orders", "done", "points", "held"):
            (self.inside / name).mkdir(parents=True)
        name, _, value = self._mark.partition("=")
        root = str(Path(rackrun.__file__).resolve().parents[1])
        full_env = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
            **(env or {}),
            FOLDER: str(self.inside),
            POINTS: ",".join(points),
            name: value,
        }
        self.started_s = time.monotonic()
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rackrun", "--out-dir", str(self.run), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=full_env,
                start_new_session=True,
            )
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.process.pid, resource.RLIMIT_CORE, (0, 0))  # faults on purpose need no core dumps

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what can be seen
    @property
    def now_s(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.started_s

    def sight(self) -> Sight | None:
        """None: its coordinator does not answer, or not yet."""
        try:
            status: dict[str, Any] = json.loads(ask(self.run, "/api/status", timeout_s=_ASK_S))
        except (UsageError, ValueError):
            return None
        core = status["core"]
        hosts = {tray["tray"]: tray["host"] for tray in core["trays"]}
        there = [one for one in core["ranks"] if one["incarnation"] is not None and one["state"] not in _GONE]
        places = [_place(one, one["rank"], hosts) for one in there]
        places += [_place(one, None, hosts) for one in core["spares"] if one["state"] == "ready"]
        return Sight(int(status["progress"]["position"][0]), Scene(tuple(places)))

    def points(self) -> dict[str, int]:
        """How often each was come to."""
        return {path.name: path.stat().st_size for path in (self.inside / "points").iterdir()}

    def processes(self) -> list[Process]:
        """All that live."""
        return marked(self._mark)

    def launcher(self) -> Process | None:
        found = Process.of(self.process.pid) if self.process.poll() is None else None
        return found if found is not None and found.state else None

    def agents(self) -> dict[str, Process]:
        """Tray -> its agent."""
        launcher = self.process.pid
        return {
            next(iter(slots)).partition("/")[0]: process
            for process, slots in self._pages().items()
            if process.parent == launcher
        }

    def workers(self) -> dict[str, Process]:
        """Slot -> its worker. A worker is below its agent's fork server, and maps its own heartbeat page alone."""
        agents = {process.pid for process in self.agents().values()}
        found = {}
        for process, slots in self._pages().items():
            above = Process.of(process.parent)
            if len(slots) == 1 and process.pid not in agents and above is not None and above.parent in agents:
                found[next(iter(slots))] = process
        return found

    def tray(self, name: str) -> list[Process]:
        """All processes of a tray, the agent first."""
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
        return self.process.poll() is not None

    def finish(self, timeout_s: float) -> Ended:
        """Wait for it, at most ``timeout_s``. None of its processes lives afterwards."""
        try:
            exit_code: int | None = self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            exit_code = None
        seconds, left = self.now_s, []
        deadline = time.monotonic() + SETTLE_S
        while exit_code is not None and (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        told = (
            tuple(f"process {process.pid}: {_command(process.pid)}" for process in left)
            if exit_code is not None
            else ()
        )
        self.close()
        return Ended(exit_code, seconds, told)

    def close(self) -> None:
        """Take back what is in force, and end what lives."""
        heal_all(self.undo.folder)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SETTLE_S)
        self._watcher.close()

    def stop(self) -> None:
        """As by Ctrl-C."""
        if not self.over:
            self.process.send_signal(signal.SIGTERM)


def _place(one: Mapping[str, Any], rank: int | None, hosts: Mapping[str, str]) -> Place:
    tray = one["slot"].partition("/")[0]
    host = hosts.get(tray, "")
    return Place(one["slot"], tray, host, host, rank, int(one["incarnation"]))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "(gone)"
