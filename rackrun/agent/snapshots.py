"""``GET /snapshot/{tray}/{index}/{incarnation}/{step}``: the bytes of a snapshot that this tray keeps, alive or dead.

The body is the worker's file as it is. A snapshot that its worker overwrites in the middle of a download breaks the
download: the reader sees fewer bytes than were announced, and asks elsewhere.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from typing import Protocol

from aiohttp import web

from rackrun.link.page import HeartbeatPage

__all__ = ["KeptSnapshots", "SnapshotService"]

_CHUNK_BYTES = 4 << 20


class KeptSnapshots(Protocol):
    """What a tray keeps of one worker, dead or alive."""

    page: HeartbeatPage
    snapshot_fds: tuple[int, int]


class Keeper(Protocol):
    def kept(self, index: int, incarnation: int) -> KeptSnapshots | None: ...


class SnapshotService:
    def __init__(self, tray: str, advertise: str, token: str, keeper: Keeper) -> None:
        self._tray = tray
        self._advertise = advertise
        self._authorization = f"Bearer {token}"
        self._keeper = keeper
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Returns ``host:port``."""
        app = web.Application()
        app.router.add_get("/snapshot/{tray}/{index}/{incarnation}/{step}", self._get)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        loopback = self._advertise == "localhost" or self._advertise.startswith("127.")
        listening = socket.create_server((self._advertise if loopback else "", 0), backlog=128)
        await web.SockSite(self._runner, listening).start()
        return f"{self._advertise}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), self._authorization.encode()):
            raise web.HTTPUnauthorized(text="wrong or missing token")
        try:
            index, incarnation, step = (int(request.match_info[name]) for name in ("index", "incarnation", "step"))
        except ValueError:
            raise web.HTTPNotFound(text="index, incarnation and step are numbers") from None
        if request.match_info["tray"] != self._tray:
            raise web.HTTPNotFound(text=f"this is tray {self._tray}")
        kept = self._keeper.kept(index, incarnation)
        if kept is None:
            raise web.HTTPNotFound(text=f"nothing is kept of incarnation {incarnation} in slot {self._tray}/{index}")
        which = kept.page.snapshots().get(step)
        if which is None:
            steps = sorted(kept.page.snapshots())
            raise web.HTTPNotFound(
                text=f"no sealed snapshot of step {step}; of incarnation {incarnation} there is {steps}"
            )
        fd = os.dup(kept.snapshot_fds[which])  # outlives the slot's forgetting
        try:
            return await self._stream(request, kept, fd, which, step)
        finally:
            os.close(fd)

    async def _stream(
        self, request: web.Request, kept: KeptSnapshots, fd: int, which: int, step: int
    ) -> web.StreamResponse:
        size = os.fstat(fd).st_size
        response = web.StreamResponse()
        response.content_length = size
        response.content_type = "application/octet-stream"
        await response.prepare(request)
        at = 0
        while at < size:
            chunk = await asyncio.to_thread(os.pread, fd, min(_CHUNK_BYTES, size - at), at)
            if kept.page.snapshots().get(step) != which or not chunk:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError(f"the snapshot of step {step} was overwritten")
            await response.write(chunk)
            at += len(chunk)
        await response.write_eof()
        return response
