"""Listening socket whose callers must show the job's token before they cost anything.

Theory of operation. A caller is *pending* until it has shown the token. Until then only its first few kilobytes are
kept, for a few seconds, and the number of pending callers is limited. If there are too many, or if descriptors run
short, the oldest is dropped: `descriptor_limit.ceiling` keeps some descriptors free for a recovery. A connection is
handed to the protocol that serves it, with the bytes received so far, only after it has shown the token. What the
protocol allows such a caller is its own decision.

An `Examine` function decides about the first bytes: `http_token` for HTTP and WebSocket; the exchange has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from rackrun.link.process.descriptor_limit import ceiling

__all__ = [
    "FIRST_BYTES_MAX",
    "FIRST_S",
    "PENDING_MAX",
    "RESERVE",
    "Admit",
    "Examine",
    "Listener",
    "Reply",
    "http_token",
]

_log = logging.getLogger(__name__)

FIRST_BYTES_MAX = 16 * 2**10
"""Largest number of bytes kept of a caller that has not shown the token: room for the head of an HTTP request."""
FIRST_S = 10.0
"""Seconds within which a caller must show the token."""
PENDING_MAX = 1024
"""Largest number of pending callers. Every rank of a large group may connect at the same moment."""
_PENDING_MIN = 8
"""Number of callers that may be pending even if descriptors are short; otherwise no other host could connect."""
RESERVE = 64
"""Number of descriptors that pending callers leave free."""
_AT_ONCE = 64
"""Number of calls that are accepted before other events of the loop are handled."""
_AGAIN_S = 0.05
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Admit:
    """The caller has shown the token."""


class Reply:
    """Send the caller this answer and close the connection."""

    def __init__(self, answer: bytes = b"") -> None:
        self.answer = answer


Examine: TypeAlias = Callable[[bytes], Admit | Reply | None]
"""Decides about the first bytes of a connection. None: more bytes are needed."""


class Listener:
    """Accepts connections on the running loop, and closes ``listening`` in the end.

    ``examine`` decides who is admitted. ``protocol`` creates what serves an admitted connection.
    """

    def __init__(
        self,
        listening: socket.socket,
        examine: Examine,
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        reserve: int = RESERVE,
        first_s: float = FIRST_S,
        pending_max: int = PENDING_MAX,
    ) -> None:
        listening.setblocking(False)
        self._listening, self._examine, self._protocol = listening, examine, protocol
        self._reserve, self._first_s, self._pending_max = reserve, first_s, pending_max
        self._loop = asyncio.get_running_loop()
        self._allowed = pending_max
        """Present limit of pending callers: lower after descriptors have run short, until all of those callers are
        gone."""
        self._pending: OrderedDict[_Pending, None] = OrderedDict()
        """Pending callers, oldest first."""
        self._handing_on: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop.add_reader(listening, self._accept)

    @property
    def pending(self) -> int:
        """Number of callers that have not shown the token yet."""
        return len(self._pending)

    async def close(self) -> None:
        """Accept no more calls and close pending connections. Admitted connections are left to their protocols."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for pending in list(self._pending):
            self._drop(pending)
        for task in list(self._handing_on):
            task.cancel()
        await asyncio.gather(*self._handing_on, return_exceptions=True)

    # -- calls come in
    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # this caller is gone already
                if not self._drop_oldest():
                    self._pause_accepting()
                    return
                continue
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        pending = _Pending(connection, time.monotonic() + self._first_s)
        # Most callers have sent the token by the time they are accepted, and never wait here.
        self._pending[pending] = None
        if self._timer is None:
            self._watch_time()
        self._read(pending)
        if pending not in self._pending:
            return
        self._loop.add_reader(pending.connection, self._read, pending)
        pending.watched = True
        if len(self._pending) == 1:
            self._allowed = self._pending_max
        if connection.fileno() >= ceiling(self._reserve):
            self._allowed = max(min(self._allowed, len(self._pending) - 1), _PENDING_MIN)
        while len(self._pending) > self._allowed:
            self._drop_oldest()

    def _pause_accepting(self) -> None:
        """Stop accepting for a while, because no descriptor is free although no caller is pending. The kernel queues
        further callers."""
        self._loop.remove_reader(self._listening)

        def again() -> None:
            self._pause = None
            self._loop.add_reader(self._listening, self._accept)

        self._pause = self._loop.call_later(_AGAIN_S, again)

    # -- what they say first
    def _read(self, pending: _Pending) -> None:
        try:
            data = pending.connection.recv(FIRST_BYTES_MAX + 1 - len(pending.heard))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(pending)
            return
        if pending.answered:
            return  # reading lets the answer arrive: closing with unread bytes would discard it
        pending.heard += data
        try:
            verdict = self._examine(bytes(pending.heard))
        except Exception:  # noqa: BLE001 - whatever a stranger sends, it costs him his own connection at the most
            _log.exception("the first bytes of a connection could not be examined")
            verdict = Reply()
        if isinstance(verdict, Admit):
            self._admit(pending)
        elif isinstance(verdict, Reply):
            self._reply(pending, verdict.answer)
        elif len(pending.heard) > FIRST_BYTES_MAX:
            self._drop(pending)

    def _admit(self, pending: _Pending) -> None:
        self._forget(pending)
        task = self._loop.create_task(self._hand_on(pending.connection, bytes(pending.heard)))
        self._handing_on.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._handing_on.discard(task)
            if task.cancelled():  # it may not even have begun
                pending.connection.close()

        task.add_done_callback(done)

    async def _hand_on(self, connection: socket.socket, heard: bytes) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: _First(self._protocol(), heard), connection)
        except OSError:
            connection.close()

    def _reply(self, pending: _Pending, answer: bytes) -> None:
        pending.answered = True
        pending.heard.clear()
        if not answer:
            self._drop(pending)
            return
        with contextlib.suppress(OSError):
            pending.connection.send(answer)  # a few hundred bytes into an empty buffer
            pending.connection.shutdown(socket.SHUT_WR)

    # -- who has to go
    def _drop_oldest(self) -> bool:
        for pending in self._pending:
            self._drop(pending)
            return True
        return False

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.connection.close()

    def _forget(self, pending: _Pending) -> None:
        self._pending.pop(pending, None)
        if pending.watched:
            self._loop.remove_reader(pending.connection)
            pending.watched = False

    def _watch_time(self) -> None:
        self._timer = None
        now = time.monotonic()
        while (oldest := next(iter(self._pending), None)) is not None and oldest.until_s <= now:
            self._drop(oldest)
        if oldest is not None:
            self._timer = self._loop.call_later(oldest.until_s - now, self._watch_time)


class _Pending:
    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self.connection, self.until_s = connection, until_s
        self.heard = bytearray()
        self.watched = False
        self.answered = False


class _First(asyncio.Protocol):
    """Passes the bytes received so far to the protocol that takes over the connection."""

    def __init__(self, follows: asyncio.BaseProtocol, heard: bytes) -> None:
        self._follows, self._heard = follows, heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        assert isinstance(self._follows, asyncio.Protocol)
        transport.set_protocol(self._follows)
        self._follows.connection_made(transport)
        if not transport.is_closing():
            self._follows.data_received(self._heard)


def http_token(token: str, *, open_to_all: dict[str, bytes] | None = None, refusal: str = "") -> Examine:
    """Return an `Examine` that admits requests with the token.

    ``open_to_all`` maps paths to the JSON that a GET without the token receives. All other requests receive ``refusal``
    with status 401.
    """
    wanted = token.encode()
    unauthorized = _response("401 Unauthorized", refusal or "wrong or missing token", "WWW-Authenticate: Bearer\r\n")
    answers = {
        path.encode(): _response("200 OK", body, type_="application/json") for path, body in (open_to_all or {}).items()
    }
    too_long = _response("431 Request Header Fields Too Large", "the head of this request is too long")

    def examine(heard: bytes) -> Admit | Reply | None:
        head, end, _ = heard.partition(b"\r\n\r\n")
        if not end:
            return Reply(too_long) if len(heard) >= FIRST_BYTES_MAX else None
        request, *lines = head.split(b"\r\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"authorization":
                scheme, _, shown = value.strip().partition(b" ")
                if scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(), wanted):
                    return Admit()
        method, _, target = request.partition(b" ")
        answer = answers.get(target.partition(b" ")[0].partition(b"?")[0]) if method == b"GET" else None
        return Reply(answer or unauthorized)

    return examine


def _response(status: str, body: str | bytes, headers: str = "", *, type_: str = "text/plain; charset=utf-8") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status}\r\nContent-Type: {type_}\r\nContent-Length: {len(data)}\r\n{headers}Connection: close\r\n\r\n"
    return head.encode() + data
