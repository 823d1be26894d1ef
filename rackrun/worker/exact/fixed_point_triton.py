"""The arithmetic of `rackrun.worker.exact.fixed_point` on a GPU: one pass over memory, and one launch for all
parameters of a bucket.

torch's operations make up to five passes. Importing this module requires Triton.

The largest magnitude is found in the same pass. The bits of a magnitude order like the number itself, with those of inf
and NaN above all others, and an atomic maximum of integers does not depend on the order in which blocks run.

A bucket is cut into blocks without regard to its parameters, so that all blocks but the last are read and written
whole, in vectors, wherever parameters begin. A block knows the first and the last parameter in it, and looks up their
scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from rackrun.worker.exact.fixed_point import Whole
from rackrun.worker.exact.parameter_segments import Factors, Segments

__all__ = ["TritonKernel", "load"]

_BLOCK = 1024
_BLOCK_APART = tl.constexpr(_BLOCK)
_ALIGNMENT = 16
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _magnitude(value):  # type: ignore[no-untyped-def]
    """Return the magnitude's bits; those of inf for NaN."""
    return tl.minimum(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _raise(largest, magnitude):  # type: ignore[no-untyped-def]
    """Raise the value at ``largest`` to ``magnitude`` if that is more.

    The value only grows, so an old value may be read, and few blocks have to write: if all wrote to the same address,
    that would take a quarter of the kernel's time. No block reads what others write, so no memory order is needed.
    """
    if magnitude > tl.load(largest):
        tl.atomic_max(largest, magnitude, sem="relaxed")


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _nearest(value, scale):  # type: ignore[no-untyped-def]
    """Return ``value`` * ``scale`` rounded half to even. Up to 2**23 the sum has no room for a fraction; above, numbers
    have none."""
    scaled = tl.abs(value * scale)
    whole = tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled)
    return tl.where(value < 0, -whole, whole)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _rounded_segments(value, table, scales, largest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Return the rounded values of one block, whose elements may be of several segments. ``table``: from
    `Segments.table`."""
    value = value.to(tl.float32)
    bits = _magnitude(value)
    inside_block = tl.arange(0, BLOCK)
    first, last, begin = _of_block(table, BLOCK)
    scale = tl.zeros([BLOCK], dtype=tl.float32)
    for segment in range(first, last + 1):
        start, stop, slot = _segment(table, segment, begin)
        inside = (inside_block >= start) & (inside_block < stop)
        _raise(largest + slot, tl.max(tl.where(inside, bits, 0), axis=0))
        scale = tl.where(inside, tl.load(scales + slot), scale)
    return _nearest(value, scale)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _of_block(table, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    return tl.load(table + block).to(tl.int32), tl.load(table + blocks + block).to(tl.int32), block.to(tl.int64) * BLOCK


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _segment(table, segment, begin):  # type: ignore[no-untyped-def]
    """Return a segment's start and stop relative to the block's ``begin``, clipped to 32 bits, and its slot."""
    row = table + 2 * tl.num_programs(0) + 3 * segment
    start = tl.minimum(tl.maximum(tl.load(row) - begin, 0), 2147483647).to(tl.int32)
    stop = tl.minimum(tl.load(row + 1) - begin, 2147483647).to(tl.int32)
    return start, stop, tl.load(row + 2)


@triton.jit(do_not_specialize=["count"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _add_segments(values, sums, table, scales, largest, count, FRESH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    if first + BLOCK <= count:
        rounded = _rounded_segments(tl.load(values + at), table, scales, largest, BLOCK).to(sums.dtype.element_ty)
        if not FRESH:
            rounded += tl.load(sums + at)
        tl.store(sums + at, rounded)
    else:
        inside = at < count
        value = tl.load(values + at, mask=inside, other=0.0)
        rounded = _rounded_segments(value, table, scales, largest, BLOCK).to(sums.dtype.element_ty)
        if not FRESH:
            rounded += tl.load(sums + at, mask=inside, other=0)
        tl.store(sums + at, rounded, mask=inside)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _add_apart(  # type: ignore[no-untyped-def]
    addresses,
    table,
    scales,
    largest,
    VALUE: tl.constexpr,  # noqa: N803
    SUM: tl.constexpr,  # noqa: N803
    FRESH: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
):
    """Add segments that have memory of their own. ``addresses``: of each segment's values and sums. ``ALIGNED``: all
    are multiples of 16. ``table``: from `Segments.table_apart`."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    BLOCK: tl.constexpr = _BLOCK_APART  # noqa: N806
    segment = tl.load(table + block)
    size = tl.load(table + 2 * blocks + 2 * segment)
    slot = tl.load(table + 2 * blocks + 2 * segment + 1)
    first = tl.load(table + blocks + block) * BLOCK
    at = first + tl.arange(0, BLOCK)
    values = tl.load(addresses + 2 * segment).to(tl.pointer_type(VALUE)) + at
    sums = tl.load(addresses + 2 * segment + 1).to(tl.pointer_type(SUM)) + at
    if ALIGNED:
        values = tl.multiple_of(values, 16)
        sums = tl.multiple_of(sums, 16)
    scale = tl.load(scales + slot)
    if first + BLOCK <= size:
        value = tl.load(values).to(tl.float32)
        rounded = _nearest(value, scale).to(SUM)
        if not FRESH:
            rounded += tl.load(sums)
        tl.store(sums, rounded)
    else:
        value = tl.load(values, mask=at < size, other=0.0).to(tl.float32)
        rounded = _nearest(value, scale).to(SUM)
        if not FRESH:
            rounded += tl.load(sums, mask=at < size, other=0)
        tl.store(sums, rounded, mask=at < size)
    _raise(largest + slot, tl.max(_magnitude(value), axis=0))


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _factors(table, inverses, marks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Return the factor for the sum of each element of one block: NaN where its segment is marked."""
    inside_block = tl.arange(0, BLOCK)
    first, last, begin = _of_block(table, BLOCK)
    factor = tl.zeros([BLOCK], dtype=tl.float32)
    for segment in range(first, last + 1):
        start, stop, slot = _segment(table, segment, begin)
        own = tl.where(tl.load(marks + segment) > 0, float("nan"), tl.load(inverses + slot))
        factor = tl.where((inside_block >= start) & (inside_block < stop), own, factor)
    return factor


@triton.jit(do_not_specialize=["count"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _read_segments(sums, out, table, inverses, marks, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    factor = _factors(table, inverses, marks, BLOCK)
    if first + BLOCK <= count:
        tl.store(out + at, (tl.load(sums + at).to(tl.float32) * factor).to(out.dtype.element_ty))
    else:
        inside = at < count
        value = tl.load(sums + at, mask=inside, other=0).to(tl.float32) * factor
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


class TritonKernel(Whole):
    """The kernels, for all types but fp64, which torch's operations handle."""

    def add_segments(
        self,
        values: torch.Tensor,
        segments: Segments,
        scales: Factors,
        into: torch.Tensor,
        largest: torch.Tensor,
        *,
        fresh: bool,
    ) -> None:
        if values.dtype == torch.float64:
            super().add_segments(values, segments, scales, into, largest, fresh=fresh)
        elif count := segments.count:
            _add_segments[(triton.cdiv(count, _BLOCK),)](
                values,
                into,
                segments.table(_BLOCK, values.device),
                scales.there,
                largest.view(torch.int32),
                count,
                FRESH=fresh,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,
            )

    def add_apart(
        self,
        values: Sequence[torch.Tensor],
        segments: Segments,
        scales: Factors,
        into: Sequence[torch.Tensor],
        largest: torch.Tensor,
        *,
        fresh: bool,
    ) -> None:
        if values[0].dtype == torch.float64:
            super().add_apart(values, segments, scales, into, largest, fresh=fresh)
            return
        addresses = [one.data_ptr() for pair in zip(values, into, strict=True) for one in pair]
        if not (blocks := segments.blocks_apart(_BLOCK)):
            return
        device = values[0].device
        _add_apart[(blocks,)](
            _brought(addresses, device),
            segments.table_apart(_BLOCK, device),
            scales.there,
            largest.view(torch.int32),
            VALUE=_TYPES[values[0].dtype],
            SUM=_TYPES[into[0].dtype],
            FRESH=fresh,
            ALIGNED=not any(address % _ALIGNMENT for address in addresses),  # a part of a bucket is not
            enable_fp_fusion=False,
        )

    def read_segments(
        self, sums: torch.Tensor, segments: Segments, inverses: Factors, marks: torch.Tensor, out: torch.Tensor
    ) -> None:
        if out.dtype == torch.float64:
            super().read_segments(sums, segments, inverses, marks, out)
        elif count := segments.count:
            _read_segments[(triton.cdiv(count, _BLOCK),)](
                sums,
                out,
                segments.table(_BLOCK, sums.device),
                inverses.there,
                marks,
                count,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,
            )


def _brought(addresses: list[int], device: torch.device) -> torch.Tensor:
    """Copy the addresses, which differ in every step, to the device without waiting for it."""
    there = torch.tensor(addresses, dtype=torch.int64)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there


def load(device: torch.device, reference: Any) -> TritonKernel | None:
    """Return the kernel; None unless it computes the same bits on ``device`` as ``reference``. The trial has parameters
    that share blocks, and one with blocks of its own."""
    kernel = TritonKernel()
    values = [0.5, 1.5, 2.5, -0.5, -1.5, -2.75, 2.0**22 + 0.5, 3.0e-39, 1.0e6, -0.0]
    many = torch.tensor(values, device=device).repeat(600)
    segments = Segments((2, 0, 1, 3), (7, 0, 5200, many.numel() - 5207))
    one = Segments((1,), (many.numel(),))
    scale = [1.0, 2.0**3, 2.0**-2, 2.0**5]
    scales, inverses = Factors.all_of(device, scale, [1 / each for each in scale])
    for integers in (torch.int32, torch.int64):
        marks = torch.tensor([0, 0, 0, 1], dtype=integers, device=device)
        found = []
        for arithmetic in (kernel, reference):
            sums, out = torch.empty_like(many, dtype=integers), torch.empty_like(many)
            largest = torch.zeros(4, device=device)
            apart = torch.zeros_like(sums)
            for fresh in (True, False):
                arithmetic.add_segments(many, segments, scales, sums, largest, fresh=fresh)
                arithmetic.add_apart([many], one, scales, [apart], largest, fresh=fresh)
            arithmetic.read_segments(sums, segments, inverses, marks, out)
            found.append([each.tolist() for each in (largest, sums, apart, out.view(torch.int32))])
        if found[0] != found[1]:
            return None
    return kernel
