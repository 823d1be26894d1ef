"""Oracle: no rank is given up that nothing has struck, or that was only slow, or stood still for less than a lease.

A rank that has taken over after a step gives itself up when all go back to a step before that: its process has not run
the steps that are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.chaos.faults.fault_types import WORKERS, Subjects
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.plan.conductor import StrikeRecord
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Incarnation, SlotId

__all__ = ["BUSY_S", "judge"]

BUSY_S = 0.3
"""If the harness itself was late by this many seconds, a pause was longer than planned."""


def judge(evidence: RunEvidence) -> Verdict:
    """Judge whether each lost rank had been struck by something that justifies giving it up."""
    excused: set[str] = set()
    for record in evidence.records:
        if _concerns_all(record):
            return Verdict(holds=True, because="what struck may concern everybody")
        if not _is_short(record):
            excused.update(evidence.places.get(record.strike.number, ()))
    excused |= _back_before_they_came(evidence.trace.plans)
    lost = [one for recovery in evidence.trace.recoveries for one in recovery.lost]
    wrong = [one for one in lost if one.slot not in excused]
    if wrong:
        said = (
            f"rank {wrong[0].rank} on {wrong[0].slot} was given up ({wrong[0].how}), and nothing had struck it for long"
        )
        if evidence.late_s > BUSY_S:
            return Verdict(holds=None, because=f"{said}; the machine stood still for {evidence.late_s:.1f} s")
        return Verdict(holds=False, because=said)
    return Verdict(holds=True, because=f"{len(lost)} ranks given up, all of them struck")


def _back_before_they_came(plans: Sequence[GenerationPlan]) -> set[SlotId]:
    """Return the slots of processes that had taken over after a later step than the one that all went back to."""
    came: dict[tuple[SlotId, Incarnation], int] = {}
    found: set[SlotId] = set()
    for plan in plans:
        at = plan.committed.step if plan.rollback is None else plan.rollback
        for member in plan.members:
            if at < came.setdefault((member.slot, member.incarnation), at) and plan.rollback is not None:
                found.add(member.slot)
            if plan.reshard is not None:
                came[member.slot, member.incarnation] = at  # it has entered main again
    return found


def _concerns_all(record: StrikeRecord) -> bool:
    """Whether a strike may justify the loss of any rank."""
    kinds = {subject.kind for subject in record.strike.subjects}
    fault = record.strike.fault
    return row_of(fault).endangers_all(fault) or (Subjects.COORDINATOR in kinds and not _is_short(record))


def _is_short(record: StrikeRecord) -> bool:
    """Whether the strike is no reason to give anybody up."""
    fault, kinds = record.strike.fault, {subject.kind for subject in record.strike.subjects}
    lasted_s = None if record.back_s is None else record.back_s - record.at_s
    return not row_of(fault).justifies_loss(fault, lasted_s, kinds <= {*WORKERS})
