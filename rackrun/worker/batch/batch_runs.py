"""How large the global batch was, run by run, and what follows from it: arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["BatchRun", "place", "shards_before"]

BatchRun: TypeAlias = tuple[int, int]
"""(first step, micro-batches in the global batch): steps with the same, up to the next run's first. The first of all begins at step 0."""


def shards_before(runs: Sequence[BatchRun], step: int) -> int:
    """Micro-batches of all steps before ``step``."""
    stops = [first for first, _ in runs[1:]] + [step]
    return sum(max(min(stop, step) - first, 0) * shards for (first, shards), stop in zip(runs, stops, strict=True))


def place(runs: Sequence[BatchRun], step: int, samples: int, micro_batch: int) -> tuple[int, int]:
    """(epoch, how many of its samples were used before): where ``step`` begins. What is left of an epoch and too little for the whole
    batch of the next step is left out."""
    epoch = used = 0
    for at, (first, shards) in enumerate(runs):
        stop = min(runs[at + 1][0], step) if at + 1 < len(runs) else step
        if first < stop:
            epoch, used = _after(epoch, used, stop - first, shards * micro_batch, samples)
    batch = next(shards for first, shards in reversed(runs) if first <= step) * micro_batch
    return (epoch, used) if used + batch <= samples else (epoch + 1, 0)


def _after(epoch: int, used: int, steps: int, batch: int, samples: int) -> tuple[int, int]:
    fit = (samples - used) // batch
    if steps <= fit:
        return epoch, used + steps * batch
    epochs, rest = divmod(steps - fit - 1, samples // batch)
    return epoch + 1 + epochs, (rest + 1) * batch
