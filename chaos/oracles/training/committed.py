"""Oracle: a committed step stays committed; no plan takes one back unless it says that all ranks roll back."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.protocol.ids import BEGIN, Position

__all__ = ["judge"]


def judge(evidence: RunEvidence) -> Verdict:
    """Judge the sequence of plans and gates."""
    trace = evidence.trace
    if not trace.plans:
        return Verdict(holds=None, because="the world was never formed")
    if trace.unpersisted:
        return Verdict(holds=False, because=f"{trace.unpersisted[0]} is not on disk, and was carried out")
    before, generation, backs = BEGIN, 0, 0
    for plan in trace.plans:
        name = f"generation {plan.generation}"
        if plan.generation <= generation:
            return Verdict(holds=False, because=f"{name} came after generation {generation}")
        again = generation > 0 and plan.committed == BEGIN
        if plan.committed < before and plan.rollback is None and not again:
            said = f"step {plan.committed.step}, and step {before.step} had been before"
            return Verdict(holds=False, because=f"{name} takes for committed only {said}")
        if plan.rollback is not None and Position(plan.rollback) > plan.committed:
            said = f"goes back to step {plan.rollback}, after the last that is committed ({plan.committed.step})"
            return Verdict(holds=False, because=f"{name} {said}")
        backs += again or plan.rollback is not None
        before, generation = (plan.committed if plan.rollback is None else Position(plan.rollback)), plan.generation
    steps = sorted({step for step, phase in trace.gates if not phase})
    missing = [step for step in range(steps[0], steps[-1]) if step not in steps] if steps else []
    if missing:
        return Verdict(holds=False, because=f"step {missing[0]} was passed over")
    return Verdict(holds=True, because=f"{len(trace.plans)} generations, {backs} of them went back as they said")
