"""The pages of an arena are had ahead: all of them, or an error, and nothing that is half done."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.errors import CheckpointError, MemoryPlanError
from rackrun.checkpoint.host_memory import populate as module
from rackrun.checkpoint.host_memory.populate import Populating, populate
from tests.checkpoint.arenas import create, read, save

PIECE = 4 * mmap.PAGESIZE
SIZE = 10 * PIECE + mmap.PAGESIZE


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


@pytest.fixture(params=["a kernel that populates", "an older kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "an older kernel":
        monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)  # it knows no such advice
    return str(request.param)


@pytest.fixture
def fd() -> Iterator[int]:
    found = os.memfd_create("test", os.MFD_CLOEXEC)
    yield found
    os.close(found)


@pytest.fixture
def threads_before() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before, "a thread was left behind"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def mapped(fd: int, size: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(fd, size)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("threads", [1, 3, 100])
def test_all_pages_are_there_afterwards(fd: int, threads: int, kernel: str, threads_before: None) -> None:
    os.ftruncate(fd, SIZE)
    memory, address = mapped(fd, SIZE)
    assert allocated(fd) == 0
    populate(fd, address, SIZE, Populating(threads))
    assert allocated(fd) == SIZE
    memory[SIZE - 1] = 7
    assert os.pread(fd, 1, SIZE - 1) == b"\x07", "the mapping is the file's still"


def test_what_is_there_already_stays_as_it_is(fd: int, kernel: str) -> None:
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, b"mine", PIECE - 2)
    memory, address = mapped(fd, SIZE)
    populate(fd, address, SIZE)
    assert memory[PIECE - 2 : PIECE + 2] == b"mine"


@pytest.mark.parametrize("threads", [1, 3])
def test_no_room_is_an_error_not_a_signal(small_tmpfs: Path, threads: int, kernel: str, threads_before: None) -> None:
    fd = os.open(small_tmpfs, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, 2**21)
        memory, address = mapped(fd, 2**21)
        with memory, pytest.raises(OSError, match="No space left"):
            populate(fd, address, 2**21, Populating(threads))
    finally:
        os.close(fd)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_arena_for_which_there_is_no_room_leaves_nothing(small_tmpfs: Path, threads: int, kernel: str) -> None:
    with pytest.raises(MemoryPlanError, match=r"does not fit .*: No space left on device"):
        create(small_tmpfs / "arena", payload_bytes=2**20, populating=Populating(threads))
    assert list(small_tmpfs.iterdir()) == []
    assert os.statvfs(small_tmpfs).f_bfree == os.statvfs(small_tmpfs).f_blocks


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_not_wanted_any_more_ends_with_the_pieces_in_hand(fd: int, threads: int, threads_before: None) -> None:
    asked: list[int] = []

    def wanted() -> bool:
        asked.append(1)
        return len(asked) <= 3

    os.ftruncate(fd, SIZE)
    _, address = mapped(fd, SIZE)
    with pytest.raises(CheckpointError, match="no longer needed"):
        populate(fd, address, SIZE, Populating(threads, wanted))
    assert allocated(fd) <= 3 * PIECE


@pytest.mark.parametrize("threads", [1, 3])
def test_an_arena_that_is_not_wanted_any_more_takes_no_memory(fd: int, threads: int, threads_before: None) -> None:
    asked: list[int] = []

    def wanted() -> bool:
        asked.append(1)
        return len(asked) <= 3

    with pytest.raises(CheckpointError, match="no longer needed"):
        create(fd, payload_bytes=SIZE, populating=Populating(threads, wanted))
    assert (os.fstat(fd).st_size, allocated(fd)) == (0, 0)
    with create(fd, payload_bytes=SIZE) as arena:  # and there may be one later
        save(arena, 1)


def test_an_arena_is_allocated_as_a_whole_and_holds_what_is_saved(fd: int, kernel: str) -> None:
    with create(fd, payload_bytes=SIZE, populating=Populating(3)) as arena:
        assert allocated(fd) == os.fstat(fd).st_size
        save(arena, 1)
        with Arena.attach(fd, job="run-42", writable=True, fencing_token=2) as other:
            assert read(other, 1) == read(arena, 1)


def test_the_kernel_is_asked_without_pythons_lock() -> None:
    """`ctypes.PyDLL`, and the methods of `mmap`, would keep it: nothing else in the process runs then, heartbeats among it."""
    assert not isinstance(module._libc, ctypes.PyDLL)
