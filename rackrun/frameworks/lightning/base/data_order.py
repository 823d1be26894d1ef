"""The samples of every step, in the order in which the stock Trainer under DDP would deliver them.

Each rank of the stock job iterates over its own `DistributedSampler`. Here the order of rank ``r`` is that of a copy of
the sampler with ``rank = r``. rackrun deals a step's micro-batches in contiguous parts, so they are numbered rank by
rank.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from rackrun.worker.data.rng import undrawn

__all__ = ["LightningOrder"]


class LightningOrder:
    """The order of one run; a `rackrun.worker.data.loader.StepOrder`.

    ``loader``: the stock loader of this rank. ``ranks``: number of ranks. ``batches``: micro-batches of one rank in an
    epoch, where the Trainer's limits count. ``accumulation``: micro-batches that a rank adds up in a step. ``seed``:
    for samplers that draw from torch's global generator.
    """

    def __init__(self, loader: Any, ranks: int, batches: int, accumulation: int, seed: int) -> None:
        self._sampler: BatchSampler = loader.batch_sampler
        self._ranks, self._seed = ranks, seed
        self.batches, self.accumulation = batches, accumulation
        self.micro_batch = int(self._sampler.batch_size)
        self.steps_per_epoch = -(-batches // accumulation)
        self._known: dict[int, list[list[list[int]]]] = {}
        self._drawn = 0
        """Number of epochs whose order has been drawn, where the sampler's generator goes on from epoch to epoch."""
        lengths = [len(batch) * ranks for batch in self._lengths()]
        self._before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        """Number of samples on all ranks before each micro-batch of an epoch."""

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of ``step``, and the number of micro-batches of a rank before it in that epoch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch, within * self.accumulation

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of one rank in ``step``: the last step of an epoch may have fewer."""
        return min(self.accumulation, self.batches - self.place(step)[1])

    def shards(self, step: int) -> int:
        """Return the number of micro-batches in the global batch of ``step``."""
        return self._ranks * self.micro_batches(step)

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before ``step``."""
        epoch, batch = self.place(step)
        return int(epoch * self._before[-1] + self._before[batch])

    def epoch(self, step: int) -> int:
        """Return the epoch of ``step``."""
        return self.place(step)[0]

    def ids(self, step: int, shard: int) -> np.ndarray[Any, Any]:
        """Return the sample ids of one micro-batch of ``step``, int64."""
        epoch, first = self.place(step)
        rank, index = divmod(shard, self.micro_batches(step))
        return np.asarray(self._rows(epoch)[rank][first + index], dtype=np.int64)

    # -- an epoch
    def _lengths(self) -> list[list[int]]:
        """Return micro-batches of the right lengths for one rank of an epoch, without drawing an order."""
        samples = len(self._sampler.sampler)  # type: ignore[arg-type]
        batches = BatchSampler(range(samples), self.micro_batch, self._sampler.drop_last)
        return list(batches)[: self.batches]

    def _rows(self, epoch: int) -> list[list[list[int]]]:
        """Return rank -> micro-batch -> sample ids; only the newest epoch's are kept."""
        if epoch not in self._known:
            self._known.clear()
            self._known[epoch] = self._epoch(epoch)
        return self._known[epoch]

    def _epoch(self, epoch: int) -> list[list[list[int]]]:
        sampler: Any = self._sampler.sampler
        with undrawn():
            if isinstance(sampler, DistributedSampler):
                return [self._of_rank(sampler, rank, epoch) for rank in range(self._ranks)]
            if isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch"):
                return [self._draw(sampler, epoch)]
            if getattr(sampler, "generator", None) is None:  # draws from torch's global generator
                torch.manual_seed(self._seed + epoch)
                return [self._draw(sampler, epoch)]
            if epoch < self._drawn:
                raise AssertionError(f"epoch {epoch} is asked for after epoch {self._drawn - 1}")
            for number in range(self._drawn, epoch + 1):
                batches = self._draw(sampler, number)
            self._drawn = epoch + 1
            return [batches]

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
