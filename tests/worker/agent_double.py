"""What an agent holds and serves for its workers, in the place of one: their memory, their snapshots, an exchange."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rackrun.link.exchange import ExchangeServer
from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.commands import Worker


@dataclass
class Child:
    """A forked worker, as its agent has it."""

    worker: Worker
    rank: int
    spare: bool
    pid: int
    pidfd: int
    channel: socket.socket
    page: HeartbeatPage
    fds: tuple[int, ...]
    """Page, two snapshots, result."""
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def result(self) -> dict[str, Any]:
        data = os.pread(self.fds[3], os.fstat(self.fds[3]).st_size, 0)
        found: dict[str, Any] = json.loads(data) if data else {}
        return found

    def close(self) -> None:
        self.channel.close()
        self.page.close()
        for fd in (self.pidfd, *self.fds):
            os.close(fd)


class SnapshotServer:
    """Serves the snapshots of workers, as an agent does; who reads them on this host may read the memory itself."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.distant = False
        """Snapshots seem to lie on another host."""

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def serve(self, children: Mapping[Worker, Child]) -> None:
        """One snapshot of one of these workers, living or dead: ``GET /snapshot/SLOT/INCARNATION/STEP``."""
        connection, _ = self._socket.accept()
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            _, _, slot, index, incarnation, step = head.split(b" ")[1].decode().split("/")
            child = next(
                c for w, c in children.items() if (w.slot, w.incarnation) == (f"{slot}/{index}", int(incarnation))
            )
            held = child.page.snapshots().get(int(step))
            if held is None:
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                return
            fd = child.fds[1 + held]
            first, last = 0, os.fstat(fd).st_size - 1
            if asked := re.search(rb"Range: bytes=(\d+)-(\d+)", head):
                first, last = map(int, asked.groups())
            data = os.pread(fd, last + 1 - first, first)
            status = b"206 Partial Content" if asked else b"200 OK"
            where = b"" if self.distant else b"X-Rackrun-Memory: %d/fd/%d\r\n" % (os.getpid(), fd)
            with contextlib.suppress(OSError):  # a reader that was overtaken does not stay for it
                connection.sendall(b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n" % (status, where, len(data)) + data)


class ExchangeProcess:
    """Where groups meet, in a process of its own, as an agent serves it; it ends when its pipe is closed."""

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe()
        told, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            asyncio.run(_serve_exchange(theirs, tell))
            os._exit(0)
        os.close(tell)
        os.close(theirs)
        self.address = os.read(told, 64).decode()
        os.close(told)

    def leave(self) -> None:
        """In a forked process: what it has inherited would keep the exchange alive."""
        os.close(self._pipe)

    def close(self) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)


async def _serve_exchange(until: int, tell: int) -> None:
    server = ExchangeServer("127.0.0.1", "")
    os.write(tell, (await server.start()).encode())
    os.close(tell)
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(until, over.set)
    await over.wait()
