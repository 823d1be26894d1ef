"""Treats tensors as the bytes in their memory: to copy them, to pack them together, and to compare them bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import crc32c
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rackrun.worker.tensors.device_digest import device_digests
from rackrun.worker.tensors.freed_tensors import refuse_freed

__all__ = [
    "copy_bytes",
    "dense_bytes",
    "digest",
    "digests",
    "digests_by_path",
    "digests_to_come",
    "host_memory",
    "local_part",
    "pack",
]


_SHARED_BYTES = 32 * 2**20
"""Size from which digests are computed by several threads; less takes one processor some milliseconds."""
_COPIED_BYTES = 256 * 2**20
"""The most bytes of copies in memory at a time, of tensors that are no dense block or are not aligned to words."""
_THREADS = 8
"""The most threads for digests; more would wait for memory."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the tensor, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor's memory as a flat uint8 tensor in storage order; None when it is not one dense block."""
    if tensor.is_contiguous():
        return tensor.detach().reshape(-1).view(torch.uint8)
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return None
        expected *= size
    # a permutation, such as channels_last
    return torch.as_strided(tensor.detach(), (expected,), (1,)).view(torch.uint8)


def host_memory(flat: torch.Tensor) -> memoryview:
    """Return the bytes of a dense uint8 tensor on the host.

    `torch.Tensor.numpy` returns them too, but forbids resizing the storage from then on, which FSDP2 does with gathered
    parameters, and a script may do.
    """
    return np.asarray(_Memory(flat)).data if flat.numel() else memoryview(b"")


class _Memory:
    """The array interface that NumPy reads. NumPy's array keeps a reference to this object, and this object to the
    tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._kept = flat
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (flat.numel(),),
            "data": (flat.data_ptr(), False),
        }


def digest(tensor: torch.Tensor) -> int:
    """Return a fast digest of the tensor's bits, as a signed 64-bit integer: CRC32C and length on the host,
    `device_digests` elsewhere. Replicas are on devices of one kind."""
    return digests([tensor])[0]


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the digest of each tensor. A device is waited for once; large amounts on the host are shared between this
    process's processors."""
    found = [0] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    for device, here in places.items():
        on_device = [tensors[place] for place in here]
        each = _of_host(on_device) if device.type == "cpu" else _of_device(on_device)
        for place, one in zip(here, each, strict=True):
            found[place] = one
    return found


def digests_to_come(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what `digests` does of ``tensors``, which are all on one device: int64 of shape (len(tensors),) there,
    without waiting for it."""
    if tensors[0].device.type == "cpu":
        return torch.tensor(_of_host(tensors), dtype=torch.int64)
    return _on_device(tensors)


def _of_host(tensors: Sequence[torch.Tensor]) -> list[int]:
    threads = min(_THREADS, len(os.sched_getaffinity(0)), len(tensors))
    if threads > 1 and sum([one.nbytes for one in tensors]) >= _SHARED_BYTES:
        with ThreadPoolExecutor(threads, "rackrun-digest") as pool:
            return list(pool.map(_checksum, tensors))
    return [_checksum(tensor) for tensor in tensors]


def _of_device(tensors: Iterable[torch.Tensor]) -> list[int]:
    digested: list[int] = _on_device(tensors).tolist()
    return digested


def _on_device(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the digests of tensors on a device, int64, without waiting for it. At most about `_COPIED_BYTES` of copies
    are in memory at a time."""
    found: list[torch.Tensor] = []
    flats: list[torch.Tensor] = []
    copied = 0
    for part in map(local_part, tensors):
        flat = _flat(part)
        flats.append(flat)
        is_read_in_place = flat.data_ptr() == part.data_ptr() and not flat.data_ptr() % 4
        copied += 0 if is_read_in_place else flat.numel()
        if copied >= _COPIED_BYTES:
            found.append(device_digests(flats))
            flats, copied = [], 0
    if flats:
        found.append(device_digests(flats))
    return torch.cat(found)


def digests_by_path(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return path -> digest of tracked tensors. Raises `StepError` for one whose memory was freed."""
    refuse_freed(tensors)
    return dict(zip(tensors, digests(list(tensors.values())), strict=True))


def _flat(part: torch.Tensor) -> torch.Tensor:
    flat = dense_bytes(part)
    return part.contiguous().reshape(-1).view(torch.uint8) if flat is None else flat


def _checksum(tensor: torch.Tensor) -> int:
    flat = _flat(local_part(tensor))
    return crc32c.crc32c(host_memory(flat)) | (flat.numel() % 2**31) << 32


def pack(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the bytes of all tensors, one after another, as a new uint8 tensor on ``device``."""
    parts = [tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def copy_bytes(packed: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Copy bytes that `pack` has packed into ``tensors``."""
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            part = packed[at : at + tensor.nbytes].clone()  # with a storage of its own, because views need alignment
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            at += tensor.nbytes
