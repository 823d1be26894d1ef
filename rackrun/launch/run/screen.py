"""Output for people: the script's log lines, a status line on a terminal, and a line for each recovery.

A thread prints, because a terminal that stops reading must not delay the coordinator.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import TextIO

from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.coordinator.shell.driver import Status
from rackrun.protocol.wire import Logged

__all__ = ["TerminalOutput", "status_text"]

_CLEAR = "\r\x1b[2K"
_CLOSE_S = 2.0


class TerminalOutput:
    """An `rackrun.coordinator.shell.driver.Observer` that prints."""

    def __init__(self, *, quiet: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._quiet = quiet
        self.live = self._out.isatty() and not quiet
        """Whether a status line is shown."""
        self._status = ""
        self._queue: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print_all, name="rackrun-screen", daemon=True)
        self._thread.start()

    # -- Observer
    def line(self, text: str, logged: Logged) -> None:  # noqa: ARG002 - for observers that want the values
        self._queue.put(("out", text))

    def recovered(self, recovery: RecoveryRecord) -> None:
        if not self._quiet:
            self.say(recovery.line())

    def protected(self, text: str) -> None:
        if not self._quiet:
            self.say(text)

    def notice(self, text: str) -> None:
        self.say(text)

    # -- ours
    def say(self, text: str) -> None:
        self._queue.put(("err", f"rackrun: {text}"))

    def status(self, text: str) -> None:
        if self.live:
            self._queue.put(("status", text))

    def close(self) -> None:
        """Print what is queued, waiting at most `_CLOSE_S` seconds, because the stream may not be read any more."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _print_all(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, text = item
            try:
                self._print(kind, text)
            except (OSError, ValueError):
                continue  # the stream has no reader any more
        if self.live and self._status:
            self._print("status", "")

    def _print(self, kind: str, text: str) -> None:
        if kind == "status":
            self._status = text[: _columns() - 1]
        elif self.live:
            self._out.write(_CLEAR)
            self._out.flush()
            print(text, file=self._out if kind == "out" else self._err, flush=True)
        else:
            print(text, file=self._out if kind == "out" else self._err, flush=True)
        if self.live:
            self._out.write(_CLEAR + self._status)
            self._out.flush()


def status_text(status: Status) -> str:
    """Return ``step 120  loss 2.31  13.2 steps/s  105 samples/s  4 ranks + 1 spare  last recovery 380 ms``."""
    progress = status.progress
    parts = [
        f"step {progress.position.step}" if progress.position.step >= 0 else getattr(status.core, "phase", "starting")
    ]
    if isinstance(loss := progress.values.get("loss"), float | int):
        parts.append(f"loss {loss:.4g}")
    if progress.steps_per_s:
        parts.append(f"{progress.steps_per_s:.3g} steps/s")
    if progress.samples_per_s:
        parts.append(f"{progress.samples_per_s:.4g} samples/s")
    ranks, spares = getattr(status.core, "world_size", 0), len(getattr(status.core, "spares", ()))
    parts.append(f"{ranks} rank{'s' * (ranks != 1)} + {spares} spare{'s' * (spares != 1)}")
    if status.last_recovery_s is not None:
        parts.append(f"last recovery {status.last_recovery_s * 1e3:.0f} ms")
    return "  ".join(parts)


def _columns() -> int:
    try:
        return os.get_terminal_size(1).columns
    except OSError:
        return 120
