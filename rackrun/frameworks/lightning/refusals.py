"""What the adapter cannot do, refused before the first step with the line to change."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from rackrun.errors import UsageError
from rackrun.frameworks.lightning.base.package import LightningPackage
from rackrun.frameworks.worker_init import refuse_worker_init
from rackrun.worker.process.reports import say

__all__ = ["refuse_loader", "refuse_trainer", "refuse_validation", "refuse_version"]

TESTED = "2.6."
"""Beginning of the versions of Lightning that are tested."""
OF_THE_LOOPS = {
    "loops.fit_loop._FitLoop.run": "self",
    "loops.fit_loop._FitLoop.setup_data": "self",
    "loops.fit_loop._FitLoop.on_advance_end": "self",
    "loops.fit_loop._FitLoop.on_run_end": "self",
    "loops.training_epoch_loop._TrainingEpochLoop.run": "self data_fetcher",
    "loops.training_epoch_loop._TrainingEpochLoop.on_run_start": "self data_fetcher",
    "loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor": "self",
    "loops.training_epoch_loop._TrainingEpochLoop.advance": "self data_fetcher",
    "loops.training_epoch_loop._TrainingEpochLoop.on_advance_end": "self data_fetcher",
    "loops.training_epoch_loop._TrainingEpochLoop._build_kwargs": "self kwargs batch batch_idx",
    "loops.training_epoch_loop._TrainingEpochLoop.update_lr_schedulers": "self interval update_plateau_schedulers",
    "loops.optimization.automatic._AutomaticOptimization.run": "self optimizer batch_idx kwargs",
    "loops.optimization.automatic._AutomaticOptimization._training_step": "self kwargs",
    "plugins.precision.precision.Precision._after_closure": "self model optimizer",
    "trainer.trainer.Trainer._run_stage": "self",
    "trainer.trainer.Trainer._run_sanity_check": "self",
    "trainer.trainer._log_hyperparams": "trainer",
    "trainer.connectors.logger_connector.logger_connector._LoggerConnector.on_batch_start": "self batch dataloader_idx",
    "callbacks.model_checkpoint.ModelCheckpoint.file_exists": "self filepath trainer",
    "strategies.strategy.Strategy.process_dataloader": "self dataloader",
}
"""What the adapter stands on in Lightning, with the names of its parameters."""


def refuse_version(package: LightningPackage) -> None:
    """Raise `UsageError` if this version of Lightning has other loops than the adapter stands on. Prints a notice for
    versions that are not tested."""
    for path, parameters in OF_THE_LOOPS.items():
        found = _parameters(package, path)
        if found != parameters:
            raise UsageError(
                f"{package.pytorch} {package.version} has another training loop than this adapter knows: {path} is ({found}), "
                f"and not ({parameters}).",
                remedy=f"install lightning {TESTED}*.",
            )
    if not package.version.startswith(TESTED):
        say(
            f"rackrun.lightning is tested with lightning {TESTED}*; this is {package.version}. Compare a short run with one under torchrun."
        )


def refuse_trainer(trainer: Any, package: LightningPackage, *, ready: bool = False) -> None:
    """Raise `UsageError` for a Trainer, module or callback that the adapter does not support. ``ready``: the optimizers
    are made."""
    module, callbacks = trainer.lightning_module, package.part("callbacks")

    def has(name: str) -> bool:
        return any(isinstance(one, getattr(callbacks, name)) for one in trainer.callbacks)

    refused = {
        "manual optimization": (
            not module.automatic_optimization,
            "leave automatic_optimization=True, or write the loop under @rackrun.elastic (docs/convert_a_script.md)",
        ),
        "reload_dataloaders_every_n_epochs": (bool(trainer.reload_dataloaders_every_n_epochs), "leave it out"),
        "fit(ckpt_path=...)": (
            bool(trainer._checkpoint_connector._loaded_checkpoint) and not ready,
            "start the job with --checkpoint-dir, which goes on from where it was; for weights alone, call load_from_checkpoint",
        ),
        "a val_check_interval in time": (
            getattr(trainer, "_val_check_time_interval", None) is not None,
            "give a number of batches or a fraction of an epoch, which is the same on all ranks",
        ),
        "StochasticWeightAveraging": (has("StochasticWeightAveraging"), "use EMAWeightAveraging or WeightAveraging"),
        "GradientAccumulationScheduler": (
            has("GradientAccumulationScheduler"),
            "give Trainer(accumulate_grad_batches=...) one number",
        ),
        "BatchSizeFinder": (has("BatchSizeFinder"), "find the batch size in a script of its own"),
        "LearningRateFinder": (has("LearningRateFinder"), "find the learning rate in a script of its own"),
        "ModelPruning": (has("ModelPruning"), "prune after the training"),
        "BackboneFinetuning and other BaseFinetuning": (
            has("BaseFinetuning"),
            "freeze layers before fit(), and train each stage in a script of its own",
        ),
        "barebones=True": (trainer.barebones, "leave it out"),
    }
    if ready:
        optimizers = trainer.optimizers
        refused |= {
            f"{len(optimizers)} optimizers": (len(optimizers) != 1, "return one optimizer from configure_optimizers"),
            "LBFGS": (
                any(isinstance(one, torch.optim.LBFGS) for one in optimizers),
                "use an optimizer that calls its closure once",
            ),
        }
    for what, (is_so, remedy) in refused.items():
        if is_so:
            raise UsageError(f"rackrun.lightning does not support {what}.", remedy=f"{remedy}.")


def refuse_loader(trainer: Any, loader: Any) -> None:
    """Raise `UsageError` for training data whose order does not follow from the step."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"the training data is a stream ({type(dataset if dataset is not None else loader).__name__}): a step that is done again could "
            "not read its samples again.",
            remedy="return one torch.utils.data.DataLoader of a data set with __len__ and __getitem__.",
        )
    refuse_worker_init(loader)
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise UsageError(
            f"the training loader's {type(batches).__name__} decides about its batches itself.",
            remedy="leave out batch_sampler=, and give batch_size= and a sampler.",
        )
    if trainer.world_size > 1 and not isinstance(batches.sampler, DistributedSampler):
        raise UsageError(
            f"with use_distributed_sampler=False and a {type(batches.sampler).__name__}, what a rank reads does not follow from its rank.",
            remedy="leave out use_distributed_sampler=False, or give a torch.utils.data.DistributedSampler.",
        )
    if len(batches) == 0:
        raise UsageError(
            f"the data set has {len(dataset)} samples, fewer than one batch for each of {trainer.world_size} ranks.",  # type: ignore[arg-type]
            remedy="use a smaller batch_size, more data, or drop_last=False.",
        )


def refuse_validation(trainer: Any, accumulation: int) -> None:
    """Raise `UsageError` for a validation between two micro-batches of one step."""
    every, batches = trainer.val_check_batch, trainer.num_training_batches
    if accumulation == 1 or not trainer.enable_validation or every == float("inf"):
        return
    over_epochs = trainer.check_val_every_n_epoch is None
    if (every != batches and every % accumulation) or (over_epochs and batches % accumulation):
        raise UsageError(
            f"validation every {every} batches falls between the {accumulation} micro-batches of a step.",
            remedy=f"choose val_check_interval so that it is a multiple of accumulate_grad_batches={accumulation} batches.",
        )


def _parameters(package: LightningPackage, path: str) -> str:
    """Return the names of the parameters of ``path``: a module, perhaps a class, and a function."""
    module, *names = path.split(".")
    while names and names[0].islower() and not names[0].startswith("_"):
        module = f"{module}.{names.pop(0)}"
    found = package.part(module)
    for name in names:
        found = getattr(found, name, None)
    return " ".join(inspect.signature(found).parameters) if found is not None else "not there"
