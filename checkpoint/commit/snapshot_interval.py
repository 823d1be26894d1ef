"""Choose how many steps apart snapshots are, from the cost of a snapshot and the failure rate. Pure.

It uses Young's first-order formula [Young 1974, Daly 2006]: with a cost of ``d`` seconds for each snapshot and ``M``
seconds between failures, the loss per second is ``d/t + t/(2 M)``, which is least at ``t = sqrt(2 d M)``. A failure
costs half an interval on average. Daly's correction is a factor of about ``1 + sqrt(d/(2 M))/3``, below 1 % wherever
``d/M`` is below a thousandth. The first order is used, and the interval never exceeds ``M`` itself, where the formula
would not hold.

The failure rate has a Gamma prior: ``prior_failures`` seen in ``prior_s`` seconds. So a job without failures is an
ordinary case, and the rate moves from the prior to the observed one as hours go by.

Bounds, in this order: at least the interval that keeps the overhead within ``overhead_max`` (1 %), at least the
caller's ``minimum``, and then, whatever those say, at most ``maximum``.

Rules:

* Every rank must compute the same number, or ranks snapshot different steps. So the inputs are *sums that all ranks
  have* (agreed over the control plane, integers in ns), and the arithmetic uses integers and fractions: no rounding
  differs between machines.
* The cost is the time that the caller waits, not the duration of the copy that overlaps with training.
* A job that fails in its first seconds has not seen its failure rate, and one slow snapshot has not measured the cost.
  So `due_early` adds snapshots at doubling distances after a start and after each recovery.
* Noise in the estimates must not move the interval: it changes only when the target differs by more than the fraction
  ``hysteresis``, or when a bound is broken.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import isqrt

import msgspec

from rackrun.checkpoint.base.errors import CheckpointError

__all__ = ["Interval", "IntervalPolicy", "ObservedCosts", "choose_interval", "due_early"]

NS = 10**9
_EARLY_SHARE = Fraction(1, 20)
"""The largest share of the time since the snapshot before that an early one may cost."""
_EARLY_ALWAYS = 4
"""Up to so many steps an early snapshot is taken whatever it costs, so that the cost is measured more than once."""


class ObservedCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the job so far, the same on every rank. Times are in ns."""

    steps: int
    step_ns: int
    """Total time of ``steps`` steps, without snapshots."""
    snapshots: int
    snapshot_ns: int
    """Total time that the caller waited for ``snapshots`` snapshots."""
    run_ns: int
    """Wall time of the job, over all its starts."""
    failures: int


class IntervalPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and priors of the interval."""

    overhead_max: float = 0.01
    """The largest share of the step time to spend on snapshots."""
    minimum: int = 1
    maximum: int = 10_000
    """Steps; not below ``minimum``. It wins over ``overhead_max``."""
    prior_failures: float = 1.0
    prior_s: float = 24 * 3600.0
    """With ``prior_failures``: one failure a day, until the job has measured its own rate."""
    hysteresis: float = 0.25

    def __post_init__(self) -> None:
        wrong = [
            name
            for name, fine in (
                ("overhead_max", 0 < self.overhead_max <= 1),
                ("minimum", self.minimum >= 1),
                ("maximum", self.maximum >= self.minimum),
                ("prior_failures", 0 < self.prior_failures < float("inf")),
                ("prior_s", 0 < self.prior_s < float("inf")),
                ("hysteresis", 0 <= self.hysteresis < 1),
            )
            if not fine
        ]
        if wrong:
            raise CheckpointError(
                f"the interval's {', '.join(wrong)} cannot be used: {self}.",
                remedy="Overhead in (0, 1], 1 <= minimum <= maximum, a positive and finite prior, hysteresis in [0, 1).",
            )


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Steps from one snapshot to the next, and the reason for that number."""

    steps: int
    reason: str


def choose_interval(observed: ObservedCosts, policy: IntervalPolicy, current: int | None = None) -> Interval:
    """Return the interval from here on. ``current``: the interval in use, for the hysteresis; None for none.

    Raises CheckpointError when a sum is negative or ``current`` is below 1.
    """
    _check(observed, current)
    if not observed.steps or not observed.snapshots or not observed.step_ns:
        return Interval(steps=current or policy.minimum, reason="nothing is measured yet")
    step = Fraction(observed.step_ns, observed.steps)
    cost = Fraction(observed.snapshot_ns, observed.snapshots)
    mtbf = mtbf_ns(observed, policy)
    best = _ceil_sqrt(2 * cost * mtbf / step**2)
    best = min(best, max(1, mtbf // step))
    cheap = _ceil(cost / (step * _exact(policy.overhead_max)))

    low = max(policy.minimum, cheap, 1)
    if low > policy.maximum:
        return Interval(steps=policy.maximum, reason=f"maximum; {cheap} would keep the overhead")
    target = min(max(best, low), policy.maximum)
    if current is not None and low <= current <= policy.maximum:
        slack = _exact(policy.hysteresis)
        if abs(target - current) <= current * slack:
            return Interval(steps=current, reason=f"kept: {target} is near")
    if target == best:
        reason = f"Young: cost {_ms(cost)} ms, step {_ms(step)} ms, MTBF {int(mtbf / NS)} s"
    elif target == policy.maximum:
        reason = "maximum"
    else:
        reason = "overhead bound" if cheap >= policy.minimum else "minimum"
    return Interval(steps=target, reason=reason)


def due_early(observed: ObservedCosts, since: int) -> bool:
    """Whether a snapshot is due ``since`` steps after the start or the last recovery, though the interval is not over.

    It is due after 1, 2, 4, 8 ... steps, so a failure costs at most half of the steps since then. Where a snapshot
    costs more than a twentieth of the time since the one before, it is left out.
    """
    if since < 1 or since & (since - 1):
        return False
    if since <= _EARLY_ALWAYS:
        return True
    cost = Fraction(observed.snapshot_ns, max(observed.snapshots, 1))
    return cost <= _EARLY_SHARE * (since // 2) * Fraction(observed.step_ns, max(observed.steps, 1))


def mtbf_ns(observed: ObservedCosts, policy: IntervalPolicy) -> Fraction:
    """Return the mean time between failures in ns, by the posterior mean of the failure rate.

    It is (prior time + run time) / (prior failures + failures).
    """
    prior_ns = _exact(policy.prior_s) * NS
    prior_failures = _exact(policy.prior_failures)
    return (prior_ns + observed.run_ns) / (prior_failures + observed.failures)


def _check(observed: ObservedCosts, current: int | None) -> None:
    if min(msgspec.structs.astuple(observed)) < 0 or (current is not None and current < 1):
        raise CheckpointError(
            f"measured sums and the interval in use cannot be negative: {observed}, {current}.",
            remedy="Sum durations of a monotonic clock.",
        )


@cache
def _exact(setting: float) -> Fraction:
    """Return a policy's setting as a fraction. They are few, and a step asks for the interval."""
    return Fraction(setting).limit_denominator(10**6)


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _ceil_sqrt(value: Fraction) -> int:
    """Return the least integer whose square is at least ``value``."""
    whole = _ceil(value)
    root = isqrt(whole)
    return root if root * root == whole else root + 1


def _ms(ns: Fraction) -> str:
    tenths = round(ns / 10**5)
    return f"{tenths // 10}.{tenths % 10}"
