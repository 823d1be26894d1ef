"""Oracle: every committed step counted the same samples as without faults, each once."""

from __future__ import annotations

from collections.abc import Mapping

from rackrun.chaos.evidence.run_evidence import RunEvidence, Trace, Verdict, gate_of
from rackrun.core.stragglers.shares import sharing

__all__ = ["judge"]


def judge(evidence: RunEvidence) -> Verdict:
    """Compare the gates, which hold the number of samples and a digest of their ids, and then the ledger.

    The ledger may be incomplete: it lacks what a rank reported to an agent that was lost at the same moment.
    """
    trace, reference, counted = evidence.trace, evidence.reference, 0
    for at, gate in sorted(trace.gates.items()):
        if at in reference.gates and gate[8:] != reference.gates[at][8:]:
            mine, theirs = gate_of(gate), gate_of(reference.gates[at])
            numbers = f"{mine.samples:.0f} samples, {theirs.samples:.0f} without faults"
            return Verdict(holds=False, because=f"step {at[0]} counted others: {numbers}")
    for step, by_rank in sorted(trace.samples.items()):
        ids = [sample for of in _of_group(trace, step, by_rank).values() for sample in of]
        counted += len(ids)
        twice = len(ids) - len(set(ids))
        if twice:
            return Verdict(holds=False, because=f"step {step} counted {twice} samples twice")
        expected = {sample for of in reference.samples.get(step, {}).values() for sample in of}
        if expected and not set(ids) <= expected:
            return Verdict(holds=False, because=f"step {step} counted samples that are not its own")
    if trace.gates and not any(gate_of(gate).samples for gate in trace.gates.values()):
        why = "no step counts any samples: what is not read by run.loader is in no ledger"
        return Verdict(holds=None, because=why)
    if not trace.samples and trace.gates:
        return Verdict(holds=None, because="the journal has no sample ids: leave out --ledger digest")
    return Verdict(holds=True, because=f"{counted} in {len(trace.gates)} gates, the same, each once")


def _of_group(trace: Trace, step: int, by_rank: Mapping[int, tuple[int, ...]]) -> Mapping[int, tuple[int, ...]]:
    """Return the samples of one of each group of ranks that have the same, such as a tensor-parallel group; of all that
    have others than the rest of their group."""
    world = next((size for begins, size in reversed(trace.sizes) if begins <= step), 0)
    of = dict(by_rank)
    for group in sharing(trace.axes, world):
        first = next((rank for rank in group if rank in of), None)
        for rank in group:
            if first is not None and rank != first and of.get(rank) == of[first]:
                del of[rank]
    return of
