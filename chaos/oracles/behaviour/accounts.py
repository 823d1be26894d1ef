"""Oracle: the times reported as productive, startup, recovery, redone, hold and other add up to the run's
length within 1%."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict

__all__ = ["judge"]

SHARE, ROUNDING_S = 0.01, 0.1


def judge(evidence: RunEvidence) -> Verdict:
    """Compare the sum of the reported times with the wall time, and the wall time with the harness's clock."""
    told = evidence.trace.goodput
    if told is None:
        return Verdict(holds=None, because="the journal has no report")
    parts = told.productive_s + told.startup_s + told.recovery_s + told.redone_s + told.hold_s + told.other_s
    allowed_s = SHARE * told.wall_s + ROUNDING_S
    if abs(parts - told.wall_s) > allowed_s:
        return Verdict(holds=False, because=f"the parts of {told.wall_s:.2f} s add up to {parts:.2f} s")
    if told.wall_s > evidence.ended.seconds + allowed_s:
        said = f"{told.wall_s:.2f} s by the journal, {evidence.ended.seconds:.2f} s by the clock"
        return Verdict(holds=False, because=said)
    return Verdict(holds=True, because=f"{told.wall_s:.1f} s, productive {told.productive_s:.1f} s")
