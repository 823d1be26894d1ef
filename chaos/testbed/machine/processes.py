"""Processes by id and start time, because an id alone may be another process's by the time a signal is sent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = ["Process", "kill_marked", "marked", "wait_gone"]

_KILL_S = 30.0
_SHM = "/dev/shm"  # noqa: S108 - looked at


class Process(msgspec.Struct, frozen=True):
    """One process."""

    pid: int
    started: int
    """The start time, in clock ticks since the machine started."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process with this id, or None if there is none."""
        stat = _stat(pid)
        return cls(pid, int(stat[19])) if stat is not None else None

    @property
    def state(self) -> str:
        """The state as in ``/proc/PID/stat``: R, S, D, T (stopped), ...; "" if the process is gone or a zombie."""
        stat = _stat(self.pid)
        return "" if stat is None or int(stat[19]) != self.started or stat[0] in "ZX" else stat[0]

    @property
    def parent(self) -> int:
        """The parent's process id; 0 if the process is gone."""
        stat = _stat(self.pid)
        return int(stat[1]) if stat is not None else 0

    def send(self, number: signal.Signals) -> bool:
        """Send a signal. Returns False if the process is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except (ProcessLookupError, OSError):
            return False
        try:
            if not self.state:
                return False
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def marked(mark: str, shared: Path | None = None) -> list[Process]:
    """Return the living processes that were started with ``mark`` (NAME=VALUE) in their environment.

    Processes that have cleared their environment are found by their ``/dev/shm``, if that is the file system at
    ``shared``.
    """
    wanted, device, found = mark.encode(), _device_of(shared), []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if (
                wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                or os.stat(f"/proc/{name}/root{_SHM}").st_dev == device
            ):
                process = Process.of(int(name))
                found += [process] if process is not None and process.state else []
    return found


def _device_of(shared: Path | None) -> int | None:
    """Return the device of the file system at ``shared``; None if nothing is mounted there or it is the
    machine's own."""
    if shared is None or not os.path.ismount(shared):
        return None
    device = os.stat(shared).st_dev
    return device if device != os.stat(_SHM).st_dev else None


def kill_marked(mark: str, shared: Path | None = None) -> None:
    """Kill the marked processes until none is alive, since one may start another meanwhile.

    Raises TimeoutError when one does not die.
    """
    deadline = time.monotonic() + _KILL_S
    while left := marked(mark, shared):
        if time.monotonic() > deadline:
            raise TimeoutError(f"killed, and not gone in {_KILL_S:.0f} s: {', '.join(str(one.pid) for one in left)}")
        for process in left:
            process.send(signal.SIGKILL)
        time.sleep(0.005)


def wait_gone(processes: Iterable[Process], timeout_s: float) -> bool:
    """Wait until all processes are gone. Returns False if some are still alive after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while any(process.state for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` after the command's name; None if there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return line[line.rindex(")") + 2 :].split()  # the command's name may contain anything
