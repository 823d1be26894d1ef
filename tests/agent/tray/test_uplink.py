"""What the agent's queue to the coordinator keeps, and what it lets go; and when its connection is none any more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import WSMsgType

from rackrun.agent.tray.coordinator_lease import LeaseEnd
from rackrun.agent.tray.tray_facts import Urgency
from rackrun.agent.tray.uplink import Uplink
from rackrun.link.channel import frame
from rackrun.link.reliable_messages import NumberedLink
from rackrun.protocol.agent_config import JOB_IS_OVER
from rackrun.protocol.commands import StopJob, WorkerCommand
from rackrun.protocol.events import WorkerFinished
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId
from rackrun.protocol.wire import Logged, UnitCommitted, encode
from tests.agent.conftest import Rig

COMMON: dict[str, Any] = {
    "slot": SlotId("tray-0/0"),
    "incarnation": Incarnation(1),
    "generation": Generation(1),
    "rank": Rank(0),
}


def keep_in(heard: list[int]) -> Callable[[WorkerCommand], None]:
    """The exit code of each `StopJob`."""

    def obey(command: WorkerCommand) -> None:
        assert isinstance(command, StopJob)
        heard.append(command.exit_code)

    return obey


def incarnations(rig: Rig) -> list[int]:
    """Of all that the coordinator has received."""
    messages = [timed.message for timed in rig.coordinator.received]
    assert all(isinstance(message, WorkerFinished) for message in messages)
    return [message.incarnation for message in messages if isinstance(message, WorkerFinished)]


async def test_a_flood_costs_the_oldest_logs_but_no_event_and_no_ledger_entry(rig: Rig) -> None:
    uplink = Uplink(
        rig.config("pass"), WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1)), lambda command: None, 1.0
    )
    total = 50_000
    for step in range(total):  # nobody is connected
        uplink.forward(Urgency.MAYBE, encode(Logged(at=Position(step), values={"loss": 1.0}, **COMMON)))
        if step % 100 == 0:
            uplink.forward(Urgency.SOON, encode(UnitCommitted(at=Position(step), **COMMON)))
            uplink.event(WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(step)))
    connection = asyncio.create_task(uplink.run())
    await uplink.flush(10.0)
    last = lambda m: isinstance(m, Logged) and m.at.step == total - 1  # noqa: E731
    await rig.coordinator.wait(last, "last log")
    connection.cancel()
    await asyncio.wait((connection,))
    messages = [timed.message for timed in rig.coordinator.received[1:]]
    logged = [m.at.step for m in messages if isinstance(m, Logged)]
    assert logged == list(range(total - len(logged), total))
    assert 5_000 <= len(logged) <= 10_000
    assert uplink.dropped == total - len(logged)
    every = list(range(0, total, 100))
    assert [m.at.step for m in messages if isinstance(m, UnitCommitted)] == every
    assert [m.incarnation for m in messages if isinstance(m, WorkerFinished)] == every


async def test_a_connection_over_which_nothing_comes_for_too_long_is_made_anew(rig: Rig) -> None:
    rig.coordinator.deaf = True
    first = WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1))
    uplink = Uplink(rig.config("pass", lease_s=0.2), first, lambda command: None, 0.2)
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.connections(2)
    await rig.coordinator.ended(1)
    connection.cancel()
    await asyncio.wait((connection,))
    assert rig.coordinator.queries[1]["resume"] == rig.coordinator.session
    assert rig.coordinator.ends[0] is not WSMsgType.CLOSE, "that says that the agent leaves: its tray would be lost"


async def test_an_agent_that_leaves_says_so(rig: Rig) -> None:
    first = WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1))
    uplink = Uplink(rig.config("pass"), first, lambda command: None, 60.0)
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.connections(1)
    connection.cancel()
    await asyncio.wait((connection,))
    await rig.coordinator.ended(1)
    assert rig.coordinator.ends == [WSMsgType.CLOSE]


async def test_an_agent_without_a_connection_ends_when_its_launcher_says_that_the_job_is_over(rig: Rig) -> None:
    await rig.start("pass")
    await rig.coordinator.stop()
    await rig.line("try again", rig.err)
    os.kill(rig.agent, JOB_IS_OVER)
    assert await rig.agent_exit() == 0, "it was told; who finds out by himself ends with 3"


async def test_an_agent_with_a_connection_is_told_by_the_coordinator_how_the_job_ended(rig: Rig) -> None:
    await rig.start("pass")
    os.kill(rig.agent, JOB_IS_OVER)
    await rig.start_worker()
    assert (await rig.coordinator.exit_of(1)).exit_code == 0
    assert await rig.end() == 0


async def test_a_connection_that_breaks_when_the_job_is_over_is_not_made_anew(rig: Rig) -> None:
    await rig.start("print('here', flush=True); import time; time.sleep(600)")
    os.kill(rig.agent, JOB_IS_OVER)
    await rig.start_worker()
    await rig.line("here")
    await rig.coordinator.hang_up()
    assert await rig.agent_exit() == 3
    assert len(rig.coordinator.queries) == 1


async def test_a_connection_that_breaks_costs_no_message_in_either_direction(rig: Rig) -> None:
    heard: list[int] = []
    uplink = Uplink(
        rig.config("pass"),
        WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1000)),
        keep_in(heard),
        60.0,
    )
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.connections(1)
    for number in range(40):
        uplink.event(WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(number)))
        await rig.coordinator.send(StopJob(exit_code=number, because="a test"))
        if number % 10 == 5:
            rig.coordinator.cut()
            uplink.event(WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(100 + number)))
            await rig.coordinator.send(StopJob(exit_code=100 + number, because="a test"))
        if number % 10 == 9:
            await rig.coordinator.connections(2 + number // 10)
    await rig.coordinator.said(WorkerFinished, lambda m: m.incarnation == 39, "last event")
    await rig.eventually(lambda: heard[-1:] == [39], "last command")
    connection.cancel()
    await asyncio.wait((connection,))
    expected = [one for number in range(40) for one in ([number, 100 + number] if number % 10 == 5 else [number])]
    assert heard == expected
    assert incarnations(rig) == [1000, *expected]


async def test_what_is_acknowledged_at_once_does_not_hide_what_is_sent_again(rig: Rig) -> None:
    """So much waits for the agent that it acknowledges before it has sent its own once more."""
    heard: list[int] = []
    first = WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1000))
    uplink = Uplink(rig.config("pass"), first, keep_in(heard), 60.0)
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.said(WorkerFinished, lambda m: m.incarnation == 1000, "its first message")
    rig.coordinator.cut()
    uplink._numbered.pack(
        [frame(WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1)))]
    )  # lost with its connection
    for number in range(100):
        await rig.coordinator.send(StopJob(exit_code=number, because="a test"))
    await rig.coordinator.said(WorkerFinished, lambda m: m.incarnation == 1, "what is sent again")
    assert len(rig.coordinator.queries) == 2, "the second connection holds"
    await rig.eventually(lambda: len(heard) == 100, "all commands")
    connection.cancel()
    await asyncio.wait((connection,))
    assert heard == list(range(100))


async def test_a_connection_that_breaks_before_the_coordinator_has_heard_a_word_is_begun_anew(rig: Rig) -> None:
    """It has given the tray up then, of which it knows nothing."""
    first = WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1000))
    uplink = Uplink(rig.config("pass"), first, lambda command: None, 60.0)
    uplink.event(WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1)))
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.connections(1)
    rig.coordinator.cut()
    rig.coordinator.session = "another's"
    rig.coordinator.received.clear()
    await asyncio.wait({connection, asyncio.create_task(rig.coordinator.connections(2))}, return_when="FIRST_COMPLETED")
    assert not connection.done()
    assert "resume" not in rig.coordinator.queries[1]
    uplink.event(WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(2)))
    await rig.coordinator.said(WorkerFinished, lambda m: m.incarnation == 2, "the last event")
    connection.cancel()
    await asyncio.wait((connection,))
    assert incarnations(rig) == [1000, 1, 2]


async def test_an_agent_that_was_heard_and_given_up_does_not_begin_anew(rig: Rig) -> None:
    """It may have workers, which no coordinator knows."""
    first = WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1000))
    uplink = Uplink(rig.config("pass"), first, lambda command: None, 60.0)
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.said(WorkerFinished, lambda m: m.incarnation == 1000, "the first message")
    await rig.coordinator.send(StopJob(exit_code=0, because="a test"))
    await rig.eventually(lambda: uplink._numbered.received, "a command")
    rig.coordinator.cut()
    rig.coordinator.session = "another's"
    assert await connection is LeaseEnd.LOST


async def test_workers_go_on_while_the_connection_is_broken(rig: Rig) -> None:
    await rig.start("print('here', flush=True); import time; time.sleep(600)")
    await rig.start_worker()
    await rig.line("here")
    rig.coordinator.cut()
    await rig.fence(0, 1)  # waits until the link is taken up again
    assert (await rig.coordinator.exit_of(1)).signal == 9
    assert len(rig.coordinator.queries) == 2
    assert await rig.end() == 0


async def test_more_than_is_kept_ends_the_agent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackrun.agent.tray.uplink.NumberedLink", lambda: NumberedLink(kept_max=3))
    uplink = Uplink(
        rig.config("pass"), WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(0)), lambda command: None, 60.0
    )
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.wait(lambda m: isinstance(m, WorkerFinished), "first message")
    await rig.coordinator.stop()
    for number in range(4):
        uplink.event(WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(number)))
    assert await asyncio.wait_for(connection, 60) is LeaseEnd.LOST


async def test_a_coordinator_that_sends_what_cannot_be_read_is_not_asked_again(rig: Rig) -> None:
    uplink = Uplink(
        rig.config("pass"), WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(0)), lambda command: None, 60.0
    )
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.connections(1)
    assert rig.coordinator._socket is not None
    await rig.coordinator._socket.send_bytes(b"hello")
    assert await asyncio.wait_for(connection, 60) is LeaseEnd.LOST


async def test_a_command_that_cannot_be_carried_out_ends_the_agent(rig: Rig) -> None:
    """Those that came with it would be lost, if it took the link up again: they have come."""

    def obey(command: WorkerCommand) -> None:
        assert isinstance(command, StopJob)
        if command.exit_code == 1:
            raise OSError(24, "Too many open files")

    uplink = Uplink(rig.config("pass"), WorkerFinished(slot=COMMON["slot"], incarnation=Incarnation(1)), obey, 60.0)
    connection = asyncio.create_task(uplink.run())
    await rig.coordinator.connections(1)
    await rig.coordinator.send(*(StopJob(exit_code=number, because="a test") for number in range(3)))
    again = asyncio.create_task(rig.coordinator.connections(2))
    await asyncio.wait((connection, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    assert connection.done()
    assert connection.result() is LeaseEnd.LOST
