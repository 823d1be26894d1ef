"""Rows of parity that an agent keeps for others' snapshots: what goes in, what spoils them, what comes out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations

import aiohttp
import pytest

from rackrun.agent.snapshots import snapshot_parity as parity
from rackrun.agent.snapshots.memory_limit import OverMemoryLimit, check_room
from rackrun.agent.snapshots.mirror import Mirror
from rackrun.agent.snapshots.snapshot_parity import TRAILER, RankParitySet
from rackrun.agent.snapshots.snapshot_service import SnapshotService
from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.redundancy.stripe_set import Part, StripeSet, decode_header
from rackrun.protocol.boot import SNAPSHOT_JOB
from rackrun.protocol.commands import Keeper, Restore, StartWorker, Stripes
from rackrun.protocol.events import Event, SnapshotStriped
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId, Step, TrayId
from rackrun.worker.restore.snapshot_fetch import CorruptSnapshot, fetch_snapshot

TOKEN = "a-token"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
RANKS = 3
SET = StripeSet((0, 1, 2))
GENERATION, STEP = 5, 8


@dataclass
class Tray:
    """Of one rank: its worker, and the service of its agent."""

    worker: WorkerHandle
    service: SnapshotService
    address: str = ""

    def kept(self, index: int, incarnation: int) -> WorkerHandle | None:
        return self.worker if (index, incarnation) == (0, self.worker.incarnation) else None

    def seal(self, step: int) -> bytes:
        """A snapshot, as a worker makes it; shards are not of one length."""
        rank, slot = int(self.worker.command.rank), step // 2 % 2
        image = random.Random(rank).randbytes(70_000 + 5_000 * rank)
        fd = self.worker.snapshot_fds[slot]
        os.ftruncate(fd, 0)
        arena = Arena.create(fd, job=SNAPSHOT_JOB, rank=rank, fencing_token=1, slots=1, payload_bytes=len(image))
        with arena, arena.begin(step, step) as writer:
            writer.payload[:] = image
            writer.seal(len(image), "layout")
        self.worker.page.seal_snapshot(slot, step)
        return os.pread(fd, os.fstat(fd).st_size, 0)


class Rack:
    """Trays of one rank each, whose ranks are one set; three, of which one may be lost, or four, of which two may."""

    def __init__(self, trays: list[Tray], lost_at_most: int = 1) -> None:
        self.trays, self.parity = trays, lost_at_most
        self.told: list[Event] = []
        self.set = tuple(Keeper(Rank(n), TrayId(f"t{n}"), tray.address) for n, tray in enumerate(trays))
        self.mirrors = [
            Mirror(
                TOKEN,
                lambda worker: RankParitySet(GENERATION, int(worker.command.rank), self.set, lost_at_most),
                self.told.append,
            )
            for _ in trays
        ]

    async def push(self, rank: int, step: int = STEP, besides: int = -1, generation: int = GENERATION) -> int:
        """Returns the step that its page says is elsewhere."""
        page, mirror = self.trays[rank].worker.page, self.mirrors[rank]
        page.want_mirror(step, besides, generation)
        mirror.update(self.trays[rank].worker)
        await mirror._pushing[self.trays[rank].worker]
        assert not page.mirroring
        return page.mirrored

    async def push_all(self, step: int = STEP, besides: int = -1) -> list[bytes]:
        sealed = [tray.seal(step) for tray in self.trays]
        for rank in range(len(self.trays)):
            assert await self.push(rank, step, besides) == step
        return sealed

    async def row(self, keeper: int, step: int = STEP, span: str = "", part: int = 0) -> tuple[int, bytes]:
        headers = AUTHORIZATION | ({"Range": f"bytes={span}"} if span else {})
        url = f"http://{self.trays[keeper].address}/parity/{GENERATION}/{keeper}/{part}/{step}"
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as answer:
            return answer.status, await answer.read()

    async def put(
        self, keeper: int, owner: int, body: bytes, *, length: int = 300, members: str = "0,1,2", parity: str = "1"
    ) -> int:
        """A stripe by hand, into a row of step 2."""
        query = {"owner": str(owner), "length": str(length), "members": members, "parity": parity, "besides": "-1"}
        url = f"http://{self.trays[keeper].address}/parity/{GENERATION}/{keeper}/0/2"
        async with (
            aiohttp.ClientSession(headers=AUTHORIZATION) as session,
            session.put(url, params=query, data=body) as answer,
        ):
            return answer.status

    async def rebuild(self, lost: int, *also: int, step: int = STEP) -> bytes:
        """As the newcomer in its place does it."""
        restore = Restore(
            rank=Rank(lost),
            rebuild=tuple(
                Stripes(
                    rank=Rank(n),
                    row=f"{tray.address}/{GENERATION}/{n}",
                    snapshot=f"{tray.address}/t{n}/0/{tray.worker.incarnation}",
                )
                for n, tray in enumerate(self.trays)
                if n not in (lost, *also)
            ),
            members=tuple(keeper.rank for keeper in self.set),
            parity=self.parity,
        )
        fd = await asyncio.to_thread(fetch_snapshot, restore, step, TOKEN, lambda: False)
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)


@pytest.fixture
async def workers() -> AsyncIterator[list[WorkerHandle]]:
    made = []
    for rank in range(RANKS + 1):
        start = StartWorker(
            slot=SlotId(f"t{rank}/0"),
            incarnation=Incarnation(7 + rank),
            spare=False,
            rank=Rank(rank),
            world_size=RANKS,
            generation=Generation(1),
            store="",
        )
        made.append(WorkerHandle(start, lambda worker, body: None))
    yield made
    for worker in made:
        worker.sent_off()
        worker.buried()
        worker.close_memory()
        worker.page.close()


@contextlib.asynccontextmanager
async def racked(workers: list[WorkerHandle], lost_at_most: int) -> AsyncIterator[Rack]:
    trays = []
    for number, worker in enumerate(workers):
        tray = Tray(worker, None)  # type: ignore[arg-type]
        tray.service = SnapshotService(f"t{number}", "127.0.0.1", TOKEN, tray)
        tray.address = await tray.service.start()
        trays.append(tray)
    made = Rack(trays, lost_at_most)
    yield made
    for mirror in made.mirrors:
        await mirror.close()
    for tray in trays:
        await tray.service.close()


@pytest.fixture
async def rack(workers: list[WorkerHandle]) -> AsyncIterator[Rack]:
    async with racked(workers[:RANKS], 1) as made:
        yield made


@pytest.fixture
async def rack_of_four(workers: list[WorkerHandle]) -> AsyncIterator[Rack]:
    pytest.importorskip("pyeclib")
    async with racked(workers, 2) as made:
        yield made


async def test_any_ones_snapshot_is_rebuilt_from_the_others_byte_for_byte(rack: Rack) -> None:
    sealed = await rack.push_all()
    assert [await rack.rebuild(lost) for lost in range(RANKS)] == sealed
    assert rack.told == [
        SnapshotStriped(
            slot=SlotId(f"t{rank}/0"),
            incarnation=Incarnation(7 + rank),
            generation=Generation(GENERATION),
            step=Step(STEP),
            besides=Step(-1),
        )
        for rank in range(RANKS)
    ]


async def test_any_twos_snapshots_are_rebuilt_from_the_other_two(rack_of_four: Rack) -> None:
    sealed = await rack_of_four.push_all()
    for lost, also in permutations(range(4), 2):
        assert await rack_of_four.rebuild(lost, also) == sealed[lost]
    assert [await rack_of_four.rebuild(lost) for lost in range(4)] == sealed, "with one lost, from three"


async def test_three_of_four_are_one_too_many(rack_of_four: Rack) -> None:
    await rack_of_four.push_all()
    with pytest.raises(CorruptSnapshot, match=r"from \[3\], in a set of \[0, 1, 2, 3\]: parity replaces 2 members"):
        await rack_of_four.rebuild(0, 1, 2)


async def test_both_parts_of_a_keepers_parity_are_kept_and_dropped_alike(rack_of_four: Rack) -> None:
    await rack_of_four.push_all(2)
    await rack_of_four.push_all(4, besides=2)
    await rack_of_four.push_all(6, besides=4)
    for part in (0, 1):
        assert [(await rack_of_four.row(0, step, part=part))[0] for step in (2, 4, 6)] == [404, 200, 200]
    assert (await rack_of_four.row(0, 6, part=2))[0] == 404


async def test_a_row_can_be_read_once_every_stripe_is_in_it(rack: Rack) -> None:
    for tray in rack.trays:
        tray.seal(STEP)
    await rack.push(0)
    assert (await rack.row(1))[0] == 404
    await rack.push(2)
    status, row = await rack.row(1)
    assert status == 200
    header = decode_header(row)
    assert (header.checkpoint, header.keeper, header.members) == (STEP, 1, (0, 1, 2))
    assert len(row) == SET.header_bytes + header.row_bytes
    assert await rack.row(1, span="4096-4105") == (206, row[4096:4106])
    assert (await rack.row(1, span="4096-99999999"))[0] == 416


async def test_each_keeper_takes_a_half_of_a_shard_and_no_more(rack: Rack) -> None:
    """Of three members; a copy would take a whole one."""
    sealed = await rack.push_all()
    for keeper in range(RANKS):
        _, row = await rack.row(keeper)
        assert len(row) <= SET.header_bytes + max(map(len, sealed)) // 2 + 64


def stripe(keeper: int, owner: int, length: int = 300) -> bytes:
    start, stop = SET.stripe(owner, Part(keeper), length)
    data = bytes(stop - start)
    return data + TRAILER.pack(crc(memoryview(data)))


@pytest.mark.parametrize("wrong", ["flipped", "short", "long", "empty", "trailer flipped"])
async def test_a_stripe_that_is_not_what_was_sent_spoils_its_row(rack: Rack, wrong: str) -> None:
    good = stripe(0, 1)
    bad = {
        "flipped": b"\x01" + good[1:],
        "short": good[:-9],
        "long": b"\0" + good,
        "empty": b"",
        "trailer flipped": good[:-1] + bytes([good[-1] ^ 1]),
    }[wrong]
    assert await rack.put(0, 1, bad) == 422
    assert await rack.put(0, 2, stripe(0, 2)) == 422, "the row is of no use any more"
    assert (await rack.row(0, 2))[0] == 404


async def test_a_stripe_is_taken_once_and_of_members_only(rack: Rack) -> None:
    assert await rack.put(0, 1, stripe(0, 1)) == 200
    assert await rack.put(0, 1, stripe(0, 1)) == 422
    assert await rack.put(0, 0, stripe(0, 1)) == 422
    assert await rack.put(0, 9, stripe(0, 1)) == 422
    assert await rack.put(0, 2, stripe(0, 2)) == 200
    assert (await rack.row(0, 2))[0] == 200


async def test_nonsense_is_refused_before_anything_is_allocated(rack: Rack) -> None:
    assert await rack.put(0, 1, b"", length=-1) == 422
    assert await rack.put(0, 1, b"", length=2**60) == 422
    assert await rack.put(0, 1, b"", members="0") == 422
    assert await rack.put(0, 1, b"", members="0,x") == 422
    assert await rack.put(0, 1, b"", parity="3") == 422
    assert await rack.put(0, 1, b"", parity="0") == 422
    assert await rack.put(0, 1, b"", length=2**45) == 507


async def test_without_the_token_no_row_is_given_and_no_stripe_taken(rack: Rack) -> None:
    async with aiohttp.ClientSession() as session:
        for verb in (session.put, session.get):
            async with verb(f"http://{rack.trays[0].address}/parity/5/0/0/2") as answer:
                assert answer.status == 401


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(OverMemoryLimit, match="do not fit"):
        check_room(1 << 50)


async def test_rows_of_the_newest_step_and_of_the_one_that_is_named_are_kept(rack: Rack) -> None:
    await rack.push_all(2)
    await rack.push_all(4, besides=2)
    assert [(await rack.row(0, step))[0] for step in (2, 4)] == [200, 200]
    await rack.push_all(6, besides=4)
    assert [(await rack.row(0, step))[0] for step in (2, 4, 6)] == [404, 200, 200]


async def test_a_push_without_memory_at_one_keeper_is_over_and_says_so(
    rack: Rack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(size: int) -> None:
        raise OverMemoryLimit(f"{size} bytes do not fit into this host's memory")

    for tray in rack.trays:
        tray.seal(STEP)
    monkeypatch.setattr(parity, "check_room", refuse)
    assert await rack.push(0) == -1
    assert not rack.told
    assert "t1 does not take it" in capsys.readouterr().err


def test_rows_that_grow_at_the_same_time_do_not_take_the_same_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free, both, fallocate = [3 << 20], threading.Barrier(2), os.posix_fallocate

    def check(size: int) -> None:
        if size > free[0]:
            raise OverMemoryLimit(f"{size} bytes do not fit into this host's memory")
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)

    def take(fd: int, start: int, size: int) -> None:
        fallocate(fd, start, size)
        free[0] -= size

    monkeypatch.setattr(parity, "check_room", check)
    monkeypatch.setattr(os, "posix_fallocate", take)
    rows = [parity._RowMemory(4096), parity._RowMemory(4096)]
    with ThreadPoolExecutor(2) as pool:
        failed = [done.exception() for done in [pool.submit(row.room, 2 << 20) for row in rows]]
    for row in rows:
        row.close()
    assert free[0] >= 0
    assert [type(one) for one in failed].count(OverMemoryLimit) == 1


async def test_a_snapshot_that_is_written_over_on_its_way_is_not_taken(rack: Rack) -> None:
    for tray in rack.trays:
        tray.seal(STEP)
    worker = rack.trays[0].worker
    worker.page.seal_snapshot(0, -1)
    assert await rack.push(0) == -1


async def test_what_was_taken_in_another_generation_is_not_given_to_this_ones_keepers(rack: Rack) -> None:
    """Else some members' stripes were in the rows of one set and others' in those of another, and all would say
    done."""
    rack.trays[0].seal(STEP)
    assert await rack.push(0, generation=GENERATION - 1) == -1
    assert not rack.told


# -- the newcomer's side -----------------------------------------------------------------------------------------------
async def test_a_keeper_that_is_gone_ends_the_rebuild_with_its_name(rack: Rack) -> None:
    await rack.push_all()
    await rack.trays[2].service.close()
    with pytest.raises(CorruptSnapshot, match="does not give it"):
        await rack.rebuild(0)


async def test_a_member_that_has_another_snapshot_in_that_slot_ends_it_too(rack: Rack) -> None:
    await rack.push_all()
    rack.trays[2].seal(STEP + 4)
    with pytest.raises(CorruptSnapshot, match="not kept any more"):
        await rack.rebuild(0)


async def test_a_damaged_input_is_noticed_before_anything_is_loaded(rack: Rack) -> None:
    await rack.push_all()
    fd = rack.trays[2].worker.snapshot_fds[STEP // 2 % 2]
    at = os.fstat(fd).st_size - 30_000
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    with pytest.raises(CorruptSnapshot, match="the stripe of rank 0"):
        await rack.rebuild(0)


async def test_what_nobody_waits_for_any_more_is_given_up(rack: Rack) -> None:
    await rack.push_all()
    address = rack.trays[1].address
    restore = Restore(rank=Rank(0), snapshot=f"{address}/t1/0/8")
    with pytest.raises(RuntimeError, match="overtaken"):
        await asyncio.to_thread(fetch_snapshot, restore, STEP, TOKEN, lambda: True)
    await rack.trays[1].service.close()
    with pytest.raises(RuntimeError, match="overtaken"):  # before anybody who may be silent is asked
        await asyncio.to_thread(fetch_snapshot, restore, STEP, TOKEN, lambda: True)
