"""What Megatron's inner optimizers train, as a module: its optimizers hold tensors that no module has."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

__all__ = ["MainParameters"]


class MainParameters(nn.Module):
    """The tensors in the parameter groups of ``optimizer``, one of Megatron's with a torch optimizer in it: fp32 copies
    of parameters in 16 bits, the model's own fp32 parameters, or this rank's shards of either (1-d)."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        if isinstance(optimizer, DistributedOptimizer):
            _detach_shards(optimizer)
        for group, options in enumerate(optimizer.optimizer.param_groups):
            for index, parameter in enumerate(options["params"]):
                # `register_parameter` refuses tensors that are no `nn.Parameter`, as Megatron's main parameters
                self._parameters[f"group{group}_{index}"] = parameter


def _detach_shards(optimizer: Any) -> None:
    """Replace the optimizer's shards of fp32 parameters, which are views that autograd knows, by views of the same
    memory that it does not. Has to be called before the optimizer has any state."""
    torch_optimizer = optimizer.optimizer
    for shards, options in zip(optimizer.shard_fp32_groups, torch_optimizer.param_groups, strict=True):
        replaced: dict[int, torch.Tensor] = {}
        for index, shard in enumerate(shards):
            detached = replaced[id(shard)] = shard.detach()
            vars(detached).update(vars(shard))  # Megatron marks what is split over tensor-parallel ranks
            if shard in torch_optimizer.state:
                torch_optimizer.state[detached] = torch_optimizer.state.pop(shard)
            shards[index] = detached
        options["params"] = [replaced.get(id(one), one) for one in options["params"]]
