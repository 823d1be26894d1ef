"""Computes the norm for gradient clipping with the same bits however gradients are sharded (torch 2.10 to 2.15).

torch adds the squares of each rank's part, and then the sums of the parts: floats, in an order that depends on the
number of ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grad

from rackrun.errors import StepError

__all__ = ["divert", "exact_norm", "missing", "restore"]

_CHUNK = 2**16


def missing() -> list[str]:
    """Return what this torch lacks, as messages."""
    known = "_get_total_norm" in inspect.unwrap(clip_grad.clip_grad_norm_).__code__.co_names
    return [] if known and hasattr(clip_grad, "_get_total_norm") else ["clip_grad_norm_ has no _get_total_norm"]


def divert() -> None:
    """Make `torch.nn.utils.clip_grad_norm_` and ``get_total_norm`` sum sharded gradients exactly from now on."""
    original: Any = clip_grad._get_total_norm
    if hasattr(original, "_rackrun_original"):
        return

    @torch.no_grad()
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not any(isinstance(tensor, DTensor) for tensor in tensors) or norm_type == math.inf:
            total: torch.Tensor = original(tensors, norm_type, error_if_nonfinite, foreach)
            return total
        if norm_type != 2.0:
            raise StepError(
                f'reduction="exact" knows no exact sum for the norm of order {norm_type} of sharded gradients.',
                remedy="clip by the norm of order 2 or inf, or by value.",
            )
        total = exact_norm(tensors)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError("The total norm of gradients is non-finite, so it cannot be clipped.")
        return total

    get_total_norm._rackrun_original = original  # type: ignore[attr-defined]
    _put(get_total_norm)


def restore() -> None:
    """Undo `divert`."""
    _put(getattr(clip_grad._get_total_norm, "_rackrun_original", clip_grad._get_total_norm))


def _put(norm: Any) -> None:
    clip_grad._get_total_norm = clip_grad.get_total_norm = torch.nn.utils.get_total_norm = norm  # type: ignore[attr-defined]


def exact_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all tensors, fp32. Squares (exact in fp64) are rounded to fixed point and added as integers,
    tensor by tensor."""
    whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    sharded: dict[Any, list[DTensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            settled = tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
            sharded.setdefault((settled.device_mesh, settled.placements), []).append(settled)
    squares = []
    for (mesh, placements), some in sharded.items():

        def over(local: torch.Tensor, how: str, mesh: Any = mesh, placements: Any = placements) -> torch.Tensor:
            reduced = [Replicate() if p.is_replicate() else Partial(how) for p in placements]
            return DTensor.from_local(local, mesh, reduced, run_check=False).full_tensor()

        parts = [tensor.to_local().reshape(-1) for tensor in some]
        largest = over(torch.stack([_largest(part) for part in parts]), "max")
        bits = torch.tensor(
            [61 - math.ceil(math.log2(max(tensor.numel(), 2))) for tensor in some], device=largest.device
        )
        exponent = torch.frexp(largest)[1]
        scale = torch.exp2((bits - 2 * exponent).double())
        sums = over(torch.stack([_square_sum(part, scale[i]) for i, part in enumerate(parts)]), "sum")
        found = sums.double() / scale
        squares.append(torch.where(largest.isfinite(), found, math.nan))
    squares += [tensor.double().square().sum().reshape(1) for tensor in whole]
    total = torch.zeros((), dtype=torch.float64, device=squares[0].device)
    for square in torch.cat(squares).unbind():  # always in this order
        total = total + square
    first = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
    return DTensor.from_local(
        total.sqrt().float(), first.device_mesh, [Replicate()] * first.device_mesh.ndim, run_check=False
    )


def _largest(part: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude; inf for values that are not finite, as a maximum over ranks cannot carry NaN."""
    largest = part.abs().amax().double() if part.numel() else part.new_zeros((), dtype=torch.float64)
    return torch.where(largest.isfinite(), largest, math.inf)


def _square_sum(part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for chunk in part.split(_CHUNK if part.device.type == "cpu" else max(part.numel(), 1)):
        total += chunk.double().square_().mul_(scale).round_().long().sum()
    return total
