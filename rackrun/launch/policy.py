"""``--policy``, ``--policy-weights`` and ``--wait-for-hardware``, checked before anything is started."""

from __future__ import annotations

import msgspec

from rackrun.coordinator.policy_host import check
from rackrun.core.policy import parse_rules, parse_weights
from rackrun.core.situation import Rules, Weights
from rackrun.errors import UsageError

__all__ = ["Policy", "policy"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    rules: Rules = Rules()
    weights: Weights = Weights()
    function: str = ""
    """``module:function``; "": none."""
    repair_patience_ms: int = 0


def policy(what: str, weights: str, patience_s: float) -> Policy:
    """Raises UsageError. A function is loaded once, in a process of its own."""
    if not 0 <= patience_s < 1e7:
        raise UsageError(f"--wait-for-hardware {patience_s} is no time to wait.", remedy="give seconds, from 0.")
    function = what.strip() if ":" in what else ""
    if function:
        module, _, name = function.partition(":")
        if not module or not name or "," in function:
            raise UsageError(
                f"--policy {what!r} names no function.", remedy="give MODULE:FUNCTION, or a list of rungs."
            )
        check(function)
    return Policy(
        rules=Rules() if function else parse_rules(what),
        weights=parse_weights(weights),
        function=function,
        repair_patience_ms=int(patience_s * 1e3),
    )
