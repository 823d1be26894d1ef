"""How much freed memory a worker keeps, so that each step does not ask the kernel for it anew."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_BLOCK_BYTES = (32 << 20) - (64 << 10)
"""glibc's malloc adjusts its thresholds to freed blocks of at most 32 MB (``DEFAULT_MMAP_THRESHOLD_MAX``)."""


def keep_freed_memory() -> None:
    """Bring the thresholds of glibc's malloc to where its own adjustment ends: from then on the heap serves blocks of
    up to 32 MB, and keeps up to 64 MB free at its top.

    It adjusts them whenever a large block is freed. Before that, tensors on the host that each step frees go back to
    the kernel, which clears their pages for the next step (a few percent of a step of a small transformer on a CPU).
    Does nothing where the user has set the thresholds (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``), or has
    another allocator.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.free(libc.malloc(_BLOCK_BYTES))  # its pages are not touched
