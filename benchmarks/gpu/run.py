"""Runs the checks, each in a process group of its own with a limit of its own, and leaves none of their processes behind.

A line of JSON for each is appended to ``checks.jsonl`` and reaches the disk before the next check begins: a machine that dies keeps what
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu import report
from benchmarks.gpu.registry import MODES, Check, Mode, load, select

__all__ = ["MARK", "Runner", "main"]

ROOT = Path(__file__).resolve().parents[2]
MARK = "RACKRUN_KIT"
"""In the environment of every process that a check starts, whatever session that process is in."""
_NOTE_CHARS = 1500
_LEAST_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--mode", choices=(*MODES, "auto"), default="auto", help="auto: dry without a GPU, box with 8 or more"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for lines, logs and the document")
    parser.add_argument("--only", default="", help="sections and ids, such as A,B,D7")
    parser.add_argument("--xid", action="store_true", help="also G: an illegal access, which leaves an Xid in the log")
    parser.add_argument("--minutes", type=float, default=9.7, help="for all checks together; what is left out says so")
    parser.add_argument(
        "--from", dest="modules", action="append", default=[], help="checks of this module instead (tests of the kit)"
    )
    options = parser.parse_args(argv)
    try:
        checks = load(options.modules)
        facts = report.facts()
        mode: Mode = _mode_of(facts) if options.mode == "auto" else options.mode
        if mode != "dry" and not facts["gpus"]:
            parser.error(f"--mode {mode} needs a GPU, and torch sees none: {facts['no_gpu']}")
        chosen = select(checks, mode, options.only)
    except ValueError as error:
        parser.error(str(error))
    runner = Runner(options.out, mode, facts, options.modules, xid=options.xid, seconds=60 * options.minutes)
    return runner.run(chosen)


def _mode_of(facts: dict[str, Any]) -> Mode:
    count = len(facts["gpus"])
    return "box" if count >= 8 else "one" if count else "dry"


class Runner:
    """``seconds``: for all checks together; one that would begin later is left out, and one that has less left than its limit gets that."""

    def __init__(
        self,
        out: Path,
        mode: Mode,
        facts: dict[str, Any],
        modules: Sequence[str] = (),
        *,
        xid: bool = False,
        seconds: float = 600.0,
    ) -> None:
        self._out, self._mode, self._facts, self._modules, self._xid = out, mode, facts, list(modules), xid
        self._began = time.monotonic()
        self._ends = self._began + seconds
        self._mark = uuid.uuid4().hex
        self._told: list[dict[str, Any]] = []
        self._signal = 0
        self._wake: tuple[int, int] = (-1, -1)
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, checks: Sequence[Check]) -> int:
        """0: all that must be is; 1: it is not; 128 + number of the signal that ended it."""
        with self._signals(), (self._out / "checks.jsonl").open("a", encoding="utf-8") as lines:
            shared = Path(tempfile.mkdtemp(prefix="rackrun-kit-"))
            try:
                for one in checks:
                    self._tell(one, self._outcome(one, shared), lines)
                    if self._signal:
                        break
            finally:
                self._sweep()
                shutil.rmtree(shared, ignore_errors=True)
        code = self._code()
        document = report.write(self._out, self._mode, self._facts, self._told, time.monotonic() - self._began, code)
        print(report.table(self._told), flush=True)
        print(f"{document}: exit code {code}", flush=True)
        return code

    def _code(self) -> int:
        if self._signal:
            return 128 + self._signal
        counts = [one for one in self._told if one["must"] or self._mode == "dry"]  # a dry run judges no figure
        return int(any(one["outcome"] == "fail" for one in counts))

    def _tell(self, one: Check, found: dict[str, Any], lines: TextIO) -> None:
        line = {"id": one.id, "title": one.title, "must": one.must, "expected": one.expected, **found}
        self._told.append(line)
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())
        print(report.line(line), flush=True)

    # -- one check
    def _outcome(self, one: Check, shared: Path) -> dict[str, Any]:
        left_s = self._ends - time.monotonic()
        limit_s = min(one.limit_s, left_s)
        if why := one.why_not(self._mode, xid=self._xid):
            return _found("skip", 0.0, why)
        if limit_s < min(_LEAST_S, one.limit_s):
            return _found("skip", 0.0, "no time is left: give more --minutes, or fewer checks with --only")
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"rackrun-kit-{one.id}-"))
        log = self._out / "logs" / f"{one.id}.txt"
        try:
            status = self._play(one, folder, shared, limit_s, log)
            seconds = time.monotonic() - began
            left = self._sweep()
            found = _read(folder / "result.json") or _unanswered(status, limit_s, log, interrupted=self._signal)
            if left:
                found["note"] = "; ".join(filter(None, [found["note"], f"{left} processes were left, and killed"]))
            return {**found, "seconds": round(seconds, 2)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _play(self, one: Check, folder: Path, shared: Path, limit_s: float, log: Path) -> int | None:
        """Its status as of `subprocess.Popen.returncode`. None: it did not end by itself."""
        order = {
            "id": one.id,
            "mode": self._mode,
            "folder": str(folder),
            "shared": str(shared),
            "limit_s": limit_s,
            "modules": self._modules,
            "parent": os.getpid(),
        }
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": python_path, MARK: self._mark, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.child", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        ended = self._wait(process.pid, limit_s)
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        return status if ended else None

    def _wait(self, pid: int, limit_s: float) -> bool:
        """Until it has ended, its time is up, or somebody interrupts us."""
        deadline = time.monotonic() + limit_s
        poll, pidfd = polling.poll(), os.pidfd_open(pid)
        try:
            poll.register(pidfd, polling.POLLIN)
            poll.register(self._wake[0], polling.POLLIN)
            while not self._signal and (left_s := deadline - time.monotonic()) > 0:
                if pidfd in dict(poll.poll(1000 * left_s)):
                    return True
            return False
        finally:
            os.close(pidfd)

    def _sweep(self) -> int:
        """Kill whatever carries our mark, in whatever session: how many there were."""
        wanted, killed = f"{MARK}={self._mark}".encode(), set()
        while pids := [pid for pid in _pids() if wanted in _environment(pid)]:
            for pid in pids:
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        return len(killed)

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
