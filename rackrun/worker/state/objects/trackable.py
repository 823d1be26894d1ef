"""Which objects cannot be tracked."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import StepError
from rackrun.worker.torch_compat import require
from rackrun.worker.torch_compat.data_parallel import ddp

__all__ = ["refuse_untrackable"]

_NEEDS = (DistributedDataParallel, "ddp"), (FSDPModule, "fsdp", "fsdp place")


def refuse_untrackable(name: str, thing: Any) -> None:
    """Raise `StepError` for an object that could not be given another rank, and so not be swapped in, and raise what
    this version of torch does not support."""
    if isinstance(thing, nn.Module):
        needed = {
            need for module in thing.modules() for kind, *needs in _NEEDS if isinstance(module, kind) for need in needs
        }
        require(*sorted(needed))
    if any(
        kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(thing).__mro__
    ):  # importing it warns, and is slow
        raise StepError(
            f"run.track was given {name!r}, a ZeroRedundancyOptimizer: which parameters it holds state for is fixed when it is made.",
            remedy="use fully_shard (FSDP2), which shards optimizer state too, or a plain optimizer.",
        )
    if isinstance(thing, nn.Module) and ddp.exchanges_parameters(thing):
        raise StepError(
            f"run.track was given {name!r}, tensor parallelism in a DistributedDataParallel that was given device_mesh: torch exchanges its parameters in "
            "each forward, so a step could not be done again, nor its state be given to another rank.",
            remedy='use fully_shard(model, mesh=run.mesh["dp"]) (FSDP2), which knows tensor-parallel parameters, in place of DistributedDataParallel.',
        )
    if isinstance(thing, nn.Module) and any(isinstance(module, FullyShardedDataParallel) for module in thing.modules()):
        raise StepError(
            f"run.track was given {name!r}, which uses FullyShardedDataParallel (FSDP1): its flat shards cannot be given another rank.",
            remedy="use fully_shard (FSDP2).",
        )
