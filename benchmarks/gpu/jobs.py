"""Whole jobs under the launcher: started as a user would, read by the lines that their scripts write, compared bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.gpu.registry import Context
from benchmarks.gpu.scripts.common import DOUBLE, DOUBLE_AT, SPARES_READY

__all__ = ["SCRIPTS", "Job", "compare", "readable", "recoveries", "train"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
Line = dict[str, Any]


class Job:
    """``with Job(...) as job``: what it starts is ended with the block. Its launcher is in our session; workers have their own."""

    def __init__(
        self,
        context: Context,
        name: str,
        script: str,
        arguments: Sequence[str] = (),
        *,
        ranks: int,
        spares: int = 0,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        double: str = "late",
    ) -> None:
        """``double``: how NCCL's contract is played in a dry run; "": gloo as it is."""
        self.folder = context.folder / name
        self.folder.mkdir()
        self.record = self.folder / "record.jsonl"
        self.record.touch()
        self.output = self.folder / "output.txt"
        flags = ["--record", str(self.record), "--flags", str(self.folder)]
        played = {DOUBLE: double} if context.dry and double and DOUBLE_AT.exists() else {}
        if context.dry and double and not played:
            context.note("without the double of NCCL's contract, which comes with the tests")
        shares = {"RACKRUN_SHARE_GPUS": "1"} if context.mode == "one" else {}
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if context.dry else {}
        self._script = SCRIPTS / script
        self._command = [
            *(sys.executable, "-m", "rackrun", "--standalone", "--nproc-per-node", str(ranks + spares)),
            *("--spares", str(spares), "--out-dir", str(self.folder / "out"), *options),
            *(str(self._script), *arguments, *flags),
        ]
        self._env = {**os.environ, **shares, **hidden, **played, **(env or {})}
        self._deadline = context.deadline - 2.0
        self._spares = spares
        self._beside: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=ROOT,
            )
        threading.Thread(target=self._tell_when_spares_are_ready, daemon=True).start()
        return self

    def _tell_when_spares_are_ready(self) -> None:
        """A rank that is lost before would not be replaced: the world would shrink, which is another training."""
        while self.process.poll() is None and self._ready_spares() < self._spares:
            time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):  # the check is over, and its folder with it
            (self.folder / SPARES_READY).touch()

    def _ready_spares(self) -> int:
        if not self._spares:
            return 0
        with contextlib.suppress(OSError, ValueError):  # the coordinator does not answer yet
            endpoint = json.loads((self.folder / "out" / "endpoint.json").read_text())
            token = (self.folder / "out" / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}"}
            with urlopen(Request(f"{endpoint['url']}/api/status", headers=headers), timeout=5) as answer:
                return sum(spare["state"] == "ready" for spare in json.load(answer)["core"]["spares"])
        return 0

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()  # agents and workers go with it
                self.process.wait()

    @contextlib.contextmanager
    def beside(self, *more: str) -> Iterator[None]:
        """The same script with ``more`` arguments, in a process of its own without a launcher, on the same record."""
        begin = self._command.index(str(self._script))
        with (self.folder / "beside.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *self._command[begin:], *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=ROOT,
            )
        self._beside = process
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{error}; beside it: {readable(self.folder / 'beside.txt', 400)}") from error
        finally:
            self._beside = None
            process.kill()
            process.wait()

    def finish(self, within_s: float = float("inf")) -> list[Line]:
        """Its lines. RuntimeError, with the end of its output, unless it ends well and in time, and so does what runs
        `beside` it, for whose turn it would wait."""
        until = time.monotonic() + max(min(self._deadline - time.monotonic(), within_s), 0.1)
        while (code := self.process.poll()) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"the job is not over in time: {self.said()}")
            if self._beside is not None and self._beside.poll():
                raise RuntimeError(f"what runs beside the job ended with exit code {self._beside.returncode}")
            time.sleep(0.02)
        if code:
            raise RuntimeError(f"the job ended with exit code {code}: {self.said()}")
        return self.lines()

    def lines(self) -> list[Line]:
        text = self.record.read_bytes()
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def wait_for(self, wanted: Callable[[Line], bool]) -> Line:
        """The first line that ``wanted`` says yes to. RuntimeError when it does not come."""
        while True:
            ended = self.process.poll() is not None
            for line in self.lines():
                if wanted(line):
                    return line
            if ended or time.monotonic() > self._deadline:
                raise RuntimeError(f"what was awaited did not come: {self.said()}")
            time.sleep(0.005)

    def said(self, chars: int = 900) -> str:
        return readable(self.output, chars)


def train(
    context: Context,
    name: str,
    *,
    steps: int,
    wrap: str = "",
    script: str = "train.py",
    ranks: int = 3,
    spares: int = 0,
    strikes: Sequence[dict[str, Any]] = (),
    more: Sequence[str] = (),
    during: Callable[[Job], None] = lambda _: None,
    double: str = "late",
) -> list[Line]:
    """A run of a script that trains, from its beginning to its end."""
    arguments = [
        *(("--wrap", wrap) if wrap else ()),
        "--steps",
        str(steps),
        "--strikes",
        json.dumps(list(strikes)),
        *more,
    ]
    began = time.monotonic()
    with Job(context, name, script, arguments, ranks=ranks, spares=spares, double=double) as job:
        during(job)
        lines = job.finish()
    first = min((line["t"] for line in lines if line["what"] == "begin"), default=began)
    print(f"{name}: first step {first - began:.1f} s after its start, over after {time.monotonic() - began:.1f} s")
    return lines


def compare(reference: list[Line], struck: list[Line], ranks: int) -> list[str]:
    """What is not the same, bit for bit, in two runs of ``scripts/train.py``. Empty: nothing.

    A process that is struck between its commit and its line leaves that line out, so that of a rank and step may be missing; one that is there
    must be equal, no two lines of a step may have a sample in common, and every rank must have come to its end.
    """
    found: list[str] = []
    one, other = _by_step(reference), _by_step(struck)
    for step in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(step, {}), other.get(step, {})
        if not theirs:
            found.append(f"nobody has step {step}")
        found += [
            f"step {step} of rank {rank}: loss and samples {theirs[rank]} and {mine.get(rank)}"
            for rank in theirs
            if theirs[rank] != mine.get(rank)
        ]
        ids = [sample for _, samples in theirs.values() for sample in samples]
        if len(ids) != len(set(ids)):
            found.append(f"step {step} has a sample twice")
    ends, others = _of(reference, "end", "rank"), _of(struck, "end", "rank")
    for rank in range(ranks):
        mine_, theirs_ = ends.get(rank, {}), others.get(rank, {})
        found += [
            f"rank {rank}: {what} differ" if rank in others else f"rank {rank} has no end"
            for what in ("weights", "moments")
            if mine_.get(what) != theirs_.get(what) or rank not in others
        ]
    phases = {line["value"] for line in reference if line["what"] == "phase"}
    found += [
        f"a phase was given {line['value']}, which no phase had"
        for line in struck
        if line["what"] == "phase" and line["value"] not in phases
    ]
    return found


def recoveries(lines: list[Line]) -> list[float]:
    """Seconds from each strike until a step was done by all that had not been done before it."""
    took = []
    for strike in (line for line in lines if line["what"] == "strike"):
        later = [
            line["t"]
            for line in lines
            if line["what"] == "done" and line["t"] > strike["t"] and line["step"] > strike["step"]
        ]
        if later:
            took.append(min(later) - strike["t"])
    return took


def readable(path: Path, chars: int) -> str:
    """The end of a log."""
    return path.read_text(errors="replace").strip()[-chars:] if path.exists() else ""


def _by_step(lines: list[Line]) -> dict[int, dict[int, tuple[str, tuple[int, ...]]]]:
    found: dict[int, dict[int, tuple[str, tuple[int, ...]]]] = {}
    for line in lines:
        if line["what"] == "done":
            found.setdefault(line["step"], {})[line["rank"]] = line["loss"], tuple(line["ids"])
    return found


def _of(lines: list[Line], what: str, key: str) -> dict[Any, Line]:
    return {line[key]: line for line in lines if line["what"] == what}
