"""Two jobs on one directory: the second is refused while the first one lives, and begins when it does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.checkpoint import CheckpointManager
from rackrun.checkpoint.base.location import RemotePath
from rackrun.checkpoint.base.process_identity import ProcessIdentity, kill_pending, namespace, process_of
from rackrun.checkpoint.durable import lease
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.lease import EXPIRY_S, InUse, Lease, living_fencing_token
from rackrun.checkpoint.durable.retention import Retention, collect
from rackrun.checkpoint.durable.storage.files import Files
from tests.checkpoint.manager.test_manager import Training, manager, shm
from tests.checkpoint.object_stores import BOTH, remote, s3_server
from tests.checkpoint.storage import JOB, ended, in_child, save, write_shard

__all__ = ["manager", "remote", "s3_server", "shm"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_DYING_S", 0.3)
    monkeypatch.setattr(lease, "_SETTLE_S", 0.01)
    monkeypatch.setattr(lease, "_LOOK_S", 0.01)


@pytest.fixture
def taken() -> Iterator[Callable[..., Lease]]:
    made: list[Lease] = []

    def make(root: Path, owner: str, fencing_token: int = 0) -> Lease:
        made.append(Lease(DurableStore(root, JOB), owner, fencing_token))
        made[-1].take()
        return made[-1]

    yield make
    for one in made:
        one.leave(ended=False)


def elsewhere(root: Path, **changes: object) -> None:
    """What is written there was written on another host."""
    store = DurableStore(root, JOB)
    path = store.directory / lease.NAME
    found = lease._read(store, path)
    assert found is not None
    store.files.replace(path, msgspec.json.encode(msgspec.structs.replace(found, boot="another", **changes)))


def test_the_second_is_refused_while_the_first_lives_and_begins_when_it_has_ended(
    tmp_path: Path, taken: Callable[..., Lease]
) -> None:
    first = taken(tmp_path, "a")
    with pytest.raises(InUse, match=f"process {os.getpid()} on .*Remedy"):
        taken(tmp_path, "b")
    taken(tmp_path, "a")  # another process of the same job
    first.leave(ended=True)
    taken(tmp_path, "b")
    with pytest.raises(InUse):
        taken(tmp_path, "a")


def test_after_a_sigkill_of_the_first_the_second_begins_at_once(tmp_path: Path, taken: Callable[..., Lease]) -> None:
    ready, write = os.pipe()

    def first() -> None:
        Lease(DurableStore(tmp_path, JOB), "a").take()
        os.write(write, b".")
        signal.pause()

    child = in_child(first)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    os.close(write)
    with pytest.raises(InUse):
        taken(tmp_path, "b")
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    taken(tmp_path, "b")


def test_a_killed_process_that_takes_long_to_die_is_waited_for(
    tmp_path: Path, taken: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of hundreds of gigabytes is not taken down within seconds."""
    first = taken(tmp_path, "a")
    looks = iter([True] * 20)

    def dying(_: ProcessIdentity) -> bool:
        if next(looks, False):
            return True
        first.leave(ended=False)  # its process is gone
        return False

    monkeypatch.setattr(lease, "_DYING_S", 0.0)
    monkeypatch.setattr(ProcessIdentity, "dying", dying)
    taken(tmp_path, "b")


def test_a_process_is_dying_from_the_moment_at_which_it_was_killed() -> None:
    assert kill_pending("Name:\tx\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n")
    assert kill_pending("SigPnd:\t0000000000000100\nShdPnd:\t0000000000004000\n")
    assert not kill_pending("SigPnd:\t0000000000000000\nShdPnd:\t0000000000004000\nSigBlk:\t0000000000000100\n")
    assert not process_of(os.getpid()).dying()
    assert not ProcessIdentity(os.getpid(), 1, namespace(), 0).dying(), "another process that had the same pid"


@BOTH
def test_of_another_host_a_beat_that_moves_is_a_job_that_lives(remote: RemotePath, taken: Callable[..., Lease]) -> None:
    taken(remote, "a")
    elsewhere(remote, beat=1)
    over = threading.Event()

    def beat() -> None:
        number = 1
        while not over.wait(0.05):
            number += 1
            elsewhere(remote, beat=number)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(InUse):
            taken(remote, "b")
    finally:
        over.set()
        beating.join()


def test_of_another_host_a_beat_that_stands_still_is_a_job_that_is_gone(
    tmp_path: Path, taken: Callable[..., Lease]
) -> None:
    taken(tmp_path, "a")
    elsewhere(tmp_path)
    path = tmp_path / JOB / lease.NAME
    old = path.stat().st_mtime - EXPIRY_S - 1
    os.utime(path, (old, old))
    taken(tmp_path, "b")


def test_who_was_overtaken_saves_no_more(tmp_path: Path, monkeypatch: Any, taken: Callable[..., Lease]) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.02)
    told = threading.Event()
    first = taken(tmp_path, "a")
    first.keep(lambda _: told.set())
    later = Lease(DurableStore(tmp_path, JOB), "b")
    assert later.hold() == ""
    later.leave(ended=False)
    assert told.wait(60)
    assert "taken over" in first.lost


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 60_000, b"\xff", b'{"owner":1}', b'{"owner":"x","epoch":"y"}'])
def test_a_damaged_file_is_nobodys(tmp_path: Path, content: bytes, taken: Callable[..., Lease]) -> None:
    (tmp_path / JOB).mkdir()
    (tmp_path / JOB / lease.NAME).write_bytes(content)
    taken(tmp_path, "a")
    with pytest.raises(InUse):
        taken(tmp_path, "b")


# -- what failed saves leave
def test_parts_of_a_job_that_is_over_go_at_once_and_those_of_one_that_lives_stay(
    tmp_path: Path, taken: Callable[..., Lease]
) -> None:
    store = DurableStore(tmp_path, JOB)
    living = taken(tmp_path, "b", 2)
    assert save(store, 1, fencing_token=2)
    for of in (1, 2, 3):
        assert write_shard(store.writer(2, 20, of, 2), 0)
    known, fencing_token = living_fencing_token(store)
    assert (known, fencing_token) == (True, 2)

    def gc() -> list[int]:
        known, alive = living_fencing_token(store)
        collect(
            store,
            Retention(1),
            fencing_token=2,
            now=lambda: 0.0,
            orphan_ttl_s=1.0,
            over=lambda one: known and one != alive,
        )
        return sorted(part.fencing_token for part in store.parts())

    assert gc() == [2]
    living.leave(ended=True)
    assert gc() == []


class Quota(Files):
    """A disk of so many bytes."""

    def __init__(self, root: Path, size: int) -> None:
        self.root, self.size = root, size

    def write(self, fd: int, data: memoryview) -> int:
        used = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        if used + len(data) > self.size:
            raise OSError(28, "No space left on device")
        return super().write(fd, data)


def test_a_disk_that_is_full_keeps_no_job_from_what_it_owns(tmp_path: Path, taken: Callable[..., Lease]) -> None:
    """Workers that have all been lost start again, and ask for what is theirs."""
    taken(tmp_path, "job")
    again = Lease(DurableStore(tmp_path, JOB, files=Quota(tmp_path, 0)), "job")
    again.take()
    again.leave(ended=False)
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="No space left"):
        Lease(DurableStore(tmp_path / "other", JOB, files=Quota(tmp_path, 0)), "job").take()


def test_saves_that_fail_leave_nothing_and_go_on_when_there_is_room_again(
    manager: Callable[..., CheckpointManager], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    one, training = manager(durable_every=1, keep=1), Training(width=256)
    quota = one._store.files = Quota(root, 10**9)
    one.prepare(training.state)
    training.step()
    assert one.save(1, durable=True).durable.result()
    quota.size = used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) + 6000
    for step in range(2, 12):  # there is room for a fragment or two, and never for a shard
        training.step()
        assert not one.save(step, durable=True).durable.result()
        one.wait_until_finished()
    assert one._store.parts() == []
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= used
    quota.size = 10**9
    training.step()
    assert one.save(12, durable=True).durable.result()
    one.wait_until_finished()
    assert [info.step for info in one._store.checkpoints()] == [12], "every one is read whole when it is written"
    one.close()


def test_the_next_start_removes_what_the_ones_before_have_left(
    manager: Callable[..., CheckpointManager], tmp_path: Path
) -> None:
    store = DurableStore(tmp_path / "checkpoints", "run")
    (tmp_path / "checkpoints").mkdir()
    for fencing_token in (1, 2):
        assert write_shard(store.writer(2, 20, fencing_token, 2), 0)
    one, training = manager(), Training()
    one.prepare(training.state)
    training.step()
    assert one.save(1, durable=True).durable.result()
    one.wait_until_finished()
    assert store.parts() == []
    two = manager(job="run")
    two.prepare(Training().state)
    assert two.save(2, durable=True).durable.result()
    handle = one.save(3, durable=True)
    assert not handle.durable.result(), "the later start has fenced it"
