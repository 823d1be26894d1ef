"""Compute how a run would have ended with another cost or checkpoint interval, by arithmetic instead of simulation.

A cost changes how long each recovery or save takes, and has almost no influence on when hardware fails. So the
decisions of a run are kept, and the seconds that a cost accounts for are scaled. This leaves out a policy that would
choose another rung at the new price, and waits that end with a worker's start. `applies` says where it must not be
used.
"""

from __future__ import annotations

import msgspec

from rackrun.chaos.planner.analysis.simulation_case import Case, chosen_intervals
from rackrun.chaos.planner.model.job_state import Intervals
from rackrun.chaos.planner.model.outcome import FleetOutcome, TimeBreakdown

__all__ = ["applies", "resaved", "rescaled"]


def applies(cost: str, outcome: FleetOutcome) -> bool:
    """Whether `rescaled` may be used for ``cost``, a field of `PlanCosts`. Waits for spares depend on how fast workers
    start."""
    return not (cost == "start_s" and outcome.where.waiting > 0)


def rescaled(case: Case, outcome: FleetOutcome, cost: str, factor: float) -> FleetOutcome:
    """Return ``outcome`` of ``case`` with ``cost`` multiplied by ``factor``.

    Intervals that ``case`` does not give are chosen anew.
    """
    costs = msgspec.structs.replace(case.costs, **{cost: getattr(case.costs, cost) * factor})
    old = case.intervals or chosen_intervals(case)
    new = case.intervals or chosen_intervals(msgspec.structs.replace(case, costs=costs))
    where = outcome.where
    extra_s = outcome.charged.get(cost, 0.0) * (factor - 1)
    step_factor = factor if cost == "step_s" else 1.0
    saving_s, redone_s = _saving(case, outcome, old, new, step_factor)
    if cost in {"checkpoint_s", "snapshot_s"}:
        share = _checkpoint_share(case, old)
        share = share if cost == "checkpoint_s" else 1 - share
        saving_s *= 1 + share * (factor - 1)
    # A break loses half a step on average; the part of that which a save takes is left out.
    broken_s = where.broken * step_factor
    return _with(outcome, saving_s, redone_s, broken_s, extra_s)


def resaved(case: Case, outcome: FleetOutcome, intervals: Intervals) -> FleetOutcome:
    """Return ``outcome`` of ``case``, a run in which nothing went back to a save, with other ``intervals``."""
    assert not outcome.where.redone, "what is computed again depends on when the failures came"
    saving_s, redone_s = _saving(case, outcome, case.intervals or chosen_intervals(case), intervals, 1.0)
    return _with(outcome, saving_s, redone_s, outcome.where.broken, 0.0)


def _saving(
    case: Case, outcome: FleetOutcome, old: Intervals, new: Intervals, step_factor: float
) -> tuple[float, float]:
    """Return the seconds of saving, and of steps computed again, with the intervals ``new``.

    Intervals count steps, which take ``step_factor`` times as long as before.
    """
    where, share = outcome.where, _checkpoint_share(case, old)
    parts = ((share, old.checkpoint, new.checkpoint), (1 - share, old.snapshot, new.snapshot))
    saving_s = sum(where.saving * part * _ratio(before, after) / step_factor for part, before, after in parts)
    longer = _ratio(new.snapshot, old.snapshot) if old.snapshot else _ratio(new.checkpoint, old.checkpoint)
    return saving_s, where.redone * longer * step_factor


def _ratio(one: int, other: int) -> float:
    return one / other if other else 0.0


def _checkpoint_share(case: Case, intervals: Intervals) -> float:
    """Return the share of the time for saving that goes into checkpoints on disk; the rest goes into snapshots."""
    checkpoint = _ratio(1, intervals.checkpoint) * case.costs.checkpoint_s
    snapshot = _ratio(1, intervals.snapshot) * case.costs.snapshot_s
    return checkpoint / (checkpoint + snapshot) if checkpoint + snapshot else 1.0


def _with(outcome: FleetOutcome, saving_s: float, redone_s: float, broken_s: float, extra_s: float) -> FleetOutcome:
    """Return the outcome with these times. Time that is lost elsewhere is missing in training, and the other
    way round."""
    where = outcome.where
    extra_s += saving_s - where.saving + redone_s - where.redone + broken_s - where.broken
    training_s = where.productive + where.slowed + where.between
    kept = max(1 - extra_s / training_s, 0.0) if training_s else 0.0
    changed: TimeBreakdown = msgspec.structs.replace(
        where,
        productive=where.productive * kept,
        slowed=where.slowed * kept,
        between=where.between * kept,
        saving=saving_s,
        redone=redone_s,
        broken=broken_s,
        recovering=where.recovering
        + extra_s
        - (saving_s - where.saving)
        - (redone_s - where.redone)
        - (broken_s - where.broken),
    )
    return msgspec.structs.replace(outcome, where=changed)
