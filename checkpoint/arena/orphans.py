"""Arenas on a tmpfs whose job is dead: found, and removed by whoever asks for it.

An arena outlives its writer on purpose, so a dead writer alone makes no orphan. It is one when all processes that are
named in it are dead, by pid and start time (`rackrun.checkpoint.base.process_identity`), and no process has it open. What no process
claims, because its writer closed it, may be waiting for the next one, and is told apart.

Traps. Processes of other pid namespaces count as alive, because their pids mean nothing here. Whether a process that only
reads has it open is seen for processes whose ``/proc`` entries may be read. Between looking and removing, an arena may be
attached again: `remove` looks once more, under the lock that attaching takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rackrun.checkpoint.arena.arena_file import ArenaFile
from rackrun.checkpoint.arena.arena_format import PAGE, RECORD_BYTES, SlotHeader, Superblock
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.base.process_identity import NOBODY, Process

__all__ = ["ArenaState", "FoundArena", "find_arenas", "remove"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where arenas are; nothing is made here
_DEPTH_MAX = 4

Inode = tuple[int, int]


class ArenaState(StrEnum):
    USED = "in use"
    ORPHANED = "orphaned"
    """Every process that is named in it is dead, and nobody has it open."""
    CLOSED = "closed"
    """Its writer has given it back, and nobody has it open."""
    UNREADABLE = "unreadable"
    """Another user's, a newer release's, or damaged: left alone."""


@dataclass(frozen=True)
class FoundArena:
    path: Path
    bytes: int
    state: ArenaState
    why: str
    job: str = ""
    rank: int = -1
    epoch: int = -1


def find_arenas(folder: Path = SHARED_MEMORY) -> list[FoundArena]:
    """All arenas in ``folder`` and below it, by path. Symbolic links are not followed. Raises CheckpointError when it
    cannot be listed."""
    try:
        os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}.", remedy="give a directory.") from error
    held = _open_files()
    return [found for path in sorted(_files(folder)) if (found := _look(path, held)) is not None]


def remove(found: FoundArena) -> None:
    """Remove an orphaned or closed arena. Raises CheckpointError when it is in use again, or cannot be removed."""
    file = ArenaFile.open(found.path, writable=True)
    try:
        with file.exclusive():
            now = _state_of(file, _open_files(), besides=os.getpid())
            if now.state not in (ArenaState.ORPHANED, ArenaState.CLOSED) or now.job != found.job:
                raise CheckpointError(f"{found.path} is {now.state}: {now.why}.", remedy="look again.")
            try:
                file.unlink()
            except OSError as error:
                raise CheckpointError(
                    f"{found.path} cannot be removed: {error.strerror}.", remedy="be the user who owns it."
                ) from error
    finally:
        file.close()


def _files(folder: Path) -> Iterator[Path]:
    for below, folders, names in os.walk(folder):
        if len(Path(below).relative_to(folder).parts) >= _DEPTH_MAX:
            folders.clear()
        yield from (Path(below) / name for name in names)


def _look(path: Path, held: dict[Inode, int]) -> FoundArena | None:
    """None: it is no arena, or gone."""
    size = 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = os.fstat(fd).st_size
            pages = [os.pread(fd, RECORD_BYTES, at) for at in (0, PAGE)]
        finally:
            os.close(fd)
        if all(Superblock.decode(page) is None for page in pages):
            return None
        file = ArenaFile.open(path, writable=False)
    except OSError:
        return None  # gone, a link, or another user's: not to be touched
    except CheckpointError as error:
        return FoundArena(path, size, ArenaState.UNREADABLE, error.what)
    try:
        return _state_of(file, held)
    except CheckpointError as error:
        return FoundArena(path, size, ArenaState.UNREADABLE, error.what)
    finally:
        file.close()


def _state_of(file: ArenaFile, held: dict[Inode, int], besides: int = 0) -> FoundArena:
    superblock = file.load(0, Superblock)
    assert file.path is not None
    if superblock is None:
        return FoundArena(file.path, file.size, ArenaState.UNREADABLE, "both copies of its superblock are damaged")
    processes = [superblock.claim]
    for slot in range(superblock.geometry.slots):
        header = file.load(superblock.geometry.header_at(slot), SlotHeader)
        if header is not None and header.fits(superblock, slot):
            processes.append(header.writer)
    status = os.fstat(file.fd)
    state, why = _judged(processes, held.get((status.st_dev, status.st_ino), 0), besides)
    return FoundArena(file.path, file.size, state, why, superblock.job, superblock.rank, superblock.epoch)


def _judged(processes: list[Process], holder: int, besides: int) -> tuple[ArenaState, str]:
    living = next((process for process in processes if process.alive()), None)
    if living is not None:
        return ArenaState.USED, f"{living} writes it"
    if holder and holder != besides:
        return ArenaState.USED, f"process {holder} has it open"
    claim = processes[0]
    if claim == NOBODY:
        return ArenaState.CLOSED, "its writer closed it"
    return ArenaState.ORPHANED, f"{claim} is dead"


def _open_files() -> dict[Inode, int]:
    """(device, inode) of what processes have open or mapped -> one of their pids; of this one, only when no other has."""
    found: dict[Inode, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        for inode in (*_descriptors(name), *_maps(name)):
            if found.get(inode, os.getpid()) == os.getpid():
                found[inode] = pid
    return found


def _descriptors(pid: str) -> Iterator[Inode]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                yield status.st_dev, status.st_ino


def _maps(pid: str) -> Iterator[Inode]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                major, _, minor = device.partition(":")
                yield os.makedev(int(major, 16), int(minor, 16)), int(inode)
