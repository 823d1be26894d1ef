"""The loss of every committed step and phase has the bits that it has without faults."""

from __future__ import annotations

from rackrun.chaos.evidence import Evidence, Verdict, gate_of

__all__ = ["judge"]


def judge(evidence: Evidence) -> Verdict:
    """Where it is to stop, of those that it came to."""
    trace, reference = evidence.trace, evidence.reference
    if trace.contradictions:
        return Verdict(holds=False, because=f"computed again, otherwise: {trace.contradictions[0]}")
    for at in sorted(reference.gates.keys() | trace.gates.keys()):
        mine, theirs = trace.gates.get(at), reference.gates.get(at)
        if mine is None and evidence.plan.expect == "stops":
            continue
        if mine is None or theirs is None:
            which = "never committed" if mine is None else "not there without faults"
            return Verdict(holds=False, because=f"step {at[0]}, phase {at[1]} was {which}")
        if mine[:8] != theirs[:8]:
            losses = f"{gate_of(mine).loss!r}, and {gate_of(theirs).loss!r} without faults"
            return Verdict(holds=False, because=f"the loss of step {at[0]}, phase {at[1]} is {losses}")
    return Verdict(holds=True, because=f"{len(trace.gates)} of {len(reference.gates)}, bit for bit")
