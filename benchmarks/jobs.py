"""Starting the systems under measurement, watching their marks, and leaving none of their processes behind."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ROOT / "benchmarks" / "workloads"
RESULTS = ROOT / "benchmarks" / "results"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a benchmark that is ended ends its jobs


class JobFailed(RuntimeError):
    """A job under measurement did not do what was awaited; its output is in the message."""


@dataclass(frozen=True)
class Mark:
    """One rank has finished one step. ``t`` is CLOCK_MONOTONIC, which all processes of a host share."""

    t: float
    rank: int
    step: int
    pid: int
    loss: float
    attempt: int


class Job:
    """One run in a session and a folder of its own. Every process it starts inherits a mark, by which `kill` finds it."""

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, folder: Path | None = None
    ) -> None:
        """``folder``: where its processes begin; else where this one is."""
        self.folder = Path(tempfile.mkdtemp(prefix="rackrun-bench-"))
        self.marks_path = self.folder / "marks.jsonl"
        self.marks_path.touch()
        self._id = uuid.uuid4().hex
        self._read_at = 0
        self._marks: list[Mark] = []
        filled = [part.format(folder=self.folder, marks=self.marks_path) for part in command]
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with (self.folder / "output.txt").open("wb") as output:
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                filled,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": python_path,
                    "OMP_NUM_THREADS": "1",
                    "RACKRUN_BENCH": self._id,
                    **(env or {}),
                },
                cwd=folder,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def marks(self) -> list[Mark]:
        """All so far, in the order in which they were written."""
        with self.marks_path.open("rb") as file:
            file.seek(self._read_at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_at += len(whole)
        self._marks += [Mark(**json.loads(line)) for line in whole.splitlines()]
        return self._marks

    def wait_for(self, done: Callable[[list[Mark]], Any], timeout_s: float, poll_s: float = 0.02) -> Any:
        """The first true answer of ``done(marks)``. Raises `JobFailed` when the job ends first, or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None  # before the marks are read: none is missed
            if answer := done(self.marks()):
                return answer
            if ended or time.monotonic() > deadline:
                why = f"exit code {self.process.returncode}" if ended else f"nothing after {timeout_s:.0f} s"
                raise JobFailed(f"{why}; the end of its output:\n{self.output()[-3000:]}")
            time.sleep(poll_s)

    def status(self) -> dict[str, Any]:
        """What the coordinator says of a rackrun job."""
        endpoint = json.loads((self.folder / "out" / "endpoint.json").read_text())
        token = (self.folder / "out" / "token").read_text().strip()
        request = urllib.request.Request(f"{endpoint['url']}/api/status", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            status: dict[str, Any] = json.load(answer)
            return status

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def pids(self) -> list[int]:
        wanted = f"RACKRUN_BENCH={self._id}".encode()
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def cpu_seconds(self) -> float:
        """User and system time so far of all its living processes."""
        ticks = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / TICKS_PER_S

    def finish(self, timeout_s: float) -> int:
        """Its exit code. Raises `JobFailed` when it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise JobFailed(
                f"still running after {timeout_s:.0f} s; the end of its output:\n{self.output()[-3000:]}"
            ) from None

    def pause(self) -> None:
        """Stop every process of it, the launcher first, so that nobody takes the others' silence for a fault."""
        for pid in sorted(self.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in sorted(self.pids(), reverse=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait()


def rackrun_command(
    script: str, *script_args: str, ranks: int = 4, spares: int = 1, launcher_args: Sequence[str] = ()
) -> list[str]:
    placement = launcher_args or ["--standalone", "--nproc-per-node", str(ranks + spares)]
    return [
        *(sys.executable, "-m", "rackrun", *placement, "--spares", str(spares), "--out-dir", "{folder}/out"),
        *(str(WORKLOADS / script), "--marks", "{marks}", *script_args),
    ]


def torchrun_command(script: str, *script_args: str, ranks: int = 4, checkpoint: bool) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        *("--max-restarts", "3", str(WORKLOADS / script), "--marks", "{marks}", *script_args),
        *(["--checkpoint", "{folder}/checkpoint.pt"] if checkpoint else []),
    ]


# torch 2.13: without it a restarted worker reads the gloo addresses of the attempt before, and never gets going again.
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def step_seconds(marks: Sequence[Mark], first_step: int, last_step: int, rank: int = 0) -> list[float]:
    """Times between one rank's marks of consecutive steps."""
    at = {mark.step: mark.t for mark in marks if mark.rank == rank}
    return [at[step] - at[step - 1] for step in range(first_step + 1, last_step + 1) if step in at and step - 1 in at]


def median_range(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return "never"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.{digits}f}–{max(values):.{digits}f}]"


def bootstrap_median(values: Sequence[float], seed: int = 0, rounds: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of the median."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds) - 1]


def machine() -> dict[str, Any]:
    import torch

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
