"""FSDP2 (``fully_shard``) and DeviceMesh, torch 2.13: leaving a step in the middle, and giving a built model another rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

__all__ = ["install", "is_gathered", "missing", "promote_sharded", "reset", "reshard", "synchronise_gradients"]

_meshes: list[weakref.ref[DeviceMesh]] = []


def missing() -> list[str]:
    needed = ("_compute_coordinate_on_dim",)
    return [f"DeviceMesh.{name} is gone" for name in needed if not hasattr(DeviceMesh, name)]


def install() -> None:
    """Remember every mesh, so that a promoted spare can be given its new place in each."""
    init = DeviceMesh.__init__

    def remembered(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _meshes.append(weakref.ref(self))

    DeviceMesh.__init__ = remembered  # type: ignore[method-assign]


def reset(module: nn.Module) -> None:
    """After an abandoned forward or backward: drop unsharded gradients and parameters, and the iteration's state."""
    for sub in _fsdp_modules(module):
        state = sub._get_fsdp_state()
        if state._is_root:
            state._reset_iter_state()
    for param in _fsdp_params(module):
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
    reshard(module)


def reshard(module: nn.Module) -> None:
    """Between units every parameter is its local shard (a forward without a backward leaves the root unsharded)."""
    for sub in _fsdp_modules(module):
        sub.reshard()


def is_gathered(module: nn.Module) -> bool:
    return any(param.sharded_state != ShardedState.SHARDED for param in _fsdp_params(module))


def synchronise_gradients(module: nn.Module, last: bool) -> None:
    for sub in _fsdp_modules(module):
        sub.set_requires_gradient_sync(last, recurse=False)
        sub.set_is_last_backward(last)


def promote_sharded(modules: Iterable[nn.Module], rank: int) -> None:
    """Give a model that was built as another rank the place of ``rank``: mesh coordinates, shard index, shard sizes.

    What the shards contain is then copied or loaded by the caller. Its groups must have their new ranks already.
    """
    for mesh in [mesh for ref in _meshes if (mesh := ref()) is not None]:
        mesh._rank = rank
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    for module in modules:
        for group in _fsdp_groups(module):
            for info in {id(i): i for i in (group.mesh_info, group.post_forward_mesh_info) if i is not None}.values():
                if hasattr(info, "shard_process_group"):
                    info.shard_mesh_rank = info.shard_process_group.rank()
                if hasattr(info, "replicate_process_group"):
                    info.replicate_mesh_rank = info.replicate_process_group.rank()
        for param in _fsdp_params(module):
            _reshape_shard(param)


def _reshape_shard(param: Any) -> None:
    """Ranks at the end of an uneven dimension hold less: take the part of the padded shard that the new rank has."""
    dim = param.fsdp_placement.dim
    whole, padded = param._orig_size[dim], param.padded_sharded_param_size[dim]
    start = min(param.mesh_info.shard_mesh_rank * padded, whole)
    length = min(padded, whole - start)
    if param.sharded_size[dim] == length:
        return
    size = list(param.sharded_size)
    size[dim] = length
    local = param._sharded_param_data.view(param.padded_sharded_param_size).narrow(dim, 0, length)
    param.sharded_size = torch.Size(size)
    param.contiguous_sharded_stride = torch.empty(size, device="meta").stride()
    param.sharded_param._local_tensor = local
    param.sharded_param.grad = None


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    return (sub for sub in module.modules() if isinstance(sub, FSDPModule))


def _fsdp_groups(module: nn.Module) -> Iterator[Any]:
    for sub in _fsdp_modules(module):
        yield from sub._get_fsdp_state()._fsdp_param_groups


def _fsdp_params(module: nn.Module) -> Iterator[Any]:
    for group in _fsdp_groups(module):
        yield from group.fsdp_params
