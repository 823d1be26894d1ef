"""Standard streams of launchers and agents: there from the start, and never a reason to end.

Descriptors 0, 1 and 2 may be closed when a process starts (``2>&-``), and then the first socket would get their number. Whoever reads
them may go away later: a closed terminal, ``| head``. What these processes say is for people; nobody there to read it is no failure.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

__all__ = ["open_closed_streams", "say_what_can_be_said"]


def open_closed_streams() -> None:
    """/dev/null in place of each standard descriptor that is closed. Before anything else is opened."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)


def say_what_can_be_said() -> None:
    """New ``sys.stdout`` and ``sys.stderr`` on descriptors 1 and 2: whole lines leave at once, and what cannot be written is dropped."""
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]


def _stream(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(_Unfailing(fd), encoding="utf-8", errors="backslashreplace", write_through=True)


class _Unfailing(io.RawIOBase):
    """A descriptor, not closed with this."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.name = fd
        self.mode = "wb"

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        left = memoryview(data).cast("B")
        size = len(left)
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._fd, left) :]
        return size
