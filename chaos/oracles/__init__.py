"""The oracles: each judges one aspect of a run as *true*, *false* or *unknown*."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rackrun.chaos.evidence.run_evidence import RunEvidence, Verdict
from rackrun.chaos.oracles.behaviour import (
    accounts,
    ending,
    leftovers,
    recovery_times,
    replayed,
    restraint,
    strikes,
    time,
)
from rackrun.chaos.oracles.training import committed, losses, rollback, samples, untracked, weights

__all__ = ["ORACLES", "judge", "overall"]

ORACLES: dict[str, Callable[[RunEvidence], Verdict]] = {
    "losses": losses.judge,
    "samples": samples.judge,
    "weights": weights.judge,
    "untracked": untracked.judge,
    "ending": ending.judge,
    "time": time.judge,
    "leftovers": leftovers.judge,
    "committed": committed.judge,
    "rollback": rollback.judge,
    "restraint": restraint.judge,
    "recovery_times": recovery_times.judge,
    "accounts": accounts.judge,
    "replayed": replayed.judge,
    "strikes": strikes.judge,
}


def judge(evidence: RunEvidence) -> list[Verdict]:
    """Return the verdict of every oracle about a run."""
    return [msgspec.structs.replace(of(evidence), oracle=name) for name, of in ORACLES.items()]


def overall(verdicts: list[Verdict]) -> bool | None:
    """Return False if any verdict is false, else None if any is unknown, else True."""
    if any(verdict.holds is False for verdict in verdicts):
        return False
    return None if any(verdict.holds is None for verdict in verdicts) else True
