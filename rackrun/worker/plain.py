"""State dicts without their tensors: what msgpack can carry, and back into the containers that the owner uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

__all__ = ["flatten", "leaves", "like", "with_tensors", "without_tensors"]


def flatten(prefix: str, value: Any) -> dict[str, torch.Tensor]:
    """Path -> tensor, of all that ``value`` holds: detached, in the same memory."""
    return {path: tensor.detach() for path, tensor in leaves(prefix, value)}


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, each tensor as the object that its owner has."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{prefix}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from leaves(f"{prefix}/{key}", item)


_TENSOR = "__rackrun_tensor__"


def without_tensors(prefix: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {_TENSOR: prefix}
    if isinstance(value, Mapping):
        return {key: without_tensors(f"{prefix}/{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_tensors(f"{prefix}/{key}", item) for key, item in enumerate(value)]
    return value


def with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [with_tensors(item, tensors) for item in value]
    return value


def like(model: Any, value: Any) -> Any:
    """``value`` in the containers that ``model`` uses: msgpack knows lists and dicts only."""
    if isinstance(model, tuple) and isinstance(value, list):
        return tuple(like(model[i] if i < len(model) else None, item) for i, item in enumerate(value))
    if isinstance(model, list) and isinstance(value, list):
        return [like(model[i] if i < len(model) else None, item) for i, item in enumerate(value)]
    if isinstance(model, Mapping) and isinstance(value, dict):
        filled = {key: like(model.get(key), item) for key, item in value.items()}
        return filled if type(model) is dict else cast("Callable[[Any], Any]", type(model))(filled)
    return value
