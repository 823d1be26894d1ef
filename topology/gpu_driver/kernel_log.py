"""Read new records of the kernel's log from ``/dev/kmsg``. Needs CAP_SYSLOG where kernel.dmesg_restrict is 1."""

from __future__ import annotations

import contextlib
import errno
import os

import msgspec

from rackrun.topology.gpu_driver.kernel_messages import KernelXid, parse_kmsg_record

__all__ = ["KernelLog", "KernelLogUnavailable"]

RECORD_MAX = 1 << 14


class KernelLogUnavailable(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's log cannot be read, so its Xids are not seen. Those that NVML reports are."""

    what: str
    remedy: str


class KernelLog:
    """The kernel's log from now on. ``fileno()`` becomes readable when ``read()`` has something to return."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.missed = 0
        """How often records were overwritten before they were read."""

    @classmethod
    def open(cls, path: str = "/dev/kmsg") -> KernelLog | KernelLogUnavailable:
        """Open the log at its end. Never raises: returns why it cannot be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            what = f"{path} cannot be read: {error.strerror}."
            return KernelLogUnavailable(what=what, remedy="give the agent CAP_SYSLOG, and the device in its container.")
        with contextlib.suppress(OSError):  # some kinds of file cannot seek
            os.lseek(fd, 0, os.SEEK_END)
        return cls(fd)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def read(self) -> list[KernelXid]:
        """Return the driver's errors in all records written since the last call. Never waits."""
        found = []
        while True:
            try:
                record = os.read(self._fd, RECORD_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                # overwritten: the next read continues with the oldest record that is left
                if error.errno == errno.EPIPE:
                    self.missed += 1
                    continue
                raise
            if not record:
                break
            xid = parse_kmsg_record(record.decode("utf-8", errors="backslashreplace"))
            if xid is not None:
                found.append(xid)
        return found
