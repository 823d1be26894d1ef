"""HTTP service for the snapshots, copies and parity that this tray keeps.

``GET /snapshot/{tray}/{index}/{incarnation}/{step}`` returns the bytes of a snapshot: of one of this tray's workers,
alive or dead, or a copy of another tray's. A header says where it lies in memory, for readers on this host
(`MEMORY_HEADER`). ``PUT`` stores such a copy here. ``/parity/{generation}/{rank}/{part}/{step}`` is a block of the
parity that this tray keeps for the set of ``rank``, its own; ``PUT`` adds a stripe to it. ``GET`` accepts a Range.

The body is the worker's file unchanged. A snapshot that its worker overwrites during a download breaks the download:
the reader receives fewer bytes than announced, and asks elsewhere.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from rackrun.agent.snapshots.memory_limit import OverMemoryLimit
from rackrun.agent.snapshots.mirror import SnapshotCopies, verify
from rackrun.agent.snapshots.snapshot_parity import KeptParityRows, RowKey
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.redundancy.stripe_set import Part, StripeSet
from rackrun.link.address import join, listen_on
from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.link.listener import RESERVE, Listener, http_token
from rackrun.protocol.boot import MEMORY_HEADER

__all__ = ["KeptSnapshots", "SnapshotService"]

_CHUNK_BYTES = 4 << 20
_PATH = "/snapshot/{tray}/{index}/{incarnation}/{step}"
_ROW = "/parity/{generation}/{rank}/{part}/{step}"


class KeptSnapshots(Protocol):
    """The page and snapshots of one worker, dead or alive."""

    page: HeartbeatPage
    snapshot_fds: tuple[int, int]


class SnapshotAccess(Protocol):
    """Gives access to the snapshots that a tray keeps."""

    def kept(self, index: int, incarnation: int) -> KeptSnapshots | None:
        """Return the snapshots that a worker of this tray has or has left; None if there are none."""


class SnapshotService:
    """The HTTP server for snapshots, copies and parity."""

    def __init__(
        self, tray: str, advertise: str, token: str, keeper: SnapshotAccess, *, reserve: int = RESERVE
    ) -> None:
        self._tray = tray
        self._advertise, self._token, self._reserve = advertise, token, reserve
        self._listener: Listener | None = None
        self._keeper = keeper
        self._copies = SnapshotCopies()
        self._rows = KeptParityRows()
        self._allocating = asyncio.Lock()
        self._everywhere = -1
        """The newest step of which every rank is known to have a copy or parity on other trays. A newcomer does not
        know it; then what others reported counts."""
        self._generation = 0
        """The newest generation from which something arrived."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Begin to serve; return ``host:port``."""
        app = web.Application()
        app.router.add_get(_PATH, self._get)
        app.router.add_put(_PATH, self._put)
        app.router.add_get(_ROW, self._get_row)
        app.router.add_put(_ROW, self._put_stripe)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        listening = listen_on(self._advertise)
        port = listening.getsockname()[1]
        assert self._runner.server is not None, "it is set up"
        self._listener = Listener(listening, http_token(self._token), self._runner.server, reserve=self._reserve)
        return join(self._advertise, port)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._copies.close()
        self._rows.close()

    def _admit(self, request: web.Request) -> None:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(shown, f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="wrong or missing token")

    def _asked(self, request: web.Request) -> tuple[str, int, int, int]:
        """Return tray, index, incarnation and step of a request."""
        self._admit(request)
        try:
            index, incarnation, step = (int(request.match_info[name]) for name in ("index", "incarnation", "step"))
        except ValueError:
            raise web.HTTPNotFound(text="index, incarnation and step are numbers") from None
        return request.match_info["tray"], index, incarnation, step

    async def _put(self, request: web.Request) -> web.StreamResponse:
        tray, index, incarnation, step = self._asked(request)
        size = request.content_length or 0
        try:
            self._check_generation(int(request.query["generation"]))
        except (ValueError, KeyError):
            raise web.HTTPUnprocessableEntity(text="of which generation?") from None
        try:
            async with self._allocating:  # gigabytes take a second each, and not this loop's
                fd = await asyncio.to_thread(self._copies.room, size)
        except OverMemoryLimit as refused:
            raise web.HTTPInsufficientStorage(text=str(refused)) from None
        try:
            at = 0
            async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
                at += await asyncio.to_thread(os.pwrite, fd, chunk, at)
            await asyncio.to_thread(verify, fd, step)
            self._check_generation(int(request.query["generation"]))  # it may have taken long
            self._copies.keep(tray, index, incarnation, step, fd)
            fd = -1
            await self._prune(int(request.query["besides"]))
        except (CheckpointError, ValueError, KeyError) as error:
            raise web.HTTPUnprocessableEntity(text=f"this is no whole snapshot: {error}") from error
        finally:
            if fd >= 0:
                os.close(fd)
        return web.json_response(self._copies.steps(tray, index, incarnation))

    def _check_generation(self, generation: int) -> None:
        """Refuse data of an older generation, which is late and must not replace newer data."""
        if generation < self._generation:
            raise web.HTTPConflict(text=f"generation {generation} is over: {self._generation} has begun")
        self._generation = generation

    async def _prune(self, everywhere: int) -> None:
        """Keep two steps of each worker and each row: the newest, and the one that is everywhere."""
        if everywhere >= 0:
            self._everywhere = everywhere
        self._copies.prune(self._everywhere)
        await self._rows.prune(self._everywhere)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        tray, index, incarnation, step = self._asked(request)
        if tray != self._tray:
            return await self._get_copy(request, tray, index, incarnation, step)
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
            where = f"{os.getpid()}/fd/{kept.snapshot_fds[which]}"
            return await self._stream(request, fd, lambda: kept.page.snapshots().get(step) == which, where)
        finally:
            os.close(fd)

    async def _get_copy(
        self, request: web.Request, tray: str, index: int, incarnation: int, step: int
    ) -> web.StreamResponse:
        found = self._copies.find(tray, index, incarnation, step)
        if found is None:
            raise web.HTTPNotFound(
                text=f"tray {self._tray} has no copy of step {step} of incarnation {incarnation} in {tray}/{index}"
            )
        fd = os.dup(found)  # a newer one may take its place meanwhile
        try:
            return await self._stream(request, fd, lambda: True, f"{os.getpid()}/fd/{found}")
        finally:
            os.close(fd)

    def _asked_row(self, request: web.Request) -> RowKey:
        self._admit(request)
        try:
            names = ("generation", "rank", "part", "step")
            generation, rank, part, step = (int(request.match_info[name]) for name in names)
        except ValueError:
            raise web.HTTPNotFound(text="generation, rank, part and step are numbers") from None
        return RowKey(generation, Part(rank, part), step)

    async def _put_stripe(self, request: web.Request) -> web.StreamResponse:
        key, query = self._asked_row(request), request.query
        try:
            members = tuple(int(rank) for rank in query["members"].split(","))
            owner, length, besides = int(query["owner"]), int(query["length"]), int(query["besides"])
            self._check_generation(key.generation)
            body = request.content.iter_chunked(_CHUNK_BYTES)
            await self._rows.add_stripe(key, StripeSet(members, int(query["parity"])), owner, length, body)
            await self._prune(besides)
        except OverMemoryLimit as refused:
            raise web.HTTPInsufficientStorage(text=str(refused)) from None
        except (CheckpointError, ValueError, KeyError) as error:
            raise web.HTTPUnprocessableEntity(text=f"this is no stripe of that row: {error}") from error
        return web.Response()

    async def _get_row(self, request: web.Request) -> web.StreamResponse:
        key = self._asked_row(request)
        found = self._rows.find(key)
        if found is None:
            raise web.HTTPNotFound(
                text=f"tray {self._tray} has no whole row of rank {key.part.keeper} for step {key.step} in generation"
                f" {key.generation}"
            )
        fd = os.dup(found)
        try:
            return await self._stream(request, fd, lambda: True)
        finally:
            os.close(fd)

    async def _stream(
        self, request: web.Request, fd: int, valid: Callable[[], bool], where: str = ""
    ) -> web.StreamResponse:
        """Send a file. ``where`` is the value of `MEMORY_HEADER`."""
        start, stop = _span(request, os.fstat(fd).st_size)
        response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        if where:
            response.headers[MEMORY_HEADER] = where
        response.content_length = stop - start
        response.content_type = "application/octet-stream"
        await response.prepare(request)
        at = start
        while at < stop:
            chunk = await asyncio.to_thread(os.pread, fd, min(_CHUNK_BYTES, stop - at), at)
            if not chunk or not valid():
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the snapshot was overwritten")
            await response.write(chunk)
            at += len(chunk)
        await response.write_eof()
        return response


def _span(request: web.Request, size: int) -> tuple[int, int]:
    """Return the first and the end byte that a request asks for: ``Range: bytes=FIRST-LAST``, or all ``size`` bytes."""
    try:
        asked = request.http_range
    except ValueError as error:
        raise web.HTTPRequestRangeNotSatisfiable(text=str(error)) from error
    start, stop = asked.start or 0, size if asked.stop is None else asked.stop
    if not 0 <= start <= stop <= size:
        raise web.HTTPRequestRangeNotSatisfiable(text=f"bytes {start} to {stop} of {size}")
    return start, stop
