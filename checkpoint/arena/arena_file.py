"""The file under an arena: opened safely, mapped and locked, with records that survive a torn write.

A record has two copies. Every change writes both, each with one pwrite, and first the copy that does not count now. A
crash before or during the first write leaves the former state; a later crash leaves the new state. Between changes a
damaged copy loses nothing. Records are read with pread, so a truncated file gives an error instead of SIGBUS there. The
mapping is accessed only after the file's size was checked.

Locks are open-file-description locks: they end with the process that holds them, and two descriptors of one process
exclude each other. Descriptors given by the caller are therefore reopened through /proc.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from rackrun.checkpoint.arena.arena_format import PAGE, RECORD_BYTES, SlotHeader, Superblock
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, MemoryPlanError
from rackrun.checkpoint.host_memory.populate import BY_ITSELF, Populating, populate
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["ArenaFile", "change_points"]

LOCK_S_MAX = 5.0
_READS_MAX = 100
_FLOCK = struct.Struct("@hhqqi4x")
_R = TypeVar("_R", Superblock, SlotHeader)

register("arena.create.allocated", "arena.create.formatted", "arena.create.linked")


def change_points(*operations: str) -> None:
    """Register the crash points around the writing of a record by each of ``operations``."""
    register(*(f"{operation}.{edge}" for operation in operations for edge in ("ready", "one_copy", "both_copies")))


class ArenaFile:
    """An open arena file: its mapping, its records and its lock."""

    def __init__(self, fd: int, path: Path | None, *, writable: bool) -> None:
        self.fd, self.path, self.writable = fd, path, writable
        self.size = os.fstat(fd).st_size
        self.map: mmap.mmap | None = None
        self._mutex = threading.RLock()
        self._depth = 0

    @classmethod
    def create(
        cls,
        where: str | os.PathLike[str] | int,
        size: int,
        records: Mapping[int, bytes],
        *,
        populating: Populating = BY_ITSELF,
    ) -> ArenaFile:
        """Allocate ``size`` bytes, write ``records`` (offset -> bytes), then link the file to its name.

        A crash on the way leaves nothing. ``where``: a path, or the descriptor of an empty file. Raises
        `MemoryPlanError` when the memory is not there, else `CheckpointError`.
        """
        path = None if isinstance(where, int) else Path(where)
        try:
            fd = _reopened(where, os.O_RDWR) if isinstance(where, int) else _unnamed(Path(where).parent)
        except OSError as error:
            raise CheckpointError(
                f"no arena can be made at {where}: {error.strerror}.",
                remedy="give a folder on a tmpfs that you may write to.",
            ) from error
        file = cls(fd, path, writable=True)
        try:
            if file.size:
                raise CheckpointError("the descriptor's file is not empty.", remedy="make the arena in a new memfd.")
            os.fchmod(fd, 0o600)
            file._allocate(size, populating)
            crash_point("arena.create.allocated")
            for at, record in records.items():
                for copy in (0, 1):
                    file.write(at + copy * PAGE, record)
            crash_point("arena.create.formatted")
            if path is not None:
                _link(fd, path)
            else:
                with contextlib.suppress(OSError):  # not a memfd, or a memfd that was made without sealing
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            crash_point("arena.create.linked")
            return file
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, where: str | os.PathLike[str] | int, *, writable: bool) -> ArenaFile:
        """Open an existing file.

        Raises `IntegrityError` for a file that is not private to this user, else `CheckpointError`.
        """
        flags = os.O_RDWR if writable else os.O_RDONLY
        path = None if isinstance(where, int) else Path(where)
        try:
            if isinstance(where, int):
                fd = _reopened(where, flags)
            else:
                fd = os.open(where, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise IntegrityError(
                    f"{where} is a symbolic link, not an arena.", remedy="find out who put it there, and remove it."
                ) from error
            raise CheckpointError(
                f"no arena can be opened at {where}: {error.strerror}.", remedy="create it first."
            ) from error
        try:
            file = cls(fd, path, writable=writable)
            file.check()
            return file
        except BaseException:
            os.close(fd)
            raise

    def map_all(self) -> None:
        """Map the whole file. Core dumps leave the mapping out."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        self.map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED, prot=access)
        self.map.madvise(mmap.MADV_DONTDUMP)

    def populate(self, how: Populating = BY_ITSELF) -> None:
        """Fault the pages in now, so that no save has to wait for that.

        See `rackrun.checkpoint.host_memory.populate.populate`.
        """
        populate(self.fd, self.address(), self.size, how)
        assert self.map is not None
        self.map.madvise(mmap.MADV_DONTDUMP)  # the kernel may have mapped pieces anew

    def _allocate(self, size: int, populating: Populating) -> None:
        """Set the size and fault all pages in. After ftruncate alone, missing memory would show later as SIGBUS.

        Raises `MemoryPlanError` when the memory is not there.
        """
        try:
            os.ftruncate(self.fd, size)
            self.size = size
            self.map_all()
            self.populate(populating)
        except BaseException as error:
            if self.map is not None:
                self.map.close()
                self.map = None
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, 0)
            if not isinstance(error, OSError):
                raise
            raise MemoryPlanError(
                f"an arena of {size} bytes does not fit at {self}: {error.strerror}.",
                remedy="make the tmpfs larger, use fewer slots, or use parity instead of mirrors.",
            ) from error

    def check(self) -> None:
        """Check that the file is still the private file of this user that was opened, with its size unchanged.

        Raises `IntegrityError` otherwise.
        """
        self._require_open()
        now = os.fstat(self.fd)
        problem = ""
        if not stat.S_ISREG(now.st_mode):
            problem = "it is not a regular file"
        elif now.st_uid != os.geteuid():
            problem = f"it belongs to user {now.st_uid}, and this process is user {os.geteuid()}"
        elif stat.S_IMODE(now.st_mode) != 0o600:
            problem = f"its mode is {stat.S_IMODE(now.st_mode):o}, not 600"
        elif now.st_size != self.size:
            problem = f"its size is {now.st_size}, not {self.size}"
        elif self.path is not None:
            try:
                named = os.stat(self.path, follow_symlinks=False)
            except FileNotFoundError:
                problem = "it has been removed"
            else:
                if (named.st_dev, named.st_ino) != (now.st_dev, now.st_ino):
                    problem = "another file has taken its place"
                elif now.st_nlink != 1:
                    problem = f"it has {now.st_nlink} names"
        if problem:
            raise IntegrityError(
                f"the arena {self} cannot be trusted: {problem}.",
                remedy="delete the file if it is still there, and restore this rank from another copy or from the checkpoint directory.",
            )

    def view(self, at: int, count: int) -> memoryview:
        """Return ``count`` bytes of the mapping from ``at`` on, after `check`."""
        assert self.map is not None
        self.check()
        return memoryview(self.map)[at : at + count]

    def address(self) -> int:
        """Return the address of the mapping in this process."""
        assert self.map is not None
        return int(np.frombuffer(self.map, dtype=np.uint8).ctypes.data)

    # -- records
    def load(self, at: int, kind: type[_R]) -> _R | None:
        """Return the valid copy of a record with the larger sequence number; None when both copies are damaged."""
        for _ in range(_READS_MAX):  # a writer may have changed the copies between the two reads
            pages = self._copies(at)
            record, _ = _newest(pages, kind)
            if record is not None or pages == self._copies(at):
                return record
        return None

    def store(self, at: int, record: _R, operation: str) -> None:
        """Replace a record. The caller holds `exclusive`. ``operation`` names the crash points."""
        former, copy = _newest(self._copies(at), type(record))
        data = record._replace(seq=former.seq + 1 if former else 1).encode()
        crash_point(f"{operation}.ready")
        self.write(at + (1 - copy) * PAGE, data)
        crash_point(f"{operation}.one_copy")
        self.write(at + copy * PAGE, data)
        crash_point(f"{operation}.both_copies")

    def write(self, at: int, data: bytes) -> None:
        if os.pwrite(self.fd, data, at) != len(data):
            raise IntegrityError(f"the arena {self} took only a part of a write.", remedy="check the host's memory.")

    def _copies(self, at: int) -> tuple[bytes, bytes]:
        return os.pread(self.fd, RECORD_BYTES, at), os.pread(self.fd, RECORD_BYTES, at + PAGE)

    # -- locks
    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock for changing records: one thread of one process has it at a time.

        It is held for microseconds, so a long wait means that its holder is stopped. Raises `CheckpointError` after
        `LOCK_S_MAX` seconds.
        """
        self._require_open()
        with self._mutex:
            deadline = time.monotonic() + LOCK_S_MAX
            while self._depth == 0 and not lock(self.fd, 0, shared=False):
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"another process has held the lock of the arena {self} for {LOCK_S_MAX} s.",
                        remedy="end that process: it is stopped while it changes a record.",
                    )
                time.sleep(0.001)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    unlock(self.fd, 0)

    def reopened(self, flags: int = os.O_RDONLY) -> int:
        """Return a new descriptor of the file, whose locks exclude those of other descriptors."""
        self._require_open()
        return _reopened(self.fd, flags)

    # -- end
    def unlink(self) -> None:
        if self.path is not None:
            self.check()
            self.path.unlink()

    def close(self) -> None:
        if self.map is not None:
            with contextlib.suppress(BufferError):  # a caller still has a view: the mapping is released with the view
                self.map.close()
            self.map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _require_open(self) -> None:
        if self.fd < 0:
            raise CheckpointError(f"the arena {self} is closed.", remedy="attach again.")

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else "in memory"


def lock(fd: int, at: int, *, shared: bool) -> bool:
    """Lock the byte at ``at`` without waiting. Return False when another descriptor has locked it."""
    try:
        fcntl.fcntl(
            fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        )
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, at: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))


# -- helpers


def _newest(pages: tuple[bytes, bytes], kind: type[_R]) -> tuple[_R | None, int]:
    a, b = (kind.decode(page) for page in pages)
    if b is not None and (a is None or b.seq > a.seq):
        return b, 1
    return a, 0


def _reopened(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _unnamed(folder: Path) -> int:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _link(fd: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
    try:  # with a src_dir_fd os.link calls linkat, which follows the link in /proc
        os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError as error:
        raise CheckpointError(
            f"there is a file at {path} already.", remedy="attach to it if it is this job's arena, or remove it."
        ) from error
    finally:
        os.close(folder)
