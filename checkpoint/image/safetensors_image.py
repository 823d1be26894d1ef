"""Write one rank's tensors into memory as a safetensors image, and read them as views of it.

`rackrun.checkpoint.image.image_layout` describes the bytes.

Bits are copied, never values (a NaN keeps its payload, fp8 is not dequantised), except that a lazy conjugate or
negative is resolved. Tensors that share storage are stored separately. A read tensor is a view of the payload; writing
into a view of read-only memory crashes the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rackrun.checkpoint.base.errors import FormatVersionError, IntegrityError, LayoutMismatch
from rackrun.checkpoint.image.image_layout import (
    PLAIN,
    Buffer,
    ImageLayout,
    TensorEntry,
    header_bytes,
    parse_image,
    plan_image,
)

__all__ = [
    "PLAIN",
    "Cuts",
    "ImageLayout",
    "TensorEntry",
    "bits_of",
    "check_local",
    "header_bytes",
    "memory_of",
    "no_cuts",
    "parse_image",
    "plan_image",
    "read_plain",
    "read_tensor",
    "read_tensors",
    "write_head",
    "write_image",
    "write_tensor",
    "write_tensors",
]

PIECE_BYTES = 2**20
"""Bytes of one copy.

It is small enough for a core's cache, and large enough that a thread hands over the interpreter only at its two ends.
"""
Bytes = NDArray[np.uint8]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_image(layout: ImageLayout, tensors: Mapping[str, torch.Tensor], plain: bytes, into: memoryview) -> None:
    """Write the whole image to the start of ``into``. ``tensors``: name -> local tensor, of any strides.

    Raises `LayoutMismatch`, before anything is written, when the tensors or the size of ``plain`` are not as planned.
    """
    start, stop = layout.extents.get(PLAIN, (0, 0))
    into = into.cast("B")
    if stop - start != len(plain) or len(into) < layout.total_bytes:
        raise LayoutMismatch(
            f"the image was planned with {stop - start} plain bytes of {layout.total_bytes} in all, and was given {len(plain)} plain "
            f"bytes and memory of {len(into)} bytes.",
            remedy="plan the image again, and give it a slot that is large enough.",
        )
    if different := tensors.keys() ^ layout.by_name.keys():
        name = min(different)
        raise LayoutMismatch(
            f"tensor {name!r:.200} is {'not in the layout' if name in tensors else 'missing'}.",
            remedy="the structure has changed: plan the image again.",
        )
    for entry in layout.entries:
        check_local(entry, tensors[entry.name])
    write_head(layout, plain, into)
    write_tensors(layout, tensors, into)


def write_head(layout: ImageLayout, plain: bytes, into: memoryview) -> None:
    """Write the header and the plain part. Nothing is checked."""
    start, stop = layout.extents.get(PLAIN, (0, 0))
    into[: len(layout.header)] = layout.header
    into[start:stop] = plain


def write_tensor(layout: ImageLayout, name: str, tensor: torch.Tensor, into: memoryview) -> None:
    """Write one tensor to its place in the image. Nothing is checked."""
    if layout.by_name[name].box.numel:
        bits = bits_of(tensor)
        place = torch.frombuffer(into, dtype=bits.dtype, count=bits.numel(), offset=layout.extents[name][0])
        place.view(bits.shape).copy_(bits)


def write_tensors(
    layout: ImageLayout,
    tensors: Mapping[str, torch.Tensor],
    into: memoryview,
    filled: Callable[[int], None] = lambda _: None,
) -> None:
    """Write tensors to their places, in the order of the image. Nothing is checked.

    About once in `PIECE_BYTES` it calls ``filled`` with the byte before which everything has been written, so that the
    callback finds the bytes in the cache. That holds if `write_head`, and all tensors not in ``tensors``, were written
    before.
    """
    told = 0
    for entry in layout.entries:
        if entry.name not in tensors:
            continue
        start, stop = layout.extents[entry.name]
        bits = bits_of(tensors[entry.name])
        if stop - start > PIECE_BYTES and bits.is_cpu and bits.is_contiguous():
            source = bits.flatten().view(torch.uint8).numpy()  # numpy copies a piece faster than torch does
            place = np.frombuffer(into, dtype=np.uint8, count=stop - start, offset=start)
            for at in range(0, stop - start, PIECE_BYTES):
                np.copyto(place[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES])
                filled(min(start + at + PIECE_BYTES, stop))
            told = stop
            continue
        write_tensor(layout, entry.name, tensors[entry.name], into)
        if stop - told >= PIECE_BYTES:
            filled(stop)
            told = stop


def read_tensor(layout: ImageLayout, name: str, payload: Buffer) -> torch.Tensor:
    """Return a tensor that is a view of ``payload`` and keeps it alive.

    Do not write to it when ``payload`` is read-only. Raises `LayoutMismatch` when the image has no such tensor,
    `FormatVersionError` when this torch does not know its dtype.
    """
    entry = layout.by_name.get(name)
    if entry is None:
        raise LayoutMismatch(f"the image holds no tensor {name!r:.200}.", remedy="it was saved by another model.")
    start, _ = layout.extents[name]
    _check_length(layout, payload)
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise FormatVersionError(
            f"this torch has no {entry.dtype} for tensor {name!r:.200}.", remedy="use a newer torch."
        )
    # creating a complex32 tensor warns that it is experimental; viewing pairs as one does not
    if dtype is torch.complex32:
        return torch.view_as_complex(_view(payload, torch.float16, (*entry.box.sizes, 2), start))
    return _view(payload, dtype, entry.box.sizes, start)


Cuts = Callable[[int, int], list[int]]
"""(address, size) -> where to cut a copy from or to these bytes, in bytes from the address.

See `rackrun.checkpoint.host_memory.background_pinning`.
"""


def no_cuts(address: int, size: int) -> list[int]:
    """Return no cuts, for memory that is not registered in pieces."""
    del address, size
    return []


def read_tensors(
    layout: ImageLayout,
    tensors: Mapping[str, torch.Tensor],
    payload: Buffer,
    threads: int = 1,
    *,
    cuts: Cuts = no_cuts,
) -> None:
    """Fill local tensors, all of the layout's, from ``payload``. Raises `LayoutMismatch` before anything is written.

    ``threads``: how many threads copy. ``cuts``: where the payload was registered with a GPU's driver in pieces.
    """
    _check_length(layout, payload)
    for entry in layout.entries:
        check_local(entry, tensors[entry.name])
    memory = np.frombuffer(payload, dtype=np.uint8)
    pieces: list[tuple[Bytes, Bytes]] = []
    with torch.no_grad():
        for entry in layout.entries:
            start, stop = layout.extents[entry.name]
            place = bits_of(tensors[entry.name])
            if stop - start > PIECE_BYTES and place.is_cpu and place.is_contiguous():
                flat = place.flatten().view(torch.uint8).numpy()
                for at in range(0, stop - start, PIECE_BYTES):
                    end = min(at + PIECE_BYTES, stop - start)
                    pieces.append((flat[at:end], memory[start + at : start + end]))
            elif place.numel():
                _copy_cut(place, _view(payload, place.dtype, tuple(place.shape), start), cuts)

    def fill(first: int) -> None:
        for into, source in pieces[first::threads]:
            np.copyto(into, source)

    if threads <= 1:
        fill(0)
        return
    with ThreadPoolExecutor(threads, "rackrun-read") as pool:
        for filled in [pool.submit(fill, first) for first in range(threads)]:
            filled.result()


def _copy_cut(place: torch.Tensor, source: torch.Tensor, cuts: Cuts) -> None:
    """Copy ``source``, which is contiguous, in the pieces that ``cuts`` gives."""
    at = cuts(source.data_ptr(), source.nbytes)
    if not at:
        place.copy_(source)
        return
    whole = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype, device=place.device)
    there, here = (one.view(-1).view(torch.uint8) for one in (whole, source))
    for start, stop in zip((0, *at), (*at, source.nbytes), strict=True):
        there[start:stop].copy_(here[start:stop])
    if whole is not place:
        place.copy_(whole)


def read_plain(layout: ImageLayout, payload: Buffer) -> bytes:
    """Return the state that is not tensors, as it was written."""
    _check_length(layout, payload)
    start, stop = layout.extents.get(PLAIN, (0, 0))
    return bytes(memoryview(payload)[start:stop])


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as integers of its itemsize; a complex one as pairs of them.

    It is a view, unless the tensor is a lazy conjugate or negative.
    """
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])


def check_local(entry: TensorEntry, tensor: torch.Tensor) -> None:
    """Raise `LayoutMismatch` unless ``tensor`` is the local part that ``entry`` describes, as plain strided memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    plainly = tensor.layout is torch.strided and tensor.device.type != "meta"
    if not plainly or hasattr(type(tensor), "__tensor_flatten__"):
        raise LayoutMismatch(
            f"tensor {entry.name!r:.200} is a {type(tensor).__name__} ({tensor.layout}, {tensor.device}), not plain memory.",
            remedy="pass a plain dense tensor instead; for a DTensor, pass the local tensors that `locals_of` returns.",
        )
    if dtype != entry.dtype or tuple(tensor.shape) != entry.box.sizes:
        raise LayoutMismatch(
            f"tensor {entry.name!r:.200} was planned as {entry.dtype}{list(entry.box.sizes)} and is {dtype}{list(tensor.shape)}.",
            remedy="the tensor has changed since the layout was planned: plan the image again.",
        )


def memory_of(buffer: Buffer) -> Any:
    """Return the buffer as an object for torch.frombuffer, which keeps ``buffer``'s memory alive.

    It is not marked as read-only, because torch warns about read-only memory.
    """
    return np.asarray(_Borrowed(buffer)) if memoryview(buffer).readonly else np.frombuffer(buffer, dtype=np.uint8)


class _Borrowed:
    """A buffer that claims to be writable, for `memory_of`."""

    def __init__(self, buffer: Buffer) -> None:
        self._kept = np.frombuffer(buffer, dtype=np.uint8)
        address = self._kept.__array_interface__["data"][0]
        shape = self._kept.shape
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, False)}


def _view(payload: Buffer, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory_of(payload), dtype=dtype, count=count, offset=start).view(shape)


def _check_length(layout: ImageLayout, payload: Buffer) -> None:
    if len(payload) < layout.total_bytes:
        raise IntegrityError(
            f"the image has {layout.total_bytes} bytes; only {len(payload)} are there.", remedy="use another copy."
        )
