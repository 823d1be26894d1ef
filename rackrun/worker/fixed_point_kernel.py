"""The same arithmetic in C, compiled when there is a compiler: one pass over memory where torch's operations make five.

It computes the same bits, so ranks with and without it agree. ``RACKRUN_KERNELS=0`` does without.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

__all__ = ["Kernel", "load"]

_SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 256 };

/* Input and output may be the same memory, so each block goes through memory of its own.
   The bits of a magnitude order like the number itself; those of inf and NaN are above all others. */
float rackrun_add(const char *values, float scale, char *sums, int64_t count, int fresh) {
    uint32_t largest = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        float in[BLOCK];
        uint32_t bits[BLOCK];
        int32_t out[BLOCK], before[BLOCK];
        int64_t part = count - start < BLOCK ? count - start : BLOCK;
        memcpy(in, values + 4 * start, 4 * part);
        memcpy(bits, in, 4 * part);
        for (int64_t i = 0; i < part; i++) {
            uint32_t magnitude = bits[i] & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
            out[i] = (int32_t)nearbyintf(in[i] * scale);
        }
        if (!fresh) {
            memcpy(before, sums + 4 * start, 4 * part);
            for (int64_t i = 0; i < part; i++) out[i] = (int32_t)((uint32_t)out[i] + (uint32_t)before[i]);
        }
        memcpy(sums + 4 * start, out, 4 * part);
    }
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    return magnitude;
}

void rackrun_read(const char *sums, float inverse, char *out, int64_t count) {
    for (int64_t start = 0; start < count; start += BLOCK) {
        int32_t in[BLOCK];
        float values[BLOCK];
        int64_t part = count - start < BLOCK ? count - start : BLOCK;
        memcpy(in, sums + 4 * start, 4 * part);
        for (int64_t i = 0; i < part; i++) values[i] = (float)in[i] * inverse;
        memcpy(out + 4 * start, values, 4 * part);
    }
}
"""

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC", "-lm")


class Kernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._add, self._read = library.rackrun_add, library.rackrun_read
        self._add.restype = ctypes.c_float
        self._add.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self._read.restype = None
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64]

    def add(self, values: torch.Tensor, scale: float, into: torch.Tensor, *, fresh: bool) -> float:
        assert values.is_contiguous() and into.is_contiguous() and values.numel() == into.numel(), "flat and alike"
        magnitude: float = self._add(values.data_ptr(), scale, into.data_ptr(), values.numel(), fresh)
        return magnitude if magnitude < float("inf") else float("inf")

    def read(self, sums: torch.Tensor, inverse: float, out: torch.Tensor) -> None:
        assert sums.is_contiguous() and out.is_contiguous() and sums.numel() == out.numel(), "flat and alike"
        self._read(sums.data_ptr(), inverse, out.data_ptr(), sums.numel())


@functools.cache
def load() -> Kernel | None:
    """None where nothing can be compiled: torch's own operations do the same."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("RACKRUN_KERNELS") == "0":
        return None
    with tempfile.TemporaryDirectory(prefix="rackrun-kernel-") as folder:
        source, library = Path(folder) / "fixed_point.c", Path(folder) / "fixed_point.so"
        source.write_text(_SOURCE)
        command = [compiler, str(source), "-o", str(library), *_FLAGS]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            return Kernel(ctypes.CDLL(str(library)))
        except (OSError, subprocess.SubprocessError):
            return None
