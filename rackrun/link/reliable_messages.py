"""Numbered messages over a connection that may break and be resumed: none is lost or handled twice.

Each end of a link has one `NumberedLink`, which outlives the connections. It numbers its messages from 1, keeps each
until the other end has acknowledged it, and drops received messages that it already has. A packet is one WebSocket
message: the number of its first message, the number of the last message received (the acknowledgement), then whole
frames (`rackrun.link.channel`). A packet without frames only acknowledges.

When a connection is resumed, each end sends the number of the last message it received, and the other end sends the
rest again. Pure: no clock, no I/O.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from rackrun.link.channel import FRAME_BYTES_MAX, split_frames

__all__ = ["BATCH_BYTES", "KEPT_BYTES_MAX", "KEPT_MAX", "PACKET_BYTES_MAX", "NumberedLink", "Welcome"]

_HEAD = struct.Struct("<QQ")
BATCH_BYTES = 1 << 20
"""Largest size of a packet in bytes, unless it holds a single larger message."""
PACKET_BYTES_MAX = FRAME_BYTES_MAX + 64
KEPT_MAX = 1 << 16
"""Number of messages that may wait for a broken connection. With more, the link is given up."""
KEPT_BYTES_MAX = 64 << 20
"""Largest total size of these messages, in bytes."""
_OWED_MAX = 64
_OWED_BYTES_MAX = 1 << 20
"""After this many messages (`_OWED_MAX`) or bytes an acknowledgement is sent alone, without a message."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of the coordinator on every connection, as JSON text."""

    session: str
    """Random name of the link. An agent must know it to resume the link."""
    received: int
    """Number of the last message that the coordinator received."""


class NumberedLink:
    """One end of a link. ``kept_max`` and ``kept_bytes_max`` limit the number and the bytes of waiting messages."""

    def __init__(self, kept_max: int = KEPT_MAX, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._kept_max, self._kept_bytes_max = kept_max, kept_bytes_max
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self.sent = 0
        """Number of the last message that was packed."""
        self.received = 0
        """Number of the last message that was received."""
        self._acknowledged = 0
        """The number that was last acknowledged to the other end."""
        self._owed_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether more may be sent before the other end acknowledges something."""
        return len(self._kept) < self._kept_max and self._kept_bytes < self._kept_bytes_max

    @property
    def unheard(self) -> list[bytes]:
        """All frames, if nothing shows that the other end has received any of them; else []."""
        return list(self._kept) if not self.received and self.can_resume(0) else []

    @property
    def owes(self) -> bool:
        """Whether received messages have not been acknowledged yet."""
        return self.received > self._acknowledged

    @property
    def owes_much(self) -> bool:
        """Whether an acknowledgement should be sent at once."""
        return self.received - self._acknowledged >= _OWED_MAX or self._owed_bytes >= _OWED_BYTES_MAX

    def overflows(self, waiting: int, waiting_bytes: int) -> bool:
        """Return whether the limits are exceeded, counting ``waiting`` messages that are not packed yet."""
        return len(self._kept) + waiting > self._kept_max or self._kept_bytes + waiting_bytes > self._kept_bytes_max

    def pack(self, frames: Sequence[bytes] = ()) -> bytes:
        """Number these frames, keep them, and return the packet."""
        first = self.sent + 1
        self.sent += len(frames)
        self._kept.extend(frames)
        self._kept_bytes += sum(map(len, frames))
        return self._packet(first, frames)

    def unpack(self, packet: bytes) -> list[bytes]:
        """The bodies of the messages that are new.

        Raises ValueError where the packet is not whole, leaves messages out, or acknowledges what was never sent.
        """
        if len(packet) < _HEAD.size:
            raise ValueError(f"a packet of {len(packet)} bytes has no head")
        first, acknowledged = _HEAD.unpack_from(packet)
        rest = bytearray(memoryview(packet)[_HEAD.size :])
        bodies = split_frames(rest)
        if rest:
            raise ValueError(f"{len(rest)} bytes after the last whole frame")
        if first < 1 or (bodies and first > self.received + 1):  # an acknowledgement may overtake what is sent again
            raise ValueError(f"message {first} came after message {self.received}")
        self._forget(acknowledged)
        new = bodies[self.received + 1 - first :]
        self.received += len(new)
        self._owed_bytes += sum(map(len, new))
        return new

    def can_resume(self, received: int) -> bool:
        """Return whether all messages after number ``received`` are kept."""
        return self.sent - len(self._kept) <= received <= self.sent

    def resume(self, received: int) -> list[bytes]:
        """Return the packets with all messages after ``received``, the last one that the other end has.

        Raises ValueError if they are not all kept.
        """
        if not self.can_resume(received):
            raise ValueError(f"messages after {received} are not kept; {len(self._kept)} are, up to {self.sent}")
        self._forget(received)
        packets = []
        number, batch, size = received + 1, list[bytes](), 0
        for frame in self._kept:
            if batch and size + len(frame) > BATCH_BYTES:
                packets.append(self._packet(number, batch))
                number, batch, size = number + len(batch), [], 0
            batch.append(frame)
            size += len(frame)
        if batch:
            packets.append(self._packet(number, batch))
        return packets

    def _packet(self, first: int, frames: Iterable[bytes]) -> bytes:
        self._acknowledged, self._owed_bytes = self.received, 0
        return b"".join((_HEAD.pack(first, self.received), *frames))

    def _forget(self, acknowledged: int) -> None:
        if acknowledged > self.sent:
            raise ValueError(f"message {acknowledged} is acknowledged, and {self.sent} were sent")
        for _ in range(acknowledged - (self.sent - len(self._kept))):
            self._kept_bytes -= len(self._kept.popleft())
