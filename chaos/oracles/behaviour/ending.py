"""Oracle: the job ended as the plan expects, successfully or with a reason and a remedy."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.faults.processes.crash_at_point import CRASHED

__all__ = ["judge"]


def _late(evidence: RunEvidence) -> str:
    """Return the name of a fault that struck when only the end of the job was left, or ""."""
    late = [record.strike.fault for record in evidence.records if record.took and evidence.came_late(record)]
    return next((name_of(fault) for fault in late if fault.loses or fault.lasts), "")


def judge(evidence: RunEvidence) -> Verdict:
    """Judge the exit code and the result. A failure after the last commit is unknown, not false."""
    code, result = evidence.ended.exit_code, evidence.trace.result
    if code is None:
        return Verdict(holds=False, because="it did not end")
    said = f"exit code {code}" + (f": {result.because}" if result is not None and result.because else "")
    if result is not None and "contradicts itself" in result.because:
        return Verdict(holds=False, because=said)
    if code != 0 and evidence.plan.expect == "survives" and (late := _late(evidence)):
        return Verdict(holds=None, because=f"{said}; {late} came after the last commit")
    if evidence.plan.expect == "survives":
        return Verdict(holds=code == 0, because=said)
    if code == 0:
        missed = bool(evidence.nobody) or any(not record.took for record in evidence.records)
        said += "; it was to stop" + ", had all been struck that was to be" * missed
        return Verdict(holds=None if missed else False, because=said)
    if (code < 0 or code == CRASHED) and evidence.killed_coordinator:
        return Verdict(holds=True, because=f"{said}; the plan killed whoever could have said more")
    if result is None or not result.because or not (result.remedy or " Remedy: " in result.because):
        return Verdict(holds=False, because=f"{said}; it does not say why, and what to do")
    return Verdict(holds=True, because=said)
