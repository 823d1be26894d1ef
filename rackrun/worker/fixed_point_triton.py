"""The same arithmetic for a GPU: one pass over memory where torch's operations make up to five. Importing it takes Triton.

The largest magnitude is found on the way: the bits of a magnitude order like the number itself, those of inf and NaN above all
others, and an atomic maximum of integers does not depend on the order in which blocks come.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["TritonKernel", "load"]

_BLOCK = 4096


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
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(largest, tl.max(tl.minimum(bits, 0x7F800000), axis=0))  # NaN as inf
    # To the nearest, half to even: up to 2**23 the sum has no place for a fraction, beyond there is none.
    scaled = tl.abs(value * scale)
    whole = tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled)
    return tl.where(value < 0, -whole, whole).to(tl.int64 if WIDE else tl.int32)


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
    return kernel
