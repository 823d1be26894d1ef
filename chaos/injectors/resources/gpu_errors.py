"""Errors of GPUs, as reported by a fake driver that the job's agents load.

The fake driver is a library of our own; it works on the trays of a rack file.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.faults.fault_row import Need
from rackrun.chaos.faults.strike_tools import GpuReport
from rackrun.chaos.faults.table.fault_table import needs_of
from rackrun.chaos.injectors.common.injection import CONFIRM_S, Missed, StrikeOutcome
from rackrun.chaos.plan.definition import Plan, faults_of
from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack, FakeTray, build
from rackrun.chaos.testbed.machine.undo_log import RestoreGpu, UndoLog
from rackrun.topology.model.rack_file import read_rack_file

__all__ = ["Reported", "driver_for", "driver_refusal"]

_READINGS = 3
"""Readings to wait for: one under way, a whole one, and the beginning of the next, which shows that the whole one has
ended."""
_REAL = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


class Reported:
    """GPU errors reported by the fake driver.

    They have taken effect when each agent has seen them: it was given the Xid, and has read its GPUs once more from the
    beginning. An Xid that was reported stays known until the GPU is repaired; what the driver answers to queries is
    undone.
    """

    def __init__(self, rack: FakeRack, slots: Sequence[str], report: GpuReport, undo: UndoLog) -> None:
        self._began_s, self._undo, self._what = time.monotonic(), undo, report.what
        self._waits: list[tuple[str, FakeTray, int, int]] = []
        self._records: list[int] = []
        says = dict(report.says)
        for slot in slots:
            name, _, index = slot.partition("/")
            if name not in rack or int(index) >= rack.tray(name).gpus:
                raise Missed(f"the rack file has no GPU for {slot}")
            tray, gpu = rack.tray(name), int(index)
            self._records.append(undo.record(RestoreGpu(str(rack.path), name, gpu, tray.said(gpu, says))))
            tray.put(gpu, says)
            if report.xid is not None:
                tray.xid(gpu, report.xid)
            self._waits.append((slot, tray, tray.event_count, tray.readings + (_READINGS if says else 0)))

    def outcome(self) -> StrikeOutcome | None:
        blind = [
            slot for slot, tray, events, readings in self._waits if tray.delivered < events or tray.readings < readings
        ]
        if not blind:
            return StrikeOutcome(
                True, f"{self._what}: seen by the agent of {', '.join(slot for slot, *_ in self._waits)}"
            )
        late = time.monotonic() - self._began_s > CONFIRM_S
        return StrikeOutcome(False, f"the agent of {', '.join(blind)} has not asked its driver") if late else None

    def take_back(self) -> None:
        for number in reversed(self._records):
            self._undo.heal(number)


def driver_refusal() -> tuple[str, str] | None:
    """Return why this machine cannot have a fake driver, and what to do about it; None if it can."""
    if any(path.exists() for path in _REAL):
        return "there is a real driver, which NCCL and CUDA need", "use a machine without GPUs"
    if shutil.which("gcc") is None:
        return (
            "the driver that tells of it has to be compiled, and there is no gcc",
            "install it (Debian: gcc libc6-dev)",
        )
    return None


def driver_for(plan: Plan, command: Sequence[str], folder: Path | None) -> tuple[FakeRack, dict[str, str]] | None:
    """Return the fake driver of the job's trays, and the environment in which its agents find it; None if none is
    needed.

    With a ``folder`` of None nothing is made: the call only checks that the driver can be made, and returns None.
    Raises `Unsupported` if the command names no rack file, and whatever `read_rack_file` raises.
    """
    if Need.DRIVER not in needs_of(faults_of(plan)):
        return None
    file = _rack_of(command)
    if not file:
        raise Unsupported(
            "no agent asks a driver for GPUs that nobody has described.", remedy="give the job a --rack FILE."
        )
    topology = read_rack_file(Path(file))
    if folder is None:
        return None
    rack = FakeRack.create(folder / "driver.state", topology)
    return rack, rack.environment(build(folder / "driver"))


def _rack_of(command: Sequence[str]) -> str:
    """Return the value of ``--rack`` in a command, or ""."""
    for index, word in enumerate(command):
        if word == "--rack":
            return "".join(command[index + 1 : index + 2])
        if word.startswith("--rack="):
            return word.partition("=")[2]
    return ""
