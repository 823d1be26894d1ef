"""Checks that torch's NCCL groups (2.10 to 2.15) have what `rackrun.worker.communicators.nccl` uses. Only a GPU shows
whether it works."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["missing"]

_BOTH = (
    "_end_coalescing",
    "_start_coalescing",
    "abort",
    "allreduce",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall_base",
    "broadcast",
    "recv",
    "send",
)


def missing() -> list[str]:
    """Return what is missing, as messages; nothing where torch was built without NCCL, as nothing is used then."""
    if not dist.is_nccl_available():
        return []
    return _of_legacy(dist.ProcessGroupNCCL) + _of_nccl2(getattr(dist, "ProcessGroupNCCL2", None))


def _of_legacy(group: Any) -> list[str]:
    options = group.Options()
    options._timeout = timedelta(hours=1)
    options.config.blocking = 1
    return _lacks(group, (*_BOTH, "eager_connect_single_device"))


def _of_nccl2(group: Any) -> list[str]:
    if not hasattr(group, "_comm_ptr"):  # before torch 2.15 it is not used
        return []
    options: Any = dist.ProcessGroupNCCL.Options()
    options.enable_reconfigure = True
    wanted = torch._C._distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
    wanted.uuid, wanted.handles, wanted.timeout = 1, ["nccl2:0:-1:0:"], timedelta(seconds=20)
    return _lacks(group, (*_BOTH, "get_reconfigure_handle", "reconfigure", "shutdown"))


def _lacks(group: Any, names: tuple[str, ...]) -> list[str]:
    return [f"{group.__name__}.{name} is gone" for name in names if not hasattr(group, name)]
