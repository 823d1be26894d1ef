"""The child process that calls NVML, and reports to its parent until the parent closes its standard input.

``python -m rackrun.topology.gpu_driver.nvml_child [--once] [--period-ms N]``. Each message on its standard output is a
length (4 bytes, little-endian) and msgpack of a `NvmlMessage`. An Xid is reported as it happens, a reading every period.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import sys

import msgspec

from rackrun.topology.gpu_driver.nvml import Nvml
from rackrun.topology.gpu_driver.readings import NvmlUnavailable, TrayReading, XidEvent

__all__ = ["NvmlMessage", "main"]

_PARENT = os.getppid()
_PR_SET_PDEATHSIG = 1
XIDS_MAX = 64
"""How many Xids are reported in a row before there is a reading again."""


class NvmlMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of a reading, an Xid, or the reason why NVML is not available."""

    reading: TrayReading | None = None
    xid: XidEvent | None = None
    unavailable: NvmlUnavailable | None = None


def main() -> None:
    """Report until the parent closes standard input or is gone; with ``--once``, report one reading."""
    parser = argparse.ArgumentParser(prog="nvml_child")
    parser.add_argument("--once", action="store_true", help="one reading, then end")
    parser.add_argument("--period-ms", type=int, default=500)
    options = parser.parse_args()
    # a process in a hanging call does not notice that its input was closed
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == _PARENT:
        nvml = Nvml.open()
        if isinstance(nvml, NvmlUnavailable):
            _send(NvmlMessage(unavailable=nvml))
            going = not options.once and _parent_waits(options.period_ms)
        else:
            going = _report(nvml, options.period_ms, once=options.once)
            nvml.close()
        if not going:
            return


def _report(nvml: Nvml, period_ms: int, *, once: bool) -> bool:
    """Report until the parent is gone (return False) or NVML has to be opened again (return True)."""
    while True:
        reading = nvml.read()
        if isinstance(reading, NvmlUnavailable):
            _send(NvmlMessage(unavailable=reading))
            return not once and _parent_waits(period_ms)
        _send(NvmlMessage(reading=reading))
        if once or not _parent_waits(0):
            return False
        if not nvml.listens:
            if not _parent_waits(period_ms):
                return False
            continue
        if not _tell_xids(nvml, period_ms):
            nvml.listen()
            if not _parent_waits(period_ms):
                return False


def _tell_xids(nvml: Nvml, timeout_ms: int) -> bool:
    """Report the Xids of one period, and those that follow at once. Return False when events cannot be waited for."""
    try:
        event = nvml.wait(timeout_ms)
        for _ in range(XIDS_MAX):
            if event is None:
                break
            _send(NvmlMessage(xid=event))
            event = nvml.wait(0)
    except nvml.errors:
        return False
    return True


def _parent_waits(timeout_ms: int) -> bool:
    """Wait ``timeout_ms``. Return False as soon as the parent has closed the input or is gone.

    The parent's end alone may not close the input: processes that it forked without exec hold the other end as well.
    """
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], timeout_ms / 1000)
    return not readable and os.getppid() == _PARENT


def _send(message: NvmlMessage) -> None:
    data = msgspec.msgpack.encode(message)
    frame = len(data).to_bytes(4, "little") + data
    while frame:
        frame = frame[os.write(sys.stdout.fileno(), frame) :]


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the parent is gone
        os._exit(0)
