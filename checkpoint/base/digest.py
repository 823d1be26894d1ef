"""Checksums: CRC32C of bulk bytes, one for each chunk, and blake2b of the small records that list them.

A CRC finds every single-bit error and every burst of up to 32 bits, at the speed of memory; it does not protect against
an adversary. Manifests and records must not be forged, so they are digested with blake2b.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import crc32c
import numpy as np

__all__ = ["CHUNK_BYTES", "ChunkDigests", "chunk_crcs", "content_digest", "crc"]

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


class ChunkDigests:
    """Computes the CRC32C of single chunks in threads of its own, while the caller goes on.

    Made for work beside a thread that trains: each time that a thread takes the GIL, the training thread may have to
    wait for it. A chunk makes its thread take the GIL twice: when there is a chunk, and behind its CRC.
    """

    def __init__(self, threads: int) -> None:
        """``threads``: the most threads. They are started as chunks are added."""
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._chunks: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
        self._found: dict[int, int] = {}
        self._error: BaseException | None = None

    def add(self, index: int, chunk: memoryview) -> None:
        """Have the chunk digested, which must not change before `finish` returns."""
        self._chunks.put((index, chunk))
        if len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._digest, name=f"rackrun-digest-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> dict[int, int]:
        """Wait for all chunks, end the threads, and return the CRCs: index -> CRC32C. Raises the first error of a thread."""
        self._end_threads()
        if self._error is not None:
            raise self._error
        return self._found

    def stop(self) -> None:
        """End the threads. Chunks that none has begun are dropped."""
        while not self._chunks.empty():
            with contextlib.suppress(Empty):  # a thread was faster
                self._chunks.get_nowait()
        self._end_threads()

    def _end_threads(self) -> None:
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _digest(self) -> None:
        for index, chunk in iter(self._chunks.get, None):
            try:
                self._found[index] = crc(chunk)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                self._error = self._error or error


def content_digest(data: bytes) -> str:
    """Return the blake2b-256 digest of a manifest or record, as hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()
