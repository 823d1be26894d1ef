"""Copies of snapshots on another tray: what is taken, what is kept, what is given back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rackrun.agent.snapshots.memory_limit import OverMemoryLimit
from rackrun.agent.snapshots.mirror import CopyHolder as Destination
from rackrun.agent.snapshots.mirror import Mirror, SnapshotCopies
from rackrun.agent.snapshots.snapshot_service import SnapshotService
from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.checkpoint.arena.arena import Arena
from rackrun.protocol.boot import MEMORY_HEADER, SNAPSHOT_JOB
from rackrun.protocol.commands import StartWorker
from rackrun.protocol.events import Event, SnapshotMirrored
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId, Step, TrayId

TOKEN = "a-token"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
IMAGE = bytes(range(256)) * 64


class Nobody:
    def kept(self, index: int, incarnation: int) -> None:
        return None


class CopyHolder:
    def __init__(self) -> None:
        self.service = SnapshotService("b", "127.0.0.1", TOKEN, Nobody())
        self.address = ""

    async def put(self, path: str, body: bytes, besides: int = -1, generation: int = 1) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession(headers=AUTHORIZATION) as session,
            session.put(
                f"http://{self.address}/snapshot/{path}",
                params={"besides": str(besides), "generation": str(generation)},
                data=body,
            ) as answer,
        ):
            return answer.status, await answer.text()

    async def get(self, path: str) -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession(headers=AUTHORIZATION) as session,
            session.get(f"http://{self.address}/snapshot/{path}") as answer,
        ):
            return answer.status, await answer.read()


@pytest.fixture
async def holder() -> AsyncIterator[CopyHolder]:
    held = CopyHolder()
    held.address = await held.service.start()
    yield held
    await held.service.close()


def seal(fd: int, step: int) -> bytes:
    """A snapshot of ``step`` in ``fd``, as a worker makes it. Returns all of its bytes."""
    os.ftruncate(fd, 0)
    arena = Arena.create(fd, job=SNAPSHOT_JOB, rank=3, fencing_token=1, slots=1, payload_bytes=len(IMAGE))
    with arena, arena.begin(step, step) as writer:
        writer.payload[:] = IMAGE
        writer.seal(len(IMAGE), "layout")
    return os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.fixture
def snapshot() -> Iterator[Callable[[int], bytes]]:
    fd = os.memfd_create("snapshot")
    yield lambda step: seal(fd, step)
    os.close(fd)


async def test_what_was_put_is_given_back_byte_for_byte(holder: CopyHolder, snapshot: Callable[[int], bytes]) -> None:
    body = snapshot(4)
    assert await holder.put("a/0/7/4", body) == (200, "[4]")
    assert await holder.get("a/0/7/4") == (200, body)
    assert (await holder.get("a/0/7/2"))[0] == 404
    assert (await holder.get("a/0/8/4"))[0] == 404


async def test_who_is_on_this_host_is_told_where_it_lies(holder: CopyHolder, snapshot: Callable[[int], bytes]) -> None:
    body = snapshot(4)
    await holder.put("a/0/7/4", body)
    url, part = f"http://{holder.address}/snapshot/a/0/7/4", {"Range": "bytes=10-19"}
    async with aiohttp.ClientSession(headers=AUTHORIZATION) as session, session.get(url, headers=part) as answer:
        assert await answer.read() == body[10:20]
        assert Path(f"/proc/{answer.headers[MEMORY_HEADER]}").read_bytes() == body


async def test_it_keeps_the_newest_and_the_one_that_is_named(
    holder: CopyHolder, snapshot: Callable[[int], bytes]
) -> None:
    await holder.put("a/0/7/2", snapshot(2))
    assert (await holder.put("a/0/7/4", snapshot(4), besides=2))[1] == "[2, 4]"
    assert (await holder.put("a/0/7/6", snapshot(6), besides=2))[1] == "[2, 6]"
    assert (await holder.put("a/0/7/8", snapshot(8), besides=6))[1] == "[6, 8]"
    assert (await holder.get("a/0/7/2"))[0] == 404


async def test_a_flipped_bit_a_short_body_and_another_step_are_refused(
    holder: CopyHolder, snapshot: Callable[[int], bytes]
) -> None:
    body = bytearray(snapshot(4))
    body[-len(IMAGE) // 2] ^= 1
    assert (await holder.put("a/0/7/4", bytes(body)))[0] == 422
    assert (await holder.put("a/0/7/4", snapshot(4)[:-4096]))[0] == 422
    assert (await holder.put("a/0/7/6", snapshot(4)))[0] == 422
    assert (await holder.put("a/0/7/4", b"nonsense"))[0] == 422
    assert (await holder.put("a/0/7/4", b""))[0] == 507
    assert (await holder.get("a/0/7/4"))[0] == 404


async def test_without_the_token_nothing_is_taken_or_given(holder: CopyHolder) -> None:
    async with aiohttp.ClientSession() as session:
        url = f"http://{holder.address}/snapshot/a/0/7/4"
        for verb in (session.put, session.get):
            async with verb(url) as answer:
                assert answer.status == 401


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(OverMemoryLimit, match="do not fit"):
        SnapshotCopies().room(1 << 50)


async def test_what_may_be_all_that_is_whole_stays_whoever_it_is_of(
    holder: CopyHolder, snapshot: Callable[[int], bytes]
) -> None:
    """Worker 1 is replaced by 2, and that by 3, which do not know what is everywhere; worker 9 of another slot does."""
    for path, step, besides in (("a/0/1", 4, -1), ("a/1/9", 6, 4), ("a/0/2", 6, -1), ("a/0/3", 8, -1)):
        assert (await holder.put(f"{path}/{step}", snapshot(step), besides))[0] == 200
    assert [(await holder.get(f"a/0/{path}"))[0] for path in ("1/4", "2/6", "3/8")] == [200, 200, 200]
    await holder.put("a/1/9/10", snapshot(10), besides=8)
    assert [(await holder.get(f"a/0/{path}"))[0] for path in ("1/4", "2/6", "3/8")] == [404, 404, 200]


async def test_what_comes_late_from_an_older_generation_takes_nobodys_place(
    holder: CopyHolder, snapshot: Callable[[int], bytes]
) -> None:
    assert (await holder.put("a/0/2/20", snapshot(20), besides=10, generation=5))[0] == 200
    status, why = await holder.put("a/0/1/8", snapshot(8), besides=4, generation=4)
    assert (status, "generation 4 is over" in why) == (409, True)
    assert (await holder.get("a/0/2/20"))[0] == 200


# -- the owner's side --------------------------------------------------------------------------------------------------
@pytest.fixture
async def worker() -> AsyncIterator[WorkerHandle]:
    start = StartWorker(
        slot=SlotId("a/0"),
        incarnation=Incarnation(7),
        spare=False,
        rank=Rank(3),
        world_size=4,
        generation=Generation(1),
        store="",
    )
    made = WorkerHandle(start, lambda worker, body: None)
    yield made
    made.sent_off()
    made.buried()
    made.close_memory()
    made.page.close()


async def test_a_worker_that_wants_a_copy_gets_one_and_the_coordinator_hears_of_it(
    holder: CopyHolder, worker: WorkerHandle
) -> None:
    told: list[Event] = []
    mirror = Mirror(TOKEN, lambda worker: Destination(1, "b", holder.address), told.append)
    mirror.update(worker)
    body = seal(worker.snapshot_fds[1], 4)
    worker.page.seal_snapshot(1, 4)
    assert not worker.page.mirroring
    worker.page.want_mirror(4, -1, 1)
    await pushed(mirror, worker)
    assert worker.page.mirrored == 4
    assert told == [
        SnapshotMirrored(
            generation=Generation(1),
            slot=SlotId("a/0"),
            incarnation=Incarnation(7),
            holder=TrayId("b"),
            where=f"{holder.address}/a/0/7",
            steps=(Step(4),),
        )
    ]
    assert await holder.get("a/0/7/4") == (200, body)
    await mirror.close()


@pytest.mark.parametrize("wrong", ["overwritten", "no such host", "damaged"])
async def test_a_copy_that_fails_is_over_and_says_so(holder: CopyHolder, worker: WorkerHandle, wrong: str) -> None:
    told: list[Any] = []
    address = "127.0.0.1:1" if wrong == "no such host" else holder.address
    mirror = Mirror(TOKEN, lambda worker: Destination(1, "b", address), told.append)
    seal(worker.snapshot_fds[0], 4)
    worker.page.seal_snapshot(0, 6 if wrong == "overwritten" else 4)
    if wrong == "damaged":
        os.pwrite(worker.snapshot_fds[0], b"!", os.fstat(worker.snapshot_fds[0]).st_size - 100)
    worker.page.want_mirror(4, -1, 1)
    await pushed(mirror, worker)
    assert worker.page.mirrored == -1
    assert not told
    await mirror.close()


async def test_with_one_tray_nothing_is_copied(worker: WorkerHandle) -> None:
    mirror = Mirror(TOKEN, lambda worker: None, lambda event: None)
    worker.page.want_mirror(4, -1, 1)
    mirror.update(worker)
    assert worker.page.mirroring
    await mirror.close()


async def pushed(mirror: Mirror, worker: WorkerHandle) -> None:
    mirror.update(worker)
    await mirror._pushing[worker]
    assert not worker.page.mirroring
