"""Read a durable checkpoint. Bytes are verified before they are returned, except through ``payload``.

`ShardReader` has the interface of an arena's reader (``payload``, ``crcs``, ``chunk``, ``verify``), so that a restore
treats all tiers alike. `ShardReader.read` and ``chunk`` check the CRC32C of every chunk that they touch. ``payload`` is
a memory map and is not checked.

Access to the map of a file that is truncated or unreadable is a SIGBUS, not an exception. Only ``payload`` maps; all
else uses reads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, Unreadable
from rackrun.checkpoint.durable.durable_manifest import (
    FRAGMENT_BYTES_MAX,
    Fragment,
    Manifest,
    ManifestEntry,
    fragment_name,
    shard_name,
    unseal,
)
from rackrun.checkpoint.durable.storage.files import Files, read_small

__all__ = ["CheckpointReader", "ShardReader", "fill"]

_OTHER = "restore from another holder or an older checkpoint."


def fill(files: Files, fd: int, into: memoryview, offset: int, path: Path) -> None:
    """Read exactly ``len(into)`` bytes from ``offset`` on. Raises IntegrityError when the file ends before."""
    done = 0
    while done < len(into):
        count = files.pread(fd, into[done:], offset + done)
        if count <= 0:
            raise IntegrityError(f"{path} ends at byte {offset + done}.", remedy=_OTHER)
        done += count


class ShardReader:
    """Reads one rank's file of a checkpoint. Raises IntegrityError for whatever is missing, unreadable or wrong."""

    def __init__(self, files: Files, directory: Path, manifest: Manifest, record: ManifestEntry) -> None:
        self.path = directory / shard_name(record.rank, manifest.world_size)
        self.rank, self.size, self.layout_hash = record.rank, record.size, record.layout_hash
        self._files = files
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._kept: tuple[int, memoryview] = (-1, memoryview(b""))  # (index, bytes) of the chunk that was verified last
        self._fragment = _read_fragment(files, directory, manifest, record)
        self.chunk_bytes = self._fragment.chunk_bytes
        self.crcs: np.ndarray = self._fragment.chunk_crcs()
        self.share_of = self._fragment.share_of
        with _typed(self.path):
            self._fd = files.open(self.path, os.O_RDONLY)
            try:
                found = files.fstat(self._fd).st_size
                if found != self.size:
                    raise IntegrityError(f"{self.path} has {found} bytes instead of {self.size}.", remedy=_OTHER)
            except BaseException:
                self.close()
                raise

    @property
    def payload(self) -> memoryview:
        """The whole file as a read-only memory map, not verified. Raises CheckpointError for an object store."""
        if self.size == 0:
            return memoryview(b"")
        if self._files.objects:
            raise CheckpointError(f"{self.path} cannot be mapped into memory.", remedy="read it: `ShardReader.read`.")
        if self._map is None:
            with _typed(self.path):
                self._map = mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ)
        return memoryview(self._map)

    def chunk(self, index: int) -> memoryview:
        """Return chunk ``index`` in memory of its own, verified."""
        if not 0 <= index < len(self.crcs):
            raise IndexError(f"{self.path} has {len(self.crcs)} chunks, and chunk {index} was asked for")
        if self._kept[0] != index:
            data = _room(min(self.chunk_bytes, self.size - index * self.chunk_bytes))
            self._load(index, data)
            self._kept = (index, data.toreadonly())
        return self._kept[1]

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of the shard, verified."""
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"{self.path} has {self.size} bytes, and bytes {start} to {stop} were asked for")
        out = _room(stop - start)
        for index in range(start // self.chunk_bytes, -(-stop // self.chunk_bytes) if stop > start else 0):
            first = index * self.chunk_bytes
            end = min(first + self.chunk_bytes, self.size)
            low, high = max(start, first), min(stop, end)
            if (low, high) == (first, end) and self._kept[0] != index:
                self._load(index, out[low - start : high - start])
            else:
                out[low - start : high - start] = self.chunk(index)[low - first : high - first]
        return out.toreadonly()

    def _load(self, index: int, into: memoryview) -> None:
        """Read a chunk into ``into``, and compare it with its CRC32C."""
        with _typed(self.path):
            fill(self._files, self._fd, into, index * self.chunk_bytes, self.path)
        if crc(into) != int(self.crcs[index]):
            raise IntegrityError(f"chunk {index} of {self.path} does not match its CRC32C.", remedy=_OTHER)

    def verify(self, progress: Callable[[int], None] | None = None) -> list[tuple[int, str]]:
        """Read all chunks.

        Return (chunk index, what is wrong) for each bad one. ``progress`` gets the bytes of each chunk.
        """
        bad = []
        for index in range(len(self.crcs)):
            try:
                self.chunk(index)
            except IntegrityError as error:
                bad.append((index, error.what))
            if progress is not None:
                progress(min(self.chunk_bytes, self.size - index * self.chunk_bytes))
        return bad

    def close(self) -> None:
        """Close the file. Views of ``payload`` stay valid; the map is released with the last of them."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self._files.close(fd)
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):
                mapped.close()


class CheckpointReader:
    """Reads one whole checkpoint. Files are opened when they are first needed; `close` closes them."""

    def __init__(self, files: Files, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.number, self.step, self.world_size = manifest.number, manifest.step, manifest.world_size
        self._files = files
        self._readers: dict[int, ShardReader] = {}

    def reader(self, rank: int) -> ShardReader:
        """Return the reader of one rank's shard. Raises CheckpointError when there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise CheckpointError(
                f"checkpoint {self.number} has no rank {rank}: its world size is {self.world_size}.",
                remedy="reshard, or ask for one of its ranks.",
            )
        if rank not in self._readers:
            self._readers[rank] = ShardReader(self._files, self.directory, self.manifest, self.manifest.shards[rank])
        return self._readers[rank]

    def shard(self, rank: int) -> memoryview:
        """Return one rank's payload as a read-only memory map, not verified."""
        return self.reader(rank).payload

    def read(self, rank: int, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of one rank's payload, verified."""
        return self.reader(rank).read(start, stop)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _room(count: int) -> memoryview:
    """Return uninitialised memory: numpy requests it in large pages, and nothing fills it with zeros first."""
    return np.empty(count, dtype=np.uint8).data


def _read_fragment(files: Files, directory: Path, manifest: Manifest, record: ManifestEntry) -> Fragment:
    """Read a rank's fragment, and check that it is the one that the manifest lists."""
    path = directory / fragment_name(record.rank, manifest.world_size)
    with _typed(path):
        fragment, digest = unseal(read_small(files, path, FRAGMENT_BYTES_MAX), Fragment, path)
    if digest != record.fragment or (fragment.rank, fragment.size) != (record.rank, record.size):
        raise IntegrityError(
            f"{path} is not the shard description (fragment) that the manifest lists: its digest, rank or size differs.",
            remedy=_OTHER,
        )
    return fragment


@contextlib.contextmanager
def _typed(path: Path) -> Iterator[None]:
    """Turn an OSError into Unreadable."""
    try:
        yield
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}.", remedy=_OTHER) from error
