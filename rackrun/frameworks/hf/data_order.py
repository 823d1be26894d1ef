"""The samples of every step, in the order in which the stock ``Trainer`` would deliver them.

The stock loader's own sampler gives an epoch's batches, and accelerate's own `BatchSamplerShard` deals them to the
ranks that the run began with: micro-batch ``j`` of rank ``r`` is batch ``j * ranks + r``, and samples from the start of
the epoch fill its end. rackrun deals a step's micro-batches in contiguous parts, so they are numbered rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, get_sampler
from torch.utils.data import BatchSampler, SequentialSampler

from rackrun.worker.data.rng import undrawn

__all__ = ["TrainerOrder"]


class TrainerOrder:
    """The order of one run; a `rackrun.worker.data.loader.StepOrder`.

    ``loader``: what the stock Trainer made. ``ranks``: number of ranks that the run began with. ``accumulation``:
    micro-batches that a rank adds up in a step. ``first``: the Trainer's number of rackrun's step 0. ``seed``: for
    samplers that draw from torch's global generator.
    """

    def __init__(self, loader: Any, ranks: int, accumulation: int, first: int, seed: int) -> None:
        self._loader, self._accumulation, self.first, self._seed = loader, accumulation, first, seed
        sampler = loader.batch_sampler
        self._sharded = sampler if isinstance(sampler, BatchSamplerShard) else None
        self._batches = sampler.batch_sampler if self._sharded is not None else sampler
        self.micro_batch = int(self._batches.batch_size)
        self._ranks = ranks
        self._length = len(self._shard([[0] * self.micro_batch] * len(self._batches), 0))
        """Micro-batches of one rank in an epoch."""
        self.steps_per_epoch = max(-(-self._length // accumulation), 1)
        self._known: dict[int, list[list[list[int]]]] = {}
        self._drawn = 0
        """Number of epochs whose order has been drawn, where the sampler's generator goes on from epoch to epoch."""

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of one of the first ranks in the Trainer's step ``step``: the last step of
        an epoch may have fewer."""
        last = step % self.steps_per_epoch == self.steps_per_epoch - 1
        return self._length - (self.steps_per_epoch - 1) * self._accumulation if last else self._accumulation

    def shards(self, step: int) -> int:
        """Return the number of micro-batches in the global batch of rackrun's step ``step``."""
        return self._ranks * self.micro_batches(self.first + step)

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before ``step``."""
        epochs, within = divmod(self.first + step, self.steps_per_epoch)
        micro_batches = epochs * self._length + within * self._accumulation
        return micro_batches * self._ranks * self.micro_batch

    def epoch(self, step: int) -> int:
        """Return the epoch of rackrun's step ``step``."""
        return (self.first + step) // self.steps_per_epoch

    def ids(self, step: int, shard: int) -> np.ndarray[Any, Any]:
        """Return the sample ids of one micro-batch of rackrun's step ``step``, int64."""
        epoch, within = divmod(self.first + step, self.steps_per_epoch)
        rank, index = divmod(shard, self.micro_batches(self.first + step))
        rows = self._rows(epoch)
        return np.asarray(rows[rank][within * self._accumulation + index], dtype=np.int64)

    # -- an epoch
    def _rows(self, epoch: int) -> list[list[list[int]]]:
        """Return rank -> micro-batch -> sample ids; only the newest epoch's are kept."""
        if epoch not in self._known:
            self._known.clear()
            batches = self._epoch(epoch)
            self._known[epoch] = [self._shard(batches, rank) for rank in range(self._ranks)]
        return self._known[epoch]

    def _shard(self, batches: list[list[int]], rank: int) -> list[list[int]]:
        if self._sharded is None:
            return batches
        given = _Given(batches, self.micro_batch, drop_last=self._sharded.drop_last)
        return list(BatchSamplerShard(given, self._ranks, rank, even_batches=self._sharded.even_batches))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Return the epoch's batches of all ranks, as the stock loader's sampler gives them."""
        sampler = get_sampler(self._loader)
        with undrawn():
            if isinstance(sampler, SeedableRandomSampler | SequentialSampler) or hasattr(sampler, "set_epoch"):
                return self._draw(epoch)
            if getattr(sampler, "generator", None) is None:  # draws from torch's global generator
                torch.manual_seed(self._seed + epoch)
                return self._draw(epoch)
            if epoch < self._drawn:
                raise AssertionError(f"epoch {epoch} is asked for after epoch {self._drawn - 1}")
            for number in range(self._drawn, epoch + 1):
                batches = self._draw(number)
            self._drawn = epoch + 1
            return batches

    def _draw(self, epoch: int) -> list[list[int]]:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)
        return [list(batch) for batch in self._batches]


class _Given(BatchSampler):
    """A batch sampler that yields batches that are known."""

    def __init__(self, batches: list[list[int]], batch_size: int, *, drop_last: bool) -> None:
        self._batches, self.batch_size, self.drop_last = batches, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self._batches])

    def __len__(self) -> int:
        return len(self._batches)
