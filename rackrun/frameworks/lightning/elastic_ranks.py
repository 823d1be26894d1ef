"""The ranks of a world whose processes may be replaced, as strategies of Lightning ask for them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from rackrun.frameworks.lightning.base.package import LightningPackage
from rackrun.worker.loop.run import Run
from rackrun.worker.process.runtime import start

__all__ = ["ElasticRanks", "environment_class", "is_mean_on_cpu", "mean_over_ranks"]


class ElasticRanks:
    """Mix-in in front of Lightning's DDP strategy, of the Trainer or of Fabric. It uses rackrun's process group."""

    _rackrun_package: LightningPackage
    _rackrun_run: Run | None = None
    global_rank: int
    world_size: int

    def __init__(self, **ddp: Any) -> None:
        self._rackrun_device = start().device
        super().__init__(cluster_environment=environment_class(self._rackrun_package)(), **ddp)  # type: ignore[call-arg]

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._rackrun_device

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0 of the world, and not a spare."""
        run = self._rackrun_run
        return run.is_main if run is not None else self.global_rank == 0

    @property
    def local_rank(self) -> int:
        """The place of this process on its host, as Lightning's ``print`` asks for it: 0 for rank 0 alone."""
        return 0 if self.is_global_zero else max(int(os.environ.get("LOCAL_RANK", "0")), 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How many ranks the data is dealt to, and which is this one."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        """Start no processes: rackrun has."""

    def set_world_ranks(self) -> None:
        """Set what Lightning's ``rank_zero_only`` goes by. A spare is not rank 0."""
        only = self._rackrun_package.fabric_part("utilities.rank_zero").rank_zero_only
        only.rank = self.global_rank or int(not self.is_global_zero)


def environment_class(package: LightningPackage) -> type:
    """Return the class that tells Lightning the rank of this process, as it is now."""
    return type(
        "ElasticEnvironment", (_Environment, package.fabric_part("plugins.environments").ClusterEnvironment), {}
    )


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


def mean_over_ranks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the mean of a tensor on CPUs, in place: the sum, divided afterwards. Stock Lightning does that where the
    backend's name is gloo, and rackrun's has another. Collective."""
    dist.all_reduce(tensor, group=group)
    ranks = dist.get_world_size(group)
    return tensor.div_(ranks) if tensor.is_floating_point() else tensor.copy_(tensor / ranks)


def is_mean_on_cpu(tensor: Any, reduce_op: Any) -> bool:
    """Whether a reduction is one for `mean_over_ranks`."""
    means = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    return bool(means and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and dist.is_initialized())
