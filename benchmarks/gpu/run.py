"""Runs the checks, each in a process group of its own with a limit of its own, and leaves none of their processes behind.

A line of JSON for each is appended to ``checks.jsonl``, and reaches the disk as soon as the check is over: a machine that dies keeps what
was found. GPU settings are never touched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select as polling
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu import report
from benchmarks.gpu.registry import MODES, Check, Mode, load, select

__all__ = ["MARK", "Runner", "main"]

ROOT = Path(__file__).resolve().parents[2]
MARK = "RACKRUN_KIT"
"""In the environment of every process that a check starts, whatever session that process is in."""
_NOTE_CHARS, _LOG_CHARS = 1500, 60_000
_LEAST_S = 5.0
_END_S = 3.0
"""Checks end their own waits a little before their limit."""
_EXECS_S = 0.2
"""How long an `exec` may take."""
_CORES_FOR_MORE, _CORES_FOR_ONE, _MOST_BESIDE = 8, 4, 4
_NOT_REACHED = 3
_DRY_PATIENCE = 2.0
"""A dry run may have two slow cores, and share them."""


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--mode", choices=(*MODES, "auto"), default="auto", help="auto: dry without a GPU, box with 8 or more"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the lines, the logs and the document")
    parser.add_argument("--only", default="", help="sections and ids, such as A,B,D7")
    parser.add_argument("--xid", action="store_true", help="also G: an illegal access, which leaves an Xid in the log")
    parser.add_argument("--budget-s", type=float, default=570.0, help="for all checks; what is not reached says so")
    parser.add_argument(
        "--beside",
        type=int,
        help="so many checks that judge no time at once (default: one for each 4 cores, 4 at most)",
    )
    parser.add_argument(
        "--from", dest="modules", action="append", default=[], help="checks of this module instead (tests of the kit)"
    )
    options = parser.parse_args(argv)
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        os.path.abspath(path) for path in paths
    )  # checks begin in another folder
    try:
        checks = load(options.modules)
        facts = report.facts()
        mode: Mode = _mode_of(facts) if options.mode == "auto" else options.mode
        if mode != "dry" and not facts["gpus"]:
            parser.error(f"--mode {mode} needs a GPU, and torch sees none: {facts['no_gpu']}")
        if mode == "dry" and options.mode == "auto":
            print(f"a dry run: torch sees no GPU ({facts['no_gpu']})", flush=True)
        chosen = select(checks, mode, options.only)
    except ValueError as error:
        parser.error(str(error))
    cores = len(os.sched_getaffinity(0))
    runner = Runner(
        options.out,
        mode,
        facts,
        options.modules,
        xid=options.xid,
        seconds=options.budget_s - (time.monotonic() - began),
        beside=options.beside or max(min(cores // _CORES_FOR_ONE, _MOST_BESIDE), 1),
    )
    return runner.run(chosen)


def _mode_of(facts: dict[str, Any]) -> Mode:
    count = len(facts["gpus"])
    return "box" if count >= 8 else "one" if count else "dry"


class _Process:
    """A check's. It may be started before its turn comes: until then it only imports."""

    def __init__(
        self, one: Check, mode: Mode, out: Path, shared: Path, modules: Sequence[str], mark: str, *, ahead: bool
    ) -> None:
        self.check, self.mark = one, f"{MARK}={mark}-{one.id}-"
        self.folder = Path(tempfile.mkdtemp(prefix=f"rackrun-kit-{one.id}-"))
        self.log = out / "logs" / f"{one.id}.txt"
        order = {
            "id": one.id,
            "mode": mode,
            "folder": str(self.folder),
            "shared": str(shared),
            "modules": list(modules),
            "parent": os.getpid(),
            "ahead": ahead,
        }
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        marked = {MARK: f"{mark}-{one.id}-", "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.child", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **marked},
                cwd=ROOT,
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._popen.pid)
        self.limit_s = self.began = 0.0

    def begin(self, limit_s: float) -> None:
        assert self._popen.stdin is not None
        self.limit_s, self.began = limit_s, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its status says how
            self._popen.stdin.write(f"{limit_s!r}\n".encode())
            self._popen.stdin.flush()

    @property
    def deadline(self) -> float:
        return self.began + self.limit_s

    def end(self) -> int | None:
        """Its status as of `subprocess.Popen.returncode`. None: it did not end by itself."""
        status = self._popen.poll()
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        os.close(self.pidfd)
        return status

    def forget(self) -> None:
        """Without having begun."""
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)


class Runner:
    """``seconds``: for all checks together; those that would begin later are not reached, and one that has less left than its limit gets that.
    ``beside``: so many checks that judge no time run at the same time."""

    def __init__(
        self,
        out: Path,
        mode: Mode,
        facts: dict[str, Any],
        modules: Sequence[str] = (),
        *,
        xid: bool = False,
        seconds: float = 600.0,
        beside: int = 1,
    ) -> None:
        self._out, self._mode, self._facts, self._modules, self._xid = out, mode, facts, list(modules), xid
        self._began = time.monotonic()
        self._ends = self._began + seconds
        self._beside, self._ahead = beside, len(os.sched_getaffinity(0)) >= _CORES_FOR_MORE
        self._mark = uuid.uuid4().hex
        self._told: list[dict[str, Any]] = []
        self._playing: list[_Process] = []
        self._prepared: _Process | None = None
        self._signal = 0
        self._wake: tuple[int, int] = (-1, -1)
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, checks: Sequence[Check]) -> int:
        """0: all that must be is; 1: it is not; 3: what must be was not reached; 128 + number of the signal that ended it."""
        with self._signals(), (self._out / "checks.jsonl").open("a", encoding="utf-8") as lines:
            shared = Path(tempfile.mkdtemp(prefix="rackrun-kit-"))
            try:
                waiting = deque(checks)
                while (waiting or self._playing) and not self._signal:
                    self._begin(waiting, shared, lines)
                    self._wait()
                    self._tell_ended(lines)
                self._tell_ended(lines)
            finally:
                if self._prepared is not None:
                    self._prepared.forget()
                _sweep(f"{MARK}={self._mark}")
                shutil.rmtree(shared, ignore_errors=True)
        self._gather_logs()
        code = self._code()
        document = report.write(self._out, self._mode, self._facts, self._told, time.monotonic() - self._began, code)
        print(report.table(self._told), flush=True)
        print(f"{document}: exit code {code}", flush=True)
        return code

    def _gather_logs(self) -> None:
        """One file in the place of many: it is to be sent."""
        folder = self._out / "logs"
        with (self._out / "logs.txt").open("a", encoding="utf-8") as file:
            for one in self._told:
                for path in sorted(folder.glob(f"{one['id']}.*txt")):
                    text = path.read_text(errors="replace")[-_LOG_CHARS:].strip()
                    if text:
                        file.write(f"==== {path.stem}\n{text}\n")
        shutil.rmtree(folder, ignore_errors=True)

    def _code(self) -> int:
        if self._signal:
            return 128 + self._signal
        counts = [one for one in self._told if one["must"] or self._mode == "dry"]  # a dry run judges no figure
        outcomes = {one["outcome"] for one in counts}
        return 1 if "fail" in outcomes else _NOT_REACHED if "not reached" in outcomes else 0

    def _tell(self, one: Check, found: dict[str, Any], lines: TextIO) -> None:
        line = {"id": one.id, "title": one.title, "must": one.must, "expected": one.expected, **found}
        self._told.append(line)
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())
        print(report.line(line), flush=True)

    # -- one check after another, or a few at a time
    def _begin(self, waiting: deque[Check], shared: Path, lines: TextIO) -> None:
        """Those whose turn it is. The one after them is started, too, where there are cores for it: to import takes seconds."""
        while waiting and not self._signal:
            one, left_s = waiting[0], self._ends - time.monotonic()
            if why := one.why_not(self._mode, xid=self._xid):
                self._tell(waiting.popleft(), _found("skip", 0.0, why), lines)
            elif left_s < min(_LEAST_S, one.limit_s):
                why = "its time was over: give more --budget-s, or fewer checks with --only"
                self._tell(waiting.popleft(), _found("not reached", 0.0, why), lines)
            elif not self._playing or (
                one.beside and len(self._playing) < self._beside and all(it.check.beside for it in self._playing)
            ):
                process = self._take_prepared(one) or self._start(one, shared, ahead=False)
                process.begin(min(self._allowed_s(one), left_s))
                self._playing.append(process)
                waiting.popleft()
            else:
                if self._ahead and self._prepared is None:
                    self._prepared = self._start(one, shared, ahead=True)
                return

    def _start(self, one: Check, shared: Path, *, ahead: bool) -> _Process:
        return _Process(one, self._mode, self._out, shared, self._modules, self._mark, ahead=ahead)

    def _take_prepared(self, one: Check) -> _Process | None:
        process, self._prepared = self._prepared, None
        assert process is None or process.check is one, "checks are begun in their order"
        return process

    def _allowed_s(self, one: Check) -> float:
        return one.limit_s * (_DRY_PATIENCE if self._mode == "dry" else 1)

    def _wait(self) -> None:
        """Until one of them has ended, the time of one is up, or somebody interrupts us."""
        if not self._playing:
            return
        poll = polling.poll()
        for fd in (self._wake[0], *(process.pidfd for process in self._playing)):
            poll.register(fd, polling.POLLIN)
        poll.poll(1000 * max(min(process.deadline for process in self._playing) - time.monotonic(), 0))

    def _tell_ended(self, lines: TextIO) -> None:
        now = time.monotonic()
        for process in list(self._playing):
            if self._signal or _has_ended(process.pidfd) or now >= process.deadline:
                self._playing.remove(process)
                self._tell(process.check, self._outcome(process), lines)

    def _outcome(self, process: _Process) -> dict[str, Any]:
        one, folder = process.check, process.folder
        try:
            status = process.end()
            seconds = time.monotonic() - process.began
            left = _sweep(process.mark)
            limit_s, allowed_s = process.limit_s, self._allowed_s(one)
            found = _read(folder / "result.json")
            found = found or _unanswered(status, limit_s, process.log, interrupted=self._signal)
            if found["outcome"] == "fail":
                self._keep(one, folder)
                if limit_s < allowed_s and seconds > limit_s / 2 - _END_S:  # a check gives its parts half of its time
                    why = f"it had {limit_s:.0f} s instead of {allowed_s:.0f}"
                    found = _found("not reached", 0.0, f"{why}: {found['note']}")
            if left:
                found["note"] = "; ".join(filter(None, [found["note"], f"{left} processes were left, and killed"]))
            return {**found, "seconds": round(seconds, 2)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, one: Check, folder: Path) -> None:
        """What the processes of a check that has failed have said."""
        for path in sorted(folder.rglob("*.txt")):
            name = "-".join(path.relative_to(folder).with_suffix("").parts)
            with contextlib.suppress(OSError):
                shutil.copyfile(path, self._out / "logs" / f"{one.id}.{name}.txt")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal is only noted: no process is then between its birth and our knowing it."""
        self._wake = os.pipe()
        os.set_blocking(self._wake[1], False)

        def note(number: int, _frame: object) -> None:
            self._signal = self._signal or number
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake[1], b"x")

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for fd in self._wake:
                os.close(fd)


def _has_ended(pidfd: int) -> bool:
    poll = polling.poll()
    poll.register(pidfd, polling.POLLIN)
    return bool(poll.poll(0))


def _sweep(mark: str) -> int:
    """Kill whatever carries it, in whatever session: how many there were."""
    wanted, killed = mark.encode(), set[int]()
    until = time.monotonic() + _EXECS_S
    while True:
        environments = {pid: _environment(pid) for pid in _pids()}
        pids = [pid for pid, entries in environments.items() if any(entry.startswith(wanted) for entry in entries)]
        if not pids and (time.monotonic() > until or not any(map(_executes, _with_empty_environment(environments)))):
            return len(killed)
        for pid in pids:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _with_empty_environment(environments: dict[int, list[bytes]]) -> list[int]:
    return [pid for pid, entries in environments.items() if not any(entries)]


def _executes(pid: int) -> bool:
    """Whether it is a program, and neither the kernel's nor one that has ended: in the middle of ``exec`` a process shows
    no environment."""
    with contextlib.suppress(OSError):
        return bool(os.readlink(f"/proc/{pid}/exe"))
    return False


def _found(outcome: str, seconds: float, note: str) -> dict[str, Any]:
    return {"outcome": outcome, "value": None, "unit": "", "seconds": seconds, "note": note}


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return None


def _unanswered(status: int | None, limit_s: float, log: Path, *, interrupted: int) -> dict[str, Any]:
    if interrupted:
        return _found("skip", 0.0, f"interrupted by {signal.Signals(interrupted).name}")
    if status is None:
        why = f"still running after its limit of {limit_s:.0f} s"
    elif status < 0:
        why = f"ended by {signal.Signals(-status).name}"
    else:
        why = f"ended with exit code {status} and no answer"
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return _found("fail", 0.0, f"{why}; the end of its log: {text[-_NOTE_CHARS:]}" if text else why)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []
