"""Files in ``/dev/shm`` that torch makes for tensors in shared memory, of processes that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

__all__ = ["TensorFiles"]

_SHARED = Path("/dev/shm")  # noqa: S108 - where the files are, whoever may write there
_PREFIX = "torch_"


class TensorFiles:
    """Removes what killed processes have left of torch's shared tensors.

    torch creates a file, maps it and unlinks it. A process that is killed in between, a data loader's for example,
    leaves the file, and its memory is lost until the host starts anew. With the sharing strategy ``file_system``, and
    where CUDA tensors are sent to other processes, files stay longer, and every kill leaves some.

    A file is removed if its name holds the id of a killed process, it belongs to this user, it is younger than this
    object, and no process has it open or mapped: where containers share ``/dev/shm``, another process may have had the
    same id.
    """

    def __init__(self) -> None:
        self._since = time.time()
        self._killed: set[str] = set()

    def reaped(self, pid: int, status: int) -> None:
        """Note that a process was reaped with this wait status. Call `remove` after it."""
        if os.WIFSIGNALED(status):
            self._killed.add(str(pid))

    def remove(self) -> None:
        """Remove the files of all killed processes that nobody holds any more."""
        if not self._killed:
            return
        with contextlib.suppress(OSError):  # there is no such folder, or it may not be read
            for name in os.listdir(_SHARED):
                if name.startswith(_PREFIX) and name.split("_")[1] in self._killed:
                    self._remove(_SHARED / name)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # another has removed it, or it is not ours
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime >= self._since and not _is_held(path):
                path.unlink()


def _is_held(path: Path) -> bool:
    """Whether any process has the file open or mapped: the kernel gives a write lease only where none has."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # for a process that opens it now; SIGIO would end this one
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
