"""Copies of tensors as they were when a unit began, and how they are put back.

Memory is kept from unit to unit. A copy that is not taken anew in a unit is as good as the tensor's version and its place in memory
tell, and these prove a change only: whoever puts it back compares first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from rackrun.checkpoint.memory import ceilings
from rackrun.worker.tensor_bytes import dense_bytes, local_part

__all__ = ["NoRoom", "UndoCopies", "place_for", "same_bits"]

_ROOM = 2
"""So many times what is to be copied has to be free."""


class UndoCopies:
    """Path -> copy."""

    def __init__(self) -> None:
        self._held: dict[str, _Copy] = {}
        self._fresh: set[str] = set()

    def begin(self) -> None:
        """A unit begins."""
        self._fresh.clear()

    def clear(self) -> None:
        self._held.clear()
        self._fresh.clear()

    def keep_only(self, paths: Iterable[str]) -> None:
        """Give the memory of all others back."""
        wanted = set(paths)
        for path in [path for path in self._held if path not in wanted]:
            del self._held[path]
            self._fresh.discard(path)

    def __contains__(self, path: str) -> bool:
        return path in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def value(self, path: str) -> torch.Tensor:
        return self._held[path].value

    def take(self, tensors: Mapping[str, torch.Tensor], place: torch.device | None = None) -> int:
        """Copy all of them now, to ``place`` if given. Returns how many bytes."""
        taken = 0
        with torch.no_grad():
            for path, tensor in tensors.items():
                former = self._held.get(path)
                value = former.value if former is not None and _fits(former.value, tensor, place) else None
                if value is None:
                    value = torch.empty_like(tensor, device=place or tensor.device)
                value.copy_(tensor)
                self._held[path] = _Copy(tensor, value)
                taken += tensor.nbytes
        self._fresh.update(tensors)
        return taken

    def is_fresh(self, path: str) -> bool:
        """Taken when the unit in hand began."""
        return path in self._fresh

    def stands(self, path: str, tensor: torch.Tensor) -> bool:
        """Nothing shows that the tensor was written to since it was copied. A write through ``.data`` would not."""
        held = self._held.get(path)
        return held is not None and held.stands(tensor)

    def equals(self, path: str, tensor: torch.Tensor) -> bool:
        """Bit for bit."""
        return same_bits(self._held[path].value, tensor)

    def put_back(self, path: str, tensor: torch.Tensor) -> bool:
        """Into ``tensor``; False when it has another shape or type by now."""
        held = self._held[path]
        if held.value.shape != tensor.shape or held.value.dtype != tensor.dtype:
            return False
        with torch.no_grad():
            tensor.copy_(held.value)
        self._held[path] = _Copy(tensor, held.value)
        return True


class _Copy:
    def __init__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._tensor, self._version = _written(tensor), _written(tensor)._version
        self.value = value

    def stands(self, tensor: torch.Tensor) -> bool:
        mine, tensor = self._tensor, _written(tensor)
        same = tensor.data_ptr() == mine.data_ptr() and tensor.shape == mine.shape and tensor.stride() == mine.stride()
        return same and tensor._version == self._version


def _written(tensor: torch.Tensor) -> torch.Tensor:
    """Whose version counts up when ``tensor`` is written to."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _fits(value: torch.Tensor, tensor: torch.Tensor, place: torch.device | None) -> bool:
    return (
        value.shape == tensor.shape
        and value.dtype == tensor.dtype
        and value.stride() == tensor.stride()
        and value.device == (place or tensor.device)
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of this rank's parts. NaN equals itself here, and 0 does not equal -0."""
    one, other = local_part(one), local_part(other)
    if one.shape != other.shape or one.dtype != other.dtype:
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
