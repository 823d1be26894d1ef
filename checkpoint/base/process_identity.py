"""Identities of writer processes that a later process with the same pid does not match.

A pid is reused, but pid and start time together are unique until the host restarts, which empties tmpfs too. Pids of
another pid namespace mean nothing here, so a process there counts as alive: a larger fencing token fences it.
"""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "NOBODY",
    "ProcessIdentity",
    "begin_session",
    "boot_id",
    "end_session",
    "kill_pending",
    "namespace",
    "process_of",
]

_PF_EXITING = 0x4
"""Flag in ``/proc/PID/stat`` that the kernel sets when the process has begun to exit."""
_sessions: set[int] = set()


class ProcessIdentity(NamedTuple):
    """A writer: a process and one session in it. A process may attach several arenas; each is a session."""

    pid: int
    start: int
    """Start time of the process, in clock ticks since the host started."""
    namespace: int
    session: int

    def alive(self) -> bool:
        """Whether the process and this session still exist. True for a process of another pid namespace."""
        if self == NOBODY:
            return False
        if self.namespace != namespace():
            return True
        if self.start != _start_time(self.pid):
            return False
        return self.pid != os.getpid() or self.session in _sessions

    def dying(self) -> bool:
        """Whether the process still exists but will run no more code of its own.

        It was killed, or the kernel is tearing its memory down. With hundreds of gigabytes, or storage that does not
        answer, that takes minutes.
        """
        if self.namespace != namespace() or self.start != _start_time(self.pid):
            return False
        try:
            flags = int(Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[6])
            status = Path(f"/proc/{self.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return bool(flags & _PF_EXITING) or kill_pending(status)

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid else "nobody"


def kill_pending(status: str) -> bool:
    """Whether ``status``, the text of ``/proc/PID/status``, shows a pending SIGKILL."""
    rows = [line.split() for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for _, mask in rows)


NOBODY = ProcessIdentity(0, 0, 0, 0)


def begin_session() -> ProcessIdentity:
    """Register a new session of this process and return its identity."""
    session = secrets.randbits(63)
    _sessions.add(session)
    return ProcessIdentity(os.getpid(), _start_time(os.getpid()), namespace(), session)


def end_session(process: ProcessIdentity) -> None:
    """End a session, so that its claims are free again."""
    _sessions.discard(process.session)


def process_of(pid: int) -> ProcessIdentity:
    """Return the identity of a process in this pid namespace, without a session."""
    return ProcessIdentity(pid, _start_time(pid), namespace(), 0)


def _start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks; 0 when it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    """Return the id that the kernel drew when this host started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
