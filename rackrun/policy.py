"""Types and functions for policies, which decide what to do after a failure.

Importable without torch; `docs/write_a_policy.md` explains policies.

``rackrun --policy module:function`` calls ``function(failure, view)`` with a `Failure` and a `ClusterView`, in a
process of its own. The function returns a `Decision`, or None to leave the decision to the default, within one second.
If it raises, returns another type or asks for something impossible, the default decides about that failure, and a
notice says so.

    >>> from rackrun.policy import ClusterView, Decision, Failure, Rank, Rung, SlotId, choose
    >>> failure = Failure(what="rank 3 lost (SIGKILL)", ranks=(Rank(3),), slots=(SlotId("tray-0/3"),))
    >>> view = ClusterView(world_size=4, usable_slots=5, takeovers={Rank(3): SlotId("tray-0/4")})
    >>> choose(failure, view).reason
    'swap: 4 x (2 s takeover + 1 s redone) = 12 GPU-s'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.checkpoint.base.deprecation import warn_renamed
from rackrun.core.policy.choice import choose, parse_rules, parse_weights, refusal
from rackrun.core.policy.rungs import options
from rackrun.protocol.ids import Rank, SlotId, TrayId
from rackrun.protocol.policy_types import (
    ClusterView,
    Costs,
    Decision,
    Failure,
    FailureCause,
    Option,
    Priors,
    ProviderNow,
    RankNow,
    Rules,
    Rung,
    SpareNow,
    TrayNow,
    Weights,
)

__all__ = [
    "ClusterView",
    "Costs",
    "Decision",
    "Failure",
    "Option",
    "Priors",
    "ProviderNow",
    "Rank",
    "RankNow",
    "Rules",
    "Rung",
    "SlotId",
    "SpareNow",
    "TrayId",
    "TrayNow",
    "Weights",
    "FailureCause",
    "choose",
    "options",
    "parse_rules",
    "parse_weights",
    "refusal",
]

if not TYPE_CHECKING:  # for a type checker there is no other name than those above

    def __getattr__(name: str) -> object:
        if name == "Whose":
            warn_renamed("rackrun.policy.Whose", "FailureCause")
            return FailureCause
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
