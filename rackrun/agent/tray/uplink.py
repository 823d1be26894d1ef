"""The agent's connection to its coordinator: ordered, bounded, and resumed when it breaks
(`rackrun.link.reliable_messages`).

Telemetry waits for up to 20 ms, so that several messages are sent together. An event is sent at once, together with
everything that waits, so that the order is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from socket import SHUT_RDWR

import aiohttp
import msgspec

from rackrun.agent.tray.coordinator_lease import (
    AttemptFailed,
    CoordinatorLease,
    GiveUp,
    HangUp,
    JoinAnew,
    LeaseEnd,
    LinkBroke,
    LinkEffect,
    LinkFact,
    LinkSilent,
    LinkState,
    LinkWelcomed,
    Retry,
)
from rackrun.agent.tray.tray_facts import Urgency
from rackrun.link.channel import frame
from rackrun.link.reliable_messages import BATCH_BYTES, PACKET_BYTES_MAX, NumberedLink, Welcome
from rackrun.protocol.agent_config import AgentConfig
from rackrun.protocol.commands import WorkerCommand
from rackrun.protocol.versions import own_versions
from rackrun.protocol.wire import PROTOCOL, AgentEvent, decode_command

__all__ = ["Uplink"]

_BATCH_S = 0.02
_LOGGED_MAX = 10_000
_CLOSE_S = 1.0
_LENGTH = struct.Struct("<I")


class Uplink:
    """Sends the tray's messages and receives the coordinator's commands."""

    def __init__(
        self, config: AgentConfig, first: AgentEvent, obey: Callable[[WorkerCommand], None], orphan_s: float
    ) -> None:
        self._config = config
        self._first = frame(first)
        self._obey = obey
        now_s = asyncio.get_running_loop().time()
        self._lease = CoordinatorLease(config.lease_s, orphan_s, now_s, config.coordinator)
        self._session = ""
        """The coordinator's name for the link; "": no `Welcome` has been received yet."""
        self._numbered = NumberedLink()
        self._senseless = False
        """Whether the coordinator has sent something that cannot be carried out; it would not send again what came with
        it."""
        self._waiting: deque[tuple[Urgency, bytes]] = deque()
        self._logged = 0
        self.dropped = 0
        """Number of log messages that were dropped in a flood so far."""
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._over = False
        self.connected = False

    def event(self, event: AgentEvent) -> None:
        """Send an event at once."""
        self._put(Urgency.NOW, frame(event))

    def forward(self, urgency: Urgency, body: bytes) -> None:
        """Send a worker's message unchanged."""
        self._put(urgency, _LENGTH.pack(len(body)) + body)

    async def run(self) -> LeaseEnd:
        """Connect and stay connected; return when that is no longer possible."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers()) as session:
            while True:
                try:
                    async with self._connect(session) as socket:
                        await self._exchange_messages(socket)
                        if self._closing or self._over or self._senseless:
                            return LeaseEnd.LOST
                        _break(socket)
                    fact = self._ended("it hung up")
                except aiohttp.WSServerHandshakeError as error:
                    fact = self._ended(await self._reason(session, error), error.status)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    fact = self._ended(str(error) or type(error).__name__)
                match effect := self._decide(fact):
                    case GiveUp():
                        return effect.end
                    case Retry() | JoinAnew():
                        if isinstance(effect, JoinAnew):
                            self._begin_anew()
                        await asyncio.sleep(effect.after_s)
                    case _:
                        raise AssertionError(effect)

    def _decide(self, fact: LinkFact) -> LinkEffect:
        """Ask the machine, and print what it has to say."""
        effect = self._lease.handle(fact, asyncio.get_running_loop().time())
        if isinstance(effect, Retry | HangUp | GiveUp) and effect.text:
            _say(effect.text)
        return effect

    def _ended(self, because: str, status: int = 0) -> LinkFact:
        """Return what it means that a connection, or the attempt to make one, has ended."""
        if self._lease.state is LinkState.CONNECTED:
            return LinkBroke(self._overflows)
        return AttemptFailed(because, status, bool(self._numbered.unheard), self._overflows)

    @property
    def _overflows(self) -> bool:
        """Whether more waits for the coordinator than is kept without a connection."""
        return self._numbered.overflows(len(self._waiting), sum(len(data) for _, data in self._waiting))

    def _begin_anew(self) -> None:
        """Forget the link, of which the coordinator had received nothing when the connection broke, and has given up
        the unknown tray."""
        unheard = self._numbered.unheard
        self._waiting.extendleft(
            (Urgency.NOW, data) for data in reversed(unheard[1:])
        )  # the first is sent after the welcome
        self._session, self._numbered = "", NumberedLink()
        self._idle.clear()

    def job_is_over(self) -> None:
        """Record that the job is over, so that a broken connection is not restored."""
        self._over = True

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most ``timeout_s`` seconds."""
        self._closing = True
        self._urgent.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    def _put(self, urgency: Urgency, data: bytes) -> None:
        if urgency is Urgency.MAYBE:
            self._logged += 1
            if self._logged > _LOGGED_MAX:
                self._drop_oldest_logged()
        self._waiting.append((urgency, data))
        self._idle.clear()
        if urgency is Urgency.NOW:
            self._urgent.set()
        self._wake.set()

    def _drop_oldest_logged(self) -> None:
        """Drop the oldest half of the log messages, so that a flood rarely needs a pass over the queue."""
        surplus = self._logged - _LOGGED_MAX // 2
        kept: deque[tuple[Urgency, bytes]] = deque()
        for item in self._waiting:
            if surplus and item[0] is Urgency.MAYBE:
                surplus -= 1
                self._logged -= 1
                self.dropped += 1
            else:
                kept.append(item)
        self._waiting = kept

    async def _exchange_messages(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Exchange messages until the connection ends."""
        welcome = await self._welcome(socket)
        if welcome is None:
            return
        again: list[bytes] = []
        if self._session:
            again = self._numbered.resume(welcome.received)
        else:
            self._session = welcome.session
            self._waiting.appendleft((Urgency.NOW, self._first))
        self._decide(LinkWelcomed())
        self._urgent.set()
        self._wake.set()
        writer = asyncio.create_task(self._write(socket, again))
        self.connected = True
        try:
            async for packet in self._messages(socket):
                for body in self._numbered.unpack(packet):
                    self._carry_out(decode_command(body))
                self._wake.set()  # there may be room for more
                if self._numbered.owes_much:
                    await socket.send_bytes(self._numbered.pack())
        except (msgspec.MsgspecError, ValueError) as error:
            self._senseless = True
            _say(f"the coordinator sent what cannot be carried out: {error}")
        except (aiohttp.ClientError, OSError):
            pass  # it broke
        finally:
            self.connected = False
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
                await writer

    def _carry_out(self, command: WorkerCommand) -> None:
        """Carry out a command. Raises ValueError if this host cannot."""
        try:
            self._obey(command)
        except OSError as error:  # the error is not the connection's
            raise ValueError(f"{type(command).__name__}: {error}") from error

    async def _welcome(self, socket: aiohttp.ClientWebSocketResponse) -> Welcome | None:
        """Receive the coordinator's first message; None: the connection ended before it."""
        with contextlib.suppress(TimeoutError, msgspec.MsgspecError):
            message = await socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                return msgspec.json.decode(message.data, type=Welcome)
        return None

    async def _messages(self, socket: aiohttp.ClientWebSocketResponse) -> AsyncIterator[bytes]:
        """Yield messages until the connection ends, or has been silent for so long that the coordinator must have given
        this agent up.

        The coordinator may be the one that is cut off; then it gives no agent up. A ping finds out whether its end of
        the connection is still there.
        """
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while True:
            try:
                message = await socket.receive()
            except TimeoutError:
                if isinstance(self._decide(LinkSilent(loop.time() - heard_s, self._over)), HangUp):
                    return
                await socket.ping()
                continue
            heard_s = loop.time()
            if message.type is aiohttp.WSMsgType.BINARY:
                yield message.data
            elif message.type is aiohttp.WSMsgType.PING:
                await socket.pong(message.data)
                if self._numbered.owes:
                    await socket.send_bytes(self._numbered.pack())
            elif message.type is not aiohttp.WSMsgType.PONG:
                return

    async def _write(self, socket: aiohttp.ClientWebSocketResponse, again: Sequence[bytes]) -> None:
        """Send waiting messages. ``again`` holds packets that were sent before over a connection that broke."""
        for packet in again:
            await socket.send_bytes(packet)
        while True:
            await self._wake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BATCH_S):  # `asyncio.wait_for` may swallow that this task is cancelled
                    await self._urgent.wait()
            self._wake.clear()
            self._urgent.clear()
            while self._waiting and self._numbered.has_room:
                await socket.send_bytes(self._numbered.pack([data for _, data in self._take_waiting()]))
            if not self._waiting:
                self._idle.set()

    def _take_waiting(self) -> list[tuple[Urgency, bytes]]:
        batch: list[tuple[Urgency, bytes]] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0][1]) <= BATCH_BYTES):
            urgency, data = self._waiting.popleft()
            self._logged -= urgency is Urgency.MAYBE
            size += len(data)
            batch.append((urgency, data))
        return batch

    async def _reason(self, session: aiohttp.ClientSession, error: aiohttp.WSServerHandshakeError) -> str:
        """Return the text of a refusal. aiohttp discards it, but a plain request receives the same."""
        text = ""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            limit = aiohttp.ClientTimeout(total=5.0)
            async with session.get(self._url(), params=self._query(), timeout=limit) as answer:
                text = (await answer.text()).strip() if answer.status == error.status else ""
        return f"{error.status} {text or error.message}"

    def _url(self) -> str:
        return f"{self._config.coordinator}/agent"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._config.token}"}

    def _query(self) -> dict[str, str]:
        query = {
            "protocol": str(PROTOCOL),
            "tray": self._config.tray,
            "host": os.uname().nodename,
            "pid": str(os.getpid()),
            **own_versions(),
        }
        return {**query, "resume": self._session, "received": str(self._numbered.received)} if self._session else query

    @asynccontextmanager
    async def _connect(self, session: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a connection. When a link is resumed, the wait for an answer is limited to a lease, and then
        repeated."""
        async with asyncio.timeout(self._config.lease_s if self._session else None):
            socket = await session.ws_connect(
                self._url(),
                params=self._query(),
                timeout=aiohttp.ClientWSTimeout(ws_receive=self._config.lease_s, ws_close=_CLOSE_S),
                max_msg_size=PACKET_BYTES_MAX,
                autoping=False,
            )
        try:
            yield socket
        finally:
            await socket.close()


def _break(connection: aiohttp.ClientWebSocketResponse) -> None:
    """End a connection without WebSocket's farewell. An agent that announces its leave is lost at once and cannot
    resume the link."""
    ours = connection.get_extra_info("socket")
    if ours is not None:
        with contextlib.suppress(OSError):  # it is closed already
            ours.shutdown(SHUT_RDWR)


def _say(text: str) -> None:
    print(f"rackrun: agent: {text}", file=sys.stderr)
