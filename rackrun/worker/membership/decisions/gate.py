"""The gate of a unit: one small all-reduce over the world, from whose sums all ranks draw the same conclusions.

Besides what the unit computed, the sums show whether all ranks are at the same place: in the same unit, after the same
collectives. Collectives of one size that meet out of order do not fail. The ranks would compute with each other's wrong
tensors, and nothing else would show it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rackrun.errors import StepError
from rackrun.protocol.ids import Position, unit_text
from rackrun.worker.membership.decisions.gate_sums import GateSums

__all__ = ["CollectiveOrder", "Offer", "agreed", "complete", "elements", "offered"]

_FINGERPRINT_BITS = 20
"""Bits of a fingerprint. The sum of its square over 8,192 ranks is exact in a float64."""

_POINT_TO_POINT = {"send", "recv", "recv_anysource", "batch"}
_SAME_SIZE_EVERYWHERE = {"allreduce", "broadcast", "reduce", "_allgather_base", "_reduce_scatter_base"}


Offer = np.ndarray[Any, Any]
_HEADER_VALUES = 5
"""Number of values in an offer, and in the sum of all offers, before the `GateSums` (see `offered`)."""
_PLACES = {name: _HEADER_VALUES + place for place, name in enumerate(GateSums._fields) if name != "shared"}


class CollectiveOrder:
    """A fingerprint of the collectives called in a unit, in groups that hold the whole world. It must be the same on
    all ranks."""

    def __init__(self) -> None:
        self._crc = 0

    def begin_unit(self) -> None:
        """Start a new fingerprint."""
        self._crc = 0

    def add_collective(self, name: str, result: Any) -> None:
        """Add the collective ``name``. ``result``: its output, a tensor or a list of tensors, used where its size is
        the same on all ranks."""
        if name in _POINT_TO_POINT:
            return
        size = 0
        if name in _SAME_SIZE_EVERYWHERE:
            size = result.numel() if isinstance(result, torch.Tensor) else sum(map(torch.Tensor.numel, result))
        self.add(f"{name} {size}")

    def add(self, what: str) -> None:
        """Add any other text that must be the same on all ranks, such as the parameters that the next collective is
        for."""
        self._crc = zlib.crc32(what.encode(), self._crc)

    @property
    def fingerprint(self) -> int:
        """The fingerprint so far, an integer of 20 bits."""
        return self._crc >> (32 - _FINGERPRINT_BITS)


def elements(result: Any) -> int:
    """Return the number of elements in a collective's result: a tensor, or tensors nested in lists."""
    if isinstance(result, torch.Tensor):
        return result.numel()
    return sum(map(elements, result)) if isinstance(result, (list, tuple)) else 0


def offered(at: Position, order: CollectiveOrder, mine: GateSums, rank: int = 0, size: int = 1) -> Offer:
    """Return this rank's part of the gate's sum: 1-d, float64, with the values known before the device has computed the
    gradients. `complete` adds the others.

    ``mine.shared`` is this rank's alone. It gets a place of its own among those of all ranks, so that the sum of the
    offers holds the numbers of each.
    """
    mark = order.fingerprint
    width = len(mine.shared)
    shared = [0.0] * (width * size)
    shared[rank * width : (rank + 1) * width] = mine.shared
    return np.array([1.0, at.step, at.phase, mark, mark**2, *mine.scalars, *shared], dtype=np.float64)


def complete(offer: Offer, **known: float) -> None:
    """Set the `GateSums` fields in ``known``. This must be fast: the device is idle meanwhile."""
    for name, value in known.items():
        offer[_PLACES[name]] = value


def agreed(total: Sequence[float], size: int, at: Position) -> GateSums | None:
    """Return the sums in ``total``; None when not all ``size`` ranks are in it (a loopback).

    Raises `StepError`, on every rank alike, when the ranks were not all at ``at``, or did not call the same collectives
    on the way.
    """
    ranks, step, phase, mark, mark_squared, *sums = total
    if ranks != size:
        return None
    if (step, phase) != (size * at.step, size * at.phase):
        raise StepError(
            f"this rank is at the gate of {unit_text(at)}, and other ranks at that of another unit.",
            remedy="call the step function on every rank in every turn of the loop; if you do, please report this.",
        )
    if size * int(mark_squared) != int(mark) ** 2:  # equal only if all marks are (Cauchy and Schwarz)
        raise StepError(
            f"the ranks did not call the same collectives, in the same order, in {unit_text(at)}: what they have computed is not to be trusted.",
            remedy="let nothing that differs between ranks decide which collectives run, which run.stream is read, or what a learning-rate rule says; if nothing does, please report this.",
        )
    return GateSums.of(sums)
