"""Describes the dtype, shape, strides and sharding of the tracked tensors on this rank, as manifests hold them.

A snapshot reads the description while the device is idle. It seldom changes, so it is computed again only when a tensor
has another address, shape or kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rackrun.worker.state.shardings import Sharding
from rackrun.worker.state.state_manifest import TensorInfo
from rackrun.worker.tensors.tensor_bytes import dense_bytes, local_part
from rackrun.worker.tensors.tensor_lists import are_plain, facts, same_objects, written

__all__ = ["TensorInfos"]

_GRAD = attrgetter("grad")


class TensorInfos:
    """The newest description of the tracked tensors, kept until something in it changes."""

    def __init__(self) -> None:
        self._key: list[Any] | None = None
        self._infos: list[TensorInfo] = []

    def of(
        self,
        parts: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        like_parameters: Callable[[], set[str]],
    ) -> list[TensorInfo]:
        """Return the descriptions of ``parts`` (path -> tensor), in their order: the same list object as long as
        nothing has changed.

        ``parameters``: the tracked parameters by path. ``like_parameters``: returns the paths of tensors that belong to
        a parameter and are sharded like it.
        """
        key = _key(parts, parameters)
        if key is None or key != self._key:
            self._key, self._infos = key, _infos(parts, parameters, like_parameters())
        return self._infos


def _key(parts: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> list[Any] | None:
    """Return everything that `_infos` depends on, and which part of a whole each tensor is; None if a tensor of an
    unknown class may lie anywhere.

    Addresses are included, so that a caller who keeps results by the list of infos checks again whether there is memory
    behind a tensor.
    """
    tensors = list(parts.values())
    local = written(tensors)
    if not are_plain(local):
        return None
    gradients = [gradient is not None for gradient in map(_GRAD, parameters.values())]
    sharded = [] if same_objects(local, tensors) else [one for one in tensors if isinstance(one, DTensor)]
    placed = [(one.shape, one.stride(), one.placements, one.device_mesh) for one in sharded]
    meshes = {id(one.device_mesh): one.device_mesh for one in sharded}
    # the coordinates of a promoted spare change in the same mesh
    coordinates = [mesh.get_coordinate() for mesh in meshes.values()]
    addresses = list(map(torch.Tensor.data_ptr, local))
    return [list(parts), facts(local), addresses, list(parameters), gradients, placed, coordinates]


def _infos(
    parts: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], like: set[str]
) -> list[TensorInfo]:
    """Compute the description of each part; ``like``: paths of tensors that are sharded like their parameter."""
    infos = []
    for path, part in parts.items():
        t = local_part(part)
        infos.append(
            TensorInfo(
                path,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                t.device.type == "cpu",
                path in like,
                () if t.is_contiguous() or dense_bytes(t) is None else tuple(t.stride()),
                None if path in like or path in parameters else Sharding.of(part, parameters),
                path in parameters and parameters[path].grad is not None,
            )
        )
    return infos
