"""Low process priority, and the way back: a process also dies at its own priority, and frees its memory in its own
time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

__all__ = ["finish_off", "first_to_go", "idle_can_be_left", "lower", "lower_session"]

_NICE_MAX = 19
_OOM_FIRST = 1000
_PROCESS_MRELEASE = 448  # the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def first_to_go() -> None:
    """Make this process and its descendants the out-of-memory killer's first choice."""
    _write("/proc/self/oom_score_adj", _OOM_FIRST)


def lower() -> None:
    """Give this process and its descendants the lowest processor priority.

    SCHED_IDLE is used only if it can be left again: a process killed in it, on processors that others keep busy, might
    take minutes to die. Otherwise nice 19 is used, which still gets a small share.
    """
    os.nice(_NICE_MAX)
    lower_session(os.getpid())
    if idle_can_be_left():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def lower_session(pid: int) -> None:
    """Lower the priority of the process's session.

    Where the kernel groups processes by session (autogroup), nice and SCHED_IDLE count only within a session, and a new
    session begins with the same share as all others.
    """
    _write(f"/proc/{pid}/autogroup", _NICE_MAX)


def finish_off(pids: list[int]) -> None:
    """Kill these processes, then help them die quickly.

    SIGKILL is sent to all first. Then they die at normal priority on any processor, and this process frees their memory
    (process_mrelease).
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's, by its set-user-ID bit
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(OSError):  # gone by now, as intended
            _write(f"/proc/{pid}/autogroup", 0)
            for thread in os.listdir(f"/proc/{pid}/task"):
                _hurry(int(thread))
            _release_memory(pid)


def _hurry(thread: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(thread, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, 0)


def _release_memory(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        _libc.syscall(ctypes.c_long(_PROCESS_MRELEASE), ctypes.c_int(pidfd), ctypes.c_uint(0))
    finally:
        os.close(pidfd)


def idle_can_be_left() -> bool:
    """Return whether SCHED_IDLE can be left again, tried in a child process."""
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _write(path: str, value: int) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(str(value))
