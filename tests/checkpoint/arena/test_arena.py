"""The arena: what its slots hold, who may write, and what is seen of damage."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.arena import arena_file
from rackrun.checkpoint.arena.arena import Arena, SlotState
from rackrun.checkpoint.arena.arena_format import SlotHeader
from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.base.errors import (
    CheckpointError,
    DuplicateOwner,
    IntegrityError,
    NoUsableCheckpoint,
    StaleFencingToken,
)
from tests.checkpoint.arenas import CHUNK, JOB, ROOM, content, create, digesting, read, save, states

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@contextlib.contextmanager
def another_process(body: Callable[[], object]) -> Iterator[int]:
    """A fork that has run ``body`` and lives until the end of the block, or until it is killed."""
    ready, tell = os.pipe()
    wait, end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(end)
        try:
            kept = body()
            os.write(tell, b"+")
            os.read(wait, 1)
            del kept
        finally:
            os._exit(0)
    os.close(tell)
    os.close(wait)
    try:
        assert os.read(ready, 1) == b"+", "the other process failed"
        yield pid
    finally:
        os.close(end)
        os.close(ready)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


# -- what slots hold


def test_a_sealed_image_reads_back_byte_for_byte(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1, commit=False)
        reader = arena.reader(1)
        assert b"".join(reader.chunk(i) for i in range(3)) == content(1) == reader.payload
        assert len(reader.crcs) == 3
        (info, free) = arena.slots()
        assert (info.state, info.number, info.step, info.fencing_token, info.kind) == (
            SlotState.SEALED,
            1,
            10,
            1,
            "data",
        )
        assert (info.owner, info.payload_bytes, info.layout_hash) == (3, ROOM, f"layout-{ROOM}")
        assert free.state is SlotState.FREE
        del reader


def test_it_outlives_its_writer(path: Path) -> None:
    create_and_save = lambda: save(create(path), 7)  # noqa: E731
    with another_process(create_and_save) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with Arena.attach(path, job=JOB) as arena:
            assert read(arena, 7) == content(7)


def test_a_memfd_serves_as_well_and_cannot_be_cut_short() -> None:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with create(fd) as arena:
        save(arena, 1)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 100)
        with Arena.attach(fd, job=JOB) as other:
            assert read(other, 1) == content(1)
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, ROOM])
def test_an_image_of_any_size_up_to_the_room_fits(path: Path, size: int) -> None:
    with create(path) as arena:
        save(arena, 1, size=size)
        assert read(arena, 1) == content(1, size)
        assert len(arena.reader(1).crcs) == -(-size // CHUNK)


@pytest.mark.parametrize("size", [-1, ROOM + 1])
def test_an_image_of_another_size_is_refused_and_the_slot_can_still_be_sealed(path: Path, size: int) -> None:
    with create(path) as arena, arena.begin(1, 1) as writer:
        with pytest.raises(CheckpointError, match="not within"):
            writer.seal(size, "")
        writer.seal(5, "")
        assert states(arena)[0] == ("SEALED", 1)


def test_threads_seal_the_same(path: Path) -> None:
    with create(path) as arena:
        digests = set()
        for threads in (1, 3):
            with arena.begin(5, 5) as writer:
                writer.payload[:] = content(5)
                writer.seal(ROOM, "", threads=threads)
            digests.add(arena.reader(5).manifest_digest)
            arena.release(5)
        assert len(digests) == 1


_FILLED = st.tuples(st.integers(0, ROOM + 10), st.sampled_from([0, 0, 1, 3]))


@given(fills=st.lists(_FILLED, max_size=6), size=st.integers(0, ROOM))
def test_what_is_digested_while_it_is_filled_is_sealed_the_same(fills: list[tuple[int, int]], size: int) -> None:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    with create(fd) as arena:
        with arena.begin(1, 10) as writer:
            writer.payload[:] = content(1)
            for upto, threads in fills:
                writer.filled(upto, threads)
            writer.seal(size, "")
        assert read(arena, 1) == content(1)[:size]
        assert arena.reader(1).crcs.tolist() == chunk_crcs(memoryview(content(1)[:size]), CHUNK).tolist()
    os.close(fd)


def test_what_is_abandoned_while_threads_digest_it_leaves_none(path: Path) -> None:
    with create(path) as arena:
        with arena.begin(1, 10) as writer:
            writer.filled(ROOM, 3)
        assert not digesting()
        assert states(arena)[0][0] == "FREE"


def test_all_that_is_begun_when_an_arena_is_closed_is_abandoned(path: Path) -> None:
    arena = create(path)
    for number in (1, 2):
        arena.begin(number, number).filled(ROOM, 2)
    arena.close()
    assert not digesting()
    with Arena.attach(path, job=JOB) as other:
        assert [state for state, _ in states(other)][:2] == ["FREE", "FREE"]


def test_threads_that_digest_end_although_the_slot_cannot_be_freed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with create(path) as arena:
        writer = arena.begin(1, 10)
        writer.filled(ROOM, 3)
        with monkeypatch.context() as failing:
            failing.setattr(arena._file, "check", Mock(side_effect=OSError(5, "no such disk")))
            with pytest.raises(OSError, match="no such disk"):
                writer.abandon()
        assert not digesting()


def test_a_byte_changed_after_it_was_called_final_shows_as_damage(path: Path) -> None:
    with create(path) as arena, arena.begin(1, 10) as writer:
        writer.filled(ROOM)
        writer.payload[0] = 1
        writer.seal(ROOM, "")
        with pytest.raises(IntegrityError, match="chunk 0"):
            read(arena, 1)


@pytest.mark.parametrize("threads", [1, 3, 99])
def test_however_many_threads_verify_they_find_the_damaged_chunk(path: Path, threads: int) -> None:
    with create(path) as arena:
        save(arena, 1)
        reader = arena.reader(1)
        reader.verify(threads)
        with path.open("r+b") as file:
            file.seek(arena._superblock.geometry.payload_at(reader._header.slot) + 2 * CHUNK + 1)
            file.write(b"\0")
        with pytest.raises(IntegrityError, match="chunk 2"):
            reader.verify(threads)


def test_copies_in_other_arenas_and_fencing_tokens_have_the_same_manifest_digest(tmp_path: Path) -> None:
    with create(tmp_path / "a") as one, create(tmp_path / "b", rank=8, fencing_token=4, slots=3) as two:
        save(one, 5)
        save(two, 5, owner=3)
        assert one.reader(5).manifest_digest == two.reader(5, owner=3).manifest_digest
        save(two, 6, kind="parity", owner=3)
        assert two.reader(6, "parity", 3).manifest_digest != two.reader(5, owner=3).manifest_digest


def test_all_memory_is_allocated_and_faulted_in_at_create(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    with create(path, payload_bytes=2**20) as arena:
        size = path.stat().st_size
        assert path.stat().st_blocks * 512 >= size
        mappings = Path("/proc/self/smaps").read_text().split(f" {path.stat().st_ino} ")
        resident_kib = re.search(r"^Rss: +(\d+) kB$", mappings[1], re.MULTILINE)
        assert resident_kib
        assert int(resident_kib[1]) * 1024 == size
        assert arena.payload_bytes == 2**20


# -- which slot is written over


def test_slots_are_written_in_turn(path: Path) -> None:
    with create(path) as arena:
        assert [save(arena, n) for n in range(1, 6)] == [0, 1, 0, 1, 0]
        assert states(arena) == [("COMMITTED", 5), ("COMMITTED", 4)]


def test_the_newest_committed_checkpoint_is_never_written_over(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        for number in range(2, 6):
            assert save(arena, number, commit=False) == 1
            assert read(arena, 1) == content(1)


def test_without_a_slot_that_may_be_written_over_begin_refuses(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        save(arena, 2, commit=False)
        with pytest.raises(CheckpointError, match=r"has no slot .* checkpoints \[2\] must stay"):
            arena.begin(3, 30, keep={2})
        assert states(arena) == [("COMMITTED", 1), ("SEALED", 2)]


def test_the_oldest_goes_first_and_bad_ones_before_it(path: Path) -> None:
    with create(path, slots=3) as arena:
        for number in (1, 2, 3):
            save(arena, number)
        arena.mark_bad(2, "NaN after restore")
        assert arena.slots()[1].reason == "NaN after restore"
        assert [save(arena, n, commit=False) for n in (4, 5)] == [1, 0]


def test_the_newest_of_each_owner_and_kind_is_kept(path: Path) -> None:
    with create(path, slots=4) as arena:
        save(arena, 1)
        save(arena, 1, owner=9)
        save(arena, 1, kind="parity", owner=0)
        for number in (2, 3):
            assert save(arena, number, commit=False) == 3
        arena.commit(3)
        assert save(arena, 4) == 0  # own data, superseded by 3; the mirror and the parity have no newer one


def test_a_checkpoint_is_written_once(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        with pytest.raises(CheckpointError, match="written once"):
            arena.begin(1, 10)
        with arena.begin(2, 20), pytest.raises(CheckpointError, match="written once"):
            arena.begin(2, 20)


def test_a_slot_that_was_abandoned_is_free(path: Path) -> None:
    with create(path) as arena:
        with arena.begin(1, 10):
            assert states(arena)[0] == ("WRITING", 1)
        assert states(arena)[0] == ("FREE", -1)


def test_a_slot_that_a_dead_process_was_writing_is_free(path: Path) -> None:
    with (
        another_process(lambda: create(path, slots=1).begin(1, 10)) as pid,
        Arena.attach(path, job=JOB, writable=True, fencing_token=2) as arena,
    ):
        with pytest.raises(CheckpointError, match="no slot"):
            arena.begin(2, 20)  # it lives, and may still store into the slot
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, though nobody has read its exit status
        save(arena, 2)
        assert read(arena, 2) == content(2)


def test_a_leased_checkpoint_is_not_written_over(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        save(arena, 2)
        with arena.lease(1):
            arena.release(1)  # its owner needs it no more; whoever reads it still does
            with pytest.raises(CheckpointError, match="no slot"):
                arena.begin(3, 30)
        assert save(arena, 3) == 0


def test_the_lease_of_another_process_counts_until_it_dies(path: Path) -> None:
    def hold() -> object:
        lease = Arena.attach(path, job=JOB).lease(1)
        lease.__enter__()
        return lease

    with create(path) as arena:
        save(arena, 1)
        save(arena, 2)
        with another_process(hold) as pid:
            with pytest.raises(CheckpointError, match="no slot"):
                arena.begin(3, 30)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            save(arena, 3)


def test_what_is_not_there_cannot_be_leased_read_committed_or_released(path: Path) -> None:
    with create(path) as arena:
        with arena.begin(1, 10):
            for act in (arena.lease(1).__enter__, lambda: arena.reader(1), lambda: arena.commit(1)):
                with pytest.raises(NoUsableCheckpoint, match="checkpoint 1"):
                    act()
        with pytest.raises(NoUsableCheckpoint):
            arena.release(1)


def test_the_newest_committed_checkpoint_is_not_released(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        with pytest.raises(CheckpointError, match="newest committed"):
            arena.release(1)
        save(arena, 2)
        arena.release(1)
        assert states(arena) == [("FREE", -1), ("COMMITTED", 2)]


def test_commit_again_is_no_error(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        arena.commit(1)
        assert states(arena)[0] == ("COMMITTED", 1)


def test_a_bad_checkpoint_is_no_source(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        arena.mark_bad(1, "x" * 500)
        with pytest.raises(NoUsableCheckpoint):
            arena.reader(1)
        assert 0 < len(arena.slots()[0].reason) < 500


@pytest.mark.parametrize("number", [-1, 2**63])
def test_checkpoints_out_of_bounds_are_refused(path: Path, number: int) -> None:
    with create(path) as arena:
        with pytest.raises(CheckpointError, match="checkpoint number is"):
            arena.begin(number, 0)
        with pytest.raises(CheckpointError, match="step is"):
            arena.begin(1, number if number > 0 else -2)
        with arena.begin(2**63 - 1, -1) as writer:
            writer.seal(0, "")
        assert [slot.number for slot in arena.slots()] == [2**63 - 1, -1]


# -- who may write


def test_a_larger_fencing_token_fences_the_smaller(path: Path) -> None:
    with create(path) as old:
        writer = old.begin(1, 10)
        with Arena.attach(path, job=JOB, writable=True, fencing_token=2) as new:
            for act in (lambda: writer.seal(5, ""), lambda: old.begin(2, 20), lambda: old.commit(1)):
                with pytest.raises(StaleFencingToken, match=r"fencing token 1 is stale: 2"):
                    act()
            with pytest.raises(StaleFencingToken):
                Arena.attach(path, job=JOB, writable=True, fencing_token=1)
            assert save(new, 3) == 1  # slot 0 is in the hands of the fenced one
            writer.abandon()
            assert states(new) == [("WRITING", 1), ("COMMITTED", 3)]


def test_a_second_living_owner_of_a_fencing_token_is_refused(path: Path) -> None:
    with create(path), pytest.raises(DuplicateOwner, match=f"process {os.getpid()}"):
        Arena.attach(path, job=JOB, writable=True, fencing_token=1)


def test_the_claim_of_a_process_that_died_or_closed_is_free(path: Path) -> None:
    with another_process(lambda: create(path)) as pid:
        with pytest.raises(DuplicateOwner):
            Arena.attach(path, job=JOB, writable=True, fencing_token=1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for _ in range(2):
            with Arena.attach(path, job=JOB, writable=True, fencing_token=1) as arena:
                assert arena.fencing_token == 1


def test_a_later_process_with_the_same_pid_is_not_its_owner(path: Path) -> None:
    with create(path) as arena:
        claim = arena._superblock.claim
        assert claim.alive()
        assert not claim._replace(start=claim.start + 1).alive()
        assert claim._replace(namespace=claim.namespace + 1).alive()  # cannot be looked at: taken as alive


def test_a_fork_does_not_inherit_the_right_to_write(path: Path) -> None:
    def body() -> None:
        with pytest.raises(DuplicateOwner, match="a fork"):
            arena.begin(1, 1)

    with create(path) as arena, another_process(body):
        pass


def test_a_reader_cannot_write(path: Path) -> None:
    with (
        create(path),
        Arena.attach(path, job=JOB) as reader,
        pytest.raises(CheckpointError, match="attached to read"),
    ):
        reader.begin(1, 10)


def test_another_jobs_arena_is_refused(path: Path) -> None:
    with create(path), pytest.raises(CheckpointError, match="of job 'run-42', not of 'other'"):
        Arena.attach(path, job="other")


def test_a_reader_sees_the_slots_of_one_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with create(path) as arena, Arena.attach(path, job=JOB) as reader:
        with arena.begin(9, 90):
            save(arena, 1)
        save(arena, 2, commit=False)
        assert states(reader) == [("SEALED", 2), ("COMMITTED", 1)]
        plain = reader._header

        def header(index: int) -> SlotHeader:
            found = plain(index)
            if found.number == 2 and found.state is SlotState.SEALED:  # after the first look at slot 0
                arena.commit(2)
                arena.begin(3, 30)
            return found

        monkeypatch.setattr(reader, "_header", header)
        assert states(reader) == [("COMMITTED", 2), ("WRITING", 3)]


def test_a_stopped_process_that_holds_the_lock_is_an_error_not_a_hang(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_file, "LOCK_S_MAX", 0.0)
    with create(path) as arena:
        other = arena._file.reopened(os.O_RDWR)
        assert arena_file.lock(other, 0, shared=False)
        with pytest.raises(CheckpointError, match="held the lock"):
            arena.begin(1, 10)
        os.close(other)
        save(arena, 1)


# -- the rest


def test_a_closed_arena_says_so(path: Path) -> None:
    arena = create(path)
    save(arena, 1)
    reader, writer = arena.reader(1), arena.begin(2, 20)
    arena.close()
    arena.close()
    for act in (
        arena.slots,
        reader.verify,
        lambda: arena.begin(3, 30),
        lambda: arena.reader(1),
        lambda: arena.commit(1),
        arena.lease(1).__enter__,
    ):
        with pytest.raises(CheckpointError, match="is closed"):
            act()
    with pytest.raises(CheckpointError, match="abandoned already"):
        writer.seal(5, "")


def test_errors_say_what_to_do(path: Path) -> None:
    with create(path) as arena, pytest.raises(CheckpointError, match="Remedy: ") as caught:
        arena.reader(1)
    assert caught.value.remedy


def test_views_kept_by_the_caller_stay_good_after_close(path: Path) -> None:
    arena = create(path)
    save(arena, 1)
    kept = np.frombuffer(arena.reader(1).payload, dtype=np.uint8)
    arena.close()
    assert kept.tobytes() == content(1)
