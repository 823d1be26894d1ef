"""Make the storage fail to which checkpoints are written."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec

from rackrun.chaos.faults.fault_types import BaseFault
from rackrun.chaos.injectors.common.injection import Missed, StrikeOutcome
from rackrun.chaos.inprocess.inprocess_faults import FaultOrder, FaultReport
from rackrun.chaos.testbed.job_under_test import JobUnderTest
from rackrun.chaos.testbed.machine.private_filesystem import SIZE_BYTES, set_size, sizes
from rackrun.chaos.testbed.machine.undo_log import RemoveFile, SetSize, UndoLog

__all__ = ["Failing", "Filled", "checkpoints_of"]

_PROBE_BYTES = 1 << 16


def checkpoints_of(job: JobUnderTest) -> Path:
    """Return the job's checkpoint directory. Raises `Missed` if the job is over or writes no checkpoints."""
    if job.over or job.checkpoints is None:
        raise Missed("the job is over, or it writes no checkpoints")
    return job.checkpoints


class Filled:
    """A full file system: its size is set to what is in it. It has taken effect when the kernel refuses to
    write more."""

    def __init__(self, path: Path, undo: UndoLog) -> None:
        self._undo, self._probe = undo, path / ".rackrun-chaos-probe"
        self._used = sizes(path)[1]
        self._record = undo.record(SetSize(str(path), SIZE_BYTES))  # undone to full size, even if it is full already
        set_size(path, None)

    def outcome(self) -> StrikeOutcome:
        try:
            self._probe.write_bytes(bytes(_PROBE_BYTES))
        except OSError as error:
            return StrikeOutcome(error.errno == errno.ENOSPC, f"{error.strerror}, with {self._used} bytes in it")
        finally:
            self._probe.unlink(missing_ok=True)
        return StrikeOutcome(False, "there is room still")

    def take_back(self) -> None:
        self._undo.heal(self._record)


class Failing:
    """Failing file calls. The order holds for every process that makes the call, and has taken effect when one has met
    it."""

    def __init__(self, fault: BaseFault, number: int, inside: Path, undo: UndoLog) -> None:
        self._undo, self._done, self._number = undo, inside / "done", number
        path = inside / "storage" / f"{number}.json"
        path.parent.mkdir(exist_ok=True)
        self._record = undo.record(RemoveFile(str(path)))
        partial = path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(FaultOrder(number, fault, 0)))
        partial.rename(path)

    def outcome(self) -> StrikeOutcome | None:
        for path in self._done.glob(f"{self._number}-*.json"):
            told = msgspec.json.decode(path.read_bytes(), type=FaultReport)
            return StrikeOutcome(True, told.detail, told.at_s)
        return None

    def take_back(self) -> None:
        self._undo.heal(self._record)
