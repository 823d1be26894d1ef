"""ExhaustDescriptors: a process cannot open another file or connection for a while."""

from __future__ import annotations

from rackrun.chaos.faults.fault_row import FaultRow, StrikeCost
from rackrun.chaos.faults.fault_types import WORKERS, BaseFault, Family, Subjects
from rackrun.chaos.faults.short_stops import is_short, shorter
from rackrun.chaos.faults.targets import AN_AGENT

__all__ = ["ROW", "ExhaustDescriptors"]


class ExhaustDescriptors(BaseFault, frozen=True, kw_only=True, tag="exhaust_descriptors"):
    """Opening a file, a socket or a pipe fails with EMFILE ("too many open files"), as in a process that leaks
    descriptors. What is open stays open."""

    family = Family.PROCESS
    strikes = (*WORKERS, Subjects.AGENT, Subjects.COORDINATOR)
    lasts = True
    for_s: float | None = None


def _cost(fault: ExhaustDescriptors, kind: Subjects) -> StrikeCost:
    safe = kind not in WORKERS and is_short(fault.for_s, on_workers=False)
    return StrikeCost.NOTHING if safe else StrikeCost.SUBJECTS


def _unsure(_: ExhaustDescriptors, kind: Subjects, alone: bool) -> str:
    if kind in WORKERS:
        return "the script may open files in a step, and end with OSError"
    return "" if alone else "nobody can join or be started meanwhile"


ROW = FaultRow(
    example=ExhaustDescriptors(),
    how="prlimit: no descriptor beyond those that are open",
    inject=lambda _, tools: tools.limit_descriptors(),
    simulate=None,
    cost=_cost,
    unsure=_unsure,
    justifies_loss=lambda _, lasted_s, on_workers: on_workers or not is_short(lasted_s, on_workers=False),
    draw=lambda d: (ExhaustDescriptors(for_s=d.choice([0.5, 2.0, 4.0])), AN_AGENT),
    simpler=lambda fault: [ExhaustDescriptors(for_s=for_s) for for_s in shorter(fault.for_s)],
)
