"""The kernel's log as it is written: ``/dev/kmsg``, from now on. It needs CAP_SYSLOG where kernel.dmesg_restrict is 1."""

from __future__ import annotations

import contextlib
import errno
import os

import msgspec

from rackrun.topology.gpu_driver.kernel_messages import KernelXid, parse_kmsg_record

__all__ = ["KernelLog", "KernelLogUnavailable"]

RECORD_MAX = 1 << 14


class KernelLogUnavailable(msgspec.Struct, frozen=True, kw_only=True):
    """Xids of the log are not seen; those that NVML reports are."""

    what: str
    remedy: str


class KernelLog:
    """``fileno()`` becomes readable when there is something for ``read()``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.missed = 0
        """Times that records were overwritten before they were read."""

    @classmethod
    def open(cls, path: str = "/dev/kmsg") -> KernelLog | KernelLogUnavailable:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            what = f"{path} cannot be read: {error.strerror}."
            return KernelLogUnavailable(what=what, remedy="give the agent CAP_SYSLOG, and the device in its container.")
        with contextlib.suppress(OSError):  # not every kind of file has an end
            os.lseek(fd, 0, os.SEEK_END)
        return cls(fd)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def read(self) -> list[KernelXid]:
        """All that was written since, as far as the driver reports errors with it. Never waits."""
        found = []
        while True:
            try:
                record = os.read(self._fd, RECORD_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten: the next read goes on with the oldest that is there
                    self.missed += 1
                    continue
                raise
            if not record:
                break
            xid = parse_kmsg_record(record.decode("utf-8", errors="backslashreplace"))
            if xid is not None:
                found.append(xid)
        return found
