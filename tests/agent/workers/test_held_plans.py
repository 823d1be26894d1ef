"""What a worker is told while a filler is in its way waits for that to be gone, in order, and not for ever."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

import rackrun.agent.workers.worker_handle
from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.link.channel import frame
from rackrun.protocol.commands import GenerationPlan, ReleaseWorkers, ResumeGeneration, StartWorker
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId

PLAN = frame(
    ResumeGeneration(
        plan=GenerationPlan(
            generation=Generation(2), world_size=0, members=(), store="127.0.0.1:1", layout=Generation(0), full=0
        ),
        because="a test",
    )
)
START = StartWorker(
    slot=SlotId("tray-0/0"),
    incarnation=Incarnation(1),
    spare=True,
    rank=Rank(0),
    world_size=1,
    generation=Generation(1),
    store="127.0.0.1:1",
)


async def test_a_plan_does_not_wait_for_ever_for_a_filler_that_does_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rackrun.agent.workers.worker_handle, "HELD_S", 0.01)
    worker, theirs = worker_and_its_end()
    worker.send(PLAN, after=asyncio.Event())
    assert await received(theirs, len(PLAN)) == PLAN
    end_of(worker, theirs)


async def test_what_follows_a_plan_that_waits_does_not_overtake_it() -> None:
    worker, theirs = worker_and_its_end()
    gone = asyncio.Event()
    first, second = PLAN, frame(ReleaseWorkers(workers=()))
    worker.send(first, after=gone)
    worker.send(second)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    gone.set()
    assert await received(theirs, len(first + second)) == first + second
    end_of(worker, theirs)


def worker_and_its_end() -> tuple[WorkerHandle, socket.socket]:
    worker = WorkerHandle(START, lambda _worker, _body: None)
    theirs = socket.socket(fileno=os.dup(worker.fds_for_birth[0]))
    theirs.setblocking(False)
    return worker, theirs


async def received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await asyncio.get_running_loop().sock_recv(connection, 1 << 16)
    return data


def end_of(worker: WorkerHandle, theirs: socket.socket) -> None:
    theirs.close()
    worker.sent_off()
    worker.buried()
    worker.close_memory()
