"""Who may connect, and what they may say."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from rackrun.coordinator.journal import Journal
from rackrun.core.events import JournalFailed, StopRequested, TimerFired, TrayLost, WorkerExited
from rackrun.core.ids import Incarnation, SlotId
from rackrun.core.wire import PROTOCOL, Upward
from tests.coordinator.fakes import DONE, TOKEN, ScriptedCore, agent, coordinator

GOOD = {"protocol": str(PROTOCOL), "tray": "tray-00"}


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}])
@pytest.mark.parametrize("path", ["/agent", "/api/status", "/metrics", "/api/end"])
async def test_without_the_token_nobody_gets_in(journal: Journal, path: str, header: dict[str, str]) -> None:
    async with coordinator(ScriptedCore(), journal) as c, aiohttp.ClientSession(headers=header) as session:
        answer = await session.get(c.url + path, params=GOOD)
        assert answer.status == 401
        assert "--token-file" in await answer.text()
        for action in ("stop", "close-breaker"):
            assert (await session.post(f"{c.url}/api/{action}")).status == 401


async def test_health_needs_no_token_and_names_the_run(journal: Journal) -> None:
    async with coordinator(ScriptedCore(), journal) as c, aiohttp.ClientSession() as session:
        assert await (await session.get(f"{c.url}/healthz")).json() == {"run_id": "job-1", "protocol": PROTOCOL}


async def test_another_protocol_is_refused_with_both_versions_named(journal: Journal) -> None:
    async with coordinator(ScriptedCore(), journal) as c, _session() as session:
        answer = await session.get(f"{c.url}/agent", params={**GOOD, "protocol": "99"})
        assert answer.status == 426
        assert "protocol 99" in (text := await answer.text())
        assert f"protocol {PROTOCOL}" in text


async def test_a_job_that_is_over_takes_no_agents_and_says_how_it_ended(journal: Journal) -> None:
    async with coordinator(ScriptedCore(TimerFired=(DONE,)), journal) as c, _session() as session:
        c.driver.begin()
        answer = await session.get(f"{c.url}/agent", params=GOOD)
        assert answer.status == 409
        assert "all done" in await answer.text()


async def test_a_tray_that_was_given_up_cannot_resume(journal: Journal) -> None:
    async with coordinator(ScriptedCore(), journal) as c, _session() as session:
        answer = await session.get(f"{c.url}/agent", params={**GOOD, "resume": "1"})
        assert answer.status == 409
        assert "begin anew" in await answer.text()


@pytest.mark.parametrize(
    "breach",
    [
        TimerFired(name="x"),
        JournalFailed(because="x"),
        WorkerExited(slot=SlotId("tray-07/0"), incarnation=Incarnation(1)),
        b"\x05\x00\x00\x00hello",
        b"\x05\x00",
    ],
    ids=["timer", "journal", "another-tray", "garbage", "half-a-frame"],
)
async def test_an_agent_that_breaks_the_protocol_loses_its_tray(journal: Journal, breach: Upward | bytes) -> None:
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c, agent(c.url) as a:
        await (a.socket.send_bytes(breach) if isinstance(breach, bytes) else a.say(breach))
        await asyncio.wait_for(asyncio.shield(c.driver.finished), 5)
        assert core.names() == ["TrayJoined", "TrayLost"]


async def test_nothing_counts_before_the_tray_has_joined(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, agent(c.url, join=False) as a:
        await a.say(WorkerExited(slot=SlotId("tray-00/0"), incarnation=Incarnation(1)))
        assert (await a.socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
        assert core.heard == []


async def test_the_same_tray_name_on_another_host_is_refused(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, agent(c.url, host="here"), agent(c.url, host="there") as other:
        message = await other.socket.receive(timeout=5)
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert "in use by host here" in message.extra
        assert core.names() == ["TrayJoined"]


async def test_stop_is_an_event_and_the_end_can_be_waited_for(journal: Journal) -> None:
    core = ScriptedCore(StopRequested=(DONE,))
    async with coordinator(core, journal) as c, _session() as session:
        end = asyncio.create_task(_text(session, f"{c.url}/api/end"))
        answer = await session.post(f"{c.url}/api/stop", json={"because": "enough"})
        assert answer.status == 202
        assert '"all done"' in await asyncio.wait_for(end, 5)
        assert isinstance(core.heard[-1], StopRequested)
        assert core.heard[-1].because == "enough"


async def test_a_person_closes_the_breaker(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, _session() as session:
        assert (await session.post(f"{c.url}/api/close-breaker", json={})).status == 202
        assert core.names() == ["BreakerClosed"]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    return await (await session.get(url)).text()


async def test_an_agent_that_is_silent_is_said_to_be_so(journal: Journal) -> None:
    """It answers pings only while it listens, and this one does not."""
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c:
        c.server._heartbeat_s = 0.2
        async with agent(c.url):
            await asyncio.wait_for(asyncio.shield(c.driver.finished), 5)
    lost = core.heard[-1]
    assert isinstance(lost, TrayLost)
    assert "no word from its agent" in lost.because
