"""Read NVML through a child process, because its calls may never return.

When a driver hangs, a thread that calls it cannot be ended, and its process cannot exit. An agent must be able to exit:
its leases and its workers depend on that. So the agent reads from a child over a pipe, and gives the child up after too
long a silence. This also keeps crashes inside the driver's library, and its threads, out of a process that forks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

from rackrun.topology.gpu_driver.nvml_child import NvmlMessage
from rackrun.topology.gpu_driver.readings import NvmlUnavailable, TrayReading, XidEvent

__all__ = ["NvmlWatch", "read_once"]

START_MS = 20_000
"""How long opening NVML may take, in ms: without the persistence daemon, the driver initialises every GPU first."""
KILL_S = 1.0

_abandoned: list[subprocess.Popen[bytes]] = []
"""Children that cannot die because the kernel holds them. They are kept here and polled later, not waited for."""


class NvmlWatch:
    """Readings every ``period_ms``, and Xids as they happen.

    ``fileno()`` becomes readable when ``next(0)`` has something to return; silence is noticed only by calling it from
    time to time. After ``patience_ms`` of silence, or the child's end, every further call returns the same
    `NvmlUnavailable`: make another watch later. Also make another one after a GPU was reset, because NVML must be
    opened again. The child ends with the thread that made the watch.
    """

    def __init__(
        self,
        *,
        period_ms: int = 500,
        patience_ms: int = 5_000,
        start_ms: int = START_MS,
        once: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "rackrun.topology.gpu_driver.nvml_child", "--period-ms", str(period_ms)]
        self._child = subprocess.Popen(
            [*command, *(["--once"] if once else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        assert self._child.stdout is not None
        self._fd = self._child.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._patience_s = patience_ms / 1000
        self._deadline = time.monotonic() + start_ms / 1000
        self._buffer = bytearray()
        self.ended: NvmlUnavailable | None = None

    def __enter__(self) -> NvmlWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    def fileno(self) -> int:
        return self._fd

    def next(self, timeout_s: float) -> TrayReading | XidEvent | NvmlUnavailable | None:
        """Return the next message; None when there is none within ``timeout_s``.

        Messages in the pipe come before `ended`.
        """
        until = time.monotonic() + timeout_s
        while self.ended is None:
            message = self._take()
            if message is not None:
                return message
            if self._readable(min(until, self._deadline) - time.monotonic()):
                self._receive()
            elif time.monotonic() >= self._deadline:
                self._give_up()
            elif time.monotonic() >= until:
                return None
        return self.ended

    def reaped(self, status: int) -> None:
        """Record that code which reaps every child of this process has reaped this one.

        ``status``: from `os.waitpid`.
        """
        self._child.returncode = os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """End the child. A child that the kernel holds is left behind."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._child.kill()
        try:
            self._child.wait(KILL_S)
        except subprocess.TimeoutExpired:
            _abandoned.append(self._child)
        for child in list(_abandoned):
            if child.poll() is not None:
                _abandoned.remove(child)

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def _receive(self) -> None:
        data = os.read(self._fd, 1 << 16)
        if data:
            self._buffer += data
            self._deadline = time.monotonic() + self._patience_s
            return
        try:
            code = self._child.wait(KILL_S)
        except subprocess.TimeoutExpired:
            code = 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.ended = NvmlUnavailable(
            why="crashed", what=f"the process that reads NVML ended ({how}).", remedy="see its message, and nvidia-smi."
        )

    def _take(self) -> TrayReading | XidEvent | NvmlUnavailable | None:
        size = int.from_bytes(self._buffer[:4], "little")
        if len(self._buffer) < 4 + size or len(self._buffer) < 4:
            return None
        message = msgspec.msgpack.decode(self._buffer[4 : 4 + size], type=NvmlMessage)
        del self._buffer[: 4 + size]
        return message.reading or message.xid or message.unavailable

    def _give_up(self) -> None:
        self.ended = NvmlUnavailable(
            why="hanging",
            what="NVML does not answer: a call has not come back.",
            remedy="see dmesg for the driver; a hung one needs a reboot.",
        )


def read_once(*, timeout_s: float = 30.0, env: Mapping[str, str] | None = None) -> TrayReading | NvmlUnavailable:
    """Return one reading, taken in a child that is given up after ``timeout_s``."""
    with NvmlWatch(once=True, start_ms=int(timeout_s * 1000), env=env) as watch:
        answer = watch.next(timeout_s + 1.0)
    assert isinstance(answer, TrayReading | NvmlUnavailable), "a single reading waits for no events"
    return answer
