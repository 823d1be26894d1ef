"""DiskFails: file calls on checkpoint storage fail, are slow, or write only half."""

from __future__ import annotations

from typing import Literal

from rackrun.chaos.faults.fault_row import FaultRow, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Machine
from rackrun.chaos.faults.targets import THE_STORAGE
from rackrun.chaos.faults.virtual_strike import CallFault, VirtualStrike

__all__ = ["CALLS", "ROW", "DiskFails"]

CALLS = {
    "write": ("EIO", "ENOSPC", "EROFS", "slow", "torn"),
    "fsync": ("EIO", "ENOSPC", "EROFS", "slow"),
    "rename": ("EIO", "ENOSPC", "EROFS", "slow"),
    "read": ("EIO", "slow"),
}
"""File call -> the errors with which it can end."""


class DiskFails(BaseFault, frozen=True, kw_only=True, tag="disk_fails"):
    """A file call on checkpoint storage fails: ``call`` ends with ``error``.

    With "slow" the call takes ``slow_s`` seconds longer, or until the fault is taken back. With "torn" only half of the
    data is written, and the call succeeds.
    """

    family = Family.STORAGE
    strikes = (Subjects.STORAGE,)
    lasts = True
    call: Literal["write", "fsync", "rename", "read"] = "fsync"
    error: Literal["EIO", "ENOSPC", "EROFS", "slow", "torn"] = "EIO"
    slow_s: float = 1.0
    for_s: float | None = None


def _refusal(fault: DiskFails, _kind: Subjects, _: Machine) -> Complaint | None:
    if fault.error in CALLS[fault.call]:
        return None
    return f"a {fault.call} does not end in {fault.error}", f"give one of {', '.join(CALLS[fault.call])}"


def _simulate(fault: DiskFails, strike: VirtualStrike) -> bool:
    strike.fail_calls(CallFault(fault.call, fault.error, fault.slow_s))
    return True


def _unsure(fault: DiskFails, _kind: Subjects, _: bool) -> str:
    if fault.error in ("torn", "slow") or fault.call == "read":
        return "it depends on whether a checkpoint is needed"
    return ""


ROW = FaultRow(
    example=DiskFails(),
    how="in the file calls of the workers that write and read checkpoints",
    inject=lambda fault, tools: tools.order_for_storage(fault),
    refusal=_refusal,
    simulate=_simulate,
    cost=always(StrikeCost.NOTHING),
    unsure=_unsure,
    justifies_loss=always(False),
    endangers_all=lambda fault: fault.call == "read",  # a rank cannot restore a checkpoint then
    draw=lambda d: (
        DiskFails(call=d.choice(["write", "fsync", "rename"]), error=d.choice(["EIO", "ENOSPC", "EROFS"]), for_s=1.0),
        THE_STORAGE,
    ),
    variants={
        Profile.DISK: lambda _, for_s: [
            (DiskFails(call="fsync", for_s=for_s), THE_STORAGE),
            (DiskFails(call="rename", error="EROFS", for_s=for_s), THE_STORAGE),
            (DiskFails(call="write", error="slow", slow_s=5.0, for_s=for_s), THE_STORAGE),
            (DiskFails(call="write", error="torn", for_s=for_s), THE_STORAGE),
            (DiskFails(call="read", for_s=for_s), THE_STORAGE),
        ],
        Profile.DAMAGED_CHECKPOINT: lambda *_: [(DiskFails(call="write", error="torn", for_s=20.0), THE_STORAGE)],
    },
)
