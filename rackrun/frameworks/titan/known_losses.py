"""Reduces what torchtitan logs of a step before the step changes any weights.

``Trainer.train_step`` adds up the losses of all ranks after ``optimizers.step()``. A rank that is lost there has passed
the gate, and nobody could add its loss to the others. So the same reductions run right before the update, and those
after it are answered from their results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils as dist_utils

__all__ = ["KnownLosses", "local_part"]


class KnownLosses:
    """The sums and maxima over ranks that one attempt at a step has computed."""

    def __init__(self) -> None:
        self._stock_sum, self._stock_max = dist_utils.dist_sum, dist_utils.dist_max
        self._sums: list[tuple[torch.Tensor, float]] = []
        self._maxima: list[tuple[torch.Tensor, float]] = []

    def reduce(self, loss: torch.Tensor, local_average: torch.Tensor, tokens: torch.Tensor, mesh: Any) -> None:
        """Reduce the three tensors of one number each over ``mesh``, as ``train_step`` does. Collective."""
        self._sums = [(local_part(one), self._stock_sum(one, mesh)) for one in (loss, tokens)]
        self._maxima = [(local_part(local_average), self._stock_max(local_average, mesh))]

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer ``dist_sum`` and ``dist_max`` from what is known, where it is."""
        self._sums, self._maxima = [], []

        def dist_sum(x: torch.Tensor, *args: Any, **kwargs: Any) -> float:
            known = _value_of(x, self._sums)
            return self._stock_sum(x, *args, **kwargs) if known is None else known

        def dist_max(x: torch.Tensor, *args: Any, **kwargs: Any) -> float:
            known = _value_of(x, self._maxima)
            return self._stock_max(x, *args, **kwargs) if known is None else known

        dist_utils.dist_sum, dist_utils.dist_max = dist_sum, dist_max
        try:
            yield
        finally:
            dist_utils.dist_sum, dist_utils.dist_max = self._stock_sum, self._stock_max


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, as with tensor parallelism, or ``x`` itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def _value_of(x: torch.Tensor, known: list[tuple[torch.Tensor, float]]) -> float | None:
    x = local_part(x)
    for reduced, value in known:
        same_kind = reduced.dtype == x.dtype and reduced.shape == x.shape
        if same_kind and torch.allclose(reduced, x, rtol=0.0, atol=0.0, equal_nan=True):
            return value
    return None
