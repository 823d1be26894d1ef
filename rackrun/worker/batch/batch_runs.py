"""Computes positions in the data from the history of global batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["BatchRun", "place", "shards_before"]

BatchRun: TypeAlias = tuple[int, int]
"""(first step, micro-batches in the global batch), valid until the first step of the next run. The first run begins at
step 0."""


def shards_before(runs: Sequence[BatchRun], step: int) -> int:
    """Return the number of micro-batches in all steps before ``step``."""
    stops = [first for first, _ in runs[1:]] + [step]
    return sum(max(min(stop, step) - first, 0) * shards for (first, shards), stop in zip(runs, stops, strict=True))


def place(runs: Sequence[BatchRun], step: int, samples: int, micro_batch: int) -> tuple[int, int]:
    """Return where ``step`` begins in the data: (epoch, number of its samples used before).

    The rest of an epoch that is too small for the whole batch of the next step is left out.
    """
    epoch = used = batch = 0
    for at, (first, shards) in enumerate(runs):
        stop = min(runs[at + 1][0], step) if at + 1 < len(runs) else step
        if first < stop:
            epoch, used = _after(epoch, used, stop - first, shards * micro_batch, samples)
        if first <= step:
            batch = shards * micro_batch
    return (epoch, used) if used + batch <= samples else (epoch + 1, 0)


def _after(epoch: int, used: int, steps: int, batch: int, samples: int) -> tuple[int, int]:
    fit = (samples - used) // batch
    if steps <= fit:
        return epoch, used + steps * batch
    epochs, rest = divmod(steps - fit - 1, samples // batch)
    return epoch + 1 + epochs, (rest + 1) * batch
