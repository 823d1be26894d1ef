"""Where workers that build a group meet: each says its address, and hears everybody else's.

An agent serves it, never a rank. A *room* is one group in one generation; in it every key is set once, the first value
stays, and each is pushed to all who are there or come later. So building a group of N costs each member one connection,
and no request waits for an answer.

torch's TCPStore does the same job, but not for us: its client formats the peer's address with a reverse DNS lookup, which
took 64 clients that connected at once 5 to 15 s on a machine without a name server; a client that waits holds a lock, so a
build that was overtaken blocked the next one; and it cannot be interrupted. This one ends at once when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import struct
import time
from collections import OrderedDict

__all__ = ["TCPSTORE_KEY", "Exchange", "ExchangeServer", "ExchangeTimeout", "ExchangeUnreachable"]

TCPSTORE_KEY = "tcpstore"
"""In every room from the start: ``host:port`` of the server's TCPStore, for what needs a real one (NCCL)."""

_HEAD = struct.Struct("<HI")  # bytes of the key, bytes of the value
_VALUE_BYTES_MAX = 16 * 2**20
_ROOMS_MAX = 64
_BACKLOG = 1024


class ExchangeTimeout(RuntimeError):
    """Somebody did not come, or the exchange is gone."""


class ExchangeUnreachable(ExchangeTimeout):
    """It is gone, or this host is cut off from it."""


def _pack(key: str, value: bytes) -> bytes:
    encoded = key.encode()
    return _HEAD.pack(len(encoded), len(value)) + encoded + value


class ExchangeServer:
    """In the agent's event loop."""

    def __init__(self, advertise: str, token: str, presets: dict[str, str]) -> None:
        self._token = token
        self._presets = {key: value.encode() for key, value in presets.items()}
        self._rooms: OrderedDict[str, _Room] = OrderedDict()
        self._server: asyncio.Server | None = None
        self._advertise = advertise

    async def start(self) -> str:
        """Serve; returns ``host:port``."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Member(self), "", 0, family=socket.AF_INET, backlog=_BACKLOG)
        return f"{self._advertise}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for room in self._rooms.values():
            for member in tuple(room.members):
                member.transport.abort()

    def enter(self, name: str, token: bytes, member: _Member) -> _Room | None:
        if not hmac.compare_digest(token, self._token.encode()):
            return None
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = _Room(dict(self._presets))
            while len(self._rooms) > _ROOMS_MAX:
                self._rooms.popitem(last=False)
        room.members[member] = None
        return room


class _Room:
    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.members: dict[_Member, None] = {}


class _Member(asyncio.Protocol):
    """One connection. Its first message names the room and carries the token."""

    def __init__(self, server: ExchangeServer) -> None:
        self._server = server
        self._room: _Room | None = None
        self._heard = bytearray()
        self._unsent: list[bytes] = []
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._room is not None:
            self._room.members.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        while len(self._heard) >= _HEAD.size:
            key_bytes, value_bytes = _HEAD.unpack_from(self._heard)
            end = _HEAD.size + key_bytes + value_bytes
            if value_bytes > _VALUE_BYTES_MAX:
                self.transport.abort()
                return
            if len(self._heard) < end:
                return
            key = bytes(self._heard[_HEAD.size : _HEAD.size + key_bytes])
            value = bytes(self._heard[_HEAD.size + key_bytes : end])
            del self._heard[:end]
            self._said(key.decode(errors="replace"), value)

    def _said(self, key: str, value: bytes) -> None:
        if self._room is None:
            self._room = self._server.enter(key, value, self)
            if self._room is None:
                self.transport.abort()
                return
            for known, what in self._room.values.items():
                self.hear(_pack(known, what))
        elif key not in self._room.values:
            self._room.values[key] = value
            message = _pack(key, value)
            for member in self._room.members:
                member.hear(message)

    def hear(self, message: bytes) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)  # what comes together goes together
        self._unsent.append(message)

    def _flush(self) -> None:
        self.transport.write(b"".join(self._unsent))
        self._unsent.clear()


class Exchange:
    """The client: a member of one room. Not for several threads at once, except `close`, which interrupts the others.

    Raises `ExchangeUnreachable` when the server cannot be reached within ``timeout_s``, or is gone.
    """

    def __init__(self, address: str, token: str, room: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(_pack(room, token.encode()))
        except OSError as error:
            raise ExchangeUnreachable(f"the exchange at {address} cannot be reached: {error}") from error
        self._address = address
        self._values: dict[str, bytes] = {}
        self._heard = bytearray()

    def set(self, key: str, value: bytes) -> None:
        """The first value of a key stays, whoever sets it."""
        try:
            self._socket.sendall(_pack(key, value))
        except OSError as error:
            raise ExchangeUnreachable(f"the exchange at {self._address} is gone: {error}") from error

    def get(self, key: str, timeout_s: float) -> bytes:
        self.wait([key], timeout_s)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all have been heard; does not wait."""
        self._hear(0.0)
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout_s: float) -> None:
        """Until all keys are set. Raises `ExchangeTimeout` after ``timeout_s``, or at once when closed."""
        deadline = time.monotonic() + timeout_s
        while missing := [key for key in keys if key not in self._values]:
            if not self._hear(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                raise ExchangeTimeout(
                    f"{len(missing)} of {len(keys)} did not come within {timeout_s:.0f} s (first: {missing[0]})"
                )

    def close(self) -> None:
        """From any thread: whoever waits stops waiting."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _hear(self, timeout_s: float) -> bool:
        """Take in what has come; whether anything has."""
        try:
            self._socket.settimeout(timeout_s)
            data = self._socket.recv(1 << 20)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError as error:
            raise ExchangeUnreachable(f"the exchange at {self._address} is gone: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)
        if not data:
            raise ExchangeUnreachable(f"the exchange at {self._address} has hung up (a wrong token, or it ended)")
        self._heard += data
        at = 0
        while len(self._heard) - at >= _HEAD.size:
            key_bytes, value_bytes = _HEAD.unpack_from(self._heard, at)
            start = at + _HEAD.size
            if len(self._heard) < start + key_bytes + value_bytes:
                break
            key = self._heard[start : start + key_bytes].decode(errors="replace")
            self._values[key] = bytes(self._heard[start + key_bytes : start + key_bytes + value_bytes])
            at = start + key_bytes + value_bytes
        del self._heard[:at]
        return True
