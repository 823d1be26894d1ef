"""Exhaust a process's memory: put it into a cgroup of its own, in which it then allocates until the kernel kills it.

Memory that the process had before is not counted in the cgroup, so the limit is a constant: only what it allocates from
then on counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rackrun.chaos.faults.processes.exhaust_memory import MEMORY_BYTES
from rackrun.chaos.injectors.common.injection import CONFIRM_S, Injected, StrikeOutcome
from rackrun.chaos.testbed.machine.cgroups import home_of, new_name, room_for
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import RemoveGroup, UndoLog

__all__ = ["Confined", "memory_here"]

_OLD, _NEW = ("memory.limit_in_bytes", "memory.oom_control"), ("memory.max", "memory.events")
_NO_SWAP = {"memory.swappiness": "0", "memory.memsw.limit_in_bytes": str(MEMORY_BYTES), "memory.swap.max": "0"}


class Confined:
    """A process that runs out of memory. It has taken effect when it is gone and the kernel has counted an OOM kill."""

    def __init__(self, process: Process, order: Callable[[], Injected], undo: UndoLog, above: Path) -> None:
        """``order`` tells the process to allocate; it is called once the process is in the cgroup ``above / NAME``."""
        self._process, self._undo = process, undo
        self._path = above / new_name()
        self._record = undo.record(RemoveGroup(str(self._path), str(home_of(process.pid, above))))
        self._path.mkdir()
        limit, events = _OLD if (self._path / _OLD[0]).exists() else _NEW
        (self._path / limit).write_text(str(MEMORY_BYTES))
        self._events = self._path / events
        for name, value in _NO_SWAP.items():
            with contextlib.suppress(OSError):  # each kernel has only some of these files
                if (self._path / name).exists():
                    (self._path / name).write_text(value)
        (self._path / "cgroup.procs").write_text(str(process.pid))
        self._began_s, self._order = time.monotonic(), order()

    def outcome(self) -> StrikeOutcome | None:
        told = self._order.outcome()
        if told is None:
            return None
        killed = next((line.split()[1] for line in self._events.read_text().splitlines() if "oom_kill " in line), "0")
        gone, late = not self._process.state, time.monotonic() - self._began_s > CONFIRM_S
        if told.took and not late and not (gone and killed != "0"):
            return None
        self._undo.heal(self._record)
        if not told.took:
            return told
        said = f"{told.detail}: {killed} killed at {MEMORY_BYTES >> 20} MiB more than before"
        return StrikeOutcome(gone and killed != "0", said if gone else f"{told.detail}, and lives on")

    def take_back(self) -> None:
        raise AssertionError("the dead stay dead")


def memory_here(pid: int) -> Path | None:
    """Return the cgroup below which one with a memory limit can be made for process ``pid``; None if that is impossible
    here."""
    return room_for(pid, "memory", _OLD, _NEW)
