"""Oracle: every strike of the plan was carried out and took effect; otherwise the run proves nothing."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.plan.definition import is_endless
from rackrun.protocol.ids import after_step

__all__ = ["judge"]


def judge(evidence: RunEvidence) -> Verdict:
    """Judge the records of the strikes. The verdict is true or unknown, never false."""
    missing = list(evidence.nobody)
    for record in evidence.records:
        if not record.took:
            whom = ", ".join(map(str, record.strike.subjects))
            why = record.detail or "nobody knows: the job ended first"
            missing.append(
                f"{name_of(record.strike.fault)} of {whom} {after_step(record.step)} did not take effect: {why}"
            )
    late = [record for record in evidence.records if record.took and evidence.came_late(record)]
    if late and evidence.plan.expect == "survives" and not is_endless(evidence.plan):
        named = name_of(late[0].strike.fault)
        missing.append(f"{named} came after the last commit: the training was over, and nothing was left to be lost")
    if evidence.undone:
        missing.append(evidence.undone)
    if not (missing or evidence.records):
        missing.append("nothing was struck")
    if missing:
        return Verdict(holds=None, because="; ".join(missing))
    return Verdict(holds=True, because=f"{len(evidence.records)} of {len(evidence.records)}")
