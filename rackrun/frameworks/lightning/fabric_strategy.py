"""The strategy for ``Fabric`` in a script under `rackrun.elastic`: Fabric's DDP on ranks that may be replaced."""

from __future__ import annotations

from typing import Any

from rackrun.frameworks.lightning.base.package import LightningPackage, package_in_use
from rackrun.frameworks.lightning.elastic_ranks import ElasticRanks, is_mean_on_cpu, mean_over_ranks
from rackrun.worker.loop.run import Run

__all__ = ["ElasticFabric"]

_made: dict[str, type] = {}


def ElasticFabric(run: Run, **ddp: Any) -> Any:  # noqa: N802 - it stands for a class, of which there is one for each package
    """Return the strategy for ``Fabric(strategy=ElasticFabric(run))``. ``ddp``: arguments of `DistributedDataParallel`.

    ``fabric.global_rank``, ``is_global_zero`` and ``rank_zero_only`` follow the rank of this process in ``run``. Raises
    `UsageError` if Lightning is not installed.
    """
    package = package_in_use(fabric=True)
    if package.fabric not in _made:
        stock = package.fabric_part("strategies").DDPStrategy
        content = {"__module__": __name__, "_rackrun_package": package}
        _made[package.fabric] = type("ElasticFabricStrategy", (_ElasticFabricStrategy, stock), content)
    strategy = _made[package.fabric](**ddp)
    strategy._rackrun_run = run
    run.on_join(strategy.set_world_ranks)
    return strategy


class _ElasticFabricStrategy(ElasticRanks):
    """Put before the class of Fabric's DDP."""

    _rackrun_package: LightningPackage

    def _setup_distributed(self) -> None:
        """Take the process group that rackrun has made."""
        self.set_world_ranks()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, in place."""
        if is_mean_on_cpu(tensor, reduce_op):
            return mean_over_ranks(tensor, group)
        return super().all_reduce(tensor, group, reduce_op)  # type: ignore[misc]
