"""Copies of tensors as they were when a unit began, and how they are put back.

Memory is kept from unit to unit. A copy that is not taken anew in a unit is as good as the tensor's version and its place in memory
tell, and these prove a change only: whoever puts it back compares first.
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

__all__ = ["NoRoom", "UndoCopies", "place_for", "same_bits"]

_ROOM = 2
"""So many times what is to be copied has to be free."""

_COPIED_AT_ONCE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
"""What torch's copy of many tensors knows on every device."""

_ADDRESS = itemgetter(0)
_Row: TypeAlias = tuple[Fact, Mark, torch.Tensor, torch.Tensor]
"""What the tensor was when it was copied; an alias of it, so that its memory is nobody else's meanwhile; the copy."""


class UndoCopies:
    """Path -> copy."""

    def __init__(self) -> None:
        self._held: dict[str, _Row] = {}
        self._fresh: set[str] = set()

    def begin(self) -> None:
        """A unit begins."""
        self._fresh.clear()

    def clear(self) -> None:
        self._held.clear()
        self._fresh.clear()

    def keep_only(self, paths: Iterable[str]) -> None:
        """Give the memory of all others back."""
        for path in self._held.keys() - set(paths):
            del self._held[path]
            self._fresh.discard(path)

    def __contains__(self, path: str) -> bool:
        return path in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def value(self, path: str) -> torch.Tensor:
        return self._held[path][3]

    def take(self, tensors: Mapping[str, torch.Tensor], place: torch.device | None = None) -> int:
        """Copy all of them now, to ``place`` if given. Returns how many bytes. Raises `StepError` where there is nothing to copy any more."""
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
        """Taken when the unit in hand began."""
        return path in self._fresh

    def stands(self, path: str, tensor: torch.Tensor) -> bool:
        """Nothing shows that the tensor was written to since it was copied. A write through ``.data`` would not."""
        return not self.outdated({path: tensor})

    def outdated(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The paths of those that do not `stands`, or were never copied."""
        found = list(tensors.values())
        return [
            path
            for path, fact, mark in zip(tensors, facts(found), marks(found), strict=True)
            if path not in self._held or self._held[path][:2] != (fact, mark)
        ]

    def equals(self, path: str, tensor: torch.Tensor) -> bool:
        """Bit for bit."""
        return same_bits(self._held[path][3], tensor)

    def put_back(self, path: str, tensor: torch.Tensor) -> bool:
        """Into ``tensor``; False when it has another shape or type by now. Raises `StepError` when its memory was freed."""
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
    """The bits of each: those of one kind by one call of torch's."""
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
    """Of this rank's parts. NaN equals itself here, and 0 does not equal -0. What was freed equals nothing."""
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


class NoRoom(Exception):
    """There is no memory for the copies."""


def place_for(size: int, device: torch.device, *, on_host: bool = False) -> torch.device | None:
    """Where ``size`` bytes of this rank's state are to be copied to: None for the device they are on. Raises `NoRoom`. ``on_host``: not
    to an accelerator, whose memory a step may need that has not run yet."""
    if device.type == "cuda" and not on_host and torch.cuda.mem_get_info(device)[0] > _ROOM * size:
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = min((ceiling.free for ceiling in ceilings(None)), default=0)
    if free < _ROOM * size * ranks:
        raise NoRoom(f"{size} bytes for each of {ranks} ranks, of {free} that are free")
    return None if device.type == "cpu" else torch.device("cpu")
