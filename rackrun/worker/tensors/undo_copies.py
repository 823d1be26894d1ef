"""Keeps copies of tensors as they were when a unit began, and puts them back.

Memory is kept from unit to unit. A copy that is not renewed in a unit is believed as far as the tensor's version and
address tell. These can only prove a change, so callers compare before they put a copy back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TypeAlias

import torch

from rackrun.checkpoint.arena.memory_plan import ceilings
from rackrun.worker.tensors.freed_tensors import is_freed, refuse_freed, refuse_without_address
from rackrun.worker.tensors.tensor_bytes import dense_bytes, local_part
from rackrun.worker.tensors.tensor_lists import Fact, Mark, facts, marks, written

__all__ = ["NoMemoryForCopies", "UndoCopies", "place_for", "same_bits"]

_ROOM = 2
"""Free memory must be at least this many times the size of the copies."""

_COPIED_AT_ONCE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
"""The dtypes that torch's copy of many tensors supports on every device."""

_ADDRESS = itemgetter(0)
_Row: TypeAlias = tuple[Fact, Mark, torch.Tensor, torch.Tensor]
"""Facts and mark of the tensor when it was copied; an alias that keeps its memory from being reused; the copy."""


class UndoCopies:
    """Copies of tensors by path."""

    def __init__(self) -> None:
        self._held: dict[str, _Row] = {}
        self._fresh: set[str] = set()

    def begin(self) -> None:
        """Begin a unit: no copy is fresh."""
        self._fresh.clear()

    def clear(self) -> None:
        """Drop all copies and free their memory."""
        self._held.clear()
        self._fresh.clear()

    def keep_only(self, paths: Iterable[str]) -> None:
        """Free the copies of all other paths."""
        for path in self._held.keys() - set(paths):
            del self._held[path]
            self._fresh.discard(path)

    def __contains__(self, path: str) -> bool:
        return path in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def value(self, path: str) -> torch.Tensor:
        """Return the copy at ``path``."""
        return self._held[path][3]

    def take(self, tensors: Mapping[str, torch.Tensor], place: torch.device | None = None) -> int:
        """Copy all ``tensors`` now, to the device ``place`` if given, and return the number of bytes. Raises
        `StepError` for a tensor whose memory was freed."""
        sources, taken = list(tensors.values()), 0
        found, marked = facts(sources), marks(sources)
        refuse_without_address(tensors, sources, list(map(_ADDRESS, marked)))
        values: list[torch.Tensor] = []
        with torch.no_grad():
            for path, source, fact in zip(tensors, sources, found, strict=True):
                former = self._held.get(path)
                device = place or source.device
                if former is not None and former[0] == fact and former[3].device == device:
                    values.append(former[3])
                else:
                    values.append(torch.empty_like(source, device=device))
                taken += source.nbytes
            _copy(values, sources)
        kept = [source.detach() for source in written(sources)]
        self._held.update(zip(tensors, zip(found, marked, kept, values, strict=True), strict=True))
        self._fresh.update(tensors)
        return taken

    def is_fresh(self, path: str) -> bool:
        """Whether the copy was taken when the current unit began."""
        return path in self._fresh

    def stands(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether nothing shows that the tensor was written to since it was copied. A write through ``.data`` does not
        show."""
        return not self.outdated({path: tensor})

    def outdated(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the paths of tensors that were never copied or were written to since (see `stands`)."""
        found = list(tensors.values())
        return [
            path
            for path, fact, mark in zip(tensors, facts(found), marks(found), strict=True)
            if path not in self._held or self._held[path][:2] != (fact, mark)
        ]

    def equals(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor has the same bits as its copy."""
        return same_bits(self._held[path][3], tensor)

    def put_back(self, path: str, tensor: torch.Tensor) -> bool:
        """Copy back into ``tensor``; returns False when it has another shape or dtype now. Raises `StepError` when its
        memory was freed."""
        value = self._held[path][3]
        refuse_freed({path: tensor})
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            return False
        with torch.no_grad():
            tensor.copy_(value)
        (fact,), (mark,), (source,) = facts([tensor]), marks([tensor]), written([tensor])
        self._held[path] = fact, mark, source.detach(), value
        return True


def _copy(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy the bits of each tensor, with one call of torch for all tensors of one kind."""
    alike: dict[tuple[torch.dtype, torch.device, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for value, tensor in zip(into, tensors, strict=True):
        if type(tensor) is torch.Tensor and tensor.dtype in _COPIED_AT_ONCE:
            values, sources = alike.setdefault((tensor.dtype, tensor.device, value.device), ([], []))
            values.append(value)
            sources.append(tensor)
        else:
            value.copy_(tensor)
    for values, sources in alike.values():
        torch._foreach_copy_(values, sources)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether this rank's parts of two tensors have the same bits: NaN equals itself, and 0 does not equal -0. A freed
    tensor equals nothing."""
    one, other = local_part(one), local_part(other)
    if one.shape != other.shape or one.dtype != other.dtype or is_freed(one) or is_freed(other):
        return False
    if one.device != other.device:
        other = other.to(one.device)
    mine, its = dense_bytes(one), dense_bytes(other)
    if mine is None or its is None or one.stride() != other.stride():
        mine, its = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    whole = len(mine) // 8 * 8
    if mine.storage_offset() % 8 or its.storage_offset() % 8:
        return torch.equal(mine, its)
    return torch.equal(mine[:whole].view(torch.int64), its[:whole].view(torch.int64)) and torch.equal(
        mine[whole:], its[whole:]
    )


class NoMemoryForCopies(Exception):
    """There is not enough memory for the copies."""


def place_for(size: int, device: torch.device, *, on_host: bool = False) -> torch.device | None:
    """Return the device for copies of ``size`` bytes of this rank's state; None for the device that the state is on.
    Raises `NoMemoryForCopies`.

    ``on_host``: do not use an accelerator, whose memory may be needed by a step that has not run yet.
    """
    if device.type == "cuda" and not on_host and torch.cuda.mem_get_info(device)[0] > _ROOM * size:
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = min((ceiling.free for ceiling in ceilings(None)), default=0)
    if free < _ROOM * size * ranks:
        raise NoMemoryForCopies(f"each of {ranks} ranks needs {size} bytes for copies, and {free} bytes are free")
    return None if device.type == "cpu" else torch.device("cpu")
