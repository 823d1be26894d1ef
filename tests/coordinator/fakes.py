"""A core that does as the test says, and an agent over a real socket."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import msgspec

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.coordinator.server.http_server import Server
from rackrun.coordinator.shell.driver import Driver
from rackrun.launch.run.rendezvous import listen
from rackrun.link.channel import frame
from rackrun.link.reliable_messages import NumberedLink, Welcome
from rackrun.protocol.commands import Command, GenerationPlan, Member, StopJob, Worker, WorkerCommand
from rackrun.protocol.events import Event, TrayJoined
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, TrayId
from rackrun.protocol.wire import PROTOCOL, Logged, UnitCommitted, Upward, decode_command

TOKEN = "a-token-for-tests-only"


class View(msgspec.Struct, frozen=True):
    phase: str = "scripted"
    waits: str = ""


class ScriptedCore:
    """Answers by the type of the event; remembers what it was asked."""

    def __init__(self, **answers: Sequence[Command] | Callable[[Event], Sequence[Command]]) -> None:
        self.answers = answers
        self.heard: list[Event] = []
        self.waits = ""
        self.sent_by: Sequence[str] = ()

    def handle(self, event: Event) -> Sequence[Command]:
        self.heard.append(event)
        answer = self.answers.get(type(event).__name__, ())
        return answer(event) if callable(answer) else answer

    def view(self) -> View:
        return View(waits=self.waits)

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.heard]


class Onlooker:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.recoveries: list[RecoveryRecord] = []
        self.told: list[str] = []
        self.notices: list[str] = []

    def line(self, text: str, logged: Logged) -> None:
        self.lines.append(text)

    def protected(self, text: str) -> None:
        self.told.append(text)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def recovered(self, recovery: RecoveryRecord) -> None:
        self.recoveries.append(recovery)


class ClockedLoop:
    """The running event loop, with a clock in seconds that the test sets. What is due later is due in real time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.time = clock
        loop = asyncio.get_running_loop()
        self.call_later, self.call_soon_threadsafe = loop.call_later, loop.call_soon_threadsafe


class Coordinator:
    """A driver and its server on a free port."""

    def __init__(self, core: ScriptedCore, journal: Journal) -> None:
        self.core = core
        self.seen = Onlooker()
        self.driver = Driver(core, journal, run_id="job-1", observer=self.seen)
        self.server = Server(self.driver, run_id="job-1", token=TOKEN)
        self.url = ""


@asynccontextmanager
async def coordinator(core: ScriptedCore, journal: Journal) -> AsyncIterator[Coordinator]:
    running = Coordinator(core, journal)
    listening = listen("127.0.0.1", 0)
    running.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    await running.server.start(listening)
    try:
        yield running
    finally:
        await running.server.close()
        running.driver.close()
        listening.close()


class Agent:
    """``numbered``: of the link that it takes up again."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, welcome: Welcome, numbered: NumberedLink | None
    ) -> None:
        self.socket = socket
        self.numbered = numbered or NumberedLink()
        self.session = welcome.session
        self._again = self.numbered.resume(welcome.received)
        self._commands: list[WorkerCommand] = []

    async def say(self, *messages: Upward | Event) -> None:
        """Send messages, also those that no agent may send."""
        for packet in (*self._again, self.numbered.pack([frame(cast(Upward, message)) for message in messages])):
            await self.socket.send_bytes(packet)
        self._again = []

    async def hear(self) -> WorkerCommand:
        """The next command."""
        while not self._commands:
            message = await self.received()
            assert message.type is aiohttp.WSMsgType.BINARY, message
            self._commands += [decode_command(body) for body in self.numbered.unpack(message.data)]
        return self._commands.pop(0)

    async def received(self) -> aiohttp.WSMessage:
        """The next message, unless it is one that only acknowledges."""
        while True:
            message = await self.socket.receive(timeout=100)
            if message.type is not aiohttp.WSMsgType.BINARY or len(message.data) > len(NumberedLink().pack()):
                return message
            self.numbered.unpack(message.data)

    def cut(self) -> None:
        """Its connection breaks, by a reset: no word of farewell."""
        connection: Any = self.socket._conn
        transport = connection.transport
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


@asynccontextmanager
async def agent(
    url: str,
    tray: str = "tray-00",
    *,
    join: bool = True,
    host: str = "here",
    answers: bool = True,
    resumes: Agent | None = None,
    at: str = "h:1",
    **query: Any,
) -> AsyncIterator[Agent]:
    """``answers``: pings, while it listens. ``resumes``: the link of that one is taken up again. ``at``: where it listens."""
    query = {"protocol": str(PROTOCOL), "tray": tray, "host": host, **query}
    if resumes is not None:
        query = {"resume": resumes.session, "received": str(resumes.numbered.received), **query}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        session.ws_connect(f"{url}/agent", params=query, autoping=answers) as connection,
    ):
        welcome = msgspec.json.decode(await connection.receive_str(timeout=100), type=Welcome)
        speaking = Agent(connection, welcome, resumes.numbered if resumes is not None else None)
        if join and resumes is None:
            await speaking.say(joined(tray, host, at))
        yield speaking


def joined(tray: str = "tray-00", host: str = "here", at: str = "h:1") -> TrayJoined:
    return TrayJoined(tray=TrayId(tray), host=host, slots=4, store=at, snapshots="h:2")


def plan(generation: int, *members: Member, committed: Position = BEGIN, rollback: int | None = None) -> GenerationPlan:
    return GenerationPlan(
        generation=Generation(generation),
        world_size=len(members),
        members=members,
        store="h:1",
        layout=Generation(0),
        full=len(members),
        committed=committed,
        rollback=rollback,  # type: ignore[arg-type]
    )


def member(rank: int, slot: str, incarnation: int, *, fresh: bool = False) -> Member:
    return Member(rank=Rank(rank), slot=SlotId(slot), incarnation=Incarnation(incarnation), fresh=fresh)


def worker(slot: str, incarnation: int) -> Worker:
    return Worker(SlotId(slot), Incarnation(incarnation))


def unit(
    step: int,
    rank: int,
    *,
    generation: int = 1,
    attempt: int = 0,
    rescaled: int = 0,
    ids: bytes = b"",
    seconds: float = 0.1,
) -> UnitCommitted:
    return UnitCommitted(
        slot=SlotId(f"tray-00/{rank}"),
        incarnation=Incarnation(rank + 1),
        generation=Generation(generation),
        rank=Rank(rank),
        at=Position(step),
        attempt=attempt,
        rescaled=rescaled,
        seconds=seconds,
        ids=ids,
    )


def logged(
    step: int, rank: int, incarnation: int | None = None, generation: int = 1, **values: float | int | str
) -> Logged:
    return Logged(
        slot=SlotId(f"tray-00/{rank}"),
        incarnation=Incarnation(rank + 1 if incarnation is None else incarnation),
        generation=Generation(generation),
        rank=Rank(rank),
        at=Position(step),
        values=values or {"loss": 1.0 / (step + 1)},
    )


DONE = StopJob(exit_code=0, because="all done")
