"""What the adapter cannot do, refused before the first step with the line to change."""

from __future__ import annotations

from typing import Any

import torchtitan.trainer
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.quantization.utils import has_quantization

from rackrun.errors import UsageError

__all__ = ["refuse_class", "refuse_config", "refuse_hooks", "refuse_version"]

TESTED = "0.3."
"""The beginning of the versions of torchtitan that are tested."""
_OF_THE_LOOP = ("train", "train_step", "should_continue_training", "batch_generator", "state_dict", "load_state_dict")
"""The Trainer's methods that the adapter stands on."""
_OPTIMIZERS = ("Adam", "AdamW")
_ONE = {
    "pipeline_parallel_degree": "pipeline stages",
    "context_parallel_degree": "context parallelism",
    "expert_parallel_degree": "expert parallelism",
}


def refuse_version() -> None:
    """Raise `UsageError` unless this version of torchtitan is one that the adapter knows: it stands on the order of what
    a step does."""
    if not torchtitan.__version__.startswith(TESTED):
        raise UsageError(
            f"torchtitan {torchtitan.__version__} is not supported: its Trainer may have another loop.",
            remedy=f'pip install "torchtitan=={TESTED}*".',
        )


def refuse_class(cls: type) -> None:
    """Raise `UsageError` if a subclass replaces what the adapter has put into the loop."""
    for one in cls.__mro__:
        if one.__module__.startswith("rackrun.") or issubclass(torchtitan.trainer.Trainer, one):
            continue
        for name in _OF_THE_LOOP:
            if name in vars(one):
                raise UsageError(
                    f"{one.__qualname__} overrides {name} of torchtitan's Trainer, on which rackrun's steps stand.",
                    remedy=f"leave {name} as it is: override forward_backward_step, post_dataloading_process or the loss.",
                )


def refuse_config(config: Any) -> None:
    """Raise `UsageError` for settings that are not supported."""
    parallelism, training = config.parallelism, config.training
    for name, what in _ONE.items():
        if getattr(parallelism, name) > 1:
            raise _refused(f"--parallelism.{name} {getattr(parallelism, name)}", what, f"--parallelism.{name} 1")
    if parallelism.spmd_backend != "partial_dtensor":
        raise _refused(
            f"--parallelism.spmd_backend {parallelism.spmd_backend}",
            "it needs a nightly build of torch, and has not been tried",
            "--parallelism.spmd_backend partial_dtensor",
        )
    if parallelism.enable_fsdp_symm_mem:
        raise _refused(
            "--parallelism.enable_fsdp_symm_mem",
            "memory that is registered with a communicator, which a failure replaces",
            "--parallelism.no-enable_fsdp_symm_mem",
        )
    if not training.disable_cuda_graphs:
        raise _refused(
            "a CUDA graph of forward and backward",
            "it holds the communicators that a failure replaces",
            "--training.disable_cuda_graphs",
        )
    if training.enable_cpu_offload:
        raise _refused("--training.enable_cpu_offload", "not tried", "--training.no-enable_cpu_offload")
    if config.compile.enable:
        raise _refused("--compile.enable", "not tried", "--compile.no-enable")
    if config.comm.mode != "default":
        raise _refused(f"--comm.mode {config.comm.mode}", "rackrun makes the process group", "--comm.mode default")
    _refuse_model(config)
    _refuse_data(config)
    _refuse_checkpoint(config.checkpoint)


def refuse_hooks(optimizers: Any) -> None:
    """Raise `UsageError` for hooks of the OptimizersContainer, which would run before the gate or after it, unknown
    to which."""
    if optimizers._optimizer_step_pre_hooks or optimizers._optimizer_step_post_hooks:
        raise UsageError(
            "a step hook is registered with the OptimizersContainer, whose step() is rackrun's.",
            remedy="register it with the optimizers in it: for one in trainer.optimizers: one.register_step_post_hook(...).",
        )


def _refuse_model(config: Any) -> None:
    spec = config.model_spec
    if has_quantization(spec.model):
        raise UsageError(
            f"{spec.name} {spec.flavor} computes in FP8 or another quantized format, whose scales rackrun does not keep.",
            remedy="choose a --config without quantization.",
        )
    if spec.post_optimizer_build_fn is not None:
        raise UsageError(
            f"{spec.name} {spec.flavor} changes weights outside of its optimizers, as the load balancing of a mixture of experts does.",
            remedy="train a model without a mixture of experts.",
        )
    for group in config.optimizer.param_groups:
        if group.optimizer_name not in _OPTIMIZERS:
            raise UsageError(
                f"the optimizer {group.optimizer_name} is not supported.", remedy=f"use {' or '.join(_OPTIMIZERS)}."
            )
    if config.optimizer.implementation == "fused_opt_states_bf16":
        raise _refused(
            "--optimizer.implementation fused_opt_states_bf16", "not tried", "--optimizer.implementation fused"
        )


def _refuse_data(config: Any) -> None:
    data = config.dataloader
    if not issubclass(data._owner, ParallelAwareDataloader):
        raise UsageError(
            f"the dataloader {data._owner.__qualname__} is no ParallelAwareDataloader, so its state is not known.",
            remedy="derive it from torchtitan.components.dataloader.ParallelAwareDataloader.",
        )
    if not getattr(data, "infinite", True):
        raise _refused("--dataloader.no-infinite", "ranks would end after different steps", "--dataloader.infinite")
    if data.num_workers:
        raise _refused(f"--dataloader.num_workers {data.num_workers}", "not tried", "--dataloader.num_workers 0")


def _refuse_checkpoint(checkpoint: Any) -> None:
    if not checkpoint.enable:
        return
    if checkpoint._owner is not CheckpointManager:
        raise UsageError(
            f"checkpoints by {checkpoint._owner.__qualname__} are not supported.",
            remedy="use torchtitan.components.checkpoint.CheckpointManager, or rackrun's --checkpoint-dir alone.",
        )
    if checkpoint.async_mode != "disabled":
        raise _refused(
            f"--checkpoint.async_mode {checkpoint.async_mode}",
            "a thread would use collectives while ranks are replaced",
            "--checkpoint.async_mode disabled; rackrun's own --checkpoint-dir is written while training goes on",
        )
    if checkpoint.create_seed_checkpoint:
        raise _refused("--checkpoint.create_seed_checkpoint", "no training", "this command with torchrun")


def _refused(setting: str, what: str, remedy: str) -> UsageError:
    return UsageError(f"{setting} is not supported: {what}.", remedy=f"write {remedy}.")
