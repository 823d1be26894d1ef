"""How the tracked tensors lie on this rank, as a manifest tells it. A snapshot asks while the device has nothing to do, and the answer is the same
as a rule, so it is made anew only when a tensor has another place, shape or kind."""

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
    def __init__(self) -> None:
        self._key: list[Any] | None = None
        self._infos: list[TensorInfo] = []

    def of(
        self,
        parts: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        like_parameters: Callable[[], set[str]],
    ) -> list[TensorInfo]:
        """Of all ``parts``, path -> tensor, in their order. The same object as long as nothing of it has changed. ``like_parameters``: which of them
        belong to a parameter and are sharded as it is."""
        key = _key(parts, parameters)
        if key is None or key != self._key:
            self._key, self._infos = key, _infos(parts, parameters, like_parameters())
        return self._infos


def _key(parts: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> list[Any] | None:
    """All that `_infos` depends on, and which part of a whole each tensor is. A new address is a new key as well, so that whoever keeps something by
    the infos looks again whether there is memory behind them. None: there is no key, because a tensor of another class may lie anywhere."""
    tensors = list(parts.values())
    local = written(tensors)
    if not are_plain(local):
        return None
    gradients = [gradient is not None for gradient in map(_GRAD, parameters.values())]
    sharded = [] if same_objects(local, tensors) else [one for one in tensors if isinstance(one, DTensor)]
    placed = [(one.shape, one.stride(), one.placements, one.device_mesh) for one in sharded]
    meshes = {id(one.device_mesh): one.device_mesh for one in sharded}
    coordinates = [mesh.get_coordinate() for mesh in meshes.values()]  # a promoted spare's change, in the same mesh
    addresses = list(map(torch.Tensor.data_ptr, local))
    return [list(parts), facts(local), addresses, list(parameters), gradients, placed, coordinates]


def _infos(
    parts: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], like: set[str]
) -> list[TensorInfo]:
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
