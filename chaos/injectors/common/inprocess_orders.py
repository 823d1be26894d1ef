"""Order a fault inside a process of the job.

The order is a file, which `rackrun.chaos.inprocess.inprocess_faults` takes up in that process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rackrun.chaos.faults.fault_types import BaseFault
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.injectors.common.injection import CONFIRM_S, StrikeOutcome
from rackrun.chaos.inprocess.inprocess_faults import FaultOrder, FaultReport
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import RemoveFile, UndoLog

__all__ = ["Ordered"]


class Ordered:
    """A fault ordered in each of ``processes``. It has taken effect when every process has reported that it begins."""

    def __init__(
        self,
        processes: Sequence[Process],
        number: int,
        fault: BaseFault,
        seed: int,
        inside: Path,
        undo: UndoLog,
    ) -> None:
        self._began_s, self._processes, self._undo = time.monotonic(), processes, undo
        self._done = [inside / "done" / f"{number}-{process.pid}.json" for process in processes]
        self._patience_s = None if row_of(fault).points(fault) else CONFIRM_S  # a point may never be reached
        self._records = []
        for process in processes:
            folder = inside / "orders" / str(process.pid)
            folder.mkdir(exist_ok=True)
            path = folder / f"{number}.json"
            self._records.append(undo.record(RemoveFile(str(path))))
            partial = path.with_suffix(".part")
            partial.write_bytes(msgspec.json.encode(FaultOrder(number, fault, seed)))
            partial.rename(path)

    def outcome(self) -> StrikeOutcome | None:
        if all(path.exists() for path in self._done):
            self._withdraw()
            told = [msgspec.json.decode(path.read_bytes(), type=FaultReport) for path in self._done]
            return StrikeOutcome(True, "; ".join(one.detail for one in told), min(one.at_s for one in told))
        gone = [p.pid for p, path in zip(self._processes, self._done, strict=True) if not p.state and not path.exists()]
        waited_s = time.monotonic() - self._began_s
        if gone:
            self._withdraw()
            return StrikeOutcome(False, f"process {gone[0]} was gone before it came to it")
        if self._patience_s is not None and waited_s > self._patience_s:
            self._withdraw()
            return StrikeOutcome(False, f"not come to within {waited_s:.0f} s")
        return None

    def take_back(self) -> None:
        self._withdraw()

    def _withdraw(self) -> None:
        for number in self._records:
            with contextlib.suppress(FileNotFoundError):
                self._undo.heal(number)
