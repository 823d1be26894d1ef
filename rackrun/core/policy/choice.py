"""Choice of a rung: by the smallest expected loss or the user's order; and a check of the user's own decisions.

Pure and deterministic: the same failure, view, rules and weights give the same decision, with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rackrun.core.policy.rungs import options
from rackrun.errors import UsageError
from rackrun.protocol.policy_types import (
    ClusterView,
    Decision,
    Failure,
    FailureCause,
    Option,
    Priors,
    Rules,
    Rung,
    Weights,
)

__all__ = [
    "allows",
    "check_provider",
    "choose",
    "one_line",
    "only_answer",
    "parse_policy",
    "parse_rules",
    "parse_weights",
    "refusal",
    "settled",
]

REASON_MAX = 300
"""Longest user text in characters: a policy's own reason, or a description of its error."""
WAIT_S_MIN = 1.0
"""Shortest wait in seconds that a user's policy can set. After it the function is asked again."""
_MEANWHILE: dict[str, Literal["wait", "train"]] = {"acquire-wait": "wait", "acquire-train": "train"}
_STAND_STILL = (Rung.ACQUIRE, Rung.WAIT, Rung.RESTART)
"""Rungs for which all ranks stand still for long, so that people ask why the others do not train on."""
_REMEDY = f"give rungs in the order of your preference (swap,wait,restart,stop), or no-RUNG,..; rungs are {', '.join(r.value for r in Rung)}."


def parse_policy(text: str) -> tuple[Rules, str]:
    """Parse ``--policy``: return the rules, or the name of a function (``module:function``). Raises UsageError."""
    if ":" not in text:
        return parse_rules(text), ""
    function = text.strip()
    module, _, name = function.partition(":")
    if not module or not name or "," in function:
        raise UsageError(f"--policy {text!r} names no function.", remedy="give MODULE:FUNCTION, or a list of rungs.")
    return Rules(), function


def parse_rules(text: str) -> Rules:
    """Parse a list of rungs. Raises UsageError.

    ``swap,wait,restart``: in this order. ``no-restart``: the cheapest of all others. ``cheapest`` or "": the cheapest.
    ``acquire-wait`` and ``acquire-train``: ACQUIRE with that value of `Decision.meanwhile`.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words in ([], ["cheapest"]):
        return Rules()
    found: list[Rung] = []
    negative = [word for word in words if word.startswith("no-")]
    meanwhile: Literal["", "wait", "train"] = next((_MEANWHILE[word] for word in words if word in _MEANWHILE), "")
    for word in words:
        try:
            found.append(Rung.ACQUIRE if word in _MEANWHILE else Rung(word.removeprefix("no-")))
        except ValueError as error:
            raise UsageError(f"--policy {text!r}: there is no rung {word!r}.", remedy=_REMEDY) from error
    if negative and len(negative) < len(words):
        raise UsageError(f"--policy {text!r} mixes rungs with no-RUNG.", remedy=_REMEDY)
    if len(dict.fromkeys(found)) < len(found):
        raise UsageError(f"--policy {text!r} names a rung twice.", remedy=_REMEDY)
    if not negative and Rung.HOLD in found and Rung.SWAP not in found:
        raise UsageError(
            f"--policy {text!r} names hold without swap: a spare that is ready could not take over.",
            remedy="name swap too: swap,hold.",
        )
    if not negative:
        return Rules(order=tuple(found), meanwhile=meanwhile)
    if Rung.STOP in found:
        raise UsageError(f"--policy {text!r}: a job must be able to stop.", remedy="leave out no-stop.")
    return Rules(never=tuple(found))


def check_provider(rules: Rules, provider: str) -> None:
    """Raise UsageError if the rules name ACQUIRE and there is no provider."""
    if Rung.ACQUIRE in rules.order and not provider:
        raise UsageError(
            "--policy names acquire, and there is nobody who could give a rack.",
            remedy="give --provider, or leave acquire out.",
        )


def parse_weights(text: str) -> Weights:
    """Parse ``goodput=1,cost=0.5``; a weight that is not named keeps its default. Raises UsageError."""
    found: dict[str, float] = {}
    for word in (part.strip() for part in text.split(",") if part.strip()):
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in Weights.__struct_fields__ or not 0 <= number < float("inf") or name in found:
            raise UsageError(
                f"--policy-weights {text!r}: {word!r} cannot be a weight.",
                remedy="give goodput=, cost= and resilience= as numbers from 0, such as goodput=1,cost=0.5,resilience=2.",
            )
        found[name] = number
    return Weights(**found)


def choose(
    failure: Failure,
    view: ClusterView,
    rules: Rules | None = None,
    weights: Weights | None = None,
    priors: Priors | None = None,
) -> Decision:
    """Choose a rung for a failure. The script's own error stops the job, whatever the rules; a stop competes only with
    waiting for hardware."""
    rules = rules or Rules()
    found = options(failure, view, weights, priors, meanwhile=rules.meanwhile)
    if failure.whose is FailureCause.USER:
        return _decision(_of(found, Rung.STOP), f"the script's own error: {failure.what}", view, found, "default")
    weights = weights or Weights()
    if rules.order:
        return _first(rules, view, found, weights)
    allowed = [one for one in found if one.possible and allows(rules, one.rung)]
    going_on = [one for one in allowed if one.rung is not Rung.STOP]
    if not view.exact and any(not _resizes(one) and not _for_hardware(one, view) for one in going_on):
        acquires = any(one.meanwhile == "train" for one in going_on)
        still = options(failure, view, weights, priors, meanwhile="wait") if acquires else found
        going_on = [_of(still, one.rung) for one in going_on if one.rung is not Rung.SHRINK]  # the others keep bits
    only_hardware = all(_for_hardware(one, view) for one in going_on)
    best = _cheapest(allowed if only_hardware else going_on)
    others = [one for one in allowed if one.rung is not best.rung]
    passed_over = _passed_over(best, found, lambda one: _why_passed_over(one, view, rules))
    reason = _because(best, others, view, found, rules, weights)
    why_no_shrink = _of(found, Rung.SHRINK).why_not
    if why_no_shrink and failure.ranks and view.rollback_steps is not None and best.rung in _STAND_STILL:
        passed_over += f"; shrink is impossible: {why_no_shrink}"
    return _decision(best, reason + passed_over, view, found, "default")


def allows(rules: Rules, rung: Rung) -> bool:
    """Return whether the rules allow a rung at all."""
    if not rules.order:
        return rung not in rules.never and not rung.only_by_name
    return rung not in rules.never and rung in (*rules.order, Rung.ABSORB, Rung.STOP)


def only_answer(rung: Rung, why: str, failure: Failure, view: ClusterView | None) -> Decision:
    """Return the decision for a rung that is taken without a choice, with its figures. If ``view`` is None, its cost is
    unknown."""
    if view is None:
        return Decision(rung=rung, reason=f"{rung.value}: {why}", by="rule")
    found = options(failure, view)
    option = _of(found, rung)
    told = f" ({_sum(option, view, Weights())})" if option.possible else ""
    return _decision(option, f"{rung.value}: {why}{told}", view, found, "rule")


def refusal(decision: Decision, failure: Failure, view: ClusterView) -> str:
    """Return why a decision of the user's policy is impossible; "": it is possible."""
    wanted = _of(options(failure, view, meanwhile=decision.meanwhile), decision.rung)
    if not wanted.possible:
        return f"{decision.rung.value} is impossible: {wanted.why_not}"
    if decision.targets and decision.targets != view.takeovers | view.uprooted and decision.targets != view.takeovers:
        return "its targets are not those of the view, which are the only ones that are possible"
    if not 0 <= decision.deadline_s < float("inf"):
        return f"a deadline of {decision.deadline_s} s"
    return ""


def settled(
    decision: Decision,
    failure: Failure,
    view: ClusterView,
    weights: Weights | None = None,
    priors: Priors | None = None,
) -> Decision:
    """Complete a decision of the user's policy with the fields that it leaves open."""
    found = options(failure, view, weights, priors, meanwhile=decision.meanwhile)
    option = _of(found, decision.rung)
    reason = one_line(decision.reason) or "the user's policy says so"
    full = _decision(
        option, f"{_named(option)}: {reason} ({_sum(option, view, weights or Weights())})", view, found, "user"
    )
    deadline_s = min(max(decision.deadline_s, WAIT_S_MIN) if decision.deadline_s else full.deadline_s, full.deadline_s)
    return msgspec.structs.replace(full, deadline_s=deadline_s)


def one_line(text: str) -> str:
    """Return text from user code as one printable line of at most `REASON_MAX` characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:REASON_MAX]


def _first(rules: Rules, view: ClusterView, found: tuple[Option, ...], weights: Weights) -> Decision:
    order = list(rules.order)
    order = ([] if Rung.ABSORB in order else [Rung.ABSORB]) + order + ([] if Rung.STOP in order else [Rung.STOP])
    passed: list[str] = []
    for rung in order:
        option = _of(found, rung)
        if option.possible:
            told = f"{_named(option)}, by the order given: {_sum(option, view, weights)}"
            told += f"; before it {'; '.join(passed)}" if passed else ""
            told += _passed_over(option, found, lambda one: _why_later(one, rules))
            return _decision(option, told, view, found, "order")
        if rung is not Rung.ABSORB or rung in rules.order:
            passed.append(f"{rung.value}: {option.why_not}")
    raise AssertionError("a stop is always possible")


def _resizes(option: Option) -> bool:
    """Return whether the option makes the world smaller."""
    return option.rung is Rung.SHRINK or option.meanwhile == "train"


def _for_hardware(option: Option, view: ClusterView) -> bool:
    """Return whether all ranks would wait for hardware that has not come."""
    if option.rung is Rung.WAIT:
        return not view.comes_by_itself
    return option.meanwhile == "wait" and view.provider is not None and not view.provider.came


def _named(option: Option) -> str:
    return f"{option.rung.value}{', and train on' if option.meanwhile == 'train' else ''}"


def _cheapest(of: Sequence[Option]) -> Option:
    """Return the cheapest option; of equal ones the first, which is the lightest."""
    return min(of, key=lambda one: one.cost_gpu_s)


def _passed_over(best: Option, found: Sequence[Option], why: Callable[[Option], str]) -> str:
    """Return the possible rungs that would cost less than the best one, each with the reason why it was passed over.
    Nobody knows what a hold costs: all are named by which the job would not wait for spares."""
    unknown = best.rung is Rung.HOLD
    never = (Rung.HOLD, Rung.STOP, Rung.WAIT) if unknown else (Rung.HOLD, Rung.STOP)
    cheaper = [
        one
        for one in found
        if one.possible
        and one.rung not in never
        and (one.rung, one.meanwhile) != (best.rung, best.meanwhile)
        and (unknown or one.cost_gpu_s < best.cost_gpu_s)
    ]
    return "".join(f"; {_named(one)} would be {_number(one.cost_gpu_s)}, but {why(one)}" for one in cheaper)


def _why_passed_over(option: Option, view: ClusterView, rules: Rules) -> str:
    if option.rung in rules.never:
        return f"no-{option.rung.value} forbids it"
    if _resizes(option) and not view.exact:
        return 'a smaller world computes other bits (no reduction="exact"), and the job goes on without it'
    return "only its name in a policy leads to it"


def _why_later(option: Option, rules: Rules) -> str:
    return "it stands later in the order" if option.rung in rules.order else "the order does not name it"


def _because(
    best: Option,
    others: Sequence[Option],
    view: ClusterView,
    found: Sequence[Option],
    rules: Rules,
    weights: Weights,
) -> str:
    if best.rung is Rung.STOP and not others:
        whose: dict[str, list[str]] = {}
        for one in found:
            if one.rung is not Rung.STOP and not one.rung.only_by_name:
                whose.setdefault(one.why_not or "not allowed", []).append(one.rung.value)
        why = "; ".join(f"{', '.join(rungs)}: {obstacle}" for obstacle, rungs in whose.items())
        return f"stop: nothing else is possible{' and allowed' if rules.never else ''} ({why})"
    told = f"{_named(best)}: {_sum(best, view, weights)}"
    rest = [one for one in others if one.rung is not Rung.STOP or best.rung in (Rung.WAIT, Rung.ACQUIRE)]
    if rest := [one for one in rest if one.cost_gpu_s >= best.cost_gpu_s or one.rung is Rung.STOP]:
        second = _cheapest(rest)
        told += f"; {_named(second)} would be {_number(second.cost_gpu_s)}"
    return told


def _decision(option: Option, reason: str, view: ClusterView, found: tuple[Option, ...], by: str) -> Decision:
    targets = view.takeovers if option.rung in (Rung.SWAP, Rung.MOVE) else {}
    if option.rung is Rung.MOVE:
        targets = targets | view.uprooted
    deadline_s = 0.0
    if option.rung is Rung.WAIT:
        patience_s = view.start_patience_s if view.comes_by_itself else 0.0
        deadline_s = max(patience_s, view.repair_patience_s) - view.patience_used_s
    elif option.meanwhile == "wait" and view.provider is not None:
        deadline_s = view.provider.patience_s
    return Decision(
        rung=option.rung,
        reason=reason,
        targets=targets,
        deadline_s=deadline_s,
        meanwhile=option.meanwhile,
        cost_gpu_s=option.cost_gpu_s,
        figures=option.figures,
        options=found,
        by=by,
    )


def _of(found: Sequence[Option], rung: Rung) -> Option:
    return next(one for one in found if one.rung is rung)


def _sum(option: Option, view: ClusterView, weights: Weights) -> str:
    """Return the cost as text: ``8 x (1.5 s takeover + 0.4 s redone) + 1.15 exposure = 16.4 GPU-s``. A weight that is not
    1 stands before its terms, so that the sum can be computed again. Nobody knows what a hold costs."""
    if option.rung is Rung.HOLD:
        return "no deadline"
    figures = option.figures
    seconds = [f"{_number(value)} s {name[:-2]}" for name, value in figures.items() if not name.endswith("_gpu_s")]
    goodput = f"{view.world_size} x ({' + '.join(seconds) or 'nothing'})"
    missing, held = view.world_size - view.shrink_to, view.world_size + len(view.spares)
    if away := figures.get("away_gpu_s"):
        goodput += f" + {missing} x {_number(away / weights.goodput / missing)} s away"
        goodput = goodput if weights.goodput == 1 else f"({goodput})"
    terms = [_weighted(weights.goodput, goodput)]
    if paid := figures.get("paid_gpu_s"):
        terms.append(_weighted(weights.cost, f"{held} x {_number(paid / weights.cost / held)} s paid"))
    if exposure := figures.get("exposure_gpu_s"):
        terms.append(_weighted(weights.resilience, f"{_number(exposure / weights.resilience)} exposure"))
    return f"{' + '.join(terms)} = {_number(option.cost_gpu_s)} GPU-s"


def _weighted(weight: float, term: str) -> str:
    return term if weight == 1 else f"{weight:g} x {term}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
