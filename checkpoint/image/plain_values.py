"""Converts state dicts to values that msgpack can encode, without their tensors, and back into the owner's own
containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from rackrun.errors import UsageError

__all__ = ["SCALARS", "flatten", "leaves", "like", "with_tensors", "without_tensors"]


SCALARS = frozenset({bool, int, float, str, bytes, type(None)})


DEPTH_MAX = 200
"""How deep containers may be nested. A container that contains itself is deeper than anything."""


def _too_deep(path: str) -> UsageError:
    return UsageError(
        f"the state at {path[:120]}... contains itself, or is nested more than {DEPTH_MAX} containers deep.",
        remedy="return plain containers of tensors and numbers from state_dict().",
    )


def flatten(prefix: str, value: Any) -> dict[str, torch.Tensor]:
    """Return path -> tensor for all tensors in ``value``: detached, sharing their memory."""
    return {path: tensor.detach() for path, tensor in leaves(prefix, value)}


def leaves(prefix: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return (path, tensor) for all tensors in ``value``, as the owner's own objects, depth first in the order of the
    containers. Raises UsageError if containers are nested more than `DEPTH_MAX` deep."""
    found: list[tuple[str, torch.Tensor]] = []
    left: list[tuple[str, Any, int]] = [(prefix, value, 0)]
    while left:
        path, one, depth = left.pop()
        if isinstance(one, torch.Tensor):
            found.append((path, one))
        elif type(one) in SCALARS:
            continue
        elif isinstance(one, (Mapping, list, tuple)):
            if depth > DEPTH_MAX:
                raise _too_deep(path)
            items = list(one.items() if isinstance(one, Mapping) else enumerate(one))
            # A comprehension would be a function call of its own, and there may be a container for each parameter.
            for key, item in reversed(items):
                left.append((f"{path}/{key}", item, depth + 1))
    return found


_TENSOR = "__rackrun_tensor__"


def without_tensors(prefix: str, value: Any) -> Any:
    """Return ``value`` with each tensor replaced by a reference to its path, and with lists and dicts as containers.
    Raises UsageError as `leaves` does."""
    whole: list[Any] = [None]
    left: list[tuple[Any, Any, str, Any, int]] = [(whole, 0, prefix, value, 0)]
    while left:
        into, at, path, one, depth = left.pop()
        if depth > DEPTH_MAX and isinstance(one, (Mapping, list, tuple)):
            raise _too_deep(path)
        if isinstance(one, torch.Tensor):
            into[at] = {_TENSOR: path}
        elif type(one) in SCALARS:
            into[at] = one
        elif isinstance(one, Mapping):
            filled = into[at] = dict.fromkeys(one)
            for key, item in one.items():
                left.append((filled, key, f"{path}/{key}", item, depth + 1))
        elif isinstance(one, (list, tuple)):
            into[at] = listed = [None] * len(one)
            for key, item in enumerate(one):
                left.append((listed, key, f"{path}/{key}", item, depth + 1))
        else:
            into[at] = one
    return whole[0]


def with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return ``value`` with each reference to a path replaced by the tensor in ``tensors``."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [with_tensors(item, tensors) for item in value]
    return value


def like(model: Any, value: Any) -> Any:
    """Return ``value`` in the container types of ``model``, because msgpack knows lists and dicts only."""
    if isinstance(model, tuple) and isinstance(value, list):
        return tuple(like(model[i] if i < len(model) else None, item) for i, item in enumerate(value))
    if isinstance(model, list) and isinstance(value, list):
        return [like(model[i] if i < len(model) else None, item) for i, item in enumerate(value)]
    if isinstance(model, Mapping) and isinstance(value, dict):
        filled = {key: like(model.get(key), item) for key, item in value.items()}
        return filled if type(model) is dict else cast("Callable[[Any], Any]", type(model))(filled)
    return value
