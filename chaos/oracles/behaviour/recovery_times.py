"""Oracle: every loss was noticed, decided about and recovered from within a time that a working machine keeps."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.chaos.faults.fault_row import StrikeCost
from rackrun.chaos.faults.fault_types import Family, Subjects
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.oracles.behaviour.restraint import BUSY_S
from rackrun.chaos.plan.conductor import StrikeRecord
from rackrun.coordinator.observe.recoveries import RecoveryRecord

__all__ = ["DECIDE_CUT_OFF_S", "DECIDE_S", "DETECT_S", "GOOD_STEP_S", "judge"]

DETECT_S = 10.0
"""Seconds from a kill to its first notice. A hang is seen when its step is late, a time that only the script knows."""
DECIDE_S = 20.0
"""Seconds from the notice to a plan. It may take longer where all wait for a worker to start."""
DECIDE_CUT_OFF_S = 75.0
"""The same where the network was cut.

Two handshakes of 20 s and a lease of 15 s pass before it is known which side is cut off.
"""
GOOD_STEP_S = 60.0
"""Seconds from the plan until every rank has committed a step."""


def judge(evidence: RunEvidence) -> Verdict:
    """Judge the times of all recoveries.

    The limits are generous: they find a recovery that hangs on a timeout, not one that is slow.
    """
    cut = any(record.strike.fault.family is Family.NETWORK for record in evidence.records)
    decide_s = DECIDE_CUT_OFF_S if cut else DECIDE_S
    found = [text for one in evidence.trace.recoveries if (text := _too_long(one, decide_s))]
    slowest = max((one.seconds or 0.0 for one in evidence.trace.recoveries), default=0.0)
    detect = [seconds for record in evidence.records if (seconds := _detected(record, evidence)) is not None]
    found += [f"a kill was noticed after {seconds:.1f} s" for seconds in detect if seconds > DETECT_S]
    if found:
        if evidence.late_s > BUSY_S:
            return Verdict(holds=None, because=f"{found[0]}; the machine stood still for {evidence.late_s:.1f} s")
        return Verdict(holds=False, because=found[0])
    noticed = f", noticed within {max(detect):.2f} s" if detect else ""
    return Verdict(
        holds=True, because=f"{len(evidence.trace.recoveries)} recoveries, {slowest:.2f} s at the most{noticed}"
    )


def _too_long(recovery: RecoveryRecord, decide_s: float) -> str:
    """Return which stage of a recovery took too long, or ""."""
    name = f"generation {recovery.generation}"
    waits = {"wait", "hold", "acquire", "restart"} & set(recovery.rungs) or recovery.planned
    if recovery.plan_ms is None or recovery.overtaken:
        return ""
    decided_s = (recovery.plan_ms - recovery.fault_ms) / 1e3
    if decided_s > decide_s and not waits:
        return f"{name} was planned after {decided_s:.1f} s"
    if recovery.committed_ms is None or "restart" in recovery.rungs:
        return ""
    good_s = (recovery.committed_ms - recovery.plan_ms) / 1e3
    return f"{name} committed its first step after {good_s:.1f} s" if good_s > GOOD_STEP_S else ""


def _detected(record: StrikeRecord, evidence: RunEvidence) -> float | None:
    """Return the seconds from the kill of a rank to its notice.

    Returns None if the strike was no such kill, or the loss was never reported; the job may have been over.
    """
    kinds = {subject.kind for subject in record.strike.subjects}
    began_s, coordinator_s = evidence.began_wall_s, evidence.trace.began_wall_s
    fault = record.strike.fault
    at_once = row_of(fault).cost(fault, Subjects.RANK) is StrikeCost.SUBJECTS_AT_ONCE
    if not (at_once and kinds == {Subjects.RANK} and record.took):
        return None
    if began_s is None or coordinator_s is None:
        return None
    struck_ms = (began_s + record.at_s - coordinator_s) * 1e3
    slots = evidence.places.get(record.strike.number, ())
    noticed = [
        recovery.fault_ms
        for recovery in evidence.trace.recoveries
        if recovery.fault_ms > struck_ms - 1e3 * BUSY_S and {one.slot for one in recovery.lost} & set(slots)
    ]
    return max(0.0, (min(noticed) - struck_ms) / 1e3) if noticed else None
