"""Make the file calls of checkpoints fail, in the process that makes them.

``storage/NUMBER.json`` says which call fails and how, for all processes alike, for as long as the file exists. All
calls of durable checkpoints go through `rackrun.checkpoint.durable.storage.files.Files`; files that a script writes itself are
not affected. The hooks are installed by `rackrun.chaos.inprocess.inprocess_faults`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rackrun.chaos.faults.storage.disk_failure import DiskFails
from rackrun.checkpoint.durable.storage.files import Files

if TYPE_CHECKING:
    from rackrun.chaos.inprocess.inprocess_faults import FaultOrder, _Hooks

__all__ = ["BadFiles", "install_files"]

_CALLS = {"write": "write", "fsync": "fsync", "rename": "rename", "link": "rename", "pread": "read"}
"""Method of `Files` -> the call that a plan names. A file may get its name by a link, so that counts as a rename."""

_SLICE_S = 0.02


class BadFiles:
    """The file calls that fail now."""

    def __init__(self, hooks: _Hooks, folder: Path) -> None:
        self._hooks, self._folder = hooks, folder / "storage"
        self._folder.mkdir(exist_ok=True)
        self._told: set[int] = set()

    def strike(self, call: str, of: Callable[..., Any], files: Files, *args: Any) -> Any:
        """Call ``of(files, *args)`` with the faults that are in force for ``call``. Raises the ``OSError`` that the
        plan names."""
        for order in self._orders(call):
            assert isinstance(order.fault, DiskFails)
            if order.fault.error == "torn" and not _is_shard(args[0]):
                continue  # records are read back at once, from the page cache, where a torn one would still be whole
            if order.number not in self._told:
                self._told.add(order.number)
                self._hooks.tell(order, f"{call}: {order.fault.error}, first in process {os.getpid()}")
            match order.fault.error:
                case "slow":
                    until_s = time.monotonic() + order.fault.slow_s
                    while time.monotonic() < until_s and order in self._orders(call):
                        time.sleep(min(_SLICE_S, order.fault.slow_s))
                case "torn":
                    fd, data = args
                    half = len(data) // 2
                    of(files, fd, data[:half])
                    of(files, fd, memoryview(bytes(len(data) - half)))
                    return len(data)
                case name:
                    number = getattr(errno, name)
                    raise OSError(number, f"chaos: {os.strerror(number)}")
        return of(files, *args)

    def _orders(self, call: str) -> list[FaultOrder]:
        """Return the orders in force for this call."""
        from rackrun.chaos.inprocess.inprocess_faults import FaultOrder

        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                order = msgspec.json.decode(path.read_bytes(), type=FaultOrder)
            except FileNotFoundError:
                continue  # taken back meanwhile
            if isinstance(order.fault, DiskFails) and order.fault.call == call:
                found.append(order)
        return found


def install_files(hooks: _Hooks, folder: Path) -> None:
    """Hook the methods of `Files`."""
    bad = BadFiles(hooks, folder)
    for name, call in _CALLS.items():
        _hook(bad, name, call)


def _hook(bad: BadFiles, name: str, call: str) -> None:
    original = getattr(Files, name)

    def hooked(self: Files, *args: Any) -> Any:
        return bad.strike(call, original, self, *args)

    setattr(Files, name, hooked)


def _is_shard(fd: int) -> bool:
    return ".safetensors" in os.readlink(f"/proc/self/fd/{fd}")
