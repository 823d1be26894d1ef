"""Megatron's DistributedDataParallel across an abandoned step: its gradient buffers, and which collectives of it are
under way."""

from __future__ import annotations

from typing import Any

__all__ = ["forget_collectives", "gathers_in_forward"]


def forget_collectives(chunk: Any, *, order_too: bool) -> None:
    """Forget the collectives that an abandoned step has begun and not waited for, and which gradients were ready.

    ``order_too``: also forget in which order gradients get ready. Then this step reduces its gradients after the
    backward pass instead of overlapping with it, as the first step of each process does. All ranks must agree on that,
    including one that has just joined.
    """
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.grad_reduce_handle = group.param_gather_handle = None
        group.param_gather_dispatched = False
        if order_too:
            group.is_first_batch, group.golden_per_param_grad_ready_counts = True, {}
            group.per_param_grad_ready_counts = {}


def gathers_in_forward(chunk: Any) -> bool:
    """Whether the forward pass gathers parameters (``overlap_param_gather``)."""
    return bool(chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather)
