"""What the agent's queue to the coordinator keeps, and what it lets go."""

from __future__ import annotations

import asyncio

from rackrun.agent.uplink import Uplink, Urgency
from rackrun.core.events import WorkerFinished
from rackrun.core.ids import Generation, Incarnation, Position, Rank, SlotId
from rackrun.core.wire import Logged, UnitCommitted, encode

COMMON = {"slot": SlotId("tray-0/0"), "incarnation": Incarnation(1), "generation": Generation(1), "rank": Rank(0)}


async def test_a_flood_costs_the_oldest_logs_but_no_event_and_no_ledger_entry(rig):
    uplink = Uplink(rig.config("pass"), WorkerFinished(slot=COMMON["slot"], incarnation=1), lambda command: None, 1.0)
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
