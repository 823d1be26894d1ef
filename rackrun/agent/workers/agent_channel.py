"""The agent's end of a worker's channel, which never blocks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from rackrun.link.channel import split_frames

__all__ = ["AgentChannel"]

_CHUNK_BYTES = 1 << 18
_UNSENT_BYTES_MAX = 16 << 20
"""Bytes that may wait for a worker. A worker that reads nothing while more waits is given up; the coordinator's
timeouts handle it."""


class AgentChannel:
    """Non-blocking channel to one worker. ``deliver`` receives the body of each message."""

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
        """Send a frame: at once if it fits, later if not, never if the worker is gone."""
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
            self._deliver = _to_nobody  # breaks the reference cycle with the worker, which holds its page's descriptor

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
            deliver(b"")  # not a valid message: the decoder reports whose fault it is
            return False
        for body in bodies:
            deliver(body)
        return True

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the worker's end is closed; earlier messages are still to be read
            self._unsent.clear()
            self._loop.remove_writer(self._fd)
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._fd, self._writable)
        else:
            self._loop.remove_writer(self._fd)


def _to_nobody(_body: bytes) -> None:
    """Drop a message of a worker that is forgotten."""
