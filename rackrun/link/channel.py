"""Framed messages over a stream socket: four bytes of length (little endian), then the message."""

from __future__ import annotations

import socket
import struct
import threading

from rackrun.protocol.commands import WorkerCommand
from rackrun.protocol.wire import Upward, decode_command, encode

__all__ = ["FRAME_BYTES_MAX", "WorkerChannel", "frame", "split_frames"]

FRAME_BYTES_MAX = 64 * 2**20
_LENGTH = struct.Struct("<I")


def frame(message: Upward | WorkerCommand) -> bytes:
    """Return the message as a frame."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


def split_frames(buffer: bytearray) -> list[bytes]:
    """Remove the complete frames from the front of ``buffer`` and return their bodies. Used by the agent.

    Raises ValueError on a frame longer than `FRAME_BYTES_MAX`.
    """
    frames = []
    at = 0
    while len(buffer) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, at)
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"frame of {length} bytes is longer than {FRAME_BYTES_MAX}")
        if len(buffer) - at - _LENGTH.size < length:
            break
        frames.append(bytes(buffer[at + _LENGTH.size : at + _LENGTH.size + length]))
        at += _LENGTH.size + length
    del buffer[:at]
    return frames


class WorkerChannel:
    """The worker's end of the channel. Any thread may send; one thread (the control thread) receives."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._send_lock = threading.Lock()

    def send(self, message: Upward) -> None:
        """Send a message. Raises OSError if the agent is gone."""
        data = frame(message)
        with self._send_lock:
            self._socket.sendall(data)

    def receive(self) -> WorkerCommand | None:
        """Wait for the next command and return it; None if the agent is gone."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        body = self._read(_LENGTH.unpack(head)[0])
        return None if body is None else decode_command(body)

    def fileno(self) -> int:
        """Return the socket's descriptor, for polling."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)
