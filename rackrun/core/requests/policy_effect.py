"""What a change of policy does to the wait or the hold that is under way, for the operator who asks for it."""

from __future__ import annotations

import msgspec

from rackrun.core.policy.active_policy import ActivePolicy
from rackrun.core.policy.choice import choose
from rackrun.core.requests.pending_requests import RequestRefused
from rackrun.protocol.policy_types import ClusterView, Decision, Failure, Rung

__all__ = ["effect_of", "effect_unknown"]


def effect_of(
    policy: ActivePolicy, failure: Failure, view: ClusterView, decision: Decision, *, what: str, holds: bool
) -> str:
    """Return what becomes of the present wait under ``policy``, whose rules decide ``decision``.

    ``what``: how the policy was given. ``holds``: the wait is a hold. Raises `RequestRefused` if the job would end at
    once and the policy does not begin with ``stop``: who changes a policy wants the job to go on.
    """
    now = "hold" if holds else "wait"
    if policy.function:
        return f"{policy.function} is asked what becomes of the {now}"
    order = policy.rules.order
    match decision.rung:
        case Rung.STOP if order[:1] == (Rung.STOP,):
            return "the job ends now"
        case Rung.STOP:
            why = _passed(order, decision) or decision.reason
            raise RequestRefused(
                "policy",
                f"all ranks wait for hardware, and {what} would end the job at once ({why})",
                f"to go on waiting, name hold: rackctl policy {_with_hold(order)}; to end the job: rackctl stop.",
            )
        case Rung.HOLD:
            goes_on = "the hold goes on" if holds else "all ranks wait on, now without a deadline (hold)"
            passed = _passed(order[: order.index(Rung.HOLD)], decision)
            return f"{goes_on} ({passed})" if passed else goes_on
        case Rung.WAIT:
            over = msgspec.structs.replace(view, start_patience_s=0.0, repair_patience_s=0.0)
            then = choose(failure, over, policy.rules, policy.weights).rung
            after = "the job ends" if then is Rung.STOP else f"{then.value} follows"
            return f"all ranks wait for at most {decision.deadline_s:.0f} s from now, then {after}"
        case Rung.ACQUIRE if decision.meanwhile == "wait":
            waits = "the hold becomes a wait" if holds else "all ranks wait on,"
            return f"{waits} for a rack (acquire), for at most {decision.deadline_s:.0f} s from now"
        case _:
            return f"the {now} ends now, by {decision.rung.value}"


def effect_unknown(policy: ActivePolicy, *, what: str, holds: bool, within_s: float) -> str:
    """Return what becomes of the present wait where that is not known yet: a rank was condemned a moment ago, and it may
    leave the last copy of some state. ``within_s``: when it is known at the latest.

    Raises `RequestRefused` if the policy might end the job then, and does not begin with ``stop``.
    """
    now, order = "hold" if holds else "wait", policy.rules.order
    if policy.function or Rung.HOLD in order or order[:1] == (Rung.STOP,):
        return f"what becomes of the {now} is decided within {within_s:g} s, when it is known what the rank lost last leaves"
    raise RequestRefused(
        "early",
        f"a rank was lost a moment ago, and it is not known yet what it leaves: {what} might end the job",
        f"ask again in {within_s:g} s, or name hold: rackctl policy {_with_hold(order)}.",
    )


def _passed(order: tuple[Rung, ...], decision: Decision) -> str:
    """Return why the rungs of ``order`` are impossible. That no spare is ready to swap is why all ranks wait."""
    passed = [one for one in decision.options if one.rung in order and one.rung is not Rung.SWAP and not one.possible]
    return "; ".join(f"{one.rung.value}: {one.why_not}" for one in passed)


def _with_hold(order: tuple[Rung, ...]) -> str:
    """Return the order with ``hold`` as its last rung before ``stop``."""
    rungs = [rung for rung in order if rung not in (Rung.HOLD, Rung.STOP)] or [Rung.SWAP]
    rungs = rungs if Rung.SWAP in rungs else [Rung.SWAP, *rungs]
    return ",".join(rung.value for rung in [*rungs, Rung.HOLD])
