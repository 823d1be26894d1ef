"""Oracle: the events of the journal, replayed through the core, give the coordinator's commands again, byte for
byte."""

from __future__ import annotations

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict

__all__ = ["judge"]


def judge(evidence: RunEvidence) -> Verdict:
    """Judge the result of the replay."""
    found = evidence.trace.replayed
    if found.unknown:
        return Verdict(holds=None, because=found.unknown)
    if found.difference:
        return Verdict(holds=False, because=found.difference)
    return Verdict(holds=True, because=f"{found.commands} commands after {found.events} events")
