"""Return: a tray that was lost comes back."""

from __future__ import annotations

from rackrun.chaos.faults.fault_row import FaultRow, Need, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.targets import Last

__all__ = ["ROW", "Return"]


class Return(BaseFault, frozen=True, kw_only=True, tag="return"):
    """Not a fault: an agent is started again for a tray that was lost."""

    family = Family.HARDWARE
    strikes = (Subjects.TRAY,)


ROW = FaultRow(
    example=Return(),
    how="an agent is started for a tray that has none",
    inject=lambda _, tools: tools.start_agents(),
    needs=always(frozenset({Need.EXTRA_PROCESSES})),
    simulate=lambda _, strike: strike.switch_on(),
    cost=always(StrikeCost.NOTHING),
    justifies_loss=always(False),
    draw=lambda _: (Return(), Last(Subjects.TRAY)),
    variants={Profile.TRAY_RETURNS: lambda *_: [(Return(), Last(Subjects.TRAY))]},
)
