"""DiskFull: the file system of the checkpoints is full."""

from __future__ import annotations

from rackrun.chaos.faults.fault_row import FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Machine
from rackrun.chaos.faults.targets import THE_STORAGE
from rackrun.chaos.faults.virtual_strike import CallFault, VirtualStrike

__all__ = ["ROW", "DiskFull"]


class DiskFull(BaseFault, frozen=True, kw_only=True, tag="disk_full"):
    """The file system has no room for anything beyond what it holds already."""

    family = Family.STORAGE
    strikes = (Subjects.STORAGE,)
    lasts = True
    for_s: float | None = None


def _refusal(_: DiskFull, _kind: Subjects, machine: Machine) -> Complaint | None:
    if machine.has_private_files():
        return None
    return "no file system can be mounted for the job alone", "run as root, with mount and unshare"


def _simulate(_: DiskFull, strike: VirtualStrike) -> bool:
    strike.fail_calls(CallFault("write", "ENOSPC"))
    return True


ROW = FaultRow(
    example=DiskFull(),
    how="on a tmpfs that is mounted for the run",
    inject=lambda _, tools: tools.fill_disk(),
    refusal=_refusal,
    needs=always(frozenset({Need.DISK})),
    simulate=_simulate,
    cost=always(StrikeCost.NOTHING),
    justifies_loss=always(False),
    draw=lambda d: (DiskFull(for_s=d.choice([0.5, 2.0])), THE_STORAGE),
    variants={Profile.DISK: lambda _, for_s: [(DiskFull(for_s=for_s), THE_STORAGE)]},
)
