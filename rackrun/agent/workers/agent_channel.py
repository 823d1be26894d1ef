"""The agent's end of a worker's channel. Nothing here ever waits for a worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from rackrun.link.channel import split_frames

__all__ = ["AgentChannel"]

_CHUNK_BYTES = 1 << 18
_UNSENT_BYTES_MAX = 16 << 20
"""A worker that reads nothing while this much waits for it is beyond help; the coordinator's timeouts deal with it."""


class AgentChannel:
    def __init__(self, connection: socket.socket, deliver: Callable[[bytes], None]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent = bytearray()
        self._fd = connection.fileno()
        self._loop.add_reader(self._fd, self._readable)

    def send(self, data: bytes) -> None:
        """At once if it fits, later if not, never if the worker is gone."""
        if self._fd < 0:
            return
        if len(self._unsent) + len(data) > _UNSENT_BYTES_MAX:
            self.close()
            return
        self._unsent += data
        if len(self._unsent) == len(data):
            self._writable()

    def drain(self) -> None:
        """Deliver everything that the worker sent before it died."""
        while self._fd >= 0 and self._read():
            pass

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._fd = -1
            self._socket.close()
            self._deliver = _to_nobody  # it holds the worker, which holds this, and its page's descriptor

    def _readable(self) -> None:
        self._read()  # one chunk a turn: a flood from one worker must not starve the others

    def _read(self) -> bool:
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._received += data
        deliver = self._deliver
        try:
            bodies = split_frames(self._received)
        except ValueError:
            self.close()
            deliver(b"")  # no message: whoever decodes it says whose fault that is
            return False
        for body in bodies:
            deliver(body)
        return True

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # its end is closed; what it said before is still to be read
            self._unsent.clear()
            self._loop.remove_writer(self._fd)
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._fd, self._writable)
        else:
            self._loop.remove_writer(self._fd)


def _to_nobody(_body: bytes) -> None:
    """Its worker is forgotten."""
