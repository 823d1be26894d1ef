"""Errors of GPUs, as reported by a fake driver that the job's agents load.

The fake driver is a library of our own; it works on the trays of a rack file.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.faults.fault_types import GpuFails, Xid
from rackrun.chaos.injectors.common.injection import CONFIRM_S, Missed, Outcome
from rackrun.chaos.plan.definition import FlipFlop, Inject, Plan, Swizzle, parts_of
from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack, FakeTray, Says, build
from rackrun.chaos.testbed.machine.undo_log import RestoreGpu, UndoLog
from rackrun.topology.health.xid_table import CATALOGUE
from rackrun.topology.model.rack_file import read_rack_file

__all__ = ["Reported", "driver_for", "driver_refusal", "said_with"]

_GPU_IS_LOST, _RESET = 15, 1
_FALLEN_OFF_THE_BUS = 79
_READINGS = 3
"""Readings to wait for: one under way, a whole one, and the beginning of the next, which shows that the whole one has
ended."""
_OF_RESETS = ("RESET_GPU", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR")
_SAYS: dict[str, dict[str, Says]] = {
    "lost": {"error": _GPU_IS_LOST},
    "reset": {"recovery_action": _RESET},
    "reboot": {"recovery_action": 2},
    "drain_p2p": {"recovery_action": 3},
    "row": {"remapped": {"2": 1}},
    "sram": {"sram_threshold": 1},
    "ecc": {"remapped": {"0": 1}},
    "link": {"link_state": {"11": 0}},
    "fabric": {"fabric_state": 2},
}
_REAL = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def said_with(fault: Xid | GpuFails) -> dict[str, Says]:
    """Return what the driver answers about the GPU as long as the fault is in force.

    For an Xid whose entry in the catalogue asks for a reset, the driver asks for one, too.
    """
    if isinstance(fault, GpuFails):
        return _SAYS[fault.says]
    entry = CATALOGUE.get(fault.code)
    if fault.code == _FALLEN_OFF_THE_BUS:
        return {"error": _GPU_IS_LOST}
    return {"recovery_action": _RESET} if entry is not None and entry.action in _OF_RESETS else {}


class Reported:
    """GPU errors reported by the fake driver.

    They have taken effect when each agent has seen them: it was given the Xid, and has read its GPUs once more from the
    beginning. An Xid that was reported stays known until the GPU is repaired; what the driver answers to queries is
    undone.
    """

    def __init__(self, rack: FakeRack, slots: Sequence[str], fault: Xid | GpuFails, undo: UndoLog) -> None:
        self._began_s, self._undo, self._what = time.monotonic(), undo, _called(fault)
        self._waits: list[tuple[str, FakeTray, int, int]] = []
        self._records: list[int] = []
        says = said_with(fault)
        for slot in slots:
            name, _, index = slot.partition("/")
            if name not in rack or int(index) >= rack.tray(name).gpus:
                raise Missed(f"the rack file has no GPU for {slot}")
            tray, gpu = rack.tray(name), int(index)
            self._records.append(undo.record(RestoreGpu(str(rack.path), name, gpu, tray.said(gpu, says))))
            tray.put(gpu, says)
            if isinstance(fault, Xid):
                tray.xid(gpu, fault.code)
            self._waits.append((slot, tray, tray.event_count, tray.readings + (_READINGS if says else 0)))

    def outcome(self) -> Outcome | None:
        blind = [
            slot for slot, tray, events, readings in self._waits if tray.delivered < events or tray.readings < readings
        ]
        if not blind:
            return Outcome(True, f"{self._what}: seen by the agent of {', '.join(slot for slot, *_ in self._waits)}")
        late = time.monotonic() - self._began_s > CONFIRM_S
        return Outcome(False, f"the agent of {', '.join(blind)} has not asked its driver") if late else None

    def take_back(self) -> None:
        for number in reversed(self._records):
            self._undo.heal(number)


def _called(fault: Xid | GpuFails) -> str:
    return f"Xid {fault.code}" if isinstance(fault, Xid) else fault.says


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
    strikes = [part.fault for part in parts_of(plan.plan) if isinstance(part, Inject | FlipFlop | Swizzle)]
    if not any(isinstance(fault, Xid | GpuFails) for fault in strikes):
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
