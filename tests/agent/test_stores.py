"""The TCPStores of an agent: where they listen, and what idle callers cost."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from rackrun.agent.stores import Stores

TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # libuv keeps a pipe from its first loop on


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.fixture(params=["127.0.0.1", "::1"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    stores = Stores(request.param, "tray-0", "token")
    store = stores.serve()
    yield request.param, store.port
    del store
    stores.close()


def test_it_listens_where_it_says_and_nowhere_else(served: tuple[str, int]) -> None:
    host, port = served
    listening = [one for one in psutil.Process().net_connections(kind="tcp") if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip for one in listening if one.laddr.port == port} == {host}


def test_who_says_nothing_costs_no_descriptor(served: tuple[str, int]) -> None:
    host, port = served
    idle = [socket.create_connection((host, port), 60) for _ in range(20)]
    before = sockets()
    client = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))  # it came after them, and is served
    client.set("key", "value")
    assert client.get("key") == b"value"
    assert sockets() <= before + 2
    del client
    for one in idle:
        one.close()
