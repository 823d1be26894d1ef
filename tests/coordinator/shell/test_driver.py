"""What the shell owes the core: order, persist before send, time, and an end."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Never

import aiohttp
import msgspec
import pytest

from rackrun.coordinator.journal.journal_writer import Journal, JournalError
from rackrun.coordinator.shell.driver import Driver
from rackrun.coordinator.shell.job_completion import JobCompletion
from rackrun.protocol.commands import (
    BreakGeneration,
    FenceWorker,
    ReleaseWorkers,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import Event, TimerFired, TrayLost, WorkerElastic, WorkerExited, WorkerFinished
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId
from rackrun.protocol.timers import DrainOver, GatherOver, JobBegins, JoinOver, Timer, UnfitWaitOver
from rackrun.protocol.wire import StateCopied
from tests.coordinator.fakes import (
    DONE,
    TOKEN,
    ClockedLoop,
    Onlooker,
    ScriptedCore,
    agent,
    coordinator,
    joined,
    logged,
    member,
    plan,
    unit,
    worker,
)

EXITED = WorkerExited(slot=SlotId("tray-00/1"), incarnation=Incarnation(2), signal=9)
BREAK = BreakGeneration(
    generation=Generation(2), workers=(worker("tray-00/0", 1), worker("tray-01/0", 3)), because="rank 1 lost"
)
RESUME = ResumeGeneration(
    plan=plan(2, member(0, "tray-00/0", 1), member(1, "tray-01/1", 4, fresh=True)), because="swap"
)

LATE = GatherOver(Generation(1))


def start(slot: str) -> StartWorker:
    return StartWorker(
        slot=SlotId(slot),
        incarnation=Incarnation(1),
        spare=False,
        rank=Rank(0),
        world_size=1,
        generation=Generation(1),
        store="h:1",
    )


async def test_commands_reach_the_trays_they_name_in_order(journal: Journal) -> None:
    fence = FenceWorker(slot=SlotId("tray-01/0"), incarnation=Incarnation(3), because="stalled")
    core = ScriptedCore(WorkerExited=(BREAK, fence, RESUME))
    async with coordinator(core, journal) as c, agent(c.url) as a, agent(c.url, "tray-01") as b:
        await a.say(EXITED)
        assert [await a.hear(), await a.hear()] == [BREAK, RESUME]
        assert [await b.hear(), await b.hear(), await b.hear()] == [BREAK, fence, RESUME]


async def test_a_generation_is_on_disk_before_anyone_is_told(journal: Journal) -> None:
    async with coordinator(ScriptedCore(WorkerExited=(BREAK,)), journal) as c, agent(c.url) as a:
        await a.say(EXITED)
        await a.hear()
        with sqlite3.connect(journal.path) as other:
            rows = other.execute("SELECT generation, stage FROM generations").fetchall()
        other.close()
        assert rows == [(2, "break")]


async def test_however_many_generations_there_have_been_each_is_on_disk_before_anyone_is_told(journal: Journal) -> None:
    """A job of weeks breaks hundreds of times."""
    orders = [
        order
        for number in range(2, 12)
        for order in (
            msgspec.structs.replace(BREAK, generation=Generation(number)),
            msgspec.structs.replace(RESUME, plan=plan(number, member(0, "tray-00/0", 1))),
        )
    ]
    given = iter(orders)
    core = ScriptedCore(WorkerExited=lambda _: (next(given),))
    async with coordinator(core, journal) as c, agent(c.url) as a:
        for done, order in enumerate(orders, start=1):
            await a.say(EXITED)
            assert await a.hear() == order
            with sqlite3.connect(journal.path) as other:
                rows = other.execute("SELECT stage, generation FROM generations ORDER BY id").fetchall()
            other.close()
            assert rows == [
                ("break", one.generation) if isinstance(one, BreakGeneration) else ("resume", one.plan.generation)
                for one in orders[:done]
            ]


async def test_a_generation_that_cannot_be_persisted_is_told_to_nobody(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core hears JournalFailed after the command's siblings were carried out, and decides."""

    def full(*_: object) -> None:
        raise JournalError("database or disk is full.")

    monkeypatch.setattr(journal, "persist", full)
    stop = StopJob(exit_code=3, because="no journal")
    core = ScriptedCore(WorkerExited=(BREAK,), JournalFailed=(stop,))
    async with coordinator(core, journal) as c, agent(c.url) as a:
        await a.say(EXITED)
        assert await a.hear() == stop
        assert core.names() == ["TrayJoined", "WorkerExited", "JournalFailed"]


async def test_what_snapshots_survive_is_told_once_there_are_any_and_when_it_changes(journal: Journal) -> None:
    plans = [msgspec.structs.replace(RESUME, protected=said) for said in ("copies", "copies", "parity", "")]
    core = ScriptedCore(WorkerExited=lambda _: (plans.pop(0),))
    async with coordinator(core, journal) as c:
        c.driver.submit(EXITED)
        c.driver.submit(WorkerElastic(slot=EXITED.slot, incarnation=EXITED.incarnation))
        c.driver.receive_telemetry([_copied("checkpoint")])
        assert c.seen.told == [], "a plain script has no snapshots, nor has one whose state has replicas"
        c.driver.receive_telemetry([_copied("snapshot")])
        assert c.seen.told == ["copies"]
        for _ in range(3):
            c.driver.submit(EXITED)
        assert c.seen.told == ["copies", "parity", "one tray is left: snapshots are lost with it"]


async def test_a_timer_comes_back_as_it_was_set_and_never_before_its_time(journal: Journal) -> None:
    early, past = UnfitWaitOver(), DrainOver()
    timers: dict[Timer, int] = {LATE: 60, early: 20, past: 0}
    core = ScriptedCore(
        TrayJoined=tuple(SetTimer(timer=timer, at_ms=at_ms) for timer, at_ms in timers.items()),
        TimerFired=lambda event: (DONE,) if isinstance(event, TimerFired) and event.timer == LATE else (),
    )
    async with coordinator(core, journal) as c, agent(c.url):
        await asyncio.wait_for(c.driver.finished, 100)
        fired = [event for event in core.heard if isinstance(event, TimerFired)]
        assert [event.timer for event in fired] == [past, early, LATE]
        assert all(event.at_ms >= due for event, due in zip(fired, (0, 20, 60), strict=True))
        assert [event.at_ms for event in core.heard] == sorted(event.at_ms for event in core.heard)


async def test_a_connection_that_ends_is_a_lost_tray(journal: Journal) -> None:
    core = ScriptedCore(TrayLost=(DONE,))
    async with coordinator(core, journal) as c:
        async with agent(c.url) as a:
            await a.say(EXITED)
        await asyncio.wait_for(c.driver.finished, 100)
        assert isinstance(core.heard[-1], TrayLost)
        assert core.heard[-1].tray == "tray-00"


def _begins(event: Event) -> bool:
    return isinstance(event, TimerFired) and event.timer == JobBegins()


async def test_a_coordinator_that_stood_still_hears_what_has_come_before_it_acts_on_its_clock(journal: Journal) -> None:
    now = [0.0]
    core = ScriptedCore(TimerFired=lambda event: (SetTimer(timer=LATE, at_ms=1),) if _begins(event) else (DONE,))
    driver = Driver(core, journal, run_id="job-1", observer=Onlooker(), loop=ClockedLoop(lambda: now[0]))
    driver.begin()
    now[0] = 5.0  # it is 5 s later, all at once
    asyncio.get_running_loop().call_later(0.05, driver.submit, EXITED)  # after the timer's time, in real time as well
    await asyncio.wait_for(asyncio.shield(driver.finished), 100)
    driver.close()
    assert core.names() == ["TimerFired", "WorkerExited", "TimerFired"]


async def test_the_end_reaches_every_agent_and_nothing_happens_afterwards(journal: Journal) -> None:
    core = ScriptedCore(WorkerFinished=(ReleaseWorkers(workers=(worker("tray-00/0", 1),)), DONE))
    async with coordinator(core, journal) as c:
        async with agent(c.url) as a, agent(c.url, "tray-01") as b:
            await a.say(WorkerFinished(slot=SlotId("tray-00/0"), incarnation=Incarnation(1)), EXITED)
            assert isinstance(await a.hear(), ReleaseWorkers)
            assert await a.hear() == await b.hear() == DONE
        assert core.names()[-1] == "WorkerFinished"
        assert c.driver.over == DONE


async def test_a_core_that_contradicts_itself_ends_the_job_with_a_reason(journal: Journal) -> None:
    def broken(_: object) -> tuple[()]:
        raise AssertionError("two owners of rank 3")

    core = ScriptedCore(WorkerExited=broken)
    async with coordinator(core, journal) as c, agent(c.url) as a:
        await a.say(EXITED)
        stop = await a.hear()
        assert isinstance(stop, StopJob)
        assert stop.exit_code == 3
        assert "two owners of rank 3" in stop.because
        assert "report" in stop.remedy


async def test_telemetry_is_shown_and_journaled_but_is_not_for_the_core(journal: Journal) -> None:
    core = ScriptedCore(WorkerFinished=(DONE,))
    async with coordinator(core, journal) as c, agent(c.url) as a:
        await a.say(logged(0, 1), logged(0, 0), unit(0, 0, ids=(7).to_bytes(8, "little")))
        await a.say(WorkerFinished(slot=SlotId("tray-00/0"), incarnation=Incarnation(1)))
        await asyncio.wait_for(asyncio.shield(c.driver.finished), 100)
        assert core.names() == ["TrayJoined", "WorkerFinished"]
        assert c.seen.lines == ["step 0  loss 1.0000"]
        assert c.driver.status().progress.position.step == 0
        assert journal.flush()
        with sqlite3.connect(journal.path) as other:
            assert other.execute("SELECT step, rank, count FROM ledger").fetchall() == [(0, 0, 1)]
        other.close()


async def test_every_event_and_command_is_journaled_with_its_cause(journal: Journal) -> None:
    core = ScriptedCore(TrayJoined=(SetTimer(timer=JoinOver(), at_ms=10**6), start("tray-00/0")))
    core.sent_by = ("JobBegins", "TrayJoined")
    async with coordinator(core, journal) as c, agent(c.url) as a:
        await a.hear()
    assert journal.flush()
    with sqlite3.connect(journal.path) as other:
        rows = other.execute("SELECT id, cause, kind, name, rule FROM events ORDER BY id").fetchall()
    other.close()
    assert rows[:3] == [
        (1, None, "event", "TrayJoined", None),
        (2, 1, "command", "SetTimer", "JobBegins"),
        (3, 1, "command", "StartWorker", "TrayJoined"),
    ]


async def test_a_stop_because_the_core_failed_is_sent_by_no_rule(journal: Journal) -> None:
    def fail(_event: object) -> Never:
        raise ZeroDivisionError

    core = ScriptedCore(TrayJoined=fail)
    core.sent_by = ("SwapDue",)  # of an earlier event
    async with coordinator(core, journal) as c, agent(c.url):
        await c.driver.finished
    assert journal.flush()
    with sqlite3.connect(journal.path) as other:
        rows = other.execute("SELECT name, cause, rule FROM events WHERE kind = 'command'").fetchall()
    other.close()
    assert rows == [("StopJob", 1, None)]


async def test_an_event_is_answered_within_milliseconds(journal: Journal) -> None:
    """Twenty round trips with a generation on disk in each; the median counts, the disk may hiccup."""
    core = ScriptedCore(WorkerExited=(BREAK,))
    loop = asyncio.get_running_loop()
    async with coordinator(core, journal) as c, agent(c.url) as a:
        times = []
        for _ in range(20):
            began = loop.time()
            await a.say(EXITED)
            await a.hear()
            times.append(loop.time() - began)
    assert sorted(times)[10] < 0.05, times


async def test_status_and_metrics_show_the_job(journal: Journal) -> None:
    async with coordinator(ScriptedCore(WorkerExited=(RESUME,)), journal) as c, agent(c.url) as a:
        await a.say(EXITED)
        await a.hear()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            status = msgspec.json.decode(await (await session.get(f"{c.url}/api/status")).read())
            metrics = await (await session.get(f"{c.url}/metrics")).text()
        assert status["run_id"] == "job-1"
        assert status["trays"] == ["tray-00"]
        assert status["core"] == {"phase": "scripted", "waits": ""}
        assert "rackrun_generation 2.0" in metrics
        assert joined().slots == 4


def test_everyone_who_waits_for_the_end_of_a_job_gets_the_first_one() -> None:
    end = JobCompletion()  # before there is an event loop

    async def wait() -> list[StopJob]:
        waiting = [asyncio.ensure_future(end) for _ in range(2)]
        await asyncio.sleep(0)
        end.reach(DONE)
        end.reach(StopJob(exit_code=3, because="later"))
        return [*await asyncio.gather(*waiting), await end]

    assert asyncio.run(wait()) == [DONE] * 3


def _copied(kind: str) -> StateCopied:
    return StateCopied(
        slot=EXITED.slot,
        incarnation=EXITED.incarnation,
        generation=Generation(1),
        rank=Rank(0),
        at=Position(0),
        kind=kind,
    )
