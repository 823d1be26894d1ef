"""Nothing of the job outlives it: no process, and with these no port, lock or anonymous memory; no file, folder or control group either."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import Evidence, Verdict

__all__ = ["judge"]


def judge(evidence: Evidence) -> Verdict:
    if evidence.ended.exit_code is None:
        return Verdict(holds=None, because="it was killed, with all that it had started")
    left = evidence.ended.left
    return Verdict(holds=not left, because="; ".join(left) or "nothing")
