"""The coordinator's HTTP server: agents (WebSocket), status, metrics, operators' requests.

Every request except ``/healthz`` must carry the job's token.

==================  =============================================================================================
``GET /agent``      WebSocket, for agents; ``?protocol=N&tray=NAME``. A binary message is a packet of numbered frames
                    (`rackrun.link.reliable_messages`). The first frame upwards is `TrayJoined`; the first message downwards is a
                    `Welcome`, as text. ``&resume=SESSION&received=N`` takes a link up again whose connection broke
``GET /healthz``    ``{"run_id": ..., "protocol": ...}``; no token
``GET /api/status``  `rackrun.coordinator.shell.driver.Status`
``GET /metrics``    for Prometheus
``POST /api/stop``  end at the next step boundary, or at once if none comes; ``text`` says which
``POST /api/close-breaker``  act on what the circuit breaker holds back
``POST /api/drain``, ``/api/return``, ``/api/swap``  the fields of `DrainRequested` (``target``, ``because``, ``wait``),
                    `ReturnRequested` (``target``), `SwapRequested` (``rank``, ``to``); the first `Answer`
``POST /api/shrink``, ``/api/grow``  those of `ShrinkRequested` (``ranks`` or ``to``), `GrowRequested` (``to``); the same
``POST /api/policy``  those of `PolicyRequested` (``policy``, ``weights``); the same. A function is loaded and checked in a child
                    process before it becomes the policy
``GET /api/answer``  ``?request=NAME``: answers with the last `Answer`, when it is known
``GET /api/end``    answers with the `StopJob` when the job is over, for launchers on other hosts
==================  =============================================================================================

Status 401: a wrong or missing token. 426: another protocol, or another version of rackrun or torch. 409: the job is
over, another host has the tray's name, or (with ``resume``) the tray was given up and its agent must begin anew. 503:
the tray has a living agent; ask again. The body explains the status.

A broken connection costs nothing if its agent resumes the link within the lease. An agent that closes its connection,
or whose host reports that it is dead (`AgentLink.dies`), is lost at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import socket
import uuid
from typing import TypeVar

import msgspec
from aiohttp import WebSocketError, WSMsgType, web

from rackrun.coordinator.server.agent_link import AgentLink, ProtocolViolation
from rackrun.coordinator.shell.driver import Driver
from rackrun.coordinator.user_code.policy_host import check
from rackrun.core.lifecycle.shutdown import DRAIN_MS
from rackrun.core.policy.choice import parse_policy
from rackrun.errors import UsageError
from rackrun.link.listener import Listener, http_token
from rackrun.link.reliable_messages import PACKET_BYTES_MAX
from rackrun.protocol.commands import Answer
from rackrun.protocol.encodable import clean, encodable, json_of
from rackrun.protocol.events import (
    BreakerClosed,
    DrainRequested,
    GrowRequested,
    OfWorker,
    PolicyRequested,
    ReturnRequested,
    ShrinkRequested,
    StopRequested,
    SwapRequested,
    TrayEvent,
    TrayJoined,
    WorkerEvent,
)
from rackrun.protocol.ids import TrayId, tray_of
from rackrun.protocol.versions import own_versions, unlike
from rackrun.protocol.wire import PROTOCOL, AgentEvent, Telemetry, Upward, decode_upward

__all__ = ["ALONE_S", "Server"]

_log = logging.getLogger(__name__)
ALONE_S = 30.0
"""Seconds by which a lease is extended while no agent at all is heard."""
_RETURN_S = 1.0
"""Seconds that an agent may take to come back even if its lease is over, because this process itself may have stood
still."""
_SAID_MAX = 100
_ASKED: dict[str, type[DrainRequested | ReturnRequested | SwapRequested | ShrinkRequested | GrowRequested]] = {
    "/api/drain": DrainRequested,
    "/api/return": ReturnRequested,
    "/api/swap": SwapRequested,
    "/api/shrink": ShrinkRequested,
    "/api/grow": GrowRequested,
}


_Asked = DrainRequested | ReturnRequested | SwapRequested | ShrinkRequested | GrowRequested | PolicyRequested
_A = TypeVar("_A", bound=_Asked)


class Server:
    """Serves one driver on a socket that already listens."""

    def __init__(self, driver: Driver, *, run_id: str, token: str, lease_s: float = 15.0) -> None:
        self._driver = driver
        self._run_id = run_id
        self._token = token.encode()
        self._lease_s = lease_s
        self._links: set[AgentLink] = set()
        self._broken: dict[AgentLink, asyncio.Task[None]] = {}
        """Links without a connection, each with the task that waits for its agent to come back."""
        self._listener: Listener | None = None
        self._said: set[str] = set()
        self._alone, self._back_s = False, -math.inf
        """Whether no agent is heard, and when one was heard again."""
        app = web.Application(client_max_size=64 * 1024)
        app.add_routes(
            [
                web.get("/agent", self._agent),
                web.get("/healthz", self._healthz),
                web.get("/api/status", self._status),
                web.get("/metrics", self._metrics),
                web.post("/api/stop", self._stop),
                web.post("/api/close-breaker", self._close_breaker),
                *(web.post(path, self._ask) for path in _ASKED),
                web.post("/api/policy", self._policy),
                web.get("/api/answer", self._answer),
                web.get("/api/end", self._end),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)

    async def start(self, listening: socket.socket) -> None:
        """Begin to serve."""
        await self._runner.setup()
        assert self._runner.server is not None, "it is set up"
        health = {"/healthz": json.dumps(self._health()).encode()}
        examine = http_token(self._token.decode(), open_to_all=health, refusal=self._no_token())
        self._listener = Listener(listening, examine, self._runner.server)

    async def close(self) -> None:
        """Send what is still to be sent, then close every connection and the port."""
        if self._listener is not None:
            await self._listener.close()
        for waiting in list(self._broken.values()):
            waiting.cancel()
        for link in list(self._links):
            await link.close()
        await self._runner.cleanup()

    # -- people and machines
    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response(self._health())

    def _health(self) -> dict[str, str | int]:
        return {"run_id": self._run_id, "protocol": PROTOCOL}

    async def _status(self, request: web.Request) -> web.Response:
        self._check_token(request)
        return web.Response(body=json_of(self._driver.status()), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        self._check_token(request)
        return web.Response(body=self._driver.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _stop(self, request: web.Request) -> web.Response:
        self._check_token(request)
        because = "rackctl stop"
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
            because = clean(str((await request.json())["because"])[:500])
        before = self._driver.status().core
        if self._driver.over is None:
            self._driver.submit(StopRequested(because=because, exit_code=143))
        text = _stopping(getattr(before, "waits", ""), over=self._driver.over is not None)
        return web.json_response({"stopping": True, "text": text}, status=202)

    async def _close_breaker(self, request: web.Request) -> web.Response:
        self._check_token(request)
        if self._driver.over is None:
            self._driver.submit(BreakerClosed())
        return web.json_response({"closed": True}, status=202)

    async def _ask(self, request: web.Request) -> web.Response:
        self._check_token(request)
        asked = await _asked(request, _ASKED[request.path], steps=self._driver.ledger.steps)
        return _said(self._answer_to(asked))

    async def _policy(self, request: web.Request) -> web.Response:
        self._check_token(request)
        asked = await _asked(request, PolicyRequested, trouble="")
        function = asked.policy.strip() if asked.policy and ":" in asked.policy else ""
        if function:
            try:
                parse_policy(function)
                await asyncio.to_thread(check, function)
            except UsageError as error:
                asked = msgspec.structs.replace(asked, trouble=error.what.rstrip("."))
        answer = self._answer_to(asked)
        if answer.outcome == "done" and function:
            self._driver.prepare(function)
        return _said(answer)

    def _answer_to(self, asked: _Asked) -> Answer:
        requests = self._driver.requests
        self._driver.submit(asked)
        return requests.newest(asked.request) or requests.ended(asked.request)

    async def _answer(self, request: web.Request) -> web.Response:
        self._check_token(request)
        answer = await self._driver.requests.last(request.query.get("request", ""))
        if answer is None:
            raise web.HTTPNotFound(
                text="no request with this id is known: it was never made, or its answer is no longer kept."
            )
        return _said(answer)

    async def _end(self, request: web.Request) -> web.Response:
        self._check_token(request)
        over = await self._driver.finished
        return web.Response(body=json_of(over), content_type="application/json")

    def _check_token(self, request: web.Request) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        shown = token.strip().encode("utf-8", "surrogateescape")
        if scheme != "Bearer" or not hmac.compare_digest(shown, self._token):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"}, text=self._no_token())

    def _no_token(self) -> str:
        return f"wrong or missing job token for run {self._run_id}. Remedy: every host of a job needs the same --token-file."

    # -- agents
    async def _agent(self, request: web.Request) -> web.StreamResponse:
        self._check_token(request)
        theirs, tray = request.query.get("protocol", "none"), request.query.get("tray", "")
        if theirs != str(PROTOCOL):
            return web.Response(
                status=426,
                text=f"the agent speaks protocol {theirs}, the coordinator speaks protocol {PROTOCOL}. Remedy: install "
                f"the same version of rackrun on every host.",
            )
        if different := unlike(request.query, own_versions()):
            host = request.query.get("host", "")
            self._say_once(
                f"{tray} of host {host} is refused: it runs {different}. Every host needs the same versions."
            )
            return web.Response(
                status=426,
                text=f"this host runs {different}, and ranks must compute the same everywhere. Remedy: install the same version of "
                f"rackrun and of torch on every host.",
            )
        if not tray or "/" in tray:
            raise web.HTTPBadRequest(text=f"tray={tray!r} is not the name of a tray.")
        resume = request.query.get("resume", "")
        link = self._link_to_resume(TrayId(tray), resume, request.query.get("received", "")) if resume else None
        if link is None and (over := self._driver.over) is not None:
            return web.Response(status=409, text=f"run {self._run_id} is over: {over.because}")
        host, pid = request.query.get("host", ""), request.query.get("pid", "")
        if resume and link is None:
            return web.Response(status=409, text=f"{tray} has been given up; its agent must begin anew")
        if link is None:
            self._check_free(TrayId(tray), host)
        connection = web.WebSocketResponse(
            receive_timeout=self._lease_s,
            autoping=False,
            compress=False,
            max_msg_size=PACKET_BYTES_MAX,
            timeout=1.0,
        )
        await connection.prepare(request)
        if link is None:
            link = AgentLink(TrayId(tray), host, int(pid) if pid.isdigit() else 0, self._lease_s)
            self._links.add(link)
        elif self._link_to_resume(link.tray, resume, request.query["received"]) is not link:  # it was given up just now
            await connection.close()
            return connection
        if (waiting := self._broken.pop(link, None)) is not None:
            waiting.cancel()
        link.attach(connection, request.transport, int(request.query["received"]) if resume else 0)
        await self._serve(link, connection)
        return connection

    async def _serve(self, link: AgentLink, connection: web.WebSocketResponse) -> None:
        """Serve an agent's connection until it ends."""
        because, broken, code, message = "its agent went away without a reason", False, 1000, b""
        try:
            because, broken = await self._listen(link, connection)
        except ProtocolViolation as breach:
            because = f"its agent broke the protocol: {breach}"
            code, message = 1002, str(breach).encode()[:120]
            _log.warning("tray %s: %s", link.tray, breach)
        finally:
            if link.connection is not connection:  # the agent has come back over another connection
                with contextlib.suppress(ConnectionError, RuntimeError):
                    await connection.close()
            elif broken and self._driver.link_of(link.tray) is link:
                link.detach()
                waiting = self._wait_for_return(link, because)
                self._broken[link] = asyncio.create_task(waiting, name=f"return-{link.tray}")
            else:
                await self._give_up(link, because, code, message)

    async def _give_up(self, link: AgentLink, because: str, code: int = 1000, message: bytes = b"") -> None:
        self._links.discard(link)
        self._driver.lost(link.tray, link, because)
        await link.close(code, message)

    def _link_to_resume(self, tray: TrayId, session: str, received: str) -> AgentLink | None:
        """Return the link to resume; None if the tray was given up, or the caller is not its agent."""
        current = self._driver.link_of(tray)
        link = next((link for link in self._links if link is current), None)
        if link is None:
            return None
        if not hmac.compare_digest(link.session.encode(), session.encode("utf-8", "surrogateescape")):
            return None
        number = int(received) if received.isascii() and received.isdigit() and len(received) < 20 else -1
        return link if link.numbered.can_resume(number) and not link.overflowed.is_set() else None

    async def _wait_for_return(self, link: AgentLink, because: str) -> None:
        """Give the tray up when its agent is dead, its lease is over, or too much waits for it. Cancelled when the
        agent comes back."""
        loop = asyncio.get_running_loop()
        dies, overflows = asyncio.create_task(link.dies()), asyncio.create_task(link.overflowed.wait())
        try:
            left_s = max(link.heard_s + self._lease_s - loop.time(), _RETURN_S)
            while True:
                done, _ = await asyncio.wait({dies, overflows}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if overflows in done:
                    because = f"{because}, and more waits for it than is kept"
                if done:
                    break
                if over := self._lease_is_over(link):
                    because = f"{over}; {because}"
                    break
                left_s = self._lease_s
        finally:
            dies.cancel()
            overflows.cancel()
        del self._broken[link]
        await self._give_up(link, because)

    def _say_once(self, text: str) -> None:
        """Report something to the user who started the job: each text once, and a limited number of them."""
        text = clean(text[:500])
        if text not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(text)
            self._driver.notice(text)

    def _check_free(self, tray: TrayId, host: str) -> None:
        """Check that no other agent acts for the tray: the first does until it is gone or its lease is over."""
        other = self._driver.link_of(tray)
        if other is None:
            return
        if host and other.host != host:
            raise web.HTTPConflict(text=f"the name {tray} is in use by host {other.host}")
        raise web.HTTPServiceUnavailable(
            text=f"{tray} has an agent, process {other.pid}; another may come when it is gone"
        )

    async def _listen(self, link: AgentLink, connection: web.WebSocketResponse) -> tuple[str, bool]:
        """Receive until the connection ends. Return why it ended, and whether it broke, so that the agent may come
        back."""
        while True:
            try:
                return await self._receive_packets(link, connection)
            except TimeoutError:
                if over := self._lease_is_over(link):
                    return over, False

    def _lease_is_over(self, link: AgentLink) -> str:
        """Return why the agent is given up at the end of a silent lease; "": it is not."""
        silent_s = asyncio.get_running_loop().time() - link.heard_s
        stood_s = link.stood_s if link.woke_s > link.heard_s else 0.0
        over = silent_s - stood_s > self._lease_s + ALONE_S or not self._hears_nobody(link)
        return f"no word from its agent for {silent_s:.0f} s" if over else ""

    def _hears_nobody(self, link: AgentLink) -> bool:
        """Return whether all other hosts have been silent for as long as that of ``link``, or were until a short time
        ago.

        Then the coordinator's own host is probably the one that is cut off, and the others may train on. Giving them
        all up would lose their state. When one is heard again, the others have another lease to be heard too. The same
        holds when this process itself stood still: their messages wait to be read.
        """
        away = [other for other in self._links if other.joined and other.host not in (link.host, socket.gethostname())]
        if away and all(other.heard_s < link.heard_s + self._lease_s / 2 for other in away):
            self._alone = True
            return True
        return asyncio.get_running_loop().time() - max(self._back_s, link.woke_s) < self._lease_s

    async def _receive_packets(self, link: AgentLink, connection: web.WebSocketResponse) -> tuple[str, bool]:
        while True:
            message = await connection.receive()
            if link.connection is not connection:
                return "its agent has come back over another connection", True
            if message.type is WSMsgType.CLOSE:
                return "its agent is gone", False
            if message.type is WSMsgType.ERROR and isinstance(message.data, WebSocketError):
                return f"its agent is gone ({type(message.data).__name__})", False
            if message.type in (WSMsgType.CLOSED, WSMsgType.CLOSING, WSMsgType.ERROR):
                error = connection.exception()
                return "its agent is gone" if error is None else f"its agent is gone ({type(error).__name__})", True
            link.heard_s = asyncio.get_running_loop().time()
            if self._alone:
                self._alone, self._back_s = False, link.heard_s
            if message.type is WSMsgType.BINARY:
                self._take_in(link, message.data)
            elif message.type is WSMsgType.PING:
                with contextlib.suppress(ConnectionError, RuntimeError):
                    await connection.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                raise ProtocolViolation(f"a message of type {message.type.name}")

    def _take_in(self, link: AgentLink, packet: bytes) -> None:
        telemetry: list[Telemetry] = []
        for upward in _decode(link, packet):
            if isinstance(upward, Telemetry):
                if self._is_believed(link, upward):
                    telemetry.append(upward)
            else:
                self._event(link, upward)
        if telemetry:
            self._driver.receive_telemetry(telemetry)
        link.took_in()

    def _is_believed(self, link: AgentLink, told: Telemetry) -> bool:
        """Return whether telemetry is used. Only an agent that has joined and was not given up may report, and only
        about its own tray."""
        if not link.joined:
            raise ProtocolViolation(f"{type(told).__name__} before TrayJoined")
        if (tray := tray_of(told.slot)) != link.tray:
            raise ProtocolViolation(f"{type(told).__name__} of {tray} on the connection of {link.tray}")
        link.check(told)
        return self._driver.link_of(link.tray) is link

    def _event(self, link: AgentLink, event: AgentEvent) -> None:
        if isinstance(event, TrayJoined):
            if event.tray != link.tray or link.joined:
                raise ProtocolViolation(f"TrayJoined of {event.tray} on the connection of {link.tray}")
            if (other := self._driver.link_of(link.tray)) is not None:  # two agents came at the same time
                raise ProtocolViolation(f"{link.tray} has an agent, process {other.pid} of host {other.host}")
            link.check(event)
            link.join(event.host, event.slots, event.store)
            self._driver.joined(event, link)
        elif isinstance(event, StopRequested):  # from an agent that was started by hand
            self._driver.submit(event)
        elif not link.joined:
            raise ProtocolViolation(f"{type(event).__name__} before TrayJoined")
        elif (tray := _tray_of(event)) != link.tray:
            raise ProtocolViolation(f"{type(event).__name__} of {tray} on the connection of {link.tray}")
        elif self._driver.link_of(link.tray) is link:  # otherwise it has been given up
            link.check(event)
            self._driver.submit(event)


def _tray_of(event: WorkerEvent | TrayEvent) -> TrayId:
    return tray_of(event.slot) if isinstance(event, OfWorker) else event.tray


async def _asked(request: web.Request, kind: type[_A], **own: object) -> _A:
    """Return the request's body as an event with a unique name. ``own`` holds fields that the client must not set."""
    own |= {"request": uuid.uuid4().hex, "at_ms": 0}
    try:
        return msgspec.convert({**encodable(await request.json()), **own}, kind)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # msgspec's is a ValueError
        raise web.HTTPBadRequest(text=clean(f"that cannot be asked: {error}")) from error


def _stopping(waits: str, *, over: bool) -> str:
    """Return what a stop leads to. ``waits``: why all ranks waited when it was asked for; "": they did not."""
    if over:
        return "the run ends now: all ranks wait, and no step boundary comes" if waits else "the run ends now"
    when = "when all ranks train again, at the next step boundary" if waits else "at the next step boundary"
    return f"stopping {when}, or after {DRAIN_MS // 1000} s; a second rackctl stop ends it at once"


def _said(answer: Answer) -> web.Response:
    return web.Response(body=json_of(answer), content_type="application/json")


def _decode(link: AgentLink, packet: bytes) -> list[Upward]:
    """Return the messages of a packet that were not received before."""
    try:
        return [decode_upward(body) for body in link.numbered.unpack(packet)]
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolViolation(f"a message that cannot be read: {error}") from error
