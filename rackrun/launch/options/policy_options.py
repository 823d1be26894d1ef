"""Parsing and checks of ``--policy``, ``--policy-weights`` and ``--wait-for-hardware``."""

from __future__ import annotations

import msgspec

from rackrun.coordinator.user_code.policy_host import check
from rackrun.core.policy.choice import parse_policy, parse_weights
from rackrun.errors import UsageError
from rackrun.protocol.policy_types import Rules, Weights

__all__ = ["PolicyOptions", "policy"]


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The policy options."""

    rules: Rules = Rules()
    weights: Weights = Weights()
    function: str = ""
    """``module:function``; "": none."""
    repair_patience_ms: int = 0


def policy(what: str, weights: str, patience_s: float) -> PolicyOptions:
    """Return the policy options. A function is loaded once, in a process of its own. Raises UsageError."""
    if not 0 <= patience_s < 1e7:
        raise UsageError(f"--wait-for-hardware {patience_s} is no time to wait.", remedy="give seconds, from 0.")
    rules, function = parse_policy(what)
    if function:
        check(function)
    return PolicyOptions(
        rules=rules,
        weights=parse_weights(weights),
        function=function,
        repair_patience_ms=int(patience_s * 1e3),
    )
