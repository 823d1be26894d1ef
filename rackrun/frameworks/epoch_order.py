"""The samples of every step, in the order in which a stock trainer would deliver them: what all trainers share.

An epoch is a list of micro-batches for each rank, and a step uses the next few of them. rackrun deals a step's
micro-batches in contiguous parts, so they are numbered rank by rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from rackrun.worker.data.rng import undrawn

__all__ = ["EpochOrder"]

T = TypeVar("T")


class EpochOrder(ABC):
    """The order of one run; a `rackrun.worker.data.loader.StepOrder`.

    ``ranks``: number of ranks that the run began with. ``batches``: micro-batches of one rank in an epoch.
    ``accumulation``: micro-batches that a rank adds up in a step. ``micro_batch``: samples in a micro-batch. ``seed``:
    for samplers that draw from torch's global generator. ``first``: the trainer's number of rackrun's step 0.
    """

    def __init__(
        self, *, ranks: int, batches: int, accumulation: int, micro_batch: int, seed: int, first: int = 0
    ) -> None:
        self.batches, self.accumulation, self.micro_batch, self.first = batches, accumulation, micro_batch, first
        self.steps_per_epoch = max(-(-batches // accumulation), 1)
        self._ranks, self._seed = ranks, seed
        self._known: dict[int, list[list[list[int]]]] = {}
        self._drawn = 0
        """Number of epochs whose order has been drawn, where the sampler's generator goes on from epoch to epoch."""

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of the trainer's step ``step``, and the number of micro-batches of a rank before it in that
        epoch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch, within * self.accumulation

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of one of the first ranks in the trainer's step ``step``: the last step of
        an epoch may have fewer."""
        return min(self.accumulation, self.batches - self.place(step)[1])

    def shards(self, step: int) -> int:
        """Return the number of micro-batches in the global batch of rackrun's step ``step``."""
        return self._ranks * self.micro_batches(self.first + step)

    def epoch(self, step: int) -> int:
        """Return the epoch of rackrun's step ``step``."""
        return self.place(self.first + step)[0]

    def ids(self, step: int, shard: int) -> np.ndarray[Any, Any]:
        """Return the sample ids of one micro-batch of rackrun's step ``step``, int64."""
        epoch, before = self.place(self.first + step)
        rank, index = divmod(shard, self.micro_batches(self.first + step))
        if epoch not in self._known:
            self._known.clear()
            with undrawn():
                self._known[epoch] = self._of_epoch(epoch)
        return np.asarray(self._known[epoch][rank][before + index], dtype=np.int64)

    @abstractmethod
    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before rackrun's step ``step``."""

    @abstractmethod
    def _of_epoch(self, epoch: int) -> list[list[list[int]]]:
        """Return rank -> micro-batch -> sample ids."""

    def _in_turn(self, sampler: Any, epoch: int, draw: Callable[[int], T]) -> T:
        """Return ``draw(epoch)``, with what ``sampler`` draws from as the stock trainer has it in that epoch."""
        if isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch"):
            return draw(epoch)
        if getattr(sampler, "generator", None) is None:  # draws from torch's global generator
            torch.manual_seed(self._seed + epoch)
            return draw(epoch)
        if epoch < self._drawn:
            raise AssertionError(f"epoch {epoch} is asked for after epoch {self._drawn - 1}")
        for number in range(self._drawn, epoch + 1):
            drawn = draw(number)
        self._drawn = epoch + 1
        return drawn
