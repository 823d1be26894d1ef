"""``batch="scale_lr"``: computes the factor for learning rates while the global batch is smaller than the full one.

The factor is a pure function of the batches of the steps so far. One that falls falls at once: the rule is there to
avoid a smaller batch with the old learning rate. One that rises may do so in steps (``warmup_steps``), because training
may diverge when a learning rate jumps up.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rackrun.errors import UsageError
from rackrun.worker.batch.batch_runs import BatchRun

__all__ = ["Mode", "Rule", "ScaleLR", "factor_at", "scaling"]

Rule: TypeAlias = Literal["linear", "sqrt"] | Callable[[int, int], float]

_RULES: dict[str, Callable[[int, int], float]] = {
    "linear": lambda batch, full_batch: batch / full_batch,
    "sqrt": lambda batch, full_batch: math.sqrt(batch / full_batch),
}
_FACTOR_MIN, _FACTOR_MAX = 1e-9, 100.0
_REMEDY = 'return a float, such as batch / full_batch; or use rule="linear" or "sqrt".'


@dataclass(frozen=True)
class ScaleLR:
    """Scale the global batch with the world, and learning rates with the batch.

    After a shrink every data-parallel rank keeps its micro-batches. So the global batch shrinks with the ranks, and the
    learning rates of all tracked optimizers are multiplied by a factor. Both grow again with the world.

    rule: ``"linear"``: batch / full batch (SGD; `Goyal et al. <https://arxiv.org/abs/1706.02677>`_). ``"sqrt"``: the
        square root of that (Adam and similar optimizers; `Malladi et al. <https://arxiv.org/abs/2205.10287>`_). Or a
        function of (batch, full batch), in samples: it must be pure, the same on all ranks, and return a number from
        1e-9 to 100.
    warmup_steps: the number of steps in which a rising factor reaches the rule's value, in equal parts. A falling
        factor falls at once.

    Raises `UsageError` for anything else.

    >>> ScaleLR("sqrt").factor(24, 32)
    0.8660254037844386
    """

    rule: Rule = "linear"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if not callable(self.rule) and self.rule not in tuple(_RULES):
            raise UsageError(
                f"rule={self.rule!r} is not known.",
                remedy='choose "linear", "sqrt" or a function of (batch, full_batch).',
            )
        steps = self.warmup_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise UsageError(f"warmup_steps={steps!r} is no number of steps.", remedy="give 0 or more.")

    @property
    def named(self) -> str:
        """The rule's name: ``linear``, ``sqrt``, or that of the user's function."""
        return getattr(self.rule, "__name__", repr(self.rule)) if callable(self.rule) else self.rule

    def factor(self, batch: int, full_batch: int) -> float:
        """Return the rule's factor for a batch of ``batch`` samples. Raises `UsageError` when the rule raises, or
        returns no valid factor."""
        rule = self.rule if callable(self.rule) else _RULES[self.rule]
        what = f"the learning-rate rule {self.named!r}, asked for a batch of {batch} of {full_batch} samples,"
        try:
            told = rule(batch, full_batch)
        except Exception as error:
            raise UsageError(f"{what} raised {type(error).__name__}: {error}", remedy=_REMEDY) from error
        if isinstance(told, bool) or not isinstance(told, numbers.Real):
            raise UsageError(f"{what} returned {told!r}, which is not a number.", remedy=_REMEDY)
        if not _FACTOR_MIN <= told <= _FACTOR_MAX:  # nor NaN
            raise UsageError(
                f"{what} returned {told!r}, which is not from {_FACTOR_MIN:g} to {_FACTOR_MAX:g}.", remedy=_REMEDY
            )
        return float(told)


Mode: TypeAlias = Literal["constant", "scale_lr"] | ScaleLR


def scaling(mode: Mode) -> ScaleLR | None:
    """Return the rule for ``mode``; None for a constant global batch. Raises `UsageError` for an unknown mode."""
    if isinstance(mode, ScaleLR):
        return mode
    if mode == "constant":
        return None
    if mode == "scale_lr":
        return ScaleLR()
    raise UsageError(f"batch={mode!r} is not known.", remedy='choose "constant", "scale_lr" or rackrun.ScaleLR(...).')


def factor_at(runs: Sequence[BatchRun], step: int, target: Callable[[int], float], warmup_steps: int) -> float:
    """Return the factor of ``step``. ``target``: returns the rule's factor for a number of micro-batches."""
    found = 0.0
    for at, (first, shards) in enumerate(runs):
        if first > step:
            break
        goal = target(shards)
        stop = min(runs[at + 1][0], step + 1) if at + 1 < len(runs) else step + 1
        risen = stop - first  # steps of this run up to `step`
        rises = at > 0 and goal > found and risen <= warmup_steps
        found = found + (goal - found) * risen / (warmup_steps + 1) if rises else goal
    return found
