"""Statistics over several seeds: the mean and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

import msgspec

__all__ = ["SeedMean", "spread_of"]

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 %, two-sided, by degrees of freedom from 1."""


class SeedMean(msgspec.Struct, frozen=True):
    """A mean over seeds."""

    mean: float
    half: float | None
    """Half of the interval in which the mean lies with 95 %; None for a single seed."""
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2%}" if self.half is None else f"{self.mean:.2%} ±{self.half:.2%}"


def spread_of(values: Sequence[float]) -> SeedMean:
    """Return the mean of independent runs, with its interval for a normal distribution."""
    count = len(values)
    if count < 2:
        return SeedMean(mean(values), None, count)
    freedom = count - 1
    factor = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
    return SeedMean(mean(values), factor * stdev(values) / math.sqrt(count), count)
