"""A shard's bytes on their way to the disk: every chunk is compared with its sealed CRC32C before and after.

The payload may be overwritten while it is read, so each chunk is copied first, and the copy is checked and written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.durable.durable_manifest import Fragment
from rackrun.checkpoint.durable.durable_reader import fill
from rackrun.checkpoint.durable.storage.files import FailureKind, FileRefused, Files, opened
from rackrun.protocol.crash_points import crash_point

__all__ = ["SealedPayload", "SliceReadable", "checked_chunks", "read_back"]


class SliceReadable(Protocol):
    """Bytes that are read by slices."""

    nbytes: int

    def __getitem__(self, wanted: slice, /) -> memoryview: ...


class SealedPayload(Protocol):
    """The part of an arena's reader that a writer uses."""

    @property
    def payload(self) -> memoryview | SliceReadable: ...


def checked_chunks(data: memoryview | SliceReadable, fragment: Fragment) -> Iterator[memoryview]:
    """Yield a private copy of each chunk, after comparing it with its sealed CRC32C.

    Raises FileRefused for a difference.
    """
    buffer = memoryview(bytearray(min(fragment.chunk_bytes, fragment.size)))
    for index, wanted in enumerate(fragment.chunk_crcs()):
        start = index * fragment.chunk_bytes
        chunk = buffer[: min(fragment.chunk_bytes, fragment.size - start)]
        chunk[:] = data[start : start + len(chunk)]
        if crc(chunk) != int(wanted):
            raise FileRefused(
                FailureKind.SOURCE, f"chunk {index} of the payload of rank {fragment.rank} does not match its CRC32C"
            )
        yield chunk
        crash_point("durable.chunk")


def read_back(files: Files, name: Path, fragment: Fragment) -> None:
    """Read a shard's file from the disk and compare every chunk, before its fragment is written.

    Another writer or an earlier attempt may have written the file first; that is fine if the bytes are the same.
    Raises FileRefused when they are not, and OSError.
    """
    with opened(files, name) as fd:
        files.forget(fd)
        if files.fstat(fd).st_size == fragment.size:
            buffer = memoryview(bytearray(min(fragment.chunk_bytes, fragment.size)))
            for index, wanted in enumerate(fragment.chunk_crcs()):
                start = index * fragment.chunk_bytes
                chunk = buffer[: min(fragment.chunk_bytes, fragment.size - start)]
                fill(files, fd, chunk, start, name)
                if crc(chunk) != int(wanted):
                    break
            else:
                return
    raise FileRefused(FailureKind.DISAGREES, f"{name} has other bytes than this rank has written")
