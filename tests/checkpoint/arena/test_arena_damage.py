"""The arena's file: what it must be to be trusted, which formats are read, and what is seen of damage."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.arena import arena_format as form
from rackrun.checkpoint.arena.arena import Arena, SlotState
from rackrun.checkpoint.arena.arena_format import PAGE, RECORD_BYTES, Geometry, SlotHeader, Superblock
from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, IntegrityError, MemoryPlanError
from rackrun.protocol import crash_points
from tests.checkpoint.arenas import CHUNK, JOB, ROOM, content, create, read, save, states

# -- what the file must be


def test_an_existing_file_is_not_created_over(path: Path) -> None:
    path.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="already"):
        create(path)
    assert path.read_bytes() == b"mine"
    assert os.listdir(path.parent) == [path.name]


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    create(real).close()
    path.symlink_to(real)
    with pytest.raises(IntegrityError, match="symbolic link"):
        Arena.attach(path, job=JOB)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="already"):
        create(path)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o400, 0o4600])
def test_a_mode_other_than_0600_is_refused(path: Path, mode: int) -> None:
    create(path).close()
    assert path.stat().st_mode & 0o7777 == 0o600
    path.chmod(mode)
    with pytest.raises(IntegrityError, match=f"mode is {mode:o}"):
        Arena.attach(path, job=JOB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_another_users_file_is_refused(path: Path) -> None:
    create(path).close()
    os.chown(path, 12345, 12345)
    with pytest.raises(IntegrityError, match="user 12345"):
        Arena.attach(path, job=JOB)


def test_a_second_name_of_the_file_is_refused(path: Path, tmp_path: Path) -> None:
    create(path).close()
    os.link(path, tmp_path / "second")
    with pytest.raises(IntegrityError, match="2 names"):
        Arena.attach(path, job=JOB)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None])
def test_what_is_no_file_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    for writable in (False, True):
        with pytest.raises(CheckpointError):
            Arena.attach(path, job=JOB, writable=writable, fencing_token=1)


def _truncate(path: Path) -> None:
    os.truncate(path, 100)


def _grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + PAGE)


def _replace(path: Path) -> None:
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").chmod(0o600)
    path.with_name("copy").rename(path)


def _chmod(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize("damage", [_truncate, _grow, _replace, Path.unlink, _chmod])
def test_a_file_changed_from_outside_while_open_is_noticed_by_every_call(
    path: Path, damage: Callable[[Path], None]
) -> None:
    arena = create(path)
    save(arena, 1)
    reader, writer = arena.reader(1), arena.begin(2, 20)
    damage(path)
    for act in (
        arena.slots,
        reader.verify,
        lambda: reader.payload,
        lambda: writer.seal(5, ""),
        lambda: arena.begin(3, 30),
        lambda: arena.reader(1),
        lambda: arena.commit(1),
        arena.unlink,
    ):
        with pytest.raises(IntegrityError, match="cannot be trusted"):
            act()
    arena.close()


def test_unlink_removes_the_file(path: Path) -> None:
    with create(path) as arena:
        arena.unlink()
    assert not path.exists()


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"slots": 65}, {"payload_bytes": 0}, {"chunk_bytes": 2**31}, {"rank": -1}]
)
def test_an_arena_that_cannot_be_is_refused_before_anything_is_made(path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        create(path, **wrong)
    assert not path.exists()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_tmpfs_is_a_typed_error_at_create_and_leaves_nothing(small_tmpfs: Path) -> None:
    with pytest.raises(MemoryPlanError, match="does not fit"):
        create(small_tmpfs / "arena", payload_bytes=2**20)
    assert list(small_tmpfs.iterdir()) == []
    assert os.statvfs(small_tmpfs).f_bfree == os.statvfs(small_tmpfs).f_blocks
    create(small_tmpfs / "arena", payload_bytes=2**18).close()


# -- formats


def _superblock(**changed: Any) -> Superblock:
    from rackrun.checkpoint.base.process_identity import NOBODY

    return Superblock(bytes(16), JOB, 3, 1, Geometry(2, ROOM, CHUNK), NOBODY, 1)._replace(**changed)


def _sealed_again(record: bytes) -> bytes:
    body = record[: RECORD_BYTES - 4]
    return body + crc(memoryview(body)).to_bytes(4, "little")


def _write_superblocks(path: Path, record: bytes) -> None:
    with path.open("r+b") as file:
        for at in (0, PAGE):
            file.seek(at)
            file.write(record)


def test_a_newer_format_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(path).close()
    monkeypatch.setattr(form, "FORMAT", 2)
    _write_superblocks(path, _superblock().encode())
    monkeypatch.undo()
    with pytest.raises(FormatVersionError, match="format 2, and this release reads up to 1"):
        Arena.attach(path, job=JOB)


def test_a_newer_format_that_this_reader_can_read_is_read() -> None:
    record = bytearray(_superblock().encode())
    record[8:10] = (2).to_bytes(2, "little")  # written as 2, readable from 1 on
    assert Superblock.decode(_sealed_again(bytes(record))) == _superblock()


def test_the_other_byte_order_is_refused() -> None:
    record = bytearray(_superblock().encode())
    record[12:13] = b">" if record[12:13] == b"<" else b"<"
    with pytest.raises(FormatVersionError, match="byte order"):
        Superblock.decode(_sealed_again(bytes(record)))


@pytest.mark.parametrize(
    "geometry", [Geometry(64, 2**46, 1), Geometry(3, ROOM, CHUNK), Geometry(2, ROOM + PAGE, CHUNK)]
)
def test_a_superblock_that_claims_more_than_the_file_has_is_refused_before_anything_is_allocated(
    path: Path, geometry: Geometry
) -> None:
    create(path).close()
    _write_superblocks(path, _superblock(geometry=geometry).encode())
    with pytest.raises(IntegrityError, match="its superblock says"):
        Arena.attach(path, job=JOB)


def test_a_header_that_claims_more_than_the_slot_has_does_not_count(path: Path) -> None:
    with create(path) as arena:
        save(arena, 1)
        header = arena._header(0)
        arena._store(header._replace(payload_bytes=2**40), "arena.commit")
        assert arena.slots()[0].state is SlotState.BAD


def test_a_header_of_another_arena_or_slot_does_not_count(path: Path, tmp_path: Path) -> None:
    with create(path) as arena, create(tmp_path / "other") as other:
        save(arena, 1)
        save(other, 1)
        at, next_at = (arena._superblock.geometry.header_at(slot) for slot in (0, 1))
        own, foreign = path.read_bytes()[at : at + 2 * PAGE], (tmp_path / "other").read_bytes()[at : at + 2 * PAGE]
        for target, pages in ((at, foreign), (next_at, own)):
            os.pwrite(arena._file.fd, pages, target)
        assert [slot.state for slot in arena.slots()] == [SlotState.BAD, SlotState.BAD]


@given(
    body=st.binary(min_size=RECORD_BYTES - 4 - 24, max_size=RECORD_BYTES - 4 - 24),
    kind=st.sampled_from([Superblock, SlotHeader]),
)
def test_any_record_with_a_right_checksum_decodes_within_bounds_or_not_at_all(body: bytes, kind: Any) -> None:
    prefix = _superblock().encode()[:24] if kind is Superblock else SlotHeader(bytes(16), 0).encode()[:24]
    record = kind.decode(_sealed_again(prefix + body))
    if record is not None:
        again = kind.decode(record.encode())
        assert again == record


@given(garbage=st.binary(max_size=3 * PAGE))
def test_garbage_is_no_arena(garbage: bytes) -> None:
    fd = os.memfd_create("garbage", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.pwrite(fd, garbage, 0)
        with pytest.raises(IntegrityError, match="no whole superblock"):
            Arena.attach(fd, job=JOB)
    finally:
        os.close(fd)


# -- damage


def test_every_single_bit_flip_of_a_record_makes_it_invalid() -> None:
    sealed = SlotHeader(bytes(range(16)), 1, SlotState.COMMITTED, number=5, step=50, digest=bytes(range(32)))
    for record in (_superblock(), sealed):
        data = bytearray(record.encode())
        assert type(record).decode(bytes(data)) == record
        for bit in range(len(data) * 8):
            data[bit // 8] ^= 1 << bit % 8
            assert type(record).decode(bytes(data)) is None
            data[bit // 8] ^= 1 << bit % 8


@pytest.fixture
def two_checkpoints(path: Path) -> Iterator[tuple[Arena, mmap.mmap]]:
    """An arena with checkpoints 1 and 2, opened to read, and its file to be damaged."""
    with create(path) as arena:
        save(arena, 1)
        save(arena, 2, commit=False)
    with Arena.attach(path, job=JOB) as arena, path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as damage:
        yield arena, damage


def _flips(damage: mmap.mmap, extents: list[tuple[int, int]]) -> Iterator[int]:
    """Every bit of ``extents`` is wrong once; its byte's offset."""
    for start, stop in extents:
        for at in range(start, stop):
            for bit in range(8):
                damage[at] ^= 1 << bit
                yield at
                damage[at] ^= 1 << bit


def _is_whole(arena: Arena, number: int) -> bool:
    """False when its damage was detected and named; an AssertionError when it was not detected."""
    try:
        assert read(arena, number) == content(number)
    except IntegrityError as error:
        return f"checkpoint {number} " not in str(error)
    return True


def test_every_single_bit_flip_of_a_superblock_is_harmless(
    path: Path, two_checkpoints: tuple[Arena, mmap.mmap]
) -> None:
    arena, damage = two_checkpoints
    copies = [(0, RECORD_BYTES), (PAGE, PAGE + RECORD_BYTES)]
    for _ in _flips(damage, copies):
        with Arena.attach(path, job=JOB) as opened:
            assert opened._superblock == arena._superblock


def test_every_single_bit_flip_of_a_header_is_harmless(two_checkpoints: tuple[Arena, mmap.mmap]) -> None:
    arena, damage = two_checkpoints
    before, geometry = arena.slots(), arena._superblock.geometry
    for slot in (0, 1):
        at = geometry.header_at(slot)
        for _ in _flips(damage, [(at, at + RECORD_BYTES), (at + PAGE, at + PAGE + RECORD_BYTES)]):
            assert arena.slots() == before  # with the digests that a chunk table is checked against
    assert _is_whole(arena, 1)
    assert _is_whole(arena, 2)


def test_every_single_bit_flip_of_a_chunk_table_or_payload_is_detected(
    two_checkpoints: tuple[Arena, mmap.mmap],
) -> None:
    arena, damage = two_checkpoints
    before, geometry = arena.slots(), arena._superblock.geometry
    for slot in (0, 1):
        table, payload = geometry.table_at(slot), geometry.payload_at(slot)
        for at in _flips(damage, [(table, table + 4 * 3), (payload, payload + ROOM)]):
            assert not _is_whole(arena, slot + 1), f"byte {at}"
        assert _is_whole(arena, 1)
        assert _is_whole(arena, 2)
    assert arena.slots() == before


def test_the_rest_of_the_file_is_never_read(path: Path, two_checkpoints: tuple[Arena, mmap.mmap]) -> None:
    arena, damage = two_checkpoints
    before, geometry = arena.slots(), arena._superblock.geometry
    used = [(0, RECORD_BYTES), (PAGE, PAGE + RECORD_BYTES)]
    for slot in (0, 1):
        header, table, payload = geometry.header_at(slot), geometry.table_at(slot), geometry.payload_at(slot)
        used += [(header, header + RECORD_BYTES), (header + PAGE, header + PAGE + RECORD_BYTES)]
        used += [(table, table + 4 * 3), (payload, payload + ROOM)]
    read_bytes = np.zeros(len(damage), dtype=bool)
    for start, stop in used:
        read_bytes[start:stop] = True
    image = np.frombuffer(damage, dtype=np.uint8)
    for bit in range(8):
        image[~read_bytes] ^= 1 << bit
        with Arena.attach(path, job=JOB) as opened:
            assert opened.slots() == arena.slots() == before
            assert all(_is_whole(opened, number) for number in (1, 2))
    del image


def test_a_flip_says_which_chunk_and_leaves_the_others_readable(two_checkpoints: tuple[Arena, mmap.mmap]) -> None:
    arena, damage = two_checkpoints
    damage[arena._superblock.geometry.payload_at(0) + CHUNK + 5] ^= 1
    reader = arena.reader(1)
    assert reader.chunk(0) == content(1)[:CHUNK]
    assert reader.chunk(2) == content(1)[2 * CHUNK :]
    with pytest.raises(IntegrityError, match=r"chunk 1 of checkpoint 1 \(data of rank 3\) in slot 0"):
        reader.chunk(1)
    del reader


def test_a_checkpoint_with_a_damaged_table_is_not_committed(
    two_checkpoints: tuple[Arena, mmap.mmap], path: Path
) -> None:
    reader, damage = two_checkpoints
    damage[reader._superblock.geometry.table_at(1)] ^= 1
    with Arena.attach(path, job=JOB, writable=True, fencing_token=1) as arena:
        with pytest.raises(IntegrityError, match="chunk table"):
            arena.commit(2)
        assert states(arena)[1] == ("SEALED", 2)


def test_a_slot_with_both_headers_lost_is_bad_and_is_written_again(
    two_checkpoints: tuple[Arena, mmap.mmap], path: Path
) -> None:
    reader, damage = two_checkpoints
    at = reader._superblock.geometry.header_at(1)
    damage[at : at + 2 * PAGE] = bytes(2 * PAGE)
    assert reader.slots()[1].state is SlotState.BAD
    with Arena.attach(path, job=JOB, writable=True, fencing_token=1) as arena:
        assert save(arena, 3) == 1


@pytest.mark.parametrize("damaged", [0, 1])
def test_the_only_whole_copy_of_a_record_is_written_last(
    two_checkpoints: tuple[Arena, mmap.mmap], path: Path, damaged: int
) -> None:
    reader, damage = two_checkpoints
    at = reader._superblock.geometry.header_at(1)
    damage[at + damaged * PAGE] ^= 1
    whole = at + (1 - damaged) * PAGE
    before, then = damage[whole : whole + PAGE], []

    def note(point: str) -> None:
        if point == "arena.commit.one_copy":
            then.append(damage[whole : whole + PAGE])

    with Arena.attach(path, job=JOB, writable=True, fencing_token=1) as arena:
        crash_points.enable(note)
        arena.commit(2)
        crash_points.enable(None)
    assert then == [before]
    assert damage[at : at + PAGE] == damage[at + PAGE : at + 2 * PAGE] != before


def _attach_again(arena: Arena) -> None:
    where = arena._file.path
    assert where is not None
    Arena.attach(where, job=JOB, writable=True, fencing_token=2).close()


def _seal(arena: Arena) -> None:
    arena._writers[0].seal(ROOM, "layout")


CHANGES: dict[str, Callable[[Arena], object]] = {
    "attach": _attach_again,
    "begin": lambda arena: arena.begin(4, 40),
    "seal": _seal,
    "commit": lambda arena: arena.commit(2),
    "mark_bad": lambda arena: arena.mark_bad(1, "reason"),
    "release": lambda arena: arena.release(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_torn_record_shows_the_former_state(path: Path, tmp_path: Path, change: str) -> None:
    """Each copy of each record that a change writes, cut after each of its bytes, as the first to be written and as
    the second."""
    with create(path, slots=4) as arena:
        save(arena, 1)
        save(arena, 2, commit=False)
        arena.begin(3, 30).payload[:] = content(3)
        before = path.read_bytes()
        CHANGES[change](arena)
        after = path.read_bytes()
    torn = tmp_path / "torn"
    torn.touch(0o600)
    torn.write_bytes(before)
    records = [at for at in range(0, len(before), PAGE) if before[at : at + PAGE] != after[at : at + PAGE]]
    a, b = (at for at in records if before[at : at + 2] == b"RR")  # the two copies
    assert b - a == PAGE

    with torn.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:

        def seen() -> object:
            with Arena.attach(torn, job=JOB) as found:
                return found._superblock.fencing_token, found.slots()

        former = seen()
        for at in records:  # a chunk table is written before the header
            if at not in (a, b):
                image[at : at + PAGE] = after[at : at + PAGE]
        for first, second in ((a, b), (b, a)):
            for count in range(RECORD_BYTES):
                image[first + count] = after[first + count]
                if image[first : first + RECORD_BYTES] != after[first : first + RECORD_BYTES]:
                    assert seen() == former
            new = seen()
            assert new != former
            for count in range(RECORD_BYTES):
                image[second + count] = after[second + count]
                assert seen() == new
            for at in (a, b):
                image[at : at + PAGE] = before[at : at + PAGE]
