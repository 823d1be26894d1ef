"""Oracle: nothing of the job outlives it, neither processes nor files, folders or control groups.

Ports, locks and anonymous memory end with the processes.
"""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict

__all__ = ["judge"]


def judge(evidence: RunEvidence) -> Verdict:
    """Judge what was found after the end; unknown if the job had to be killed."""
    if evidence.ended.exit_code is None:
        return Verdict(holds=None, because="it was killed, with all that it had started")
    left = evidence.ended.left
    return Verdict(holds=not left, because="; ".join(left) or "nothing")
