"""The strategy: Lightning's DDP on ranks that may be replaced. It installs the adapter when ``fit`` sets the Trainer up.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from rackrun.frameworks.lightning.package import LightningPackage, package_in_use
from rackrun.frameworks.lightning.training_session import TrainingSession
from rackrun.worker.process.runtime import start

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


def environment_class(package: LightningPackage) -> type:
    """Return the class that tells Lightning the rank of this process, as it is now."""
    return type("ElasticEnvironment", (_Environment, package.fabric_part("plugins.environments").ClusterEnvironment), {})


class _Environment:
    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))

    def set_world_size(self, size: int) -> None:
        """Do nothing: the world says it."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the world says it."""


class _ElasticStrategy:
    """Put before the class of Lightning's DDP."""

    _rackrun_package: LightningPackage
    _rackrun: TrainingSession | None = None
    _lightning_module: Any

    def __init__(self, **ddp: Any) -> None:
        super().__init__(cluster_environment=environment_class(self._rackrun_package)(), **ddp)  # type: ignore[call-arg]
        self._rackrun_device = start().device

    @property
    def root_device(self) -> Any:
        """The device of this process."""
        return self._rackrun_device

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0 of the world, and not a spare."""
        session = self._rackrun
        if session is not None and session.run is not None:
            return session.run.is_main
        return bool(self.global_rank == 0)  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How many ranks the data is dealt to, and which is this one."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        """Start no processes: rackrun has."""

    def setup_distributed(self) -> None:
        """Take the process group that rackrun has made."""
        self._rackrun_package.fabric_part("utilities.seed").reset_seed()
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Set what Lightning's ``rank_zero_only`` goes by. A spare is not rank 0."""
        only = self._rackrun_package.part("utilities.rank_zero").rank_zero_only
        rank = self.global_rank  # type: ignore[attr-defined]
        only.rank = rank if rank or self.is_global_zero else 1

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
        """Reduce a tensor over the ranks, in place. On CPUs a mean is the sum, divided afterwards, as in stock
        Lightning, which goes by the name of the backend."""
        means = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not (means and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and dist.is_initialized()):
            return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]
        dist.all_reduce(tensor, group=group)
        ranks = dist.get_world_size(group)
        return tensor.div_(ranks) if tensor.is_floating_point() else tensor.copy_(tensor / ranks)

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
