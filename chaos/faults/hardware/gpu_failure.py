"""GpuFails: the driver of a GPU answers queries with an error or a bad state."""

from __future__ import annotations

from typing import Literal

from rackrun.chaos.faults.fault_row import FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.strike_tools import GpuReport
from rackrun.chaos.faults.targets import A_RANK

__all__ = ["ANSWERS", "ROW", "GpuFails", "report_of"]

ANSWERS: dict[str, dict[str, int | dict[str, int]]] = {
    "lost": {"error": 15},
    "reset": {"recovery_action": 1},
    "reboot": {"recovery_action": 2},
    "drain_p2p": {"recovery_action": 3},
    "row": {"remapped": {"2": 1}},
    "sram": {"sram_threshold": 1},
    "ecc": {"remapped": {"0": 1}},
    "link": {"link_state": {"11": 0}},
    "fabric": {"fabric_state": 2},
}
"""State of a GPU -> what its driver answers to queries about it."""


class GpuFails(BaseFault, frozen=True, kw_only=True, tag="gpu_fails"):
    """The GPU's driver answers queries about the GPU with an error or a bad state.

    ``lost``, ``reset``, ``reboot`` and ``drain_p2p`` are the driver's own words. ``row``: a remapped memory row waits
    for a reset. ``sram``: the SRAM has too many errors. ``ecc``: one error was corrected, which has no consequences.
    ``link``: an NVLink is down. ``fabric``: the GPU's registration with the fabric is gone.
    """

    family = Family.HARDWARE
    strikes = (Subjects.RANK, Subjects.SPARE)
    lasts = True
    says: Literal["lost", "reset", "reboot", "drain_p2p", "row", "sram", "ecc", "link", "fabric"]
    for_s: float | None = None


def report_of(fault: GpuFails) -> GpuReport:
    """Return what the driver reports."""
    return GpuReport(fault.says, ANSWERS[fault.says])


ROW = FaultRow(
    example=GpuFails(says="lost"),
    how="the same",
    inject=lambda fault, tools: tools.report_gpu(report_of(fault)),
    refusal=lambda _fault, _kind, machine: machine.without_driver(),
    needs=always(frozenset({Need.DRIVER})),
    simulate=None,
    cost=always(StrikeCost.SLOTS),
    justifies_loss=always(True),
    draw=lambda d: (
        GpuFails(says=d.choice(["lost", "reset", "reboot", "row", "sram", "ecc", "link"]), for_s=2.0),
        A_RANK,
    ),
)
