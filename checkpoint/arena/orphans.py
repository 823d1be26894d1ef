"""Find arenas on a tmpfs whose job is dead, and remove those that the caller names.

An arena outlives its writer on purpose, so a dead writer alone makes no orphan. An arena is an orphan when all
processes named in it are dead, by pid and start time (`rackrun.checkpoint.base.process_identity`), and no process has
it open. An arena that its writer closed may be waiting for the next writer, and is reported as closed, not orphaned.

Processes of other pid namespaces count as alive, because their pids mean nothing here. A process that only reads an
arena is noticed only if its ``/proc`` entries may be read. Between finding and removing, an arena may be attached
again: `remove` checks once more, under the lock that attaching takes.
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
from rackrun.checkpoint.base.process_identity import NOBODY, ProcessIdentity

__all__ = ["ArenaState", "FoundArena", "find_arenas", "remove"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - arenas are found here; no file is made
_DEPTH_MAX = 4

Inode = tuple[int, int]


class ArenaState(StrEnum):
    """Whether an arena is still needed."""

    USED = "in use"
    ORPHANED = "orphaned"
    """Every process named in it is dead, and no process has it open."""
    CLOSED = "closed"
    """Its writer closed it, and no process has it open."""
    UNREADABLE = "unreadable"
    """It belongs to another user or a newer release, or is damaged. It is left alone."""


@dataclass(frozen=True)
class FoundArena:
    """One arena and its state. ``why``: the reason for the state, in words."""

    path: Path
    bytes: int
    state: ArenaState
    why: str
    job: str = ""
    rank: int = -1
    fencing_token: int = -1


def find_arenas(folder: Path = SHARED_MEMORY) -> list[FoundArena]:
    """Return all arenas in ``folder`` and below, sorted by path. Symbolic links are not followed.

    Raises CheckpointError when the folder cannot be listed.
    """
    try:
        os.listdir(folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be listed: {error.strerror}.",
            remedy="give a directory that exists and that you may read.",
        ) from error
    held = _open_files()
    return [found for path in sorted(_files(folder)) if (found := _look(path, held)) is not None]


def remove(found: FoundArena) -> None:
    """Remove an orphaned or closed arena. Raises CheckpointError when it is in use again or cannot be removed."""
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
    """Describe the arena at ``path``; None when the file is no arena, or is gone."""
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
        return None  # gone, a link, or another user's file: never touched
    except CheckpointError as error:
        return FoundArena(path, size, ArenaState.UNREADABLE, error.what)
    try:
        return _state_of(file, held)
    except CheckpointError as error:
        return FoundArena(path, size, ArenaState.UNREADABLE, error.what)
    finally:
        file.close()


def _state_of(file: ArenaFile, held: dict[Inode, int], besides: int = 0) -> FoundArena:
    """Decide the state of an open arena.

    ``held``: (device, inode) -> a pid that has it open; ``besides`` is not counted.
    """
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
    return FoundArena(file.path, file.size, state, why, superblock.job, superblock.rank, superblock.fencing_token)


def _judged(processes: list[ProcessIdentity], holder: int, besides: int) -> tuple[ArenaState, str]:
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
    """Return (device, inode) -> a pid, for all files that processes have open or mapped.

    Other processes come before this one.
    """
    found: dict[Inode, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        pid = int(name)
        for inode in (*_descriptors(name), *_maps(name)):
            if found.get(inode, os.getpid()) == os.getpid():
                found[inode] = pid
    return found


def _descriptors(pid: str) -> Iterator[Inode]:
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
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
