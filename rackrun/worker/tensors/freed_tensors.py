"""Detects tracked tensors whose memory was freed. Copying or digesting one reads foreign memory, and may end the
process by SIGSEGV.

A tensor has sizes and strides, and its storage has a size of its own. They fit until the storage is resized. FSDP2
resizes the storage of the whole parameters that it gathers: they are in the modules during forward and backward, and
have 0 bytes afterwards. A script that exchanges the ``data`` of two of them, or resizes a storage itself, leaves such
tensors behind. torch refuses most uses of one with an exception, which the script must see, so rackrun must not end the
process before that.

An exact check takes a call or two for each tensor. It is done where all tensors are visited anyway: at the end of the
loop, before digests and images, in the first steps and other audits, and when the structure of modules has changed. In
every other step only tensors that are copied are checked, by their address, which is known already: it is 0 where the
storage is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from rackrun.errors import StepError
from rackrun.worker.tensors.tensor_lists import written

__all__ = ["is_freed", "refuse_freed", "refuse_without_address"]


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage has fewer bytes than its sizes, strides and offset need."""
    return _missing(tensor) > 0


def refuse_freed(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `StepError` for the first of ``tensors`` (path -> tensor) whose memory was freed."""
    for path, tensor in zip(tensors, written(tensors.values()), strict=True):
        if missing := _missing(tensor):
            raise StepError(
                f"the memory of {_shown(path)}, which is tracked, was freed: its storage is {missing} bytes smaller than its sizes "
                f"{tuple(tensor.shape)} and strides need, so it can neither be copied nor compared.",
                remedy="write values into tensors (with torch.no_grad(): a.copy_(b)) in place of an exchange of their .data or of their storage. "
                "Under fully_shard do it after optimizer.step(): what a parameter is in forward and backward is freed when they are over.",
            )


def refuse_without_address(paths: Iterable[str], tensors: Iterable[torch.Tensor], addresses: Collection[int]) -> None:
    """Raise `StepError` for the first freed tensor whose address is 0, which every tensor that has lost its whole
    storage has."""
    if not all(addresses):
        found = zip(paths, tensors, addresses, strict=True)
        refuse_freed({path: tensor for path, tensor, address in found if not address})


def _missing(tensor: torch.Tensor) -> int:
    """Return how many bytes the tensor's storage is too small; 0 if it is not."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return 0  # it holds its values in other tensors, and has no storage
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return max(0, int(needed) - tensor.untyped_storage().nbytes())


def _shown(path: str) -> str:
    return path.replace("/param/", ".").replace("/buffer/", ".")
