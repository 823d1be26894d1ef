"""Oracle: the loss of every committed step and phase has the same bits as without faults."""

from __future__ import annotations

import math

from rackrun.chaos.evidence.run_evidence import RunEvidence, Trace, Verdict, gate_of

__all__ = ["ROUNDING", "judge", "resized_because"]

ROUNDING = 1e-4
"""The relative tolerance for the first step of a world of another size, whose state has the same bits but whose sums
are rounded differently."""


def judge(evidence: RunEvidence) -> Verdict:
    """Compare the gates of all steps and phases with the reference.

    If the plan expects the job to stop, only the steps it reached are compared. If the number of ranks has changed and
    the same bits are not promised, the verdict is unknown from there on.
    """
    trace, reference = evidence.trace, evidence.reference
    if trace.contradictions:
        return Verdict(holds=False, because=f"computed again, otherwise: {trace.contradictions[0]}")
    resized, rounded = trace.resized if not trace.exact else None, False
    for at in sorted(reference.gates.keys() | trace.gates.keys()):
        mine, theirs = trace.gates.get(at), reference.gates.get(at)
        if mine is None and evidence.plan.expect == "stops":
            continue
        if mine is None or theirs is None:
            which = "never committed" if mine is None else "not there without faults"
            return Verdict(holds=False, because=f"step {at[0]}, phase {at[1]} was {which}")
        if mine[:8] == theirs[:8]:
            continue
        here, there = gate_of(mine).loss, gate_of(theirs).loss
        if resized is None or at[0] < resized[0] or (at[0] == resized[0] and not _near(here, there)):
            losses = f"{here!r}, and {there!r} without faults"
            return Verdict(holds=False, because=f"the loss of step {at[0]}, phase {at[1]} is {losses}")
        rounded = True
    if rounded:
        return Verdict(holds=None, because=f"bit for bit until then; {resized_because(trace)}")
    return Verdict(holds=True, because=f"{len(trace.gates)} of {len(reference.gates)}, bit for bit")


def resized_because(trace: Trace) -> str:
    """Return why the steps after a resize cannot be compared with the run without faults."""
    assert trace.resized is not None, "asked only where it was"
    step, ranks = trace.resized
    return f'from step {step} on it has {ranks} ranks instead of {trace.sizes[0][1]}, and reduction="fast" rounds sums over them otherwise'


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING) or (math.isnan(one) and math.isnan(other))
