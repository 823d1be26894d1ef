"""Who may connect, and what they may say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.server import agent_link, http_server
from rackrun.protocol.commands import Answer, DismissTray
from rackrun.protocol.events import (
    DepartureAnnounced,
    DrainRequested,
    Event,
    JournalFailed,
    ReturnRequested,
    StopRequested,
    SwapRequested,
    TimerFired,
    TrayLost,
    WorkerExited,
)
from rackrun.protocol.ids import Incarnation, SlotId, TrayId
from rackrun.protocol.timers import timer_named
from rackrun.protocol.versions import own_versions
from rackrun.protocol.wire import PROTOCOL, Logged, UnitCommitted, Upward
from tests.coordinator.fakes import DONE, TOKEN, Coordinator, ScriptedCore, agent, coordinator, joined, logged, unit
from tests.coordinator.journal.test_journal import query

GOOD = {"protocol": str(PROTOCOL), "tray": "tray-00"}


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}])
@pytest.mark.parametrize("path", ["/agent", "/api/status", "/metrics", "/api/end", "/api/answer"])
async def test_without_the_token_nobody_gets_in(journal: Journal, path: str, header: dict[str, str]) -> None:
    async with coordinator(ScriptedCore(), journal) as c, aiohttp.ClientSession(headers=header) as session:
        answer = await session.get(c.url + path, params=GOOD)
        assert answer.status == 401
        assert "--token-file" in await answer.text()
        for action in ("stop", "close-breaker", "drain", "return", "swap"):
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


@pytest.mark.parametrize("other", ["rackrun", "torch"])
async def test_a_host_with_other_versions_is_refused_before_anything_starts_there(journal: Journal, other: str) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, _session() as session:
        theirs = {**own_versions(), other: "0.0.7"}
        for _ in range(3):
            answer = await session.get(f"{c.url}/agent", params={**GOOD, **theirs, "host": "old-host"})
            assert answer.status == 426
            text = await answer.text()
        assert f"{other} 0.0.7 (here {own_versions()[other]})" in text
        assert "Remedy: install the same version" in text
        assert core.heard == []
        assert len(c.seen.notices) == 1, "who started the job is told once"
        assert f"tray-00 of host old-host is refused: it runs {other} 0.0.7" in c.seen.notices[0]


async def test_a_host_with_the_same_versions_is_taken_in(journal: Journal) -> None:
    ours: dict[str, Any] = own_versions()
    async with coordinator(ScriptedCore(), journal) as c, agent(c.url, **ours):
        await taken_in(c)


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
        TimerFired(timer=timer_named("join")),
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
        await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
        assert core.names() == ["TrayJoined", "TrayLost"]


async def test_nothing_counts_before_the_tray_has_joined(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, agent(c.url, join=False) as a:
        await a.say(WorkerExited(slot=SlotId("tray-00/0"), incarnation=Incarnation(1)))
        assert (await a.received()).type is aiohttp.WSMsgType.CLOSE
        assert core.heard == []


@pytest.mark.parametrize("told", [unit(1, 0), logged(1, 0)], ids=["committed", "logged"])
async def test_telemetry_of_a_connection_that_has_joined_no_tray_is_not_believed(
    journal: Journal, told: UnitCommitted | Logged
) -> None:
    async with coordinator(ScriptedCore(), journal) as c, agent(c.url, join=False) as a:
        await a.say(told)
        assert (await a.socket.receive(timeout=60)).type is aiohttp.WSMsgType.CLOSE
        assert (c.driver.ledger.steps, c.seen.lines) == (0, [])
    assert journal.flush()
    assert (journal.rows_lost, query(journal.path, "SELECT count(*) FROM units")) == (0, [(0,)])


async def test_telemetry_of_another_tray_costs_the_one_who_tells_it(journal: Journal) -> None:
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c, agent(c.url, tray="tray-01") as a:
        await a.say(unit(1, 0))  # of tray-00
        await asyncio.wait_for(asyncio.shield(c.driver.finished), 60)
        assert core.names() == ["TrayJoined", "TrayLost"]
        assert c.driver.ledger.steps == 0


async def test_telemetry_of_an_agent_that_was_given_up_is_not_believed(journal: Journal) -> None:
    async with coordinator(ScriptedCore(), journal) as c, agent(c.url, answers=False) as a:
        await taken_in(c)
        link = c.driver.link_of(TrayId("tray-00"))
        assert link is not None
        c.driver.lost(TrayId("tray-00"), link, "a test")
        await a.say(unit(1, 0))
        await a.socket.ping()
        while (await a.socket.receive(timeout=60)).type is not aiohttp.WSMsgType.PONG:
            pass
        assert c.driver.ledger.steps == 0


async def test_the_same_tray_name_on_another_host_is_refused(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, agent(c.url, host="here"), _session() as session:
        await taken_in(c)
        answer = await session.get(f"{c.url}/agent", params={**GOOD, "host": "there"})
        assert answer.status == 409
        assert "in use by host here" in await answer.text()
        assert core.names() == ["TrayJoined"]


async def test_a_second_agent_of_a_tray_waits_until_the_first_is_gone(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, _session() as session:
        async with agent(c.url, pid=7):
            await taken_in(c)
            answer = await session.get(f"{c.url}/agent", params={**GOOD, "host": "here", "pid": "8"})
            assert answer.status == 503
            assert "has an agent, process 7" in await answer.text()
            assert core.names() == ["TrayJoined"]
        await gone(c)
        async with agent(c.url, pid=8):
            await taken_in(c)
            assert core.names() == ["TrayJoined", "TrayLost", "TrayJoined"]


async def test_of_two_agents_that_come_at_the_same_moment_one_is_taken_in(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, agent(c.url, pid=7, join=False) as one, agent(c.url, pid=8):
        await taken_in(c)
        await one.say(joined())
        message = await one.socket.receive(timeout=100)
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert message.extra is not None
        assert "has an agent, process 8" in message.extra
        assert core.names() == ["TrayJoined"]


async def taken_in(c: Coordinator) -> None:
    async with asyncio.timeout(100):
        while c.driver.link_of(TrayId("tray-00")) is None:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


async def gone(c: Coordinator) -> None:
    async with asyncio.timeout(100):
        while c.driver.link_of(TrayId("tray-00")) is not None:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


async def test_stop_is_an_event_and_the_end_can_be_waited_for(journal: Journal) -> None:
    core = ScriptedCore(StopRequested=(DONE,))
    async with coordinator(core, journal) as c, _session() as session:
        end = asyncio.create_task(_text(session, f"{c.url}/api/end"))
        answer = await session.post(f"{c.url}/api/stop", json={"because": "enough"})
        assert answer.status == 202
        assert '"all done"' in await asyncio.wait_for(end, 100)
        assert isinstance(core.heard[-1], StopRequested)
        assert core.heard[-1].because == "enough"


@pytest.mark.parametrize(
    ("waits", "ends", "text"),
    [
        ("", False, "stopping at the next step boundary, or after 60 s; a second rackctl stop ends it at once"),
        ("", True, "the run ends now"),
        ("rank 1 lost; hold", True, "the run ends now: all ranks wait, and no step boundary comes"),
        (
            "rank 1 lost; wait",
            False,
            "stopping when all ranks train again, at the next step boundary, or after 60 s; a second rackctl stop ends it at once",
        ),
    ],
)
async def test_a_stop_says_when_the_run_ends(waits: str, ends: bool, text: str, journal: Journal) -> None:
    core = ScriptedCore(StopRequested=(DONE,) if ends else ())
    core.waits = waits
    async with coordinator(core, journal) as c, _session() as session:
        answer = await session.post(f"{c.url}/api/stop", json={})
        assert (await answer.json())["text"] == text


async def test_a_person_closes_the_breaker(journal: Journal) -> None:
    core = ScriptedCore()
    async with coordinator(core, journal) as c, _session() as session:
        assert (await session.post(f"{c.url}/api/close-breaker", json={})).status == 202
        assert core.names() == ["BreakerClosed"]


def said(event: Event, outcome: str = "begun") -> tuple[Answer, ...]:
    assert isinstance(event, DrainRequested | ReturnRequested | SwapRequested)
    return (Answer(request=event.request, outcome=outcome, text=f"{outcome} it is"),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("drain", {"target": "tray-00", "because": "its fan", "wait": True}, "DrainRequested"),
        ("return", {"target": "tray-00"}, "ReturnRequested"),
        ("swap", {"rank": 3, "to": "tray-00/1"}, "SwapRequested"),
    ],
)
async def test_what_is_asked_is_an_event_and_its_first_answer_comes_back(
    journal: Journal, path: str, fields: dict[str, object], name: str
) -> None:
    core = ScriptedCore(**{name: said})
    async with coordinator(core, journal) as c, _session() as session:
        answer = await (await session.post(f"{c.url}/api/{path}", json=fields)).json()
        assert (answer["outcome"], answer["text"]) == ("begun", "begun it is")
        assert c.seen.notices == ["begun it is"]
        (event,) = core.heard
        assert type(event).__name__ == name
        assert {field: getattr(event, field) for field in fields} == fields


@pytest.mark.parametrize("end", ["answered", "the job ends"])
async def test_the_last_answer_can_be_waited_for(journal: Journal, end: str) -> None:
    core = ScriptedCore(DrainRequested=said, BreakerClosed=lambda _: said(core.heard[0], "done"), StopRequested=(DONE,))
    async with coordinator(core, journal) as c, _session() as session:
        first = await (await session.post(f"{c.url}/api/drain", json={"target": "tray-00"})).json()
        wait = asyncio.create_task(_text(session, f"{c.url}/api/answer?request={first['request']}"))
        await session.post(f"{c.url}/api/{'close-breaker' if end == 'answered' else 'stop'}", json={})
        last = json.loads(await asyncio.wait_for(wait, 100))
        assert last["text"] == ("done it is" if end == "answered" else "the job has ended: all done")
        late = json.loads(await _text(session, f"{c.url}/api/answer?request={first['request']}"))
        assert late == last, "whoever asks later"


async def test_what_cannot_be_asked_is_refused_in_words(journal: Journal) -> None:
    async with coordinator(ScriptedCore(StopRequested=(DONE,)), journal) as c, _session() as session:
        for path, body in (
            ("drain", {}),
            ("swap", {"rank": "x"}),
            ("return", ["tray-00"]),
            ("drain", {"target": None}),
        ):
            answer = await session.post(f"{c.url}/api/{path}", json=body)
            assert answer.status == 400
            assert "that cannot be asked" in await answer.text()
        assert (await session.post(f"{c.url}/api/drain", data=b"{")).status == 400
        assert (await session.get(f"{c.url}/api/answer?request=x")).status == 404
        await session.post(f"{c.url}/api/stop", json={})
        over = await (await session.post(f"{c.url}/api/drain", json={"target": "tray-00"})).json()
        assert (over["outcome"], over["refusal"]) == ("refused", "over")


async def test_only_the_coordinator_may_ask(journal: Journal) -> None:
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c, agent(c.url) as a:
        await a.say(DrainRequested(request="x", target="tray-07"))
        await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
        assert core.names() == ["TrayJoined", "TrayLost"]


async def test_a_tray_that_is_told_to_leave_is_dismissed_and_not_fenced_when_it_goes(journal: Journal) -> None:
    dismissal = DismissTray(tray=TrayId("tray-00"), because="SIGTERM")
    core = ScriptedCore(DepartureAnnounced=(dismissal,), TrayLost=(DONE,))
    async with coordinator(core, journal) as c:
        fenced: list[TrayId] = []
        c.driver.fence = lambda tray, _pid: fenced.append(tray)
        async with agent(c.url) as a:
            await a.say(DepartureAnnounced(tray=TrayId("tray-00"), because="SIGTERM", exit_code=143))
            assert await a.hear() == dismissal
        await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
        assert not fenced


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    return await (await session.get(url)).text()


async def test_an_agent_that_is_silent_is_said_to_be_so(journal: Journal) -> None:
    """It answers pings only while it listens, and this one does not."""
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c:
        c.server._lease_s = 0.3
        async with agent(c.url):
            await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
    lost = core.heard[-1]
    assert isinstance(lost, TrayLost)
    assert "no word from its agent" in lost.because


async def test_an_answer_that_is_late_costs_nothing_within_the_lease(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_link, "_PINGS", 600)
    core = ScriptedCore(StopRequested=(DONE,))
    async with coordinator(core, journal) as c:
        c.server._lease_s = 60.0
        async with agent(c.url, answers=False) as a:
            for _ in range(3):
                assert (await a.received()).type is aiohttp.WSMsgType.PING
            await a.say(StopRequested(because="enough", exit_code=0))
            await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
    assert core.names() == ["TrayJoined", "StopRequested"]


async def test_nobody_is_given_up_while_nobody_at_all_is_heard(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is cut off, and the others go on without it."""
    alone = asyncio.Event()
    hears_nobody = http_server.Server._hears_nobody

    def watched(self: http_server.Server, link: agent_link.AgentLink) -> bool:
        if found := hears_nobody(self, link):
            alone.set()
        return found

    monkeypatch.setattr(http_server.Server, "_hears_nobody", watched)
    core = ScriptedCore(StopRequested=(DONE,))
    async with coordinator(core, journal) as c:
        c.server._lease_s = 0.5
        async with (
            agent(c.url, "tray-01", host="b", answers=False) as one,
            agent(c.url, "tray-02", host="c", answers=False),
        ):
            await asyncio.wait_for(alone.wait(), 100)
            await one.say(StopRequested(because="enough", exit_code=0))
            await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
    assert core.names() == ["TrayJoined", "TrayJoined", "StopRequested"]


async def test_not_even_then_for_ever(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ALONE_S", 0.5)
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c:
        c.server._lease_s = 0.3
        async with agent(c.url, "tray-01", host="b", answers=False), agent(c.url, "tray-02", host="c", answers=False):
            await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
    assert core.names()[-1] == "TrayLost"


async def test_a_tray_that_is_silent_while_others_are_heard_is_lost(journal: Journal) -> None:
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c:
        c.server._lease_s = 0.5
        async with agent(c.url, "tray-01", host="b", answers=False), agent(c.url, "tray-02", host="c") as other:
            listens = asyncio.create_task(other.received())
            await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
            listens.cancel()
    assert core.names() == ["TrayJoined", "TrayJoined", "TrayLost"]
    lost = core.heard[-1]
    assert isinstance(lost, TrayLost)
    assert lost.tray == "tray-01"
