"""Fetches a lost rank's snapshot from the agents that keep it: as it is, or rebuilt from the other members of its set.

Either way the result is the file that the lost worker had sealed. Loading verifies every chunk, so a wrong file is
never taken for it.
"""

from __future__ import annotations

import errno
import http.client
import mmap
import os
from collections.abc import Callable, Iterator

from rackrun.checkpoint.base.errors import CheckpointError, MemoryPlanError
from rackrun.checkpoint.redundancy.erasure_code import rebuild
from rackrun.checkpoint.redundancy.stripe_set import Part, RowHeader, StripeSet, decode_header
from rackrun.link.address import host_and_port
from rackrun.protocol.commands import Restore, Stripes

__all__ = ["CorruptSnapshot", "fetch_snapshot"]

_SILENCE_S = 30
_PIECE_BYTES = 1 << 20
_ROWS_AT_ONCE = 4


class CorruptSnapshot(Exception):
    """A snapshot is not what was sealed, and nothing of it was used. ``where``: its address, if that is known; ""
    otherwise."""

    def __init__(self, why: str, where: str = "") -> None:
        super().__init__(why)
        self.where = where


def fetch_snapshot(restore: Restore, step: int, token: str, overtaken: Callable[[], bool]) -> int:
    """Fetch or rebuild the snapshot of ``step``, and return the file descriptor of its arena in memory.

    Raises `CorruptSnapshot` when an agent does not give its part or the result is not what was lost, `MemoryPlanError` when
    there is no memory, and `RuntimeError` when ``overtaken()`` says that nobody waits for it any more.
    """
    fd = os.memfd_create("rackrun-fetched", os.MFD_CLOEXEC)
    try:
        try:
            os.fchmod(fd, 0o600)
            if restore.snapshot:
                _fetch(_Agents(step, token, overtaken), restore.snapshot, fd)
            else:
                _rebuild(_Agents(step, token, overtaken), restore, fd)
            if overtaken():  # a newer generation was announced
                raise RuntimeError("overtaken")
        except BaseException:
            os.close(fd)
            raise
        return fd
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise MemoryPlanError(f"the snapshot cannot be brought here: {error.strerror}.") from error
        whose = restore.snapshot or ", ".join(one.snapshot for one in restore.rebuild)
        raise CorruptSnapshot(f"{whose} does not give it ({error!r}).") from error
    except CheckpointError as error:
        raise CorruptSnapshot(error.what) from error


class _Agents:
    """Reads snapshots and rows of parity from agents over HTTP."""

    def __init__(self, step: int, token: str, overtaken: Callable[[], bool]) -> None:
        self._step, self._overtaken = step, overtaken
        self._headers = {"Authorization": f"Bearer {token}"}

    def get(self, kind: str, where: str, start: int, stop: int | None) -> Iterator[memoryview]:
        """Yield the bytes ``start`` to ``stop`` (None: all) of the ``kind`` of object at ``host:port/path``. Each piece
        is valid until the next is requested."""
        if start == stop:
            return
        if self._overtaken():
            raise RuntimeError("overtaken")
        address, _, path = where.partition("/")
        host, port = host_and_port(address)
        connection = http.client.HTTPConnection(host, port, timeout=_SILENCE_S)
        try:
            headers = self._headers | ({} if stop is None else {"Range": f"bytes={start}-{stop - 1}"})
            connection.request("GET", f"/{kind}/{path}/{self._step}", headers=headers)
            response = connection.getresponse()
            expected = http.HTTPStatus.OK if stop is None else http.HTTPStatus.PARTIAL_CONTENT
            if response.status == http.HTTPStatus.NOT_FOUND:
                raise CheckpointError("it is not kept any more")
            if response.status != expected:
                raise http.client.HTTPException(f"{response.status} {response.reason}")
            left = int(response.headers["Content-Length"])
            piece = memoryview(bytearray(min(_PIECE_BYTES, max(left, 1))))
            while left:
                got = response.readinto(piece[:left])
                if not got:
                    raise http.client.IncompleteRead(b"", left)
                if self._overtaken():
                    raise RuntimeError("overtaken")
                yield piece[:got]
                left -= got
        finally:
            connection.close()


def _fetch(agents: _Agents, where: str, fd: int) -> None:
    at = 0
    for piece in agents.get("snapshot", where, 0, None):
        at += os.pwrite(fd, piece, at)


def _rebuild(agents: _Agents, restore: Restore, fd: int) -> None:
    from_rank: dict[int, Stripes] = {one.rank: one for one in restore.rebuild}
    stripe_set = StripeSet(tuple(int(rank) for rank in restore.members), restore.parity)
    header_bytes = stripe_set.header_bytes

    def parity(part: Part, start: int, stop: int) -> Iterator[memoryview]:
        return agents.get("parity", f"{from_rank[part.keeper].row}/{part.number}", start, stop)

    def header(part: Part) -> RowHeader:
        return decode_header(b"".join(map(bytes, parity(part, 0, header_bytes))))

    def read(where: Part | int, start: int, stop: int) -> Iterator[memoryview]:
        if isinstance(where, Part):
            return parity(where, header_bytes + start, header_bytes + stop)
        return agents.get("snapshot", from_rank[where].snapshot, start, stop)

    def room(size: int) -> memoryview:
        os.posix_fallocate(fd, 0, max(size, 1))
        return memoryview(mmap.mmap(fd, max(size, 1)))[:size]

    gone = [member for member in stripe_set.members if member not in from_rank]
    rebuild(stripe_set, restore.rank, gone, header, room, read, _ROWS_AT_ONCE)
