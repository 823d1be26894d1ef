"""The arithmetic of `rackrun.worker.exact.fixed_point` in C, compiled if there is a compiler: one pass over memory
where torch needs five.

It computes the same bits, so ranks with and without it agree. ``RACKRUN_KERNELS=0`` turns it off.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile

import torch

__all__ = ["Kernel", "load"]

_SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 64 };

/* Input and output may be the same memory, so a block is read before it is written.
   The bits of a magnitude order like the number itself; those of inf and NaN are above all others. */
static inline uint32_t add_block(const char *values, float scale, char *sums, int64_t count, int fresh) {
    float in[BLOCK];
    uint32_t bits[BLOCK], largest = 0;
    int32_t out[BLOCK], before[BLOCK];
    memcpy(in, values, 4 * count);
    memcpy(bits, values, 4 * count);
    if (!fresh) memcpy(before, sums, 4 * count);
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = bits[i] & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
        out[i] = (int32_t)nearbyintf(in[i] * scale);
        if (!fresh) out[i] = (int32_t)((uint32_t)out[i] + (uint32_t)before[i]);
    }
    memcpy(sums, out, 4 * count);
    return largest;
}

static inline uint32_t add_all(const char *values, float scale, char *sums, int64_t count, int fresh) {
    uint32_t largest = 0, found;
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        found = add_block(values + 4 * i, scale, sums + 4 * i, BLOCK, fresh);
        largest = found > largest ? found : largest;
    }
    found = add_block(values + 4 * i, scale, sums + 4 * i, count - i, fresh);
    return found > largest ? found : largest;
}

float rackrun_add(const char *values, float scale, char *sums, int64_t count, int fresh) {
    uint32_t largest = fresh ? add_all(values, scale, sums, count, 1) : add_all(values, scale, sums, count, 0);
    if (largest > 0x7f800000u) largest = 0x7f800000u;
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    return magnitude;
}

static inline void read_block(const char *sums, float inverse, char *out, int64_t count) {
    int32_t in[BLOCK];
    float values[BLOCK];
    memcpy(in, sums, 4 * count);
    for (int64_t i = 0; i < count; i++) values[i] = (float)in[i] * inverse;
    memcpy(out, values, 4 * count);
}

void rackrun_read(const char *sums, float inverse, char *out, int64_t count) {
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) read_block(sums + 4 * i, inverse, out + 4 * i, BLOCK);
    read_block(sums + 4 * i, inverse, out + 4 * i, count - i);
}
"""

_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-lm",
)


class Kernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._add, self._read = library.rackrun_add, library.rackrun_read
        self._add.restype = ctypes.c_float
        self._add.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self._read.restype = None
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64]

    def add(self, values: torch.Tensor, scale: float, into: torch.Tensor, *, fresh: bool) -> float:
        _check(values, into)
        magnitude: float = self._add(values.data_ptr(), scale, into.data_ptr(), values.numel(), fresh)
        return magnitude

    def read(self, sums: torch.Tensor, inverse: float, out: torch.Tensor) -> None:
        _check(sums, out)
        self._read(sums.data_ptr(), inverse, out.data_ptr(), sums.numel())


def _check(source: torch.Tensor, target: torch.Tensor) -> None:
    assert source.is_contiguous(), "memory is read in one go"
    assert target.is_contiguous(), "memory is written in one go"
    assert source.numel() == target.numel(), "elements match"


@functools.cache
def load() -> Kernel | None:
    """Return the compiled kernel; None if nothing can be compiled, as torch's own operations do the same."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.environ.get("RACKRUN_KERNELS") == "0":
        return None
    memory = os.memfd_create("rackrun-kernel")
    try:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return _build(compiler, f"/proc/{os.getpid()}/fd/{memory}")
        # Some linkers write only into folders, and some systems run no code from anonymous memory.
        with (
            tempfile.TemporaryDirectory(prefix="rackrun-kernel-") as folder,
            contextlib.suppress(OSError, subprocess.SubprocessError),
        ):
            return _build(compiler, f"{folder}/fixed_point.so")
    finally:
        os.close(memory)
    return None


def _build(compiler: str, library: str) -> Kernel:
    """Compile the kernel into the file ``library``, and load it. A file in memory disappears when this process ends."""
    command = [compiler, "-pipe", "-x", "c", "-", "-o", library, *_FLAGS]
    subprocess.run(command, input=_SOURCE.encode(), check=True, capture_output=True, timeout=60)
    return Kernel(ctypes.CDLL(library))
