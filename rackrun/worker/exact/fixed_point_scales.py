"""Defines how gradients become integers: the available bits, and the scale of every parameter.

There is one scale for each parameter, not one for every few elements. A finer scale gains the bits by which those
elements stay below the parameter's largest. But a row that becomes active (of an embedding, for a rare token) would
outgrow its scale, and the step would have to be done again every now and then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rackrun.errors import UsageError

__all__ = ["AttemptScales", "Scales", "BitBudget", "fit", "width_of"]

_RESOLUTION_BITS_MIN = 14
_DECAY = 0.9


@dataclass(frozen=True)
class BitBudget:
    """How the bits of a value are divided: ``headroom`` for growth from one step to the next, and a share for each
    shard of the rest."""

    dtype: torch.dtype
    container: torch.dtype
    """The float type of the same size, in which FSDP transports the integers."""
    bits: int
    headroom: int

    def of_a_shard(self, shards: int) -> int:
        """Return the bits for one shard's integers, such that no sum of ``shards`` of them can leave the range."""
        return self.bits - 2 - math.ceil(math.log2(shards))


_WIDTHS = {
    "exact": BitBudget(torch.int32, torch.float32, bits=32, headroom=3),
    "exact64": BitBudget(torch.int64, torch.float64, bits=64, headroom=16),
}


def width_of(reduction: str, shards: int) -> BitBudget | None:
    """Return the width for ``reduction``; None for ``"fast"`` and ``"none"``. Raises `UsageError` for an unknown value,
    and when ``shards`` leave too few bits for each."""
    if reduction in ("fast", "none"):
        return None
    width = _WIDTHS.get(reduction)
    if width is None:
        raise UsageError(
            f"reduction={reduction!r} is not known.", remedy='choose "fast", "exact", "exact64" or "none".'
        )
    if width.of_a_shard(shards) - width.headroom < _RESOLUTION_BITS_MIN:
        raise UsageError(
            f'reduction="{reduction}" leaves {width.of_a_shard(shards) - width.headroom} bits to each of {shards} micro-batches.',
            remedy='use reduction="exact64", or larger micro-batches.',
        )
    return width


class Scales:
    """The largest magnitude expected of each parameter's gradient, which decays. Tracked, so that it is restored with
    the rest."""

    def __init__(self, count: int) -> None:
        self.largest = torch.zeros(count)
        """fp32, by slot; 0 until a gradient other than 0 was seen."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the largest magnitudes, a tensor of shape (slots,) in fp32."""
        return {"largest": self.largest}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copy a `state_dict` in place. The number of slots must be the same."""
        self.largest.copy_(state["largest"])

    def seen(self, largest: torch.Tensor) -> None:
        """Update from a committed step. A gradient that was 0 throughout (an unused parameter) or not finite changes
        nothing."""
        told = largest.isfinite() & (largest > 0)
        self.largest.copy_(torch.where(told, torch.maximum(largest, self.largest * _DECAY), self.largest))


@dataclass(frozen=True)
class AttemptScales:
    """The scales of one attempt, which follow from the expected magnitudes."""

    limits: torch.Tensor
    """The largest magnitude that each gradient may have; beyond it the integers could leave their range."""
    scale: list[float]
    """A power of two for each parameter; 0 where there is no scale yet."""
    inverse: list[float]


def fit(expected: torch.Tensor, headroom: int, bits: int) -> AttemptScales:
    """Return the scales at which a gradient at its limit is an integer of ``bits`` bits."""
    exponents = torch.frexp(expected)[1].tolist()  # expected < 2**exponent
    known = (expected > 0).tolist()
    shifts = [min(max(bits - headroom - exponent, -126), 126) for exponent in exponents]
    limits = [math.ldexp(1.0, e + headroom) if known[i] else 0.0 for i, e in enumerate(exponents)]
    return AttemptScales(
        torch.tensor(limits, dtype=torch.float64).float(),
        [math.ldexp(1.0, shift) if known[i] else 0.0 for i, shift in enumerate(shifts)],
        [math.ldexp(1.0, -shift) for shift in shifts],
    )
