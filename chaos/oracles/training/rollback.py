"""Oracle: a rollback goes back no further than to the snapshots that must exist."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.chaos.faults.fault_types import Family

__all__ = ["INTERVALS", "judge"]

INTERVALS = 3
"""The most snapshot intervals of a rollback.

Two snapshots are kept; a third interval may be on its way to another tray when the first two are lost with theirs.
"""


def judge(evidence: RunEvidence) -> Verdict:
    """Judge the longest rollback by the plan's limit, or by the distance of the snapshots that the ranks reported.

    A rollback because of state found corrupt has no limit.
    """
    trace, excused = evidence.trace, _excused(evidence)
    backs = [
        (plan.committed.step - plan.rollback, plan)
        for plan in trace.plans
        if plan.rollback is not None and not plan.anew and plan.generation not in excused
    ]
    if not backs:
        return Verdict(holds=True, because="nobody went back")
    steps, plan = max(backs, key=lambda one: one[0])
    told = f"{steps} steps at the most, in generation {plan.generation}"
    limit, why = evidence.plan.rollback_max, "as the plan says"
    if limit is None and trace.snapshot_gap is not None:
        limit, why = INTERVALS * trace.snapshot_gap + 1, f"a snapshot every {trace.snapshot_gap} steps"
    if limit is None:
        return Verdict(holds=True, because=f"{told}; nobody has told of two snapshots, or of how far it may be")
    if steps > limit:
        said = (
            f"generation {plan.generation} goes back {steps} steps, from step {plan.committed.step} to {plan.rollback}"
        )
        return Verdict(holds=False, because=f"{said}; {limit} are right ({why})")
    return Verdict(holds=True, because=f"{told}; {limit} are right ({why})")


def _excused(evidence: RunEvidence) -> set[int]:
    """Return the generations that had to skip a snapshot because it was damaged."""
    flipped = any(record.strike.fault.family is Family.CORRUPTION and record.took for record in evidence.records)
    return {plan.generation for plan in evidence.trace.plans} if flipped else set(evidence.trace.damaged)
