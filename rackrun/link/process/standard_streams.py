"""Standard streams of launchers and agents: always open, and never a reason to exit.

Descriptors 0, 1 and 2 may be closed when a process starts (``2>&-``); then the first socket would get their number.
Their reader may go away later: a closed terminal, ``| head``. The output of these processes is for people, and a
missing reader is no failure.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

__all__ = ["open_closed_streams", "say_what_can_be_said"]


def open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard descriptor. Call it before anything else is opened."""
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
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that flush whole lines at once and drop what cannot be
    written."""
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]


def _stream(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(_Unfailing(fd), encoding="utf-8", errors="backslashreplace", write_through=True)


class _Unfailing(io.RawIOBase):
    """Raw stream on a descriptor that it does not close, and whose write errors it ignores."""

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
