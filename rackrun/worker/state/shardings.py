"""Describes a DTensor's placement on its mesh, so that another rank without that tensor can create it.

Collectives and files carry local parts. A plain tensor cannot be added to a DTensor, so each part becomes a DTensor
again before its owner uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

__all__ = ["Sharding", "part_like", "take_part"]


class Sharding(msgspec.Struct, frozen=True, array_like=True):
    """The placement of one DTensor. ``shape`` and ``strides`` are those of the whole tensor."""

    near: str
    """Path of a tracked parameter on the same mesh."""
    placements: tuple[int | None, ...]
    """For each axis of the mesh the dim that it shards, or None where it replicates. Empty: the same as that parameter,
    which has the same shape."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> Sharding | None:
        """Return the sharding of ``tensor``; None if it is no DTensor, or one that these parameters cannot describe."""
        if not isinstance(tensor, DTensor):
            return None
        near = {p: q for p, q in parameters.items() if isinstance(q, DTensor) and q.device_mesh == tensor.device_mesh}
        for path, parameter in near.items():
            if (parameter.shape, parameter.placements) == (tensor.shape, tensor.placements):
                return cls(path, (), tuple(tensor.shape), tuple(tensor.stride()))
        if not near or not _is_told_by_dims(tensor):
            return None
        return cls(next(iter(near)), _dims(tensor), tuple(tensor.shape), tuple(tensor.stride()))

    def placed(self, near: DTensor) -> tuple[Placement, ...]:
        """Return the placements on the mesh of ``near``."""
        if not self.placements:
            return tuple(near.placements)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in self.placements)

    def local_shape(self, near: DTensor) -> tuple[int, ...]:
        """Return the shape of this rank's part. Each axis of the mesh cuts what the axes before it have left, as
        ``torch.chunk`` does."""
        if not self.placements:
            return tuple(near.to_local().shape)
        shape, mesh = list(self.shape), near.device_mesh
        for parts, part, dim in zip(mesh.shape, mesh.get_coordinate() or (), self.placements, strict=True):
            if dim is not None:
                size = -(-shape[dim] // parts)
                shape[dim] = max(0, min(size, shape[dim] - part * size))
        return tuple(shape)

    def whole(self, local: torch.Tensor, near: DTensor) -> DTensor:
        """Return the DTensor of which ``local`` is this rank's part. It shares the memory of ``local``."""
        return _whole(local, near, self.placed(near), self.shape, self.strides)


def take_part(tensor: DTensor, local: torch.Tensor) -> bool:
    """Make ``local`` this rank's part of ``tensor``, which was created as another rank, with a part of another size.

    Sizes differ because ranks at the end of an uneven dim hold less. Returns False, with nothing changed, if this
    rank's part has not the shape of ``local``.
    """
    if not _is_told_by_dims(tensor):
        return False
    if Sharding("", _dims(tensor), tuple(tensor.shape), tuple(tensor.stride())).local_shape(tensor) != local.shape:
        return False
    tensor._local_tensor = local
    if tensor.is_leaf:
        tensor.grad = None
    return True


def part_like(local: torch.Tensor, model: torch.Tensor | None) -> torch.Tensor:
    """Return ``local`` as a DTensor placed like ``model``, if that is one and its part has the same shape; otherwise
    ``local`` itself."""
    if not isinstance(model, DTensor) or isinstance(local, DTensor) or model.to_local().shape != local.shape:
        return local
    return _whole(local, model, model.placements, model.shape, model.stride())


def _whole(
    local: torch.Tensor,
    near: DTensor,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> DTensor:
    whole: DTensor = DTensor.from_local(
        local, near.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return whole


def _is_told_by_dims(tensor: DTensor) -> bool:
    return all(type(placement) in {Shard, Replicate} for placement in tensor.placements)


def _dims(tensor: DTensor) -> tuple[int | None, ...]:
    return tuple(placement.dim if isinstance(placement, Shard) else None for placement in tensor.placements)
