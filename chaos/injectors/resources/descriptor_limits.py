"""No more descriptors: the kernel refuses a process any number that is not in use now."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from rackrun.chaos.faults.strike_tools import StrikeOutcome
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import SetDescriptors, UndoLog

__all__ = ["WithoutDescriptors"]


class WithoutDescriptors:
    """Processes whose soft limit of open files is the lowest number that they do not use. The kernel gives out the
    lowest free number, so each further one is refused, and the higher ones stay open."""

    def __init__(self, processes: Sequence[Process], undo: UndoLog) -> None:
        self._undo, self._records, self._limits = undo, [], {}
        for process in processes:
            if not process.state:
                continue
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            self._records.append(undo.record(SetDescriptors(process, soft, hard)))
            self._limits[process] = limit = _lowest_free(process.pid)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, hard))

    def outcome(self) -> StrikeOutcome:
        if not self._limits:
            return StrikeOutcome(False, "gone already")
        told = ", ".join(f"{process.pid}: {limit}" for process, limit in self._limits.items())
        return StrikeOutcome(True, f"limit of descriptors, of process {told}")

    def take_back(self) -> None:
        for record in self._records:
            self._undo.heal(record)


def _lowest_free(pid: int) -> int:
    used = {int(name) for name in os.listdir(Path("/proc", str(pid), "fd"))}
    return next(number for number in count() if number not in used)
