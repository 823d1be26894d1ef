"""The strategy: Lightning's DDP on ranks that may be replaced. It installs the adapter when ``fit`` sets the Trainer up."""

from __future__ import annotations

from typing import Any

from rackrun.frameworks.lightning.base.package import LightningPackage, package_in_use
from rackrun.frameworks.lightning.elastic_ranks import ElasticRanks, is_mean_on_cpu, mean_over_ranks
from rackrun.frameworks.lightning.forward_redirection import RestoringRedirection
from rackrun.frameworks.lightning.state.csv_rows import back_up_rows
from rackrun.frameworks.lightning.training_session import TrainingSession
from rackrun.worker.snapshots.durable_checkpoints import checkpoint_directory

__all__ = ["Elastic", "strategy_class"]

_made: dict[str, type] = {}


def Elastic(**ddp: Any) -> Any:  # noqa: N802 - it stands for a class, of which there is one for each package
    """Return the strategy for ``Trainer(strategy=Elastic())``. ``ddp``: arguments of `DistributedDataParallel`, such as
    ``find_unused_parameters=True``.

    Any rank may be lost at any moment; its replacement goes on inside of the same ``fit``, with the same weights, the
    same samples and the same metrics. Raises `UsageError` if Lightning is not installed.
    """
    return strategy_class(package_in_use())(**ddp)


def strategy_class(package: LightningPackage) -> type:
    """Return the class of the strategy for ``package``."""
    if package.pytorch not in _made:
        stock = package.part("strategies").DDPStrategy
        _made[package.pytorch] = type(
            "ElasticStrategy",
            (_ElasticStrategy, stock),
            {"__module__": __name__, "_rackrun_package": package, "strategy_name": "rackrun"},
        )
    return _made[package.pytorch]


class _ElasticStrategy(ElasticRanks):
    """Put before the class of Lightning's DDP."""

    _rackrun: TrainingSession | None = None

    def __init__(self, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._forward_redirection = RestoringRedirection(vars(self)["_forward_redirection"])

    def setup_distributed(self) -> None:
        """Take the process group that rackrun has made, before loggers begin."""
        self._rackrun_package.fabric_part("utilities.seed").reset_seed()
        self.set_world_ranks()
        trainer = getattr(self.lightning_module, "_trainer", None)  # type: ignore[attr-defined]
        if trainer is not None and self.is_global_zero and checkpoint_directory():
            for logger in trainer.loggers:
                if isinstance(logger, self._rackrun_package.part("loggers").CSVLogger):
                    back_up_rows(logger)

    def setup(self, trainer: Any) -> None:
        """Set the model and the optimizer up, and for ``fit`` the adapter. Raises `UsageError` for what it does not
        support."""
        package = self._rackrun_package
        fits = trainer.state.fn == package.part("trainer.states").TrainerFn.FITTING
        if fits and self._rackrun is None:
            self._rackrun = TrainingSession(trainer, package)
        elif fits:
            self._rackrun.refuse_second_fit()  # type: ignore[union-attr]
        super().setup(trainer)  # type: ignore[misc]
        if fits:
            self._rackrun.install()  # type: ignore[union-attr]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, in place."""
        if is_mean_on_cpu(tensor, reduce_op):
            return mean_over_ranks(tensor, group)
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    def process_dataloader(self, dataloader: Any) -> Any:
        """Keep the training loader, which says what the samples are, and give the loop one that reads nothing."""
        session = self._rackrun
        if session is not None and session.takes_loader:
            return session.take_loader(dataloader)
        return super().process_dataloader(dataloader)  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, on rank 0."""
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        if self._rackrun is not None:
            self._rackrun.files.save(filepath)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, on rank 0."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        if self._rackrun is not None:
            self._rackrun.files.remove(filepath)
