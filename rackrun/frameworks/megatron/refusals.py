"""What the adapter cannot do, refused before the first step with the line to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rackrun.errors import UsageError

__all__ = [
    "inner_optimizers",
    "refuse_model",
    "refuse_optimizer",
    "refuse_random_numbers",
    "refuse_sizes",
    "refuse_version",
]

TESTED = "0.16."
"""The beginning of the versions of megatron-core that are tested."""
_UNSUPPORTED_SIZES = {
    "pipeline_model_parallel_size": "pipeline stages",
    "context_parallel_size": "context parallelism",
    "expert_model_parallel_size": "expert parallelism",
}
_KINDS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
_OF_DDP = {
    "use_megatron_fsdp": "Megatron's own FSDP",
    "use_custom_fsdp": "Megatron's own FSDP",
    "align_param_gather": "an all-gather of parameters that pipeline stages begin together",
    "fp8_param_gather": "parameters in fp8",
    "nccl_ub": "gradient buffers that are registered with NCCL, which a failure replaces",
    "check_for_large_grads": "a check that compares gradients with those of older steps, which a rank that joins has not seen",
}
_OF_OPTIMIZER = {
    "use_precision_aware_optimizer": "main parameters that an optimizer of Transformer Engine holds",
    "optimizer_cpu_offload": "an optimizer whose state is on the host",
    "overlap_param_gather_with_optimizer_step": "an all-gather of parameters between two parts of optimizer.step()",
}


def refuse_version() -> None:
    """Raise `UsageError` unless this version of megatron-core is one that the adapter knows: it stands on names that
    are not public."""
    if not megatron.core.__version__.startswith(TESTED):
        raise UsageError(
            f"megatron-core {megatron.core.__version__} is not supported: how its optimizers hold their state may be another.",
            remedy=f'pip install "megatron-core=={TESTED}*".',
        )


def refuse_sizes(sizes: Mapping[str, Any]) -> None:
    """Raise `UsageError` for arguments of ``initialize_model_parallel`` that are not supported."""
    for name, what in _UNSUPPORTED_SIZES.items():
        if sizes.get(name) not in {None, 1}:
            raise UsageError(
                f"rackrun.megatron.initialize was given {name}={sizes[name]}: {what} are not supported.",
                remedy=f"leave out {name}; tensor and data parallelism work.",
            )
    if sizes.get("order", "tp-cp-ep-dp-pp") != "tp-cp-ep-dp-pp":
        raise UsageError(
            f"rackrun.megatron.initialize was given order={sizes['order']!r}: run.mesh has another order.",
            remedy="leave out order=.",
        )


def refuse_model(chunks: Sequence[Any]) -> None:
    """Raise `UsageError` for a model that is not in Megatron's DistributedDataParallel, or that has settings which are
    not supported."""
    if len(chunks) != 1 or not isinstance(chunks[0], DistributedDataParallel):
        kind = type(chunks[0]).__name__ if chunks else "nothing"
        raise UsageError(
            f"rackrun.megatron.track was given {len(chunks)} model chunks, the first a {kind}.",
            remedy="pass a list with one megatron.core.distributed.DistributedDataParallel.",
        )
    config = chunks[0].config
    for name, what in _OF_DDP.items():
        if getattr(chunks[0].ddp_config, name, False):
            raise _refused(f"DistributedDataParallelConfig({name}=True)", what, name)
    for name in ("fp8", "fp4"):
        if getattr(config, name, None):
            raise _refused(f"TransformerConfig({name}=...)", f"what {name} keeps of older steps is not tracked", name)
    _refuse_timers(config)
    if getattr(config, "num_moe_experts", None):
        raise _refused(
            "TransformerConfig(num_moe_experts=...)", "a mixture of experts was not tried", "num_moe_experts"
        )
    if getattr(config, "cuda_graph_impl", "none") not in {None, "none"} or getattr(config, "enable_cuda_graph", False):
        what = "a captured collective would be replayed on a communicator that a failure has replaced"
        raise _refused("CUDA graphs", what, "cuda_graph_impl")


def refuse_optimizer(optimizer: Any) -> None:
    """Raise `UsageError` for optimizers, or settings of them, that are not supported."""
    for one in inner_optimizers(optimizer):
        if type(one) not in _KINDS or (
            one.optimizer is not None and not isinstance(one.optimizer, torch.optim.Optimizer)
        ):
            names = ", ".join(kind.__name__ for kind in _KINDS)
            raise UsageError(
                f"rackrun.megatron.track was given a {type(one).__name__}, which is not supported.",
                remedy=f"make it by megatron.core.optimizer.get_megatron_optimizer, with Adam or SGD ({names}).",
            )
        for name, what in _OF_OPTIMIZER.items():
            if getattr(one.config, name, False):
                raise _refused(f"OptimizerConfig({name}=True)", what, name)
        _refuse_timers(one.config)


def refuse_random_numbers() -> None:
    """Raise `UsageError` for generators of Megatron's that cannot be tracked, and for a mode in which Megatron itself
    does steps again."""
    states = get_cuda_rng_tracker().get_states()
    if not all(isinstance(state, torch.Tensor) for state in states.values()):
        raise UsageError(
            "Megatron's random number generators are made for CUDA graphs.",
            remedy="leave out use_te_rng_tracker=True and use_cudagraphable_rng=True.",
        )
    if get_rerun_state_machine().get_mode() is not RerunMode.DISABLED:
        raise UsageError(
            "Megatron's rerun state machine is on, which does steps again by itself.",
            remedy="leave out initialize_rerun_state_machine(mode=...); rackrun --check-replicas finds wrong bits.",
        )


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers in a ``ChainedOptimizer``, or ``optimizer`` itself."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _refuse_timers(config: Any) -> None:
    if getattr(config, "timers", None) is not None:
        what = "a step that is left in the middle leaves them running, and Megatron then refuses to start them"
        raise _refused(f"{type(config).__name__}(timers=...)", what, "timers")


def _refused(setting: str, what: str, name: str) -> UsageError:
    return UsageError(f"{setting} is not supported: {what}.", remedy=f"leave out {name}.")
