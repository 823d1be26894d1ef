"""Exchange where the workers that build a group publish their addresses and receive those of the others.

An agent serves it, never a rank. A *room* is one group in one generation. In a room every key is set once, the first
value stays, and each is pushed to all members, present and later. So building a group of N costs each member one
connection, and no request waits for an answer.

torch's TCPStore does the same job, but has three drawbacks here. Its client formats the peer's address with a reverse
DNS lookup, which took 64 clients that connected at once 5 to 15 s on a machine without a name server. A waiting client
holds a lock, so a build that was overtaken blocked the next one. And it cannot be interrupted. This exchange ends at
once when it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import struct
import time
from collections import OrderedDict

from rackrun.link.address import connection_to, join, listen_on
from rackrun.link.listener import FIRST_BYTES_MAX, RESERVE, Admit, Listener, Reply

__all__ = ["Exchange", "ExchangeServer", "ExchangeTimeout", "ExchangeUnreachable"]

_HEAD = struct.Struct("<HI")  # bytes of the key, bytes of the value
_VALUE_BYTES_MAX = 16 * 2**20
"""Largest value, in bytes, of a member that has shown the token."""
_EMPTY_ROOMS_MAX = 1024
"""Number of empty rooms that are kept of each kind, so that late members find what was published. The kind is the part
of the room's name before the first slash; all numbers are one kind."""


class ExchangeTimeout(RuntimeError):
    """A key was not set in time, or the exchange is gone."""


class ExchangeUnreachable(ExchangeTimeout):
    """The exchange is gone, or this host is cut off from it."""


def _pack(key: str, value: bytes) -> bytes:
    encoded = key.encode()
    return _HEAD.pack(len(encoded), len(value)) + encoded + value


class ExchangeServer:
    """Serves the exchange: members of a group publish their addresses here and read those of the others.

    It runs in the agent's event loop. It listens on the announced address and on no other. A caller that has not shown
    the token costs it a few kilobytes for a few seconds (`rackrun.link.listener`). ``reserve`` is the number of
    descriptors that such callers leave free.
    """

    def __init__(self, advertise: str, token: str, *, reserve: int = RESERVE) -> None:
        self._token = token.encode()
        self._rooms: dict[str, _Room] = {}
        self._empty: dict[str, OrderedDict[str, None]] = {}
        """The empty rooms of each kind, in the order in which they became empty."""
        self._listener: Listener | None = None
        self._advertise, self._reserve = advertise, reserve

    async def start(self) -> str:
        """Begin to serve; return ``host:port``."""
        listening = listen_on(self._advertise)
        port = listening.getsockname()[1]
        self._listener = Listener(listening, self._examine, lambda: _Member(self), reserve=self._reserve)
        return join(self._advertise, port)

    async def close(self) -> None:
        """Stop serving, and end all connections."""
        if self._listener is not None:
            await self._listener.close()
        for room in self._rooms.values():
            for member in tuple(room.members):
                member.transport.abort()

    def _examine(self, heard: bytes) -> Admit | Reply | None:
        """Examine a connection's first message, which names the room and carries the token."""
        if len(heard) < _HEAD.size:
            return None
        key_bytes, value_bytes = _HEAD.unpack_from(heard)
        end = _HEAD.size + key_bytes + value_bytes
        if end > FIRST_BYTES_MAX or value_bytes != len(self._token):
            return Reply()
        if len(heard) < end:
            return None
        return Admit() if self._is_token(heard[_HEAD.size + key_bytes : end]) else Reply()

    def _is_token(self, shown: bytes) -> bool:
        return hmac.compare_digest(shown, self._token)

    def enter(self, name: str, token: bytes, member: _Member) -> _Room | None:
        """Add a member to a room; return None if the token is wrong."""
        if not self._is_token(token):
            return None
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = _Room(name)
        room.members[member] = None
        self._empty.get(_kind_of(name), OrderedDict()).pop(name, None)
        return room

    def leave(self, room: _Room, member: _Member) -> None:
        """Remove a member from its room. An empty room is dropped when very many others of its kind became empty after
        it; a room with members never is."""
        room.members.pop(member, None)
        if not room.members:
            empty = self._empty.setdefault(_kind_of(room.name), OrderedDict())
            empty[room.name] = None
            while len(empty) > _EMPTY_ROOMS_MAX:
                del self._rooms[empty.popitem(last=False)[0]]


def _kind_of(name: str) -> str:
    first = name.partition("/")[0]
    return "" if first.isdigit() else first


class _Room:
    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, bytes] = {}
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
            self._server.leave(self._room, self)

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
            asyncio.get_running_loop().call_soon(self._flush)  # messages of one loop round are sent together
        self._unsent.append(message)

    def _flush(self) -> None:
        self.transport.write(b"".join(self._unsent))
        self._unsent.clear()


class Exchange:
    """The client: a member of one room. Threads must not share it, except for `close`, which interrupts the others.

    Raises `ExchangeUnreachable` if the server cannot be reached within ``timeout_s``, or is gone.
    """

    def __init__(self, address: str, token: str, room: str, timeout_s: float) -> None:
        try:
            self._socket = connection_to(address, timeout_s)
        except OSError as error:
            raise ExchangeUnreachable(f"the exchange at {address} cannot be reached: {error}") from error
        try:
            self._socket.sendall(_pack(room, token.encode()))
        except OSError as error:
            self._socket.close()
            raise ExchangeUnreachable(f"the exchange at {address} cannot be reached: {error}") from error
        self._address = address
        self._values: dict[str, bytes] = {}
        self._heard = bytearray()

    def set(self, key: str, value: bytes) -> None:
        """Set a key. The first value of a key stays, whichever member set it."""
        try:
            self._socket.sendall(_pack(key, value))
        except OSError as error:
            raise ExchangeUnreachable(f"the exchange at {self._address} is gone: {error}") from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a key and return its value. Raises as `wait` does."""
        self.wait([key], timeout_s)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have been received, without waiting."""
        self._hear(0.0)
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout_s: float) -> None:
        """Wait until all keys are set. Raises `ExchangeTimeout` after ``timeout_s`` seconds, or at once when closed."""
        deadline = time.monotonic() + timeout_s
        while missing := [key for key in keys if key not in self._values]:
            if not self._hear(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                raise ExchangeTimeout(
                    f"{len(missing)} of {len(keys)} did not come within {timeout_s:.0f} s (first: {missing[0]})"
                )

    def close(self) -> None:
        """Close the connection, from any thread. Waiting threads stop waiting."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _hear(self, timeout_s: float) -> bool:
        """Receive what has arrived within ``timeout_s`` seconds; return whether anything has."""
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
