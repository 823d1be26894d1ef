"""Where groups meet: who gets in, what a stranger may cost, and that nobody is put out."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from rackrun.link.exchange import Exchange, ExchangeServer, ExchangeUnreachable

TOKEN = "the-token-of-this-test"
WAIT_S = 60.0
HEAD = struct.Struct("<HI")


@pytest.fixture
async def server() -> AsyncIterator[ExchangeServer]:
    served = ExchangeServer("127.0.0.1", TOKEN)
    yield served
    await served.close()
    await asyncio.sleep(0)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this user may have {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def pack(key: bytes, value: bytes) -> bytes:
    return HEAD.pack(len(key), len(value)) + key + value


async def hung_up(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), WAIT_S) == b""
    except ConnectionError:
        return True


async def test_all_hear_what_each_says(server: ExchangeServer) -> None:
    address = await server.start()
    one = await asyncio.to_thread(Exchange, address, TOKEN, "1/dp/0", WAIT_S)
    two = await asyncio.to_thread(Exchange, address, TOKEN, "1/dp/0", WAIT_S)
    one.set("a", b"1")
    two.set("b", b"2")
    assert await asyncio.to_thread(two.get, "a", WAIT_S) == b"1"
    assert await asyncio.to_thread(one.get, "b", WAIT_S) == b"2"
    for client in (one, two):
        client.close()


@pytest.mark.parametrize("advertise", ["127.0.0.1", "::1", "localhost"])
async def test_it_listens_where_it_says_and_nowhere_else(advertise: str) -> None:
    server = ExchangeServer(advertise, TOKEN)
    try:
        host, port = parts(await server.start())
        assert host == advertise
        assert all(ipaddress.ip_address(bound).is_loopback for bound in _listening_hosts(port))
        client = await asyncio.to_thread(
            Exchange, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", TOKEN, "r", WAIT_S
        )
        client.close()
    finally:
        await server.close()


def _listening_hosts(port: int) -> list[str]:
    """Local addresses on which this process listens at ``port``."""
    open_ = psutil.Process().net_connections(kind="tcp")
    found = [one.laddr.ip for one in open_ if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
    assert found
    return found


@pytest.mark.parametrize("token", [b"", b"wrong", b"x" * len(TOKEN), b"\xff" * len(TOKEN), TOKEN.encode() + b"x"])
async def test_without_the_token_nobody_gets_in(server: ExchangeServer, token: bytes) -> None:
    reader, writer = await asyncio.open_connection(*parts(await server.start()))
    writer.write(pack(b"room", token) + pack(b"key", b"value"))
    assert await hung_up(reader)
    writer.close()
    assert not server._rooms


async def test_who_has_not_shown_the_token_cannot_make_the_server_keep_much(server: ExchangeServer) -> None:
    """16 MiB each, announced and sent by many: what is kept of them all is less than one of these."""
    where = parts(await server.start())
    before = _resident_bytes()
    streams = [await asyncio.open_connection(*where) for _ in range(20)]
    for _, writer in streams:
        writer.write(HEAD.pack(4, 16 * 2**20 - 1) + b"room" + b"x" * 2**20)
    for reader, writer in streams:
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(writer.drain(), WAIT_S)
        assert await hung_up(reader)
        writer.close()
    assert _resident_bytes() - before < 16 * 2**20


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_thousand_groups_meet_at_once(server: ExchangeServer, many_descriptors: None) -> None:
    """All first members are there before a second one comes."""
    where = parts(await server.start())
    groups = 1_000
    first = [await asyncio.open_connection(*where) for _ in range(groups)]
    for number, (_, writer) in enumerate(first):
        writer.write(pack(f"1/group-{number}/0".encode(), TOKEN.encode()) + pack(b"here/0", b"0"))
    alone = pack(b"here/0", b"0")
    for reader, _ in first:
        assert await asyncio.wait_for(reader.readexactly(len(alone)), WAIT_S) == alone
    second = [await asyncio.open_connection(*where) for _ in range(groups)]
    for number, (_, writer) in enumerate(second):
        writer.write(pack(f"1/group-{number}/0".encode(), TOKEN.encode()) + pack(b"here/1", b"1"))
    other = pack(b"here/1", b"1")
    for members, said in ((first, other), (second, alone + other)):
        for reader, writer in members:
            assert await asyncio.wait_for(reader.readexactly(len(said)), WAIT_S) == said
            writer.close()
            await writer.wait_closed()


async def test_who_comes_after_all_have_left_finds_what_was_said(server: ExchangeServer) -> None:
    """The claim to a generation's store, after thousands of groups were built in it."""
    address = await server.start()
    where = parts(address)
    claim = await asyncio.to_thread(Exchange, address, TOKEN, "master/1", WAIT_S)
    claim.set("claim", b"tray-0")
    claim.close()
    for number in range(1_500):
        reader, writer = await asyncio.open_connection(*where)
        writer.write(pack(f"1/group-{number}/0".encode(), TOKEN.encode()) + pack(b"k", b"v"))
        await asyncio.wait_for(reader.readexactly(len(pack(b"k", b"v"))), WAIT_S)
        writer.close()
        await writer.wait_closed()
    late = await asyncio.to_thread(Exchange, address, TOKEN, "master/1", WAIT_S)
    assert await asyncio.to_thread(late.get, "claim", WAIT_S) == b"tray-0"
    late.close()
    assert len(server._rooms) < 1_100, "what nobody comes back to is let go"


def test_nobody_there_is_told_as_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ExchangeUnreachable):
            Exchange(f"127.0.0.1:{taken.getsockname()[1]}", TOKEN, "room", 1.0)
