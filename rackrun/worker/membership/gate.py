"""What the ranks bring to the gate of a unit, and what its one small all-reduce makes of it: sums, from which every rank
draws the same conclusions.

Besides what the unit computed, it tells whether the ranks are at the same place: the same unit, and the same collectives on
the way to it. Collectives of one size that meet out of order do not fail: the ranks compute with each other's wrong tensors,
and nothing else would show it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rackrun.errors import StepError
from rackrun.protocol.ids import Position

__all__ = ["CollectiveOrder", "GateSums", "Offer", "agreed", "complete", "elements", "offered"]

_FINGERPRINT_BITS = 20
"""Sums of its square over 8,192 ranks are exact in a float64."""

_POINT_TO_POINT = {"send", "recv", "recv_anysource", "batch"}
_SAME_SIZE_EVERYWHERE = {"allreduce", "broadcast", "reduce", "_allgather_base", "_reduce_scatter_base"}


class GateSums(NamedTuple):
    """Over all ranks."""

    loss: float
    samples: float
    ids_digest: float
    draining: float
    """Ranks that were told to end the run."""
    snapshot_cost_s: float
    step_s: float
    """Of each rank's median."""
    changed_late: float
    """Ranks whose buffers have changed after the gate before."""
    mirroring: float
    """Ranks whose last snapshot is still on its way to another tray."""
    mirrored: float
    """Ranks whose last snapshot that was to go there is there."""
    writing: float
    """Ranks whose last checkpoint is still being written."""
    cut_short: float
    """Ranks that have found the last checkpoint not whole, after a loss."""
    ahead: float
    """Ranks that have begun a later unit already, before a rollback."""
    pausing: float
    """Ranks that were told to pause for a planned swap."""
    dealt: float
    """Ranks that have heard of the next deal (`rackrun.worker.batch.share_changes`)."""
    not_finite: float
    """Ranks whose part of the loss is inf or NaN (``--nan-probation``)."""
    tried: float
    """Ranks that have computed this step before for that, or go on so."""
    parts: float = 0.0
    """Ranks that have seen a step go on, with collectives, after its first ``optimizer.step()`` (`rackrun.worker.steps.multi_part_steps`)."""
    torn: float = 0.0
    """Ranks that have found, doing the step again, that their state is not the one it began with."""
    stirred: float = 0.0
    """Ranks whose state had changed between the unit before and this one."""


Offer = np.ndarray[Any, Any]
_HEADER_VALUES = 5
"""In an offer, and in the sum of all, in front of the `GateSums`: see `offered`."""
_PLACES = {name: _HEADER_VALUES + place for place, name in enumerate(GateSums._fields)}


class CollectiveOrder:
    """A fingerprint of the collectives called in a unit, in those groups that hold the whole world."""

    def __init__(self) -> None:
        self._crc = 0

    def begin_unit(self) -> None:
        self._crc = 0

    def called(self, name: str, result: Any) -> None:
        """``result`` is what the collective gives: a tensor, or a list of tensors, where its size is the same on all ranks."""
        if name in _POINT_TO_POINT:
            return
        size = 0
        if name in _SAME_SIZE_EVERYWHERE:
            size = result.numel() if isinstance(result, torch.Tensor) else sum(tensor.numel() for tensor in result)
        self.add(f"{name} {size}")

    def add(self, what: str) -> None:
        """Something else that is to be the same: for which parameters the next collective is."""
        self._crc = zlib.crc32(what.encode(), self._crc)

    @property
    def fingerprint(self) -> int:
        return self._crc >> (32 - _FINGERPRINT_BITS)


def elements(result: Any) -> int:
    """How many a collective gives: in a tensor, or in tensors nested in lists."""
    if isinstance(result, torch.Tensor):
        return result.numel()
    return sum(map(elements, result)) if isinstance(result, (list, tuple)) else 0


def offered(at: Position, order: CollectiveOrder, mine: GateSums) -> Offer:
    """This rank's part of the sum, float64, as far as it is known before the device has computed the gradients; `complete` adds the rest."""
    mark = order.fingerprint
    return np.array([1.0, at.step, at.phase, mark, mark**2, *mine], dtype=np.float64)


def complete(offer: Offer, **known: float) -> None:
    """Fields of `GateSums` that are known now. It has to be quick: the device has nothing to do meanwhile."""
    for name, value in known.items():
        offer[_PLACES[name]] = value


def agreed(total: Sequence[float], size: int, at: Position) -> GateSums | None:
    """What is in ``total``; None when not all ``size`` ranks are in it (a loopback).

    Raises `StepError`, on every rank alike, when they were not all at ``at`` by the same collectives.
    """
    ranks, step, phase, mark, mark_squared, *sums = total
    if ranks != size:
        return None
    if (step, phase) != (size * at.step, size * at.phase):
        raise StepError(
            f"this rank is at the gate of {_named(at)}, and other ranks at that of another unit.",
            remedy="call the step function on every rank in every turn of the loop; if you do, please report this.",
        )
    if size * int(mark_squared) != int(mark) ** 2:  # equal only if all marks are (Cauchy and Schwarz)
        raise StepError(
            f"the ranks did not call the same collectives, in the same order, in {_named(at)}: what they have computed is not to be trusted.",
            remedy="let nothing that differs between ranks decide which collectives run, or what a learning-rate rule says; if nothing does, please report this.",
        )
    return GateSums(*sums)


def _named(at: Position) -> str:
    return f"step {at.step}" + (f", phase {at.phase}" if at.phase else "")
