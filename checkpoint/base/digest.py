"""Checksums: CRC32C of bulk bytes, one for each chunk, and blake2b of the small records that list them.

A CRC finds every single-bit error and every burst of up to 32 bits, at the speed of memory; it does not protect against
an adversary. Manifests and records must not be forged, so they are digested with blake2b.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import crc32c
import numpy as np

__all__ = ["CHUNK_BYTES", "chunk_crcs", "content_digest", "crc"]

CHUNK_BYTES = 8 * 2**20


def crc(data: memoryview | np.ndarray[Any, Any], value: int = 0) -> int:
    """Return the CRC32C of contiguous bytes, continued from ``value``. Releases the GIL."""
    return crc32c.crc32c(data.data if isinstance(data, np.ndarray) else data, value)


def chunk_crcs(payload: memoryview, chunk_bytes: int = CHUNK_BYTES, threads: int = 1) -> np.ndarray[Any, Any]:
    """Return the CRC32C of each chunk, uint32[ceil(bytes / chunk_bytes)]. The last chunk may be shorter."""
    flat = payload.cast("B")
    starts = range(0, len(flat), chunk_bytes)
    crcs = np.zeros(len(starts), dtype=np.uint32)

    def digest(first: int, step: int) -> None:
        for index in range(first, len(starts), step):
            crcs[index] = crc(flat[starts[index] : starts[index] + chunk_bytes])

    threads = min(threads, len(starts))
    if threads <= 1:
        digest(0, 1)
        return crcs
    with ThreadPoolExecutor(threads, "rackrun-digest") as pool:
        for done in [pool.submit(digest, first, threads) for first in range(threads)]:
            done.result()
    return crcs


def content_digest(data: bytes) -> str:
    """Return the blake2b-256 digest of a manifest or record, as hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()
