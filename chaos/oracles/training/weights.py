"""Oracle: at its end every rank had the same state as without faults, bit for bit.

The state is parameters, buffers, optimizers and schedulers.
"""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.chaos.oracles.training.losses import resized_because

__all__ = ["judge"]


def judge(evidence: RunEvidence) -> Verdict:
    """Compare the digests of the ranks' state at the end."""
    if evidence.plan.expect == "stops":
        return Verdict(holds=True, because="it was to stop: there are none")
    mine, theirs = evidence.trace.held, evidence.reference.held
    if not theirs:
        return Verdict(holds=None, because="no rank of the run without faults came to its end")
    same = set(theirs.values())
    if mine.keys() != theirs.keys() and not (mine and len(same) == 1):  # equal ranks: one is enough
        missing = ", ".join(sorted(theirs.keys() - mine.keys(), key=int)) or "none"
        return Verdict(
            holds=None, because=f"{len(mine)} ranks at the end, {len(theirs)} without faults; missing: {missing}"
        )
    other = sorted((rank for rank in mine if mine[rank] != theirs.get(rank, min(same))), key=int)
    if other and evidence.trace.resized is not None and not evidence.trace.exact:
        if len(same) == 1 and len(set(mine.values())) > 1:
            return Verdict(holds=False, because="replicas do not hold the same any more")
        return Verdict(holds=None, because=resized_because(evidence.trace))
    if other:
        return Verdict(holds=False, because=f"rank {', '.join(other)} held something else")
    return Verdict(holds=True, because=f"{len(mine)} ranks, bit for bit")
