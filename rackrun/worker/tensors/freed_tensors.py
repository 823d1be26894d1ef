"""Tracked tensors whose memory is gone. Who copies or digests one reads memory that is nobody's, and its process ends by SIGSEGV.

A tensor has sizes and strides, and its storage has a number of bytes of its own. They fit until the storage is resized. FSDP2 does that to the whole
parameters that it gathers: in forward and backward they stand in the modules, and after that their storage has 0 bytes. A script that exchanges
the ``data`` of two of them, or resizes a storage itself, leaves such tensors behind. torch refuses most uses of one with an exception, which is the
script's to see. rackrun must not end the process before that.

The exact question takes a call or two for each tensor, so it is asked where all of them are looked at anyway: at the end of the loop, before digests and
images, in the first steps and other audits, and when modules are seen to be made of something else. In every other step only what is copied is looked
at, by its address, which is known already: 0 where the storage is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from rackrun.errors import StepError
from rackrun.worker.tensors.tensor_lists import written

__all__ = ["is_freed", "refuse_freed", "refuse_without_address"]


def is_freed(tensor: torch.Tensor) -> bool:
    """Its storage has fewer bytes than its sizes, strides and offset need."""
    return _missing(tensor) > 0


def refuse_freed(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `StepError` for the first that is freed. ``tensors``: path -> tensor."""
    for path, tensor in zip(tensors, written(tensors.values()), strict=True):
        if missing := _missing(tensor):
            raise StepError(
                f"the memory of {_shown(path)}, which is tracked, was freed: its storage is {missing} bytes smaller than its sizes "
                f"{tuple(tensor.shape)} and strides need, so it can neither be copied nor compared.",
                remedy="write values into tensors (with torch.no_grad(): a.copy_(b)) in place of an exchange of their .data or of their storage. "
                "Under fully_shard do it after optimizer.step(): what a parameter is in forward and backward is freed when they are over.",
            )


def refuse_without_address(paths: Iterable[str], tensors: Iterable[torch.Tensor], addresses: Collection[int]) -> None:
    """The same, of those whose address is 0: other than an empty tensor, each has lost its whole storage."""
    if not all(addresses):
        found = zip(paths, tensors, addresses, strict=True)
        refuse_freed({path: tensor for path, tensor, address in found if not address})


def _missing(tensor: torch.Tensor) -> int:
    """Bytes."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return 0  # it holds its values in other tensors, and has no storage
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return max(0, int(needed) - tensor.untyped_storage().nbytes())


def _shown(path: str) -> str:
    return path.replace("/param/", ".").replace("/buffer/", ".")
