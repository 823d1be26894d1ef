"""The samples of every step, in the order in which the stock ``Trainer`` would deliver them.

The stock loader's own sampler gives an epoch's batches, and accelerate's own `BatchSamplerShard` deals them to the
ranks that the run began with: micro-batch ``j`` of rank ``r`` is batch ``j * ranks + r``, and samples from the start of
the epoch fill its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, get_sampler
from torch.utils.data import BatchSampler

from rackrun.frameworks.epoch_order import EpochOrder

__all__ = ["TrainerOrder"]


class TrainerOrder(EpochOrder):
    """The order of one run.

    ``loader``: what the stock Trainer made. ``ranks``, ``accumulation``, ``first`` and ``seed``: as for `EpochOrder`.
    """

    def __init__(self, loader: Any, ranks: int, accumulation: int, first: int, seed: int) -> None:
        self._loader, sampler = loader, loader.batch_sampler
        self._sharded = sampler if isinstance(sampler, BatchSamplerShard) else None
        self._batches = sampler.batch_sampler if self._sharded is not None else sampler
        self._ranks, self.micro_batch = ranks, int(self._batches.batch_size)
        batches = len(self._shard([[0] * self.micro_batch] * len(self._batches), 0))
        super().__init__(
            ranks=ranks,
            batches=batches,
            accumulation=accumulation,
            micro_batch=self.micro_batch,
            seed=seed,
            first=first,
        )

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before rackrun's step ``step``."""
        epoch, before = self.place(self.first + step)
        return (epoch * self.batches + before) * self._ranks * self.micro_batch

    def _of_epoch(self, epoch: int) -> list[list[list[int]]]:
        sampler = get_sampler(self._loader)
        if isinstance(sampler, SeedableRandomSampler):
            batches = self._draw(epoch)
        else:
            batches = self._in_turn(sampler, epoch, self._draw)
        return [self._shard(batches, rank) for rank in range(self._ranks)]

    def _shard(self, batches: list[list[int]], rank: int) -> list[list[int]]:
        if self._sharded is None:
            return batches
        given = _Given(batches, self.micro_batch, drop_last=self._sharded.drop_last)
        return list(BatchSamplerShard(given, self._ranks, rank, even_batches=self._sharded.even_batches))

    def _draw(self, epoch: int) -> list[list[int]]:
        """Return the epoch's batches of all ranks, as the stock loader's sampler gives them."""
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
