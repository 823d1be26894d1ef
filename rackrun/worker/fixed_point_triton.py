"""The same arithmetic for a GPU: one pass over memory where torch's operations make up to five, and one launch for all parameters of a bucket.
Importing it takes Triton.

The largest magnitude is found on the way: the bits of a magnitude order like the number itself, those of inf and NaN above all
others, and an atomic maximum of integers does not depend on the order in which blocks come.

A bucket is cut into blocks without regard to its parameters, so that all blocks but the last are read and written whole, in vectors, wherever
parameters begin. A block knows the first and the last parameter that it has a part of, and looks up what is theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from rackrun.worker.segments import Factors, Segments

__all__ = ["TritonKernel", "load"]

_BLOCK = 4096
_SEGMENTED_BLOCK = 2048


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _add(values, sums, largest, scale, count, FRESH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803 - Triton's own notation
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    if first + BLOCK <= count:  # without a mask, memory is read and written in vectors
        rounded = _rounded(tl.load(values + at), largest, scale, WIDE)
        if not FRESH:
            rounded += tl.load(sums + at)
        tl.store(sums + at, rounded)
    else:
        inside = at < count
        rounded = _rounded(tl.load(values + at, mask=inside, other=0.0), largest, scale, WIDE)
        if not FRESH:
            rounded += tl.load(sums + at, mask=inside, other=0)
        tl.store(sums + at, rounded, mask=inside)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _rounded(value, largest, scale, WIDE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    value = value.to(tl.float32)
    tl.atomic_max(largest, tl.max(_magnitude(value), axis=0))
    return _nearest(value, scale).to(tl.int64 if WIDE else tl.int32)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _magnitude(value):  # type: ignore[no-untyped-def]
    """Its bits; NaN as inf."""
    return tl.minimum(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _nearest(value, scale):  # type: ignore[no-untyped-def]
    """Half to even: up to 2**23 the sum has no place for a fraction, beyond there is none."""
    scaled = tl.abs(value * scale)
    whole = tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled)
    return tl.where(value < 0, -whole, whole)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _rounded_segments(value, table, scales, largest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """One block, whose elements may be of several segments. ``table``: as of `_table_of`."""
    value = value.to(tl.float32)
    bits = _magnitude(value)
    inside_block = tl.arange(0, BLOCK)
    first, last, begin = _of_block(table, BLOCK)
    scale = tl.zeros([BLOCK], dtype=tl.float32)
    for segment in range(first, last + 1):
        start, stop, slot = _segment(table, segment, begin)
        inside = (inside_block >= start) & (inside_block < stop)
        tl.atomic_max(largest + slot, tl.max(tl.where(inside, bits, 0), axis=0))
        scale = tl.where(inside, tl.load(scales + slot), scale)
    return _nearest(value, scale)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _of_block(table, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    return tl.load(table + block).to(tl.int32), tl.load(table + blocks + block).to(tl.int32), block.to(tl.int64) * BLOCK


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _segment(table, segment, begin):  # type: ignore[no-untyped-def]
    row = table + 2 * tl.num_programs(0) + 3 * segment
    return tl.load(row) - begin, tl.load(row + 1) - begin, tl.load(row + 2)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
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
def _factors(table, inverses, marks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """For each element of one block: what its sum is multiplied by, NaN where its segment is marked."""
    inside_block = tl.arange(0, BLOCK)
    first, last, begin = _of_block(table, BLOCK)
    factor = tl.zeros([BLOCK], dtype=tl.float32)
    for segment in range(first, last + 1):
        start, stop, slot = _segment(table, segment, begin)
        own = tl.where(tl.load(marks + segment) > 0, float("nan"), tl.load(inverses + slot))
        factor = tl.where((inside_block >= start) & (inside_block < stop), own, factor)
    return factor


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
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


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _read(sums, out, inverse, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    factor = tl.load(inverse)
    if first + BLOCK <= count:
        tl.store(out + at, (tl.load(sums + at).to(tl.float32) * factor).to(out.dtype.element_ty))
    else:
        inside = at < count
        value = tl.load(sums + at, mask=inside, other=0).to(tl.float32) * factor
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


class TritonKernel:
    """As `rackrun.worker.fixed_point.FixedPoint`, for all but fp64."""

    def add(self, values: torch.Tensor, scale: float, into: torch.Tensor, *, fresh: bool) -> torch.Tensor:
        largest = torch.zeros((), dtype=torch.int32, device=values.device)
        if count := values.numel():
            _add[(triton.cdiv(count, _BLOCK),)](
                values,
                into,
                largest,
                scale,
                count,
                FRESH=fresh,
                WIDE=into.dtype == torch.int64,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,
            )
        return largest.view(torch.float32)

    def read(self, sums: torch.Tensor, inverse: float | torch.Tensor, out: torch.Tensor) -> None:
        if count := sums.numel():
            factor = torch.as_tensor(inverse, dtype=torch.float32, device=out.device)
            _read[(triton.cdiv(count, _BLOCK),)](sums, out, factor, count, BLOCK=_BLOCK, enable_fp_fusion=False)

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
        if count := segments.count:
            _add_segments[(triton.cdiv(count, _SEGMENTED_BLOCK),)](
                values,
                into,
                segments.table(_SEGMENTED_BLOCK, values.device),
                scales.there,
                largest.view(torch.int32),
                count,
                FRESH=fresh,
                BLOCK=_SEGMENTED_BLOCK,
                enable_fp_fusion=False,
            )

    def read_segments(
        self, sums: torch.Tensor, segments: Segments, inverses: Factors, marks: torch.Tensor, out: torch.Tensor
    ) -> None:
        if count := segments.count:
            _read_segments[(triton.cdiv(count, _SEGMENTED_BLOCK),)](
                sums,
                out,
                segments.table(_SEGMENTED_BLOCK, sums.device),
                inverses.there,
                marks,
                count,
                BLOCK=_SEGMENTED_BLOCK,
                enable_fp_fusion=False,
            )


def load(device: torch.device, reference: Any) -> TritonKernel | None:
    """None unless it computes on ``device`` what ``reference`` does, bit for bit."""
    kernel = TritonKernel()
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.75, 2.0**22 + 0.5, 3.0e-39, 1.0e6, -0.0], device=device)
    for integers in (torch.int32, torch.int64):
        found = []
        for arithmetic in (kernel, reference):
            sums, out = torch.empty_like(values, dtype=integers), torch.empty_like(values)
            largest = [arithmetic.add(values, 2.0**3, sums, fresh=fresh) for fresh in (True, False)]
            arithmetic.read(sums, 2.0**-3, out)
            found.append([one.tolist() for one in (*largest, sums, out)])
        if found[0] != found[1]:
            return None
        if not _segments_agree(kernel, reference, values, integers):
            return None
    return kernel


def _segments_agree(kernel: Any, reference: Any, values: torch.Tensor, integers: torch.dtype) -> bool:
    """Of parameters that share blocks, and one that has blocks of its own."""
    many = values.repeat(600)
    segments = Segments((2, 0, 1, 3), (7, 0, 5200, many.numel() - 5207))
    scale = [1.0, 2.0**3, 2.0**-2, 2.0**5]
    scales, inverses = Factors.all_of(values.device, scale, [1 / one for one in scale])
    marks = torch.tensor([0, 0, 0, 1], dtype=integers, device=values.device)
    found = []
    for arithmetic in (kernel, reference):
        sums, out = torch.empty_like(many, dtype=integers), torch.empty_like(many)
        largest = torch.zeros(4, device=values.device)
        for fresh in (True, False):
            arithmetic.add_segments(many, segments, scales, sums, largest, fresh=fresh)
        arithmetic.read_segments(sums, segments, inverses, marks, out)
        found.append([one.tolist() for one in (largest, sums, out.view(torch.int32))])
    return bool(found[0] == found[1])
