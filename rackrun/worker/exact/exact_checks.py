"""Checks before the first step what ``reduction="exact"`` cannot cover, as far as that is visible then."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from rackrun.errors import StepError

__all__ = ["check_module", "check_optimizer", "check_parameter", "check_without_gradients", "has_running_statistics"]

_NOT_ELEMENTWISE = ("Adafactor", "Muon", "LBFGS")
"""Optimizers that sum over a parameter's elements."""


def check_parameter(path: str, parameter: torch.Tensor, reducers: int) -> None:
    """Raise `StepError` unless exactly one wrapper reduces the parameter's gradient, which must be of a floating-point
    type."""
    if not reducers:
        raise StepError(
            f'{path} is trained, but neither DDP nor FSDP2 reduces its gradient, so reduction="exact" cannot.',
            remedy="wrap the module in DistributedDataParallel or fully_shard, on one rank too; or freeze the parameter.",
        )
    if reducers > 1:
        raise StepError(
            f"the gradient of {path} is reduced by {reducers} wrappers.",
            remedy="wrap modules that share parameters together, in one DistributedDataParallel; and track it once.",
        )
    if not parameter.dtype.is_floating_point:
        raise StepError(
            f'{path} is {parameter.dtype}: reduction="exact" adds floating-point gradients only.',
            remedy='use reduction="fast".',
        )


def check_without_gradients(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise `StepError` if one of ``parameters``, which no optimizer trains and no wrapper reduces, has a gradient,
    which the script might use itself. Called before a gate."""
    for path, parameter in parameters.items():
        if parameter.grad is not None:
            raise StepError(
                f"{path} got a gradient, but neither DDP nor FSDP2 reduces it, and no tracked optimizer trains it.",
                remedy="freeze it (requires_grad_(False)) if it is not trained; else wrap its module in DistributedDataParallel or "
                "fully_shard, and track its optimizer.",
            )


def check_module(name: str, module: nn.Module) -> None:
    """Raise `StepError` if the module's forward pass sums floats over ranks."""
    for path, sub in module.named_modules():
        if isinstance(sub, nn.SyncBatchNorm):
            raise StepError(
                f"{name}.{path} is a SyncBatchNorm, whose statistics are sums of floats over as many ranks as there are.",
                remedy='use LayerNorm or GroupNorm, or reduction="fast".',
            )


def has_running_statistics(module: nn.Module) -> bool:
    """Whether the module trains with batch norm, whose buffers depend on what one rank has seen."""
    return any(isinstance(sub, _BatchNorm) and sub.track_running_stats and sub.training for sub in module.modules())


def check_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise `StepError` for an optimizer whose result for an element depends on which other elements are on the
    rank."""
    sharded = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    kind = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _NOT_ELEMENTWISE), None)
    if sharded and kind:
        raise StepError(
            f"{name!r} is an optimizer ({kind}) that adds up over a parameter's elements, of which each rank has a part.",
            remedy="use one that treats each element by itself (AdamW, SGD, ...), or DistributedDataParallel.",
        )
    for group in optimizer.param_groups:
        if group.get("fused") and any(isinstance(p, DTensor) and p.device.type == "cpu" for p in group["params"]):
            raise StepError(
                f"{name!r} has fused=True, which on a CPU rounds the last elements of a shard unlike the others: "
                "where shards end depends on the number of ranks.",
                remedy="leave out fused=True.",
            )
