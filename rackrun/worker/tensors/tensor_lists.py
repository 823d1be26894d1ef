"""Reads one property of many tensors without a Python call for each.

A step reads the version of every parameter several times. A list that C fills takes about 50 ns for each element, and a
Python function ten times that.
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
    "versions_of_plain",
    "written",
]

Mark = tuple[int, int]
"""Address and version of a tensor. A changed mark proves a change of the tensor; an unchanged one proves nothing."""
Fact = tuple[Any, ...]
"""Type, shape, strides, dtype and device of a tensor: a copy made for one tensor fits another with the same facts."""

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_VERSION, _NBYTES = attrgetter("_version"), attrgetter("nbytes")
_SHAPE, _DTYPE, _DEVICE = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")


def written(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each tensor the one whose version counts writes: of a DTensor, this rank's part."""
    found = list(tensors)
    if are_plain(found):
        return found
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in found]


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all are of torch's own tensor classes, so that none can hold its values elsewhere."""
    return set(map(type, tensors)) <= _PLAIN


def local_parts(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of each tensor, detached: with the same memory and version."""
    found = written(tensors)
    if are_plain(found):
        return list(map(torch.Tensor.detach, found))
    detached = [tensor.detach() for tensor in tensors]  # a part that is still being gathered, or of another class
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in detached]


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version of this rank's part of each tensor: equal as long as no write to them was noticed."""
    return list(map(_VERSION, written(tensors)))


def versions_of_plain(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the same as `versions`, of tensors that `are_plain`."""
    return list(map(_VERSION, tensors))


def marks(tensors: Iterable[torch.Tensor]) -> list[Mark]:
    """Return address and version of this rank's part of each tensor."""
    found = written(tensors)
    return list(zip(map(torch.Tensor.data_ptr, found), map(_VERSION, found), strict=True))


def facts(tensors: Sequence[torch.Tensor]) -> list[Fact]:
    """Return type, shape, strides, dtype and device of each tensor."""
    strides = map(torch.Tensor.stride, tensors)
    return list(
        zip(map(type, tensors), map(_SHAPE, tensors), strides, map(_DTYPE, tensors), map(_DEVICE, tensors), strict=True)
    )


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the storages that the tensors are views of."""
    return set(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors)))


def nbytes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the number of bytes of each tensor."""
    return list(map(_NBYTES, tensors))


def same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether both sequences hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))
