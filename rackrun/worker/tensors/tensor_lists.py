"""One question asked of many tensors, without a call of Python's own for each of them.

A step asks for the version of every parameter, several times. A list that C fills costs some 50 ns an element, and a function of ours
ten times that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = [
    "Fact",
    "Mark",
    "are_plain",
    "facts",
    "local_parts",
    "marks",
    "nbytes",
    "same_objects",
    "storages",
    "versions",
    "written",
]

Mark = tuple[int, int]
"""Address and version of a tensor. One that has moved proves a change; one that stands proves nothing."""
Fact = tuple[Any, ...]
"""Type, shape, strides, dtype and device of a tensor: a copy that was made for it fits another with the same."""

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_VERSION, _NBYTES = attrgetter("_version"), attrgetter("nbytes")
_SHAPE, _DTYPE, _DEVICE = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")


def written(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of each the tensor whose version counts up when it is written to: of a DTensor, this rank's part."""
    found = list(tensors)
    if _any_sharded(found):
        return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in found]
    return found


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """None is of a class of its own, and may hold its values elsewhere."""
    return set(map(type, tensors)) <= _PLAIN


def local_parts(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of each, detached: the same memory, and the same version."""
    found = written(tensors)
    if are_plain(found):
        return list(map(torch.Tensor.detach, found))
    detached = [tensor.detach() for tensor in tensors]  # a part that is still being gathered, or of a kind of its own
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in detached]


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of this rank's part of each: equal as long as nothing was seen to be written to them."""
    return list(map(_VERSION, written(tensors)))


def marks(tensors: Iterable[torch.Tensor]) -> list[Mark]:
    found = written(tensors)
    return list(zip(map(torch.Tensor.data_ptr, found), map(_VERSION, found), strict=True))


def facts(tensors: Sequence[torch.Tensor]) -> list[Fact]:
    strides = map(torch.Tensor.stride, tensors)
    return list(
        zip(map(type, tensors), map(_SHAPE, tensors), strides, map(_DTYPE, tensors), map(_DEVICE, tensors), strict=True)
    )


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the memory that they are views of."""
    return set(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors)))


def nbytes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Bytes of each."""
    return list(map(_NBYTES, tensors))


def same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _any_sharded(tensors: list[torch.Tensor]) -> bool:
    kinds = set(map(type, tensors))
    return not kinds <= _PLAIN and any(issubclass(kind, DTensor) for kind in kinds)
