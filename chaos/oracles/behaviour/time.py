"""Oracle: the job ended within its time limit."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict

__all__ = ["judge"]


def judge(evidence: RunEvidence) -> Verdict:
    """Judge whether the job ended before it was killed."""
    ended = evidence.ended
    if ended.exit_code is None:
        return Verdict(holds=False, because=f"it still ran after {evidence.limit_s:.0f} s, and was killed")
    return Verdict(holds=True, because=f"{ended.seconds:.1f} s of {evidence.limit_s:.0f} s that it may take")
