"""Who writes: a process, named so that a later one with the same pid is not taken for it.

A pid alone is reused; with the start time it is unique until the host starts again, which empties tmpfs too. Pids of
another pid namespace mean nothing here, so such a process counts as alive: it is fenced by a larger epoch, not by looking.
"""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path
from typing import NamedTuple

__all__ = ["NOBODY", "Process", "begin_session", "end_session", "kill_pending", "namespace", "process_of"]

_PF_EXITING = 0x4
"""Of the kernel's flags in ``/proc/PID/stat``: the process has begun to end."""
_sessions: set[int] = set()


class Process(NamedTuple):
    """A writer: a process, and one of its sessions (one attached arena), because one process may attach more than once."""

    pid: int
    start: int
    """Clock ticks from the start of the host to its own."""
    namespace: int
    session: int

    def alive(self) -> bool:
        if self == NOBODY:
            return False
        if self.namespace != namespace():
            return True
        if self.start != _start_time(self.pid):
            return False
        return self.pid != os.getpid() or self.session in _sessions

    def dying(self) -> bool:
        """Whether the process is there still, and will run no more code of its own: it was killed, or the kernel takes its memory
        down. With hundreds of gigabytes, or storage that does not answer, that takes minutes."""
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
    """Whether ``status``, the text of ``/proc/PID/status``, has a SIGKILL that waits to be acted on."""
    rows = [line.split() for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for _, mask in rows)


NOBODY = Process(0, 0, 0, 0)


def begin_session() -> Process:
    session = secrets.randbits(63)
    _sessions.add(session)
    return Process(os.getpid(), _start_time(os.getpid()), namespace(), session)


def end_session(process: Process) -> None:
    _sessions.discard(process.session)


def process_of(pid: int) -> Process:
    """Another process of this pid namespace, as a whole."""
    return Process(pid, _start_time(pid), namespace(), 0)


def _start_time(pid: int) -> int:
    """0 when there is no such process, or only its exit status waits to be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
