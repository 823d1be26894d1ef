"""A connection that breaks costs nothing when the agent comes back within its lease; an agent that dies is missed at once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import pytest

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.server import agent_link, http_server
from rackrun.coordinator.server.agent_link import AgentLink
from rackrun.link.channel import frame
from rackrun.link.reliable_messages import NumberedLink
from rackrun.protocol.commands import DismissTray
from rackrun.protocol.events import TrayJoined, TrayLost, WorkerFinished
from rackrun.protocol.ids import Incarnation, SlotId, TrayId
from rackrun.protocol.wire import PROTOCOL
from tests.coordinator.fakes import DONE, TOKEN, Agent, Coordinator, ScriptedCore, agent, coordinator

TRAY = TrayId("tray-00")
COMMANDS = [DismissTray(tray=TRAY, because=str(number)) for number in range(6)]


def finished(number: int) -> WorkerFinished:
    return WorkerFinished(slot=SlotId("tray-00/0"), incarnation=Incarnation(number))


@contextmanager
def listening() -> Iterator[str]:
    """Somewhere an agent is, as long as it lives."""
    with socket.create_server(("127.0.0.1", 0)) as here:
        yield f"127.0.0.1:{here.getsockname()[1]}"


@asynccontextmanager
async def joined(c: Coordinator, at: str) -> AsyncIterator[Agent]:
    async with agent(c.url, at=at) as one:
        await reached(c)
        yield one


async def link_of(c: Coordinator) -> AgentLink:
    async with asyncio.timeout(60):
        while (link := c.driver.link_of(TRAY)) is None:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
    assert isinstance(link, AgentLink)
    return link


async def reached(c: Coordinator) -> None:
    """The coordinator has been where the agent listens."""
    link = await link_of(c)
    async with asyncio.timeout(60):
        while not link._reachable:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


async def broken(c: Coordinator) -> None:
    """The coordinator has seen it."""
    link = await link_of(c)
    async with asyncio.timeout(60):
        while link.connection is not None:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


async def refused(c: Coordinator, session: str, received: str = "0") -> bool:
    query = {"protocol": str(PROTOCOL), "tray": TRAY, "host": "here", "resume": session, "received": received}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as caller:
        answer = await caller.get(f"{c.url}/agent", params=query)
        return answer.status == 409 and "begin anew" in await answer.text()


async def test_nothing_is_lost_and_nothing_comes_twice_when_a_link_is_taken_up_again(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                await one.say(finished(1))
                c.driver._send_to(frame(COMMANDS[0]), [TRAY])
                assert await one.hear() == COMMANDS[0]
                one.cut()
                await broken(c)
                c.driver._send_to(frame(COMMANDS[1]), [TRAY])
                one.numbered.pack([frame(finished(2))])  # on its way when the connection broke
            async with agent(c.url, resumes=one) as again:
                assert again.session == one.session
                await again.say(finished(3))
                c.driver._send_to(frame(COMMANDS[2]), [TRAY])
                assert [await again.hear(), await again.hear()] == COMMANDS[1:3]
                async with asyncio.timeout(60):
                    while len(core.heard) < 4:  # noqa: ASYNC110 - nobody is told
                        await asyncio.sleep(0)
    assert [event.incarnation for event in core.heard if isinstance(event, WorkerFinished)] == [1, 2, 3]
    assert core.names()[:2] == ["TrayJoined", "WorkerFinished"]
    assert "TrayLost" not in core.names()[:4]


async def test_an_agent_may_come_back_before_the_coordinator_has_missed_it(journal: Journal) -> None:
    """Its end of the connection is reset, and the coordinator's is not."""
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one, agent(c.url, resumes=one) as again:
                c.driver._send_to(frame(COMMANDS[0]), [TRAY])
                assert await again.hear() == COMMANDS[0]
                assert (await one.received()).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
                assert core.names() == ["TrayJoined"]


async def test_nothing_is_said_over_a_connection_before_the_welcome() -> None:
    """A ping is due just when the agent comes back, and it has told something that is not acknowledged yet. Who is not
    welcomed first closes the connection, and its tray is lost."""
    link, said = AgentLink(TRAY, "here", 7, 600.0), list[str]()
    link.numbered.unpack(NumberedLink().pack([frame(finished(1))]))
    link.attach(Said(said), None, 0)  # type: ignore[arg-type]
    await link.ping()
    await asyncio.sleep(0)
    await link.ping()
    link.detach()
    await link.close()
    assert said[0] == "text"
    assert said[-1] == "ping"


async def test_who_reads_never_waits_for_an_agent_that_does_not(journal: Journal) -> None:
    """It would not see the end of the lease, and two ends that wait so for each other do it for ever."""
    async with coordinator(ScriptedCore(), journal) as c:
        link, other = AgentLink(TRAY, "here", 7, 600.0), NumberedLink()
        link.joined, said = True, list[str]()
        link.attach(Said(said), None, 0)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        c.server._take_in(link, other.pack([frame(finished(number)) for number in range(100)]))
        assert said == ["text"], "what has come is not acknowledged by who reads"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert said == ["text", "bytes"], "but by who writes, and soon"
        link.detach()
        await link.close()


async def test_what_waited_while_a_link_was_broken_unseen_does_not_count_later() -> None:
    """The agent comes back before its old connection is missed, and more waits for it than is kept without one."""
    link = AgentLink(TRAY, "here", 7, 600.0)
    link.numbered = NumberedLink(kept_max=3)
    link.attach(Said([]), None, 0)  # type: ignore[arg-type]
    for command in COMMANDS:
        link.send(frame(command))
    link.attach(Said([]), None, 0)  # type: ignore[arg-type]
    assert not link.overflowed.is_set()
    link.detach()
    assert link.overflowed.is_set()
    await link.close()


async def test_a_connection_may_break_while_its_link_is_closed() -> None:
    link = AgentLink(TRAY, "here", 7, 600.0)
    link.attach(Said([]), None, 0)  # type: ignore[arg-type]
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    link.detach()
    await closing


class Said:
    """A connection that notes what is said over it."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    async def send_str(self, _text: str) -> None:
        self._said.append("text")

    async def send_bytes(self, _packet: bytes) -> None:
        self._said.append("bytes")

    async def ping(self) -> None:
        self._said.append("ping")


@pytest.mark.parametrize("times", [20])
async def test_a_link_may_break_as_often_as_it_likes(journal: Journal, times: int) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
            for number in range(times):
                async with agent(c.url, resumes=one) as again:
                    await again.say(finished(number))
                    c.driver._send_to(frame(COMMANDS[0]), [TRAY])
                    if number % 2:
                        assert await again.hear() == COMMANDS[0]
                    again.cut()
            async with agent(c.url, resumes=one) as again, asyncio.timeout(60):
                while len(core.heard) < times + 1:
                    await again.say()
                    await asyncio.sleep(0)
                assert [event.incarnation for event in core.heard if isinstance(event, WorkerFinished)] == [
                    *range(times)
                ]
                assert again.numbered.received in (times - 1, times)


async def test_a_job_that_ends_meanwhile_tells_who_comes_back(journal: Journal) -> None:
    async with coordinator(ScriptedCore(StopRequested=(DONE,)), journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
                await broken(c)
                c.driver.stop(DONE)
            async with agent(c.url, resumes=one) as again:
                assert await again.hear() == DONE


async def test_who_does_not_come_back_within_the_lease_is_lost_and_cannot_resume(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        c.server._lease_s = 0.3
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
            await lost(core)
            assert await refused(c, one.session)
    event = core.heard[-1]
    assert isinstance(event, TrayLost)
    assert event.because.startswith("no word from its agent")


async def test_who_was_not_heard_because_the_coordinator_stood_still_may_come_back(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_RETURN_S", 100.0)
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                (await link_of(c)).heard_s -= 1000.0
                one.cut()
                await broken(c)
            async with agent(c.url, resumes=one):
                assert core.names() == ["TrayJoined"]


async def test_however_long_the_coordinator_stood_still_agents_have_a_lease_to_be_heard(journal: Journal) -> None:
    async with coordinator(ScriptedCore(), journal) as c:
        with listening() as at:
            async with joined(c, at):
                link, now_s = await link_of(c), asyncio.get_running_loop().time()
                link.heard_s, link.woke_s, link.stood_s = now_s - 1000.0, now_s, 990.0
                assert not c.server._lease_is_over(link)
                link.stood_s = 10.0
                assert c.server._lease_is_over(link), "of the rest of the time it was silent"
                link.stood_s, link.woke_s = 990.0, now_s - c.server._lease_s
                assert c.server._lease_is_over(link)


@pytest.mark.parametrize("case", ["another session", "more than was sent", "no number"])
async def test_who_is_not_the_links_agent_cannot_resume_it(journal: Journal, case: str) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
                await broken(c)
                session = "x" if case == "another session" else one.session
                assert await refused(c, session, {"more than was sent": "7", "no number": "x"}.get(case, "0"))
                assert core.names() == ["TrayJoined"], "and it costs its agent nothing"
            async with agent(c.url, resumes=one):
                pass


async def test_a_tray_that_was_given_up_for_another_reason_cannot_resume(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
                await broken(c)
                c.driver.lost(TRAY, await link_of(c), "its agent was killed by SIGKILL")
                assert await refused(c, one.session)
                async with agent(c.url, at=at, pid=8):
                    assert (await link_of(c)).pid == 8
    assert core.names()[:3] == ["TrayJoined", "TrayLost", "TrayJoined"]


async def test_more_than_is_kept_costs_the_tray(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "NumberedLink", lambda: NumberedLink(kept_max=3))
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
                await broken(c)
                for number in range(3):
                    c.driver._send_to(frame(COMMANDS[number]), [TRAY])
                assert core.names() == ["TrayJoined"]
                c.driver._send_to(frame(COMMANDS[3]), [TRAY])
                assert await refused(c, one.session)
                await lost(core)
    event = core.heard[-1]
    assert isinstance(event, TrayLost)
    assert "more waits for it than is kept" in event.because


async def test_an_agent_whose_host_refuses_is_dead_and_lost_at_once(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
                await broken(c)
                assert core.names() == ["TrayJoined"]
        await lost(core)  # the place where it listened is closed
        assert await refused(c, one.session)


@pytest.mark.parametrize(
    ("known", "told"),
    [("its agent was killed by SIGKILL", "its agent was killed by SIGKILL"), ("", "its agent is gone")],
)
async def test_how_an_agent_ended_is_told_if_it_is_known_though_its_connection_broke_first(
    journal: Journal, known: str, told: str
) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        c.driver.how_ended = lambda tray, _pid: known if tray == TRAY else ""
        with listening() as at:
            async with joined(c, at) as one:
                one.cut()
                await broken(c)
        await lost(core)  # its host refuses connections
    event = core.heard[-1]
    assert isinstance(event, TrayLost)
    assert event.because.startswith(told)


async def test_an_agent_that_takes_its_leave_is_lost_at_once(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        with listening() as at:
            async with joined(c, at):
                pass
            await lost(core)


async def test_where_nobody_can_say_that_it_lives_it_is_lost_at_once(journal: Journal) -> None:
    """The coordinator has never reached where it listens."""
    core = ScriptedCore()
    async with coordinator(core, journal) as c, agent(c.url, at="nobody.invalid:1") as one:
        await link_of(c)
        one.cut()
        await lost(core)


async def test_an_agent_that_is_killed_is_missed_at_once(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own: the kernel closes all that it has, in whatever order."""
    monkeypatch.setattr(http_server, "ALONE_S", 600.0)
    core = ScriptedCore()
    async with coordinator(core, journal) as c:
        c.server._lease_s = 600.0
        pid = os.fork()
        if pid == 0:
            _be_an_agent(c.url)
        try:
            await reached(c)
        finally:
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
        await lost(core)
        print(f"missed after {1e3 * (time.monotonic() - began):.1f} ms")
        os.waitpid(pid, 0)


def _be_an_agent(url: str) -> None:
    async def be() -> None:
        with listening() as at:
            async with agent(url, at=at):
                await asyncio.Event().wait()

    try:
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        asyncio.run(be())
    finally:
        os._exit(1)


async def lost(core: ScriptedCore) -> None:
    async with asyncio.timeout(60):
        while not isinstance(core.heard[-1], TrayLost):  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
    assert sum(isinstance(event, TrayLost) for event in core.heard) == sum(
        isinstance(event, TrayJoined) for event in core.heard
    )
