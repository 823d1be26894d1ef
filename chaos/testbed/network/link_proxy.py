"""A proxy between the agents and the coordinator, which makes their connections slow or breaks them.

Run as ``python -m rackrun.chaos.testbed.network.link_proxy ADDRESS PORT TRAY...``: it listens on one port for each tray
and forwards to the coordinator at ``ADDRESS:PORT``. Its first line of output is `Ports`. Each line of JSON on its input
(`LinkOrder`) sets what is in force; a line of output (`StrikeMet`) reports, for each strike and tray, that something has met the
fault. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys
from collections import deque

import msgspec

from rackrun.chaos.faults.network.bad_link import Link

__all__ = ["StrikeMet", "Ports", "LinkOrder"]

_CHUNK_BYTES = 1 << 16
_HELD_BYTES_MAX = 4 << 20
_AGAIN_S = 0.05
_RESET = struct.pack("ii", 1, 0)
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Ports(msgspec.Struct, frozen=True):
    """Tray -> the port on which the proxy listens for it."""

    ports: dict[str, int]


class LinkOrder(msgspec.Struct, frozen=True):
    """An order to the proxy: put a bad link in force for one tray."""

    strike: int
    tray: str
    link: Link | None
    """The bad link; None takes it back."""
    seed: int = 0


class StrikeMet(msgspec.Struct, frozen=True):
    """The report that a strike has met a connection of a tray."""

    strike: int
    tray: str
    detail: str


class _Way:
    """The link between one tray and the coordinator."""

    def __init__(self, tray: str) -> None:
        self.tray = tray
        self.pairs: set[_Pair] = set()
        self.link = Link()
        self.number = -1
        """The number of the strike that is in force, or was last."""
        self._told, self._draw = True, random.Random(0)
        self._free_s = {True: 0.0, False: 0.0}

    def strike(self, number: int, link: Link, seed: int) -> None:
        """Put a bad link in force; ``seed`` is that of its random delays."""
        self.link, self.number, self._told, self._draw = link, number, False, random.Random(seed)
        for pair in list(self.pairs):
            self.hit(pair)

    def hit(self, pair: _Pair) -> None:
        """Apply the fault to a connection that existed, or was being made, at the strike."""
        if self.link.reset:
            pair.reset()
            self.effect("connections are reset")
        elif self.link.half_open:
            pair.close_above()
            self.effect("closed on the coordinator's side, and not on the agent's")

    def take_back(self) -> None:
        """End the fault. Connections that have lost bytes are reset."""
        self.link, self._told = Link(), True
        for pair in list(self.pairs):
            if pair.half or pair.swallowed:
                pair.reset()  # lost bytes never arrive any more

    def effect(self, detail: str) -> None:
        """Report, once for each strike, that the fault has met something."""
        if not self._told:
            self._told = True
            _tell(StrikeMet(self.number, self.tray, detail))

    def due_s(self, now_s: float, size: int, *, up: bool) -> float:
        """Return the time at which ``size`` bytes that arrive now are sent on. ``up``: towards the coordinator."""
        link = self.link
        due = now_s + link.latency_s + self._draw.uniform(0.0, link.jitter_s)
        if link.bytes_per_s is not None:
            self._free_s[up] = max(self._free_s[up], now_s) + size / link.bytes_per_s
            due = max(due, self._free_s[up])
        return due


class _Pair:
    """The two halves of one connection: ``below`` is the agent's, ``above`` the coordinator's."""

    def __init__(self, way: _Way, below: _Stream, above: _Stream) -> None:
        self._way, self._below, self._above = way, below, above
        self.half = False
        """Whether the upper half is closed and the lower is not."""
        self.swallowed = False
        """Whether bytes of the connection have been dropped."""

    async def run(self) -> None:
        """Forward bytes in both directions until either end closes."""
        self._way.pairs.add(self)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(self._below[0], self._above[1], up=True))
                both.create_task(self._pump(self._above[0], self._below[1], up=False))
        finally:
            self._way.pairs.discard(self)
            self.reset()

    def reset(self) -> None:
        for _, writer in (self._below, self._above):
            _abort(writer)

    def close_above(self) -> None:
        self.half = True
        self._above[1].transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        """Send bytes on in their order, each when it is due; meanwhile more are read."""
        loop = asyncio.get_running_loop()
        waiting: deque[tuple[float, bytes]] = deque()
        changed = asyncio.Event()

        async def take_in() -> None:
            last_s, data = 0.0, b"-"
            while data:
                data = await reader.read(_CHUNK_BYTES)
                if self.half:
                    await asyncio.Event().wait()  # bytes are neither read nor answered, without any sign of it
                if data and not up and self._way.link.replies_lost:
                    self.swallowed = True
                    self._way.effect(f"{len(data)} bytes from the coordinator are lost")
                    continue
                now_s = loop.time()
                last_s = max(last_s, self._way.due_s(now_s, len(data), up=up))
                if data and last_s > now_s:
                    self._way.effect(f"{len(data)} bytes go on {last_s - now_s:.3f} s later")
                waiting.append((last_s, data))
                changed.set()
                while sum(len(one) for _, one in waiting) > _HELD_BYTES_MAX:
                    changed.clear()
                    await changed.wait()

        async def give_out() -> None:
            while True:
                while not waiting:
                    changed.clear()
                    await changed.wait()
                due_s, data = waiting[0]
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
                waiting.popleft()
                changed.set()

        async with asyncio.TaskGroup() as both:
            both.create_task(take_in())
            both.create_task(give_out())


class _Proxy:
    def __init__(self, above: tuple[str, int]) -> None:
        self._above, self._up = above, False
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, way: _Way) -> int:
        """Listen for the agent of one tray, and return the port."""

        async def accept(*below: object) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            reader, writer = below
            assert isinstance(reader, asyncio.StreamReader)
            assert isinstance(writer, asyncio.StreamWriter)
            await self._join(way, (reader, writer))

        server = await asyncio.start_server(accept, self._above[0], 0)
        return int(server.sockets[0].getsockname()[1])

    async def _join(self, way: _Way, below: _Stream) -> None:
        try:
            if way.link.reset:
                way.effect("connections are reset")
                return
            number = way.number
            pair = _Pair(way, below, await self._connect())
            if way.number != number:
                way.hit(pair)
            await pair.run()
        except* OSError:
            pass  # one end has left
        finally:
            _abort(below[1])

    async def _connect(self) -> _Stream:
        """Connect to the coordinator. A connection that comes before it first listens waits here."""
        while True:
            try:
                found = await asyncio.open_connection(*self._above)
            except ConnectionRefusedError:
                if self._up:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                self._up = True
                return found


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once with a reset, which the other end sees."""
    connected = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


def _tell(what: Ports | StrikeMet) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


async def _main(above: tuple[str, int], trays: list[str]) -> None:
    loop = asyncio.get_running_loop()
    proxy, ways = _Proxy(above), {tray: _Way(tray) for tray in trays}
    _tell(Ports({tray: await proxy.serve(way) for tray, way in ways.items()}))
    said = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), sys.stdin)
    while line := await said.readline():
        say = msgspec.json.decode(line, type=LinkOrder)
        if say.link is None:
            ways[say.tray].take_back()
        else:
            ways[say.tray].strike(say.strike, say.link, say.seed)


if __name__ == "__main__":
    asyncio.run(_main((sys.argv[1], int(sys.argv[2])), sys.argv[3:]))
