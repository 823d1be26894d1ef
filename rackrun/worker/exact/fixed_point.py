"""The arithmetic of ``reduction="exact"`` on one device: gradients as fixed-point integers.

A scale is a power of two, so multiplying by it is exact, and rounding to an integer (half to even) is the only step
that loses anything. Integers add up to the same bits in any order. So the result does not depend on how it is computed:
in chunks, by a compiled kernel, or on another device.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from rackrun.worker.exact import fixed_point_c
from rackrun.worker.exact.parameter_segments import Factors, Segments
from rackrun.worker.process.reports import say

if TYPE_CHECKING:
    from rackrun.worker.exact.fixed_point_triton import TritonKernel

__all__ = ["FixedPoint", "Whole", "fixed_point"]

_CHUNK = 2**16
"""Elements of a chunk: 256 KiB of them stay in a core's cache from one operation to the next."""


class FixedPoint(ABC):
    """The operations; this class applies them segment by segment, where there is no kernel for all segments at once."""

    @abstractmethod
    def add(self, values: torch.Tensor, scale: float, into: torch.Tensor, *, fresh: bool) -> torch.Tensor | float:
        """Compute ``into`` (integers) += round(``values`` * ``scale``). Both are flat and of one length.

        ``fresh``: ``into`` is overwritten, and may be the same memory. Returns the largest magnitude in ``values``, or
        inf when some are not finite, in which case the sum has no meaning. It is a tensor on a device, without a wait,
        and a number on the host.
        """

    @abstractmethod
    def read(self, sums: torch.Tensor, inverse: float | torch.Tensor, out: torch.Tensor) -> None:
        """Compute ``out`` = ``sums`` * ``inverse``, each rounded once. ``out`` may be the same memory as ``sums``."""

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
        """Do `add` for each segment of ``values`` and ``into``. ``largest`` (fp32, no element below 0, one for every
        slot) becomes the maximum of itself and what `add` returns."""
        parts = [part for _, part in segments.parts()]
        flat = [values[part] for part in parts], [into[part] for part in parts]
        FixedPoint.add_apart(self, flat[0], segments, scales, flat[1], largest, fresh=fresh)

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
        """Do `add_segments` where each segment has memory of its own: all ``values`` have one dtype, and all of
        ``into`` have one."""
        for slot, value, sums in zip(segments.slots, values, into, strict=True):
            found = self.add(value, scales.host[slot], sums, fresh=fresh)
            place = largest[slot]
            if isinstance(found, torch.Tensor):
                torch.maximum(place, found, out=place)
            elif found > place.item():
                place.fill_(found)

    def read_segments(
        self, sums: torch.Tensor, segments: Segments, inverses: Factors, marks: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Do `read` for each segment. ``marks``: an integer for every segment; where it is above 0 the whole segment
        becomes NaN."""
        factors = torch.where(marks > 0, math.nan, inverses.there[segments.places(inverses.there.device)])
        for (_, part), factor in zip(segments.parts(), factors.unbind(), strict=True):
            self.read(sums[part], factor, out[part])


def fixed_point(device: torch.device) -> FixedPoint:
    """Return the fastest implementation for ``device`` that computes the right bits."""
    return _InChunks() if device.type == "cpu" else _kernel_for(device) or Whole()


class _InChunks(FixedPoint):
    """The implementation on a CPU: chunk by chunk, without an allocation. A compiled kernel adds fp32 to int32 where
    there is a compiler."""

    def __init__(self) -> None:
        self._local = threading.local()  # gloo's threads read sums while the main thread adds the next
        self._kernel = fixed_point_c.load()

    def add(self, values: torch.Tensor, scale: float, into: torch.Tensor, *, fresh: bool) -> float:
        if self._kernel is not None and (values.dtype, into.dtype) == (torch.float32, torch.int32):
            return self._kernel.add(values, scale, into, fresh=fresh)
        largest, wide = 0.0, _wide(values.dtype)
        floats, integers = self._buffer(wide), self._buffer(into.dtype)
        for start, stop in _chunks(values.numel()):
            chunk, target = values[start:stop], into[start:stop]
            scratch = floats[: stop - start]
            if chunk.dtype != wide:
                chunk = scratch.copy_(chunk)
            low, high = torch.aminmax(chunk)
            largest = _larger(largest, -low.item(), high.item())
            torch.mul(chunk, scale, out=scratch).round_()
            if fresh:
                target.copy_(scratch)
            else:
                target.add_(integers[: stop - start].copy_(scratch))
        return largest

    def read(self, sums: torch.Tensor, inverse: float | torch.Tensor, out: torch.Tensor) -> None:
        inverse = float(inverse)
        if self._kernel is not None and (out.dtype, sums.dtype) == (torch.float32, torch.int32):
            self._kernel.read(sums, inverse, out)
            return
        floats = self._buffer(_wide(out.dtype))
        for start, stop in _chunks(sums.numel()):
            scratch = floats[: stop - start].copy_(sums[start:stop])
            out[start:stop].copy_(scratch.mul_(inverse))

    def read_segments(
        self, sums: torch.Tensor, segments: Segments, inverses: Factors, marks: torch.Tensor, out: torch.Tensor
    ) -> None:
        for (slot, part), marked in zip(segments.parts(), marks.tolist(), strict=True):
            self.read(sums[part], math.nan if marked > 0 else inverses.host[slot], out[part])

    def _buffer(self, dtype: torch.dtype) -> torch.Tensor:
        found: torch.Tensor | None = getattr(self._local, str(dtype), None)
        if found is None:
            found = torch.empty(_CHUNK, dtype=dtype)
            setattr(self._local, str(dtype), found)
        return found


class Whole(FixedPoint):
    """The implementation on an accelerator by a few torch operations, without a wait of the host."""

    def add(self, values: torch.Tensor, scale: float, into: torch.Tensor, *, fresh: bool) -> torch.Tensor:
        wide = values.to(_wide(values.dtype))
        largest = torch.linalg.vector_norm(wide, float("inf")) if wide.numel() else wide.new_zeros(())
        scaled = wide.mul(scale).round_()
        if fresh:
            into.copy_(scaled)  # which may be the memory of ``values``
        else:
            into.add_(scaled.to(into.dtype))
        return torch.where(largest.isfinite(), largest, math.inf)

    def read(self, sums: torch.Tensor, inverse: float | torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(sums.to(_wide(out.dtype)).mul_(inverse))


def _kernel_for(device: torch.device) -> TritonKernel | None:
    """Return the Triton kernel for ``device``; None if there is no Triton, or if the kernel does not compute the same
    bits as torch's operations."""
    if device.type != "cuda" or os.environ.get("RACKRUN_KERNELS") == "0":
        return None
    try:
        from rackrun.worker.exact import fixed_point_triton

        return fixed_point_triton.load(device, Whole())
    except Exception as error:  # noqa: BLE001 - whatever a compiler and a driver think of
        if not isinstance(error, ImportError):
            say(
                f"the exact reduction's kernel cannot be used here, torch's own operations are: {type(error).__name__}: {error}"
            )
        return None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the float type that holds a value of ``dtype``, and its product with a power of two, exactly."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


def _larger(*magnitudes: float) -> float:
    return max(magnitudes) if all(magnitude < math.inf for magnitude in magnitudes) else math.inf
