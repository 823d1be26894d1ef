"""Duplicate: a second agent or coordinator is started beside the first."""

from __future__ import annotations

from rackrun.chaos.faults.fault_row import FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.targets import AN_AGENT, THE_COORDINATOR

__all__ = ["ROW", "Duplicate"]


class Duplicate(BaseFault, frozen=True, kw_only=True, tag="duplicate"):
    """A second process of the same kind is started beside the first."""

    family = Family.CONTROL
    strikes = (Subjects.COORDINATOR, Subjects.AGENT)
    lasts = True
    for_s: float | None = None


ROW = FaultRow(
    example=Duplicate(),
    how="another agent for a tray; another launcher on the same folder",
    inject=lambda _, tools: tools.start_duplicates(),
    needs=always(frozenset({Need.EXTRA_PROCESSES})),
    simulate=None,
    cost=always(StrikeCost.NOTHING),
    justifies_loss=always(False),
    draw=lambda d: (Duplicate(for_s=20.0), d.choice([THE_COORDINATOR, AN_AGENT])),
)
