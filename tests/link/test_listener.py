"""What callers that have not shown the token may cost: a little, of each thing, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rackrun.link.address import listen
from rackrun.link.listener import FIRST_BYTES_MAX, Admit, Listener, Reply, http_token

TOKEN = "the-token-of-this-test"
WAIT_S = 60.0
GOOD = f"GET /x HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


class Echo(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def says_token(heard: bytes) -> Admit | Reply | None:
    if len(heard) < len(TOKEN):
        return None
    return Admit() if heard.startswith(TOKEN.encode()) else Reply(b"no")


Start = Callable[..., tuple[Listener, tuple[str, int]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    begun: list[Listener] = []

    def begin(**options: object) -> tuple[Listener, tuple[str, int]]:
        listening = listen("127.0.0.1")
        where = listening.getsockname()[:2]
        begun.append(Listener(listening, says_token, Echo, **options))  # type: ignore[arg-type]
        return begun[-1], where

    yield begin
    for listener in begun:
        await listener.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the connection is closed."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while more := await asyncio.wait_for(reader.read(4096), WAIT_S):
            heard += more
    return heard


async def test_what_was_said_before_the_token_was_whole_is_not_lost(start: Start) -> None:
    _, where = start()
    reader, writer = await asyncio.open_connection(*where)
    sent = TOKEN.encode() + b" and more"
    for byte in sent:
        writer.write(bytes([byte]))
        await writer.drain()
    assert await asyncio.wait_for(reader.readexactly(len(sent)), WAIT_S) == sent
    writer.close()


async def test_a_wrong_token_is_answered_and_hung_up_on(start: Start) -> None:
    listener, where = start()
    reader, writer = await asyncio.open_connection(*where)
    writer.write(b"x" * 4 * FIRST_BYTES_MAX)
    assert await ended(reader) in {b"no", b""}  # the answer may be overtaken by what was not read
    writer.close()
    while listener.pending:  # noqa: ASYNC110 - it has no event of its own
        await asyncio.sleep(0.001)


async def test_who_says_nothing_is_hung_up_on_in_the_end(start: Start) -> None:
    listener, where = start(first_s=0.05)
    idle = [await asyncio.open_connection(*where) for _ in range(5)]
    for reader, writer in idle:
        assert await ended(reader) == b""
        writer.close()
    assert listener.pending == 0


async def test_who_says_a_little_now_and_then_has_no_more_time(start: Start) -> None:
    _, where = start(first_s=0.2)
    reader, writer = await asyncio.open_connection(*where)
    over = asyncio.ensure_future(ended(reader))
    while not over.done():
        with contextlib.suppress(ConnectionError):
            writer.write(b"")
            writer.transport.write(TOKEN[:1].encode())
        await asyncio.wait((over,), timeout=0.02)
    assert over.result() in {b"", b"no"}
    writer.close()


async def test_of_too_many_the_oldest_has_to_go_and_who_has_the_token_gets_in(start: Start) -> None:
    listener, where = start(pending_max=10)
    idle = [await asyncio.open_connection(*where) for _ in range(50)]
    reader, writer = await asyncio.open_connection(*where)
    writer.write(TOKEN.encode())
    assert await asyncio.wait_for(reader.readexactly(len(TOKEN)), WAIT_S) == TOKEN.encode()
    assert listener.pending <= 10
    for other, _ in idle[:40]:
        assert await ended(other) == b""
    for _, each in (*idle, (reader, writer)):
        each.close()


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """For this process, from here on."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        limit = probe.fileno() + 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connects(where: tuple[str, int], count: int) -> Iterator[socket.socket]:
    for _ in range(count):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(where)
        yield client


async def test_idle_callers_leave_descriptors_for_a_recovery(start: Start, few_descriptors: int) -> None:
    """The clients are of this process too: so few that what they leave is what the listener leaves."""
    listener, where = start(reserve=20)
    idle = list(connects(where, 30))
    for _ in range(200):
        await asyncio.sleep(0)
    room = [socket.socket() for _ in range(12)]  # what a recovery may need
    for one in (*room, *idle):
        one.close()
    assert listener.pending < 30


async def test_when_descriptors_have_run_out_it_goes_on_as_soon_as_there_are_some(
    start: Start, few_descriptors: int
) -> None:
    listener, where = start()
    client = next(connects(where, 1))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(socket.socket())
    for _ in range(20):
        await asyncio.sleep(0)
    assert listener.pending == 0
    for one in taken:
        one.close()
    loop = asyncio.get_running_loop()
    await asyncio.wait_for(loop.sock_sendall(client, TOKEN.encode()), WAIT_S)
    assert await asyncio.wait_for(loop.sock_recv(client, 100), WAIT_S) == TOKEN.encode()
    client.close()


async def test_closing_hangs_up_on_who_is_pending(start: Start) -> None:
    listener, where = start()
    reader, writer = await asyncio.open_connection(*where)
    while not listener.pending:  # noqa: ASYNC110 - it has no event of its own
        await asyncio.sleep(0)
    await listener.close()
    assert await ended(reader) == b""
    writer.close()


# -- HTTP
@pytest.mark.parametrize("cut", range(0, len(GOOD), 7))
def test_half_a_head_is_waited_for(cut: int) -> None:
    assert http_token(TOKEN)(GOOD[:cut]) is None


def test_a_whole_head_with_the_token_is_let_in() -> None:
    examine = http_token(TOKEN)
    assert isinstance(examine(GOOD), Admit)
    assert isinstance(examine(GOOD.replace(b"Authorization", b"aUTHORIZATION") + b"body"), Admit)


def test_a_head_without_an_end_is_too_long_some_time() -> None:
    verdict = http_token(TOKEN)(b"GET /" + b"x" * FIRST_BYTES_MAX)
    assert isinstance(verdict, Reply)
    assert verdict.answer.startswith(b"HTTP/1.1 431")


def test_what_everybody_may_know_is_answered_without_the_token() -> None:
    examine = http_token(TOKEN, open_to_all={"/healthz": b"{}"}, refusal="no entry")
    fine, wrong = examine(b"GET /healthz?x=1 HTTP/1.1\r\n\r\n"), examine(b"POST /healthz HTTP/1.1\r\n\r\n")
    assert isinstance(fine, Reply)
    assert fine.answer.startswith(b"HTTP/1.1 200 ")
    assert fine.answer.endswith(b"\r\n\r\n{}")
    assert isinstance(wrong, Reply)
    assert wrong.answer.startswith(b"HTTP/1.1 401 ")
    assert wrong.answer.endswith(b"no entry")


@given(st.binary(max_size=400) | st.binary(max_size=100).map(lambda tail: GOOD.replace(TOKEN.encode(), tail)))
def test_whatever_a_stranger_sends_is_judged(heard: bytes) -> None:
    verdict = http_token(TOKEN)(heard)
    assert not isinstance(verdict, Admit) or TOKEN.encode() in heard


async def test_a_request_and_its_body_reach_the_application_whole() -> None:
    app = web.Application(client_max_size=2**23)

    async def size(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    app.router.add_put("/", size)
    runner = web.AppRunner(app, handle_signals=False, access_log=None)
    await runner.setup()
    listening = listen("127.0.0.1")
    where = listening.getsockname()[:2]
    assert runner.server is not None
    listener = Listener(listening, http_token(TOKEN), runner.server)
    body = b"b" * 3_000_000
    reader, writer = await asyncio.open_connection(*where)
    for _ in range(2):  # the connection stays
        writer.write(
            f"PUT / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        writer.write(body)
        answer = await asyncio.wait_for(reader.readuntil(b"3000000"), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 200")
    writer.close()
    await listener.close()
    await runner.cleanup()
