"""Reads images of old ranks from wherever they are: this process's own snapshot, memory of this host that an agent
holds, or an agent elsewhere.

Only the requested parts are read, in whole chunks, and each chunk is verified.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rackrun.checkpoint.arena.arena_remote import HEAD_BYTES, RemoteSlot
from rackrun.checkpoint.arena.arena_slot import SlotReader
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout
from rackrun.checkpoint.image.safetensors_image import header_bytes, parse_image
from rackrun.link.address import host_and_port
from rackrun.protocol.boot import MEMORY_HEADER
from rackrun.worker.restore.snapshot_fetch import CorruptSnapshot
from rackrun.worker.state.state_image import manifest_in
from rackrun.worker.state.state_manifest import StateManifest

__all__ = ["OldImage", "OldImages"]

_SILENCE_S = 30
_HEAD_BYTES = 256 * 2**10
_DISTANT_WINDOW_BYTES, _NEAR_WINDOW_BYTES = 64 * 2**20, 8 * 2**20


class _Source(Protocol):
    size: int
    layout_hash: str

    def peek(self, start: int, stop: int) -> bytes:
        """Return bytes without verifying them."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return verified bytes, valid until the next call."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None: ...

    def close(self) -> None: ...


class OldImage:
    """The image of one old rank. ``where``: its address, as in `rackrun.protocol.commands.Reshard.images`."""

    def __init__(self, where: str, source: _Source) -> None:
        self.where, self._source = where, source
        head = source.peek(0, _HEAD_BYTES)
        length = header_bytes(head[:8], limit=source.size)
        self.layout: ImageLayout = parse_image(
            head[:length] if length <= len(head) else source.peek(0, length), limit=source.size
        )
        if self.layout.layout_hash != source.layout_hash:
            raise IntegrityError("its header is not what was sealed.", remedy="take another copy.")
        self._manifest: StateManifest | None = None

    @property
    def manifest(self) -> StateManifest:
        """The image's manifest. Raises `CorruptSnapshot`."""
        if self._manifest is None:
            self._manifest = manifest_in(bytes(self.read(*self.layout.extents[PLAIN])))
        return self._manifest

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._source.expect(ranges)

    def read(self, start: int, stop: int) -> memoryview:
        """Return verified bytes, valid until the next call. Raises `CorruptSnapshot`."""
        with _told_of(self.where):
            return self._source.read(start, stop)

    def close(self) -> None:
        self._source.close()


class OldImages:
    """The images of old ranks; as a context manager it closes them at its end. ``own``: returns this process's snapshot
    with the given name, or None."""

    def __init__(
        self,
        named: int,
        own_address: str,
        own: Callable[[int], SlotReader | None],
        token: str,
        heard: Callable[[], bool],
    ) -> None:
        """``named``: the snapshots' name. ``heard`` is called while reading; if it returns False nobody waits for the
        result, and `RuntimeError` is raised."""
        self._named, self._own_address, self._own, self._token, self._heard = named, own_address, own, token, heard
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OldImages:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, where: str) -> OldImage:
        """Open the image at ``where``. Raises `CorruptSnapshot` when it cannot be read."""
        with _told_of(where):
            image = OldImage(where, self._source(where))
            self._stack.callback(image.close)
            return image

    def _source(self, where: str) -> _Source:
        if self.is_own(where) and (reader := self._own(self._named)) is not None:
            return _Own(reader)
        distant = _Distant(where, self._named, self._token, self._heard)
        return _near(distant, self._named, self._heard) or distant

    def is_own(self, where: str) -> bool:
        return where.endswith(self._own_address)


@contextlib.contextmanager
def _told_of(where: str) -> Iterator[None]:
    """Context manager that turns errors into `CorruptSnapshot` with the address ``where``."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise CorruptSnapshot(f"{where} does not give it ({error!r}).", where) from error
    except CheckpointError as error:
        raise CorruptSnapshot(f"{where}: {error.what}", where) from error


class _Own:
    """An image in this process's own memory."""

    def __init__(self, reader: SlotReader) -> None:
        self._reader, self._payload = reader, reader.payload
        self._verified: set[int] = set()
        self.size, self.layout_hash = len(self._payload), reader.layout_hash

    def peek(self, start: int, stop: int) -> bytes:
        return bytes(self._payload[start:stop])

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: all bytes are in memory."""

    def read(self, start: int, stop: int) -> memoryview:
        size = self._reader.chunk_bytes
        for index in range(start // size, -(-stop // size)):
            if index not in self._verified:
                self._reader.chunk(index)
                self._verified.add(index)
        return self._payload[start:stop]

    def close(self) -> None:
        """Do nothing: the snapshot is kept."""


class _Near(RemoteSlot):
    """An image in memory of this host that another process holds. It is read, not mapped, because its owner may
    truncate it."""

    def __init__(self, fd: int, named: int, heard: Callable[[], bool]) -> None:
        self._fd, self._heard = fd, heard
        super().__init__(self._pread, named, _NEAR_WINDOW_BYTES)

    def _pread(self, start: int, into: memoryview) -> None:
        _listen(self._heard)
        if os.preadv(self._fd, [into], start) != len(into):
            raise IntegrityError("it was cut short.", remedy="take another copy.")

    def close(self) -> None:
        os.close(self._fd)


class _Distant(RemoteSlot):
    """An image kept by an agent, read over HTTP."""

    def __init__(self, where: str, named: int, token: str, heard: Callable[[], bool]) -> None:
        self._address, _, path = where.partition("/")
        self._path, self._heard = f"/snapshot/{path}/{named}", heard
        self._headers = {"Authorization": f"Bearer {token}"}
        self.memory = ""
        """Where the agent's memory is, as in `MEMORY_HEADER`; "" if unknown."""
        super().__init__(self._get, named, _DISTANT_WINDOW_BYTES)

    def close(self) -> None:
        """Do nothing: no connection stays open between two requests, which may be far apart."""

    def _get(self, start: int, into: memoryview) -> None:
        host, port = host_and_port(self._address)
        connection = http.client.HTTPConnection(host, port, timeout=_SILENCE_S)
        try:
            _listen(self._heard)
            span = {"Range": f"bytes={start}-{start + len(into) - 1}"}
            connection.request("GET", self._path, headers=self._headers | span)
            self._receive(connection.getresponse(), into)
        finally:
            connection.close()

    def _receive(self, response: http.client.HTTPResponse, into: memoryview) -> None:
        if response.status == http.HTTPStatus.NOT_FOUND:
            raise IntegrityError("it is not kept any more.", remedy="take another copy.")
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            raise http.client.HTTPException(f"{response.status} {response.reason}")
        self.memory = response.headers.get(MEMORY_HEADER, "")
        at = 0
        while at < len(into):
            got = response.readinto(into[at:])
            if not got:
                raise http.client.IncompleteRead(b"", len(into) - at)
            at += got
            _listen(self._heard)


def _near(distant: _Distant, named: int, heard: Callable[[], bool]) -> _Near | None:
    """Return the same image as memory of this host, or None if the agent's memory is elsewhere or cannot be opened.

    It is the same if it begins like the bytes that the agent has sent: an arena begins with a random name.
    """
    path = f"/proc/{distant.memory}"
    try:
        if not distant.memory or not stat.S_ISREG(os.stat(path).st_mode):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if os.pread(fd, HEAD_BYTES, 0) != distant.head:
        os.close(fd)
        return None
    try:
        return _Near(fd, named, heard)
    except BaseException:
        os.close(fd)
        raise


def _listen(heard: Callable[[], bool]) -> None:
    """Raise `RuntimeError` if nobody waits for the result any more."""
    if not heard():
        raise RuntimeError("overtaken")
