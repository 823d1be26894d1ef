"""What the adapter cannot do, refused before the first step with the line to change."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate
import transformers
from torch.utils.data import BatchSampler, IterableDataset
from transformers.training_args import ParallelMode

from rackrun.errors import UsageError
from rackrun.frameworks.worker_init import refuse_worker_init
from rackrun.worker.process.reports import say

__all__ = ["OF_THE_LOOP", "refuse_arguments", "refuse_class", "refuse_loader", "refuse_version"]

TESTED = ("5.24.", "1.15.")
"""Beginnings of the versions of transformers and accelerate that are tested."""
OF_THE_LOOP = {
    "training_step": "model inputs num_items_in_batch",
    "_inner_training_loop": "batch_size args resume_from_checkpoint trial ignore_keys_for_eval",
    "_run_epoch": "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
    "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "set_initial_training_values": "args dataloader",
    "_get_num_items_in_batch": "batch_samples device",
    "_clip_grad_norm": "model",
    "_get_grad_norm": "model grad_norm",
    "_get_learning_rate": "",
    "_track_num_input_tokens": "inputs",
    "_maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_finalize_training": "trial num_train_samples start_time",
    "_load_rng_state": "checkpoint",
    "floating_point_ops": "inputs",
    "store_flos": "",
}
"""The Trainer's methods that the adapter stands on, with the names of their parameters."""
_GENERATES = ("_generate_and_score_completions", "_generate_vllm", "_buffered_inputs", "num_generations")
"""Attributes by which a Trainer is known that samples from its model, keeps what it has sampled, and trains on it."""
_MAY_OVERRIDE = {"floating_point_ops", "_evaluate"}


def refuse_version() -> None:
    """Raise `UsageError` if this version of transformers has other methods than the adapter stands on. Prints a notice
    for versions that are not tested."""
    for name, parameters in OF_THE_LOOP.items():
        method = getattr(transformers.Trainer, name, None)
        found = " ".join(list(inspect.signature(method).parameters)[1:]) if method is not None else "not there"
        if found != parameters:
            raise UsageError(
                f"transformers {transformers.__version__} has another training loop than this adapter knows: Trainer.{name} is ({found}), "
                f"and not ({parameters}).",
                remedy=f"install transformers {TESTED[0]}* and accelerate {TESTED[1]}*.",
            )
    if not (transformers.__version__.startswith(TESTED[0]) and accelerate.__version__.startswith(TESTED[1])):
        say(
            f"rackrun.hf is tested with transformers {TESTED[0]}* and accelerate {TESTED[1]}*; these are transformers {transformers.__version__} "
            f"and accelerate {accelerate.__version__}. Compare a short run with one under torchrun."
        )


def refuse_class(cls: type) -> None:
    """Raise `UsageError` if a subclass replaces what the adapter has put into the loop."""
    for name in OF_THE_LOOP:
        if name in vars(cls) and name not in _MAY_OVERRIDE:
            raise UsageError(
                f"{cls.__qualname__} overrides {name} of rackrun's Trainer, which is called for a whole step and not for a batch.",
                remedy=f"derive {cls.__qualname__} from transformers.Trainer, and train with "
                f"`class Elastic{cls.__qualname__}(rackrun.hf.Elastic, {cls.__qualname__}): pass`.",
            )


def refuse_arguments(trainer: Any) -> None:
    """Raise `UsageError` for arguments of the Trainer that the adapter does not support."""
    args, accelerator = trainer.args, trainer.accelerator
    mesh = getattr(accelerator, "parallelism_config", None) is not None or getattr(trainer, "is_tp_enabled", False)
    sharded = trainer.is_distributed_loading_by_transformers or trainer.is_model_parallel or mesh
    refused = {
        "deepspeed": (trainer.is_deepspeed_enabled, "leave out deepspeed=; models that fit one GPU train under DDP"),
        "fsdp": (
            trainer.is_fsdp_enabled or bool(args.fsdp),
            "leave out fsdp=; for FSDP2 convert the script (docs/convert_a_script.md)",
        ),
        "a sharded model (tp_plan, device_map, parallelism_config)": (sharded, "load the whole model on each GPU"),
        "auto_find_batch_size": (args.auto_find_batch_size, "set per_device_train_batch_size"),
        "hyperparameter_search": (trainer.hp_search_backend is not None, "start one job for each trial"),
        "ignore_data_skip": (args.ignore_data_skip, "leave out ignore_data_skip=True"),
        "a Trainer that generates its own training data (GRPO, RLOO, online DPO)": (
            any(hasattr(trainer, name) for name in _GENERATES),
            "write the loop with run.do (docs/recipes.md), or train with SFTTrainer, DPOTrainer or RewardTrainer",
        ),
        "sync_ref_model, which changes the reference model between steps": (
            getattr(args, "sync_ref_model", False),
            "leave out sync_ref_model=True",
        ),
        "precompute_ref_log_probs, which needs all ranks before a spare is one of them": (
            getattr(args, "precompute_ref_log_probs", False),
            "leave out precompute_ref_log_probs=True",
        ),
        "several GPUs in one process": (
            args.n_gpu > 1,
            "start it with rackrun --nproc-per-node, one process for each GPU",
        ),
        "accelerator_config with dispatch_batches or split_batches": (
            bool(accelerator.dispatch_batches) or accelerator.split_batches,
            "leave them out",
        ),
        "use_cpu=False without a GPU": (
            args.world_size == 1 and _has_ranks() and args.parallel_mode != ParallelMode.DISTRIBUTED,
            "write TrainingArguments(use_cpu=True)",
        ),
    }
    for what, (is_so, remedy) in refused.items():
        if is_so:
            raise UsageError(f"rackrun.hf does not support {what}.", remedy=f"{remedy}.")


def refuse_loader(trainer: Any, loader: Any) -> None:
    """Raise `UsageError` for data whose order does not follow from the step."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"the training data is a stream ({type(dataset).__name__}): a step that is done again could not read its samples again.",
            remedy="give train_dataset a data set with __len__ and __getitem__.",
        )
    refuse_worker_init(loader)
    sampler = getattr(loader, "batch_sampler", None)
    batches = getattr(sampler, "batch_sampler", sampler)
    if not isinstance(batches, BatchSampler) or not getattr(batches, "batch_size", None):
        raise UsageError(
            f"the training loader's {type(batches).__name__} makes batches of different sizes.",
            remedy='leave out train_sampling_strategy="batch_rebalance", or a batch_sampler of your own.',
        )
    if trainer.args.world_size > 1 and not trainer.accelerator.even_batches:
        raise UsageError(
            "with even_batches=False ranks have different numbers of batches.",
            remedy="leave out even_batches=False in accelerator_config.",
        )


def _has_ranks() -> bool:
    import torch.distributed as dist

    return bool(dist.is_initialized() and dist.get_world_size() > 1)
