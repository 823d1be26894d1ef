"""A launcher on a host without the coordinator learns how the job ended, whatever becomes of its connection."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rackrun.launch.run import job_loop
from rackrun.protocol.commands import StopJob

DONE = StopJob(exit_code=0, because="all done")
LOST = StopJob(exit_code=3, because="the coordinator is gone")
WAIT_S = 60.0

Answer = Callable[[int], Awaitable[web.StreamResponse | None]]
"""None: hang up."""


async def end_of(url: str, patience_s: float = WAIT_S) -> StopJob:
    found: list[StopJob] = []
    async with aiohttp.ClientSession() as session:
        await asyncio.wait_for(job_loop._end_of(session, url, found.append, LOST, patience_s), WAIT_S)
    return found[0]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Answer], Awaitable[str]]]:
    """``await serve(answer) -> url``: ``answer`` is told how often it was asked before."""
    runners = []

    async def start(answer: Answer) -> str:
        asked = 0

        async def handle(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            answered = await answer(asked - 1)
            if answered is None:
                assert request.transport is not None
                request.transport.abort()
            return answered or web.Response()

        app = web.Application()
        app.add_routes([web.get("/api/end", handle)])
        runners.append(web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_it_asks_again_over_a_new_connection_when_nothing_is_said(
    serve: Callable[[Answer], Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first may be half open: what would have been said over it is lost."""
    monkeypatch.setattr(job_loop, "_AGAIN_S", 0.2)

    async def answer(asked: int) -> web.StreamResponse | None:
        if not asked:
            await asyncio.Event().wait()
        return web.Response(body=msgspec.json.encode(DONE))

    assert await end_of(await serve(answer)) == DONE


async def test_a_connection_that_breaks_is_no_end(serve: Callable[[Answer], Awaitable[str]]) -> None:
    async def answer(asked: int) -> web.StreamResponse | None:
        if asked < 3:
            return None
        return web.Response(body=msgspec.json.encode(DONE))

    assert await end_of(await serve(answer)) == DONE


async def test_a_coordinator_that_was_there_and_refuses_for_long_is_gone(
    serve: Callable[[Answer], Awaitable[str]],
) -> None:
    async def answer(_asked: int) -> None:
        pass

    assert await end_of(await serve(answer), patience_s=0.3) == LOST


async def test_a_coordinator_to_which_there_is_no_way_may_be_there_still() -> None:
    unreachable = OSError(errno.EHOSTUNREACH, "No route to host")
    session = Refusing([unreachable, unreachable, None])
    found: list[StopJob] = []
    await job_loop._end_of(session, "http://head", found.append, LOST, 0.0)  # type: ignore[arg-type]
    assert found == [DONE]


class Refusing:
    """A session with an answer, or an error, for each request."""

    def __init__(self, errors: list[OSError | None]) -> None:
        self._errors = iter(errors)

    @asynccontextmanager
    async def get(self, _url: str, **_options: object) -> AsyncIterator[SimpleNamespace]:
        if (error := next(self._errors)) is not None:
            raise error
        yield SimpleNamespace(status=200, read=self._read)

    async def _read(self) -> bytes:
        return msgspec.json.encode(DONE)
