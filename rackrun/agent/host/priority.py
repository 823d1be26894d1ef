"""Low priority, and the way back from it: a process dies at its own priority, too, and its memory is freed by its own time."""

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
    """This process, and what it starts: the out-of-memory killer's first choice."""
    _write("/proc/self/oom_score_adj", _OOM_FIRST)


def lower() -> None:
    """This process, and what it starts: last in line for the processors.

    SCHED_IDLE only where we may take it back: a process killed in it, on processors that others keep busy, might take minutes
    to die. Else nice 19, which still gets a small share.
    """
    os.nice(_NICE_MAX)
    lower_session(os.getpid())
    if idle_can_be_left():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def lower_session(pid: int) -> None:
    """Where the kernel groups processes by session (autogroup), nice and SCHED_IDLE count only within one, and a new session
    begins as equal to all others."""
    _write(f"/proc/{pid}/autogroup", _NICE_MAX)


def finish_off(pids: list[int]) -> None:
    """SIGKILL, to all before anything else; then have them die at normal priority on any processor, and free their memory in
    our own time (process_mrelease)."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's, by its set-user-ID bit
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(OSError):  # gone by now, which is what is wanted
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
    """Asked of a child: who cannot leave it could not afterwards lead a normal life."""
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
