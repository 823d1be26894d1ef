"""The coordinator's end of the link to one agent, which outlives connections and tells a dead agent from a cut
connection.

The kernel closes the connection of a killed agent just as a middlebox may. So the coordinator asks the agent's host: an
agent listens (`AgentLink.join`) for as long as it lives, and the kernel of its host refuses connections as soon as it
is dead. An accepted connection stays open, and its end shows a later death.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import socket
from collections import deque
from collections.abc import Sequence

import msgspec
from aiohttp import web

from rackrun.coordinator.server.message_validation import unlikely
from rackrun.link.address import host_and_port
from rackrun.link.reliable_messages import BATCH_BYTES, NumberedLink, Welcome
from rackrun.protocol.events import Event
from rackrun.protocol.ids import TrayId
from rackrun.protocol.wire import Telemetry

__all__ = ["AgentLink", "ProtocolViolation"]

_PINGS = 5
"""Number of pings in a lease. TCP doubles its wait after each lost answer; with five pings one arrives in time after a
silence of up to half a lease."""
_PROBE_S = 2.0
"""Seconds within which a host must accept or refuse a connection."""
_PROBE_AGAIN_S = (0.01, 1.0)


class ProtocolViolation(Exception):
    """An agent sent something that it must not send."""


class AgentLink:
    """The link to one agent, from its first hello until its tray is given up.

    Messages wait in an outbox, which the task of the current connection empties: waiting messages leave as one packet,
    and none waits for more to come. Pings are sent several times in a lease, whatever else is sent. Each side receives
    the other's, and gives it up only when nothing at all has arrived for a whole lease. (aiohttp's own heartbeat waits
    for one answer, for a third of that time: a network that is silent for so long would cost a tray.)
    """

    def __init__(self, tray: TrayId, host: str, pid: int, lease_s: float) -> None:
        self.tray = tray
        self.session = secrets.token_hex(16)
        """Random name that an agent must know to resume the link."""
        self.joined = False
        self.slots = 0
        """Slots of the tray, once it has joined."""
        self.host, self.pid = host, pid
        self.heard_s = asyncio.get_running_loop().time()
        self.woke_s = -math.inf
        """When this process had last stood still for longer than between two pings."""
        self.stood_s = 0.0
        """For how many seconds it had stood still."""
        self.numbered = NumberedLink()
        self.connection: web.WebSocketResponse | None = None
        """The current connection; None: it is broken."""
        self.overflowed = asyncio.Event()
        """Set if more messages wait for the agent than are kept without a connection."""
        self._transport: asyncio.BaseTransport | None = None
        self._welcomed = False
        """Whether the `Welcome` was sent over the current connection. Nothing may be sent before it."""
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._filled = asyncio.Event()
        self._closing = False
        self._listens_at = ""
        self._reachable = False
        """Whether the agent's host has accepted a connection, so that it can be found out whether the agent lives."""
        self._sender: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        self._pinger = asyncio.create_task(self._ping_often(lease_s / _PINGS), name=f"ping-{tray}")

    def check(self, message: Event | Telemetry) -> None:
        """Raise `ProtocolViolation` if no working agent of this tray would send this message."""
        if because := unlikely(message, self.slots):
            raise ProtocolViolation(f"{type(message).__name__}: {because}")

    def join(self, host: str, slots: int, listens_at: str) -> None:
        """Record where the agent is: ``listens_at`` is ``host:port``."""
        self.joined, self.host, self.slots, self._listens_at = True, host, slots, listens_at
        self._prober = asyncio.create_task(self._probe_once(), name=f"probe-{self.tray}")

    def send(self, data: bytes) -> None:
        """Send one frame, now or when the connection is resumed."""
        self._outbox.append(data)
        self._outbox_bytes += len(data)
        self._filled.set()
        if self.connection is None and self.numbered.overflows(len(self._outbox), self._outbox_bytes):
            self.overflowed.set()

    # -- connections
    def attach(self, connection: web.WebSocketResponse, transport: asyncio.BaseTransport | None, received: int) -> None:
        """Use this connection from now on. The agent has everything up to message number ``received``.

        Raises ValueError if the messages after it are not all kept.
        """
        again = self.numbered.resume(received)
        self.detach()
        self.overflowed.clear()
        self.connection, self._transport = connection, transport
        self.heard_s = asyncio.get_running_loop().time()
        self._filled.set()
        self._sender = asyncio.create_task(self._send_all(connection, again), name=f"send-{self.tray}")

    def detach(self) -> None:
        """Stop using the current connection."""
        if self._sender is not None:
            self._sender.cancel()
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()
        self.connection, self._transport, self._sender, self._welcomed = None, None, None, False
        if self.numbered.overflows(len(self._outbox), self._outbox_bytes):
            self.overflowed.set()

    async def close(self, code: int = 1000, message: bytes = b"") -> None:
        """Flush for at most a second, then close."""
        self._closing = True
        self._filled.set()
        self._pinger.cancel()
        if self._prober is not None:
            self._prober.cancel()
        if (sender := self._sender) is not None:
            await asyncio.wait({sender}, timeout=1.0)
            sender.cancel()
        if self.connection is not None:  # it may have broken in the meantime
            with contextlib.suppress(ConnectionError, RuntimeError):
                await self.connection.close(code=code, message=message)

    async def acknowledge(self) -> None:
        """Acknowledge what was received, without a message. Raises ConnectionError or RuntimeError."""
        if self.connection is not None and self._welcomed and self.numbered.owes:
            await self.connection.send_bytes(self.numbered.pack())

    async def ping(self) -> None:
        """Send a ping. Raises ConnectionError or RuntimeError."""
        await self.acknowledge()
        if self.connection is not None and self._welcomed:
            await self.connection.ping()

    async def _ping_often(self, every_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + every_s
            await asyncio.sleep(every_s)
            if loop.time() > due_s + every_s:
                self.woke_s, self.stood_s = loop.time(), loop.time() - due_s
            with contextlib.suppress(ConnectionError, RuntimeError):  # the reader sees the end as well, and reports it
                await self.ping()

    async def _send_all(self, connection: web.WebSocketResponse, again: Sequence[bytes]) -> None:
        welcome = Welcome(session=self.session, received=self.numbered.received)
        try:
            await connection.send_str(msgspec.json.encode(welcome).decode())
            self._welcomed = True
            for packet in again:
                await connection.send_bytes(packet)
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._outbox and self.numbered.has_room:
                    await connection.send_bytes(self.numbered.pack(self._take_waiting_frames()))
                if self.numbered.owes_much:
                    await connection.send_bytes(self.numbered.pack())
                if self._closing:
                    return
        except (ConnectionError, RuntimeError):
            return  # the reader sees the end as well, and reports it

    def took_in(self) -> None:
        """Wake the sending task if it has room for more, or has to acknowledge at once.

        That task acknowledges, because the reader must not wait for an agent that does not read.
        """
        if self._outbox or self.numbered.owes_much:
            self._filled.set()

    def _take_waiting_frames(self) -> list[bytes]:
        batch, size = list[bytes](), 0
        while self._outbox and (not batch or size + len(self._outbox[0]) <= BATCH_BYTES):
            batch.append(self._outbox.popleft())
            size += len(batch[-1])
        self._outbox_bytes -= size
        return batch

    # -- whether the agent lives
    async def dies(self) -> None:
        """Return when the agent's host reports that the agent is dead, or at once if that host was never reached,
        because then nothing shows that the agent lives."""
        pause_s = _PROBE_AGAIN_S[0]
        while True:
            try:
                probe = await self._probe()
            except ConnectionRefusedError:
                return
            except (OSError, ValueError):
                if not self._reachable:
                    return
                pause_s = min(2 * pause_s, _PROBE_AGAIN_S[1])
            else:
                with probe, contextlib.suppress(OSError):
                    await asyncio.get_running_loop().sock_recv(probe, 1)
            await asyncio.sleep(pause_s)

    async def _probe_once(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            (await self._probe()).close()

    async def _probe(self) -> socket.socket:
        """Return a connection to the address where the agent listens. Raises OSError or ValueError."""
        loop = asyncio.get_running_loop()
        host, port = host_and_port(self._listens_at)
        async with asyncio.timeout(_PROBE_S):
            family, kind, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            probe = socket.socket(family, kind)
            try:
                probe.setblocking(False)
                await loop.sock_connect(probe, address)
            except BaseException:
                probe.close()
                raise
        self._reachable = True
        return probe
