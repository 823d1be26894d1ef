"""Linux facilities for controlling processes: death signals, subreapers, /proc, process groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "ProcessStat",
    "adopt_orphans",
    "children",
    "close_other_fds",
    "cpu_seconds",
    "descendants",
    "descendants_now",
    "die_with",
    "exit_code_and_signal",
    "has_open",
    "kill_session",
    "kill_tree",
    "read_stat",
    "thread_count",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send ``sig`` to this process when its parent ends. Exits at once if the parent has ended already.

    The signal is sent when the forking *thread* ends, so parents must fork from their main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, int(sig))
    if os.getppid() != parent:  # it died between the fork and the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class ProcessStat(NamedTuple):
    """State of a process from its stat file in /proc."""

    exiting: bool
    """Whether the kernel is tearing it down. It will never run again, although freeing its memory may take long."""
    status: int
    """Wait status as from `os.waitpid`; 0 until it is known."""
    stopped: bool
    """Whether a signal (SIGSTOP and similar) has stopped it. A debugger's stop does not count."""


def read_stat(fd: int) -> ProcessStat | None:
    """Read an open ``/proc/PID/task/PID/stat``; None: no such process. The stat file of the whole process would add up
    all threads."""
    try:
        line = os.pread(fd, 1024, 0)
    except OSError:
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the command's name may hold anything
    exiting = bool(int(fields[6]) & _PF_EXITING) or fields[0] in (b"Z", b"X")
    return ProcessStat(exiting, int(fields[49]), fields[0] == b"T")


def exit_code_and_signal(status: int) -> tuple[int | None, int | None]:
    """Return the exit code and the signal of a wait status; one of them is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def thread_count() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def has_open(path: str) -> bool:
    """Return whether this process has a file of this name open."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                return True
    return False


def close_other_fds(keep: Iterable[int]) -> None:
    """Close every descriptor from 3 up, except these."""
    start = 3
    for fd in sorted(fd for fd in set(keep) if fd >= start):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def descendants(root: int) -> list[int]:
    """Return all descendants of ``root``, parents first."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in _all_processes().items():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def children(parent: int) -> list[int]:
    """Return the children of all threads of ``parent``, adopted ones included."""
    return [pid for pid, (above, _) in _all_processes().items() if above == parent]


def descendants_now(root: int) -> list[int]:
    """As `descendants`, but much faster if the kernel lists children, for processes that live only an instant."""
    found: list[int] = []
    todo = [root]
    while todo:
        parent = todo.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    below = [int(text) for text in file.read().split()]
                found += below
                todo += below
        except OSError:
            if parent == root and not os.path.exists(f"/proc/{root}/task/{root}/children"):
                return descendants(root)
    return found


def cpu_seconds(root: int) -> float:
    """Return the processor time of ``root`` and all its descendants, living or reaped."""
    ticks = 0
    for pid in (root, *descendants_now(root)):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
            ticks += sum(int(field) for field in line[line.rindex(b")") + 2 :].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def kill_tree(root: int, spare: Iterable[int] = ()) -> bool:
    """SIGKILL all descendants of ``root``, repeated until no new one is found, because a process may fork in between.
    Return False if some belong to another user and live on."""
    spared = set(spare)
    killed: set[int] = set()
    all_ours = True
    while found := [pid for pid in descendants(root) if pid not in killed and pid not in spared]:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                all_ours = False
        killed.update(found)
    return all_ours


def kill_session(leader: int) -> None:
    """SIGKILL the rest of a worker's session. Call it only while its leader is not reaped: until then no other process
    can have its id."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for pid, (_, session) in _all_processes().items():
        if session == leader and pid != leader:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _all_processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the session of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                line = file.read()
        except OSError:  # it has gone, or is another user's where /proc hides those (hidepid)
            continue
        fields = line[line.rindex(b")") + 2 :].split()
        found[int(name)] = (int(fields[1]), int(fields[3]))
    return found


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("the rackrun agent needs Linux (pidfd, memfd, prctl)")
