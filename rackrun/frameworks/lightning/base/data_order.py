"""The samples of every step, in the order in which the stock Trainer under DDP would deliver them.

Each rank of the stock job iterates over its own `DistributedSampler`. Here the order of rank ``r`` is that of a copy of
the sampler with ``rank = r``.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from rackrun.frameworks.epoch_order import EpochOrder

__all__ = ["LightningOrder"]


class LightningOrder(EpochOrder):
    """The order of one run.

    ``loader``: the stock loader of this rank. ``batches``: as for `EpochOrder`, where the Trainer's limits count.
    ``ranks``, ``accumulation`` and ``seed``: as for `EpochOrder`.
    """

    def __init__(self, loader: Any, ranks: int, batches: int, accumulation: int, seed: int) -> None:
        self._sampler: BatchSampler = loader.batch_sampler
        micro_batch = int(self._sampler.batch_size)
        super().__init__(ranks=ranks, batches=batches, accumulation=accumulation, micro_batch=micro_batch, seed=seed)
        lengths = [len(batch) * ranks for batch in self._lengths()]
        self._before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        """Number of samples on all ranks before each micro-batch of an epoch."""

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before ``step``."""
        epoch, batch = self.place(step)
        return int(epoch * self._before[-1] + self._before[batch])

    def _lengths(self) -> list[list[int]]:
        """Return micro-batches of the right lengths for one rank of an epoch, without drawing an order."""
        samples = len(self._sampler.sampler)  # type: ignore[arg-type]
        batches = BatchSampler(range(samples), self.micro_batch, self._sampler.drop_last)
        return list(batches)[: self.batches]

    def _of_epoch(self, epoch: int) -> list[list[list[int]]]:
        sampler: Any = self._sampler.sampler
        if isinstance(sampler, DistributedSampler):
            return [self._of_rank(sampler, rank, epoch) for rank in range(self._ranks)]
        return [self._in_turn(sampler, epoch, lambda number: self._draw(sampler, number))]

    def _of_rank(self, sampler: Any, rank: int, epoch: int) -> list[list[int]]:
        torch.manual_seed(self._seed + epoch)  # what it wraps may draw from the global generator
        mine = copy.copy(sampler)
        mine.rank = rank
        return self._draw(mine, epoch)

    def _draw(self, sampler: Any, epoch: int) -> list[list[int]]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        batches = BatchSampler(sampler, self.micro_batch, self._sampler.drop_last)
        return [list(batch) for batch in batches][: self.batches]
