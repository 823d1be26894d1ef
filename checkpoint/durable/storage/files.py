"""The file operations of the durable tier in one replaceable object, and their errors as values.

Storage may fail in the middle of a save, and a save is never worth a training run: whatever `Files` raises becomes a
`FileFailure` before it reaches code that trains.

A failed ``fsync`` may have dropped the pages it could not write and marked them clean, so the next one succeeds over
lost data: the file is thrown away and never synced again. ``close`` reports errors too (NFS, quotas). A name is on disk
only after an ``fsync`` of the directory that holds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError
from rackrun.checkpoint.durable.storage.partial_files import partial_path

__all__ = [
    "FileFailure",
    "FailureKind",
    "Files",
    "FileRefused",
    "Unsynced",
    "delete_tree",
    "failure_of",
    "opened",
    "put_name",
    "read_small",
    "set_aside",
    "sync_directory",
    "write_new",
]


class FailureKind(StrEnum):
    """What went wrong with a file operation."""

    FULL = "full"
    """There is no room, or a quota is reached."""
    READ_ONLY = "read-only"
    """The storage is read-only, or the operation is not permitted."""
    VANISHED = "vanished"
    """A file or directory that was there is gone."""
    UNSYNCED = "unsynced"
    """An fsync failed: the data it covered is not trusted again."""
    IO = "io"
    SOURCE = "source"
    """The bytes to be written differ from the sealed ones."""
    DISAGREES = "disagrees"
    """Other bytes exist under the same name."""


@dataclass(frozen=True)
class FileFailure:
    """Why a file operation failed. ``errno`` is 0 when no system call failed."""

    kind: FailureKind
    what: str
    errno: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class FileRefused(Exception):
    """Carries a FileFailure that no system call reported, up to the caller that turns it into a value."""

    def __init__(self, kind: FailureKind, what: str) -> None:
        super().__init__(what)
        self.failure = FileFailure(kind, what)


class Unsynced(OSError):
    """An fsync failed."""


_KINDS = {
    errno.ENOSPC: FailureKind.FULL,
    errno.EDQUOT: FailureKind.FULL,
    errno.EROFS: FailureKind.READ_ONLY,
    errno.EACCES: FailureKind.READ_ONLY,
    errno.EPERM: FailureKind.READ_ONLY,
    errno.ENOENT: FailureKind.VANISHED,
    errno.ENOTDIR: FailureKind.VANISHED,
    errno.ESTALE: FailureKind.VANISHED,
}


def failure_of(error: Exception) -> FileFailure:
    """Return an exception as a FileFailure."""
    if isinstance(error, FileRefused):
        return error.failure
    if isinstance(error, CheckpointError):
        return FileFailure(FailureKind.IO, str(error))
    number = error.errno or 0 if isinstance(error, OSError) else 0
    kind = FailureKind.UNSYNCED if isinstance(error, Unsynced) else _KINDS.get(number, FailureKind.IO)
    return FileFailure(kind, str(error), number)


class Files:
    """The operating system's file operations. Tests and object stores replace them."""

    objects = False
    """True for an object store: it has no links, no renames, and nothing to sync."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def forget(self, fd: int) -> None:
        """Drop the file's cached pages, so that the next read comes from the disk, as far as the system allows that."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def abandon(self, fd: int) -> None:
        """Close a file whose content is not wanted."""
        self.close(fd)

    def stat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def listdir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def make_root(self, path: Path) -> None:
        """Make the directory that holds the jobs' directories, and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def sizes(self, directory: Path, names: list[str]) -> dict[str, os.stat_result]:
        """Return the status of each of these files. Raises OSError when one is missing."""
        return {name: self.stat(directory / name) for name in names}

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file so that it appears whole under its name, replacing any file there."""
        temporary = partial_path(path)
        write_new(self, temporary, [memoryview(data)])
        try:
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise

    def create(self, path: Path, data: bytes) -> None:
        """Write a small file so that it appears whole under its name. Raises FileExistsError when one is there."""
        temporary = partial_path(path)
        write_new(self, temporary, [memoryview(data)])
        try:
            if not put_name(self, temporary, path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        finally:
            with contextlib.suppress(OSError):
                self.unlink(temporary)


@contextlib.contextmanager
def opened(files: Files, path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file for the duration of a ``with`` block. After an error it is abandoned, not closed normally."""
    fd = files.open(path, flags)
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            files.abandon(fd)
        raise
    files.close(fd)


def write_new(files: Files, path: Path, parts: Iterable[memoryview]) -> None:
    """Write a new file with ``parts`` one after the other, and sync it. When this raises, no file is left."""
    try:
        with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            size = 0
            for part in parts:
                size += len(part)
                _write_all(files, fd, part)
            if (found := files.fstat(fd).st_size) != size:
                raise OSError(errno.EIO, f"the file has {found} bytes after {size} were written", str(path))
            _fsync(files, fd, path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(path)
        raise


def _write_all(files: Files, fd: int, data: memoryview) -> None:
    while len(data):
        written = files.write(fd, data)
        if written <= 0:
            raise OSError(errno.EIO, "the file system accepted no bytes")
        data = data[written:]


def _fsync(files: Files, fd: int, path: Path) -> None:
    try:
        files.fsync(fd)
    except OSError as error:
        raise Unsynced(error.errno, f"fsync: {error.strerror}", str(path)) from error


def sync_directory(files: Files, path: Path) -> None:
    """Sync a directory, so that the names in it are on disk. Raises Unsynced."""
    with opened(files, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        _fsync(files, fd, path)


_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


def put_name(files: Files, temporary: Path, name: Path) -> bool:
    """Give a finished file its name, in the directory of its temporary name.

    Return False when the name is taken, by another writer or an earlier attempt; nothing is changed then. Where the
    file system has no hard links, the file is renamed instead: writers of one name are expected to write the same
    bytes, and `verify` notices when they do not.
    """
    try:
        files.link(temporary, name)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if _exists(files, name):
            return False
        files.rename(temporary, name)
    return True


def _exists(files: Files, path: Path) -> bool:
    try:
        files.stat(path)
    except FileNotFoundError:
        return False
    return True


def read_small(files: Files, path: Path, limit: int) -> bytes:
    """Read a whole file of at most ``limit`` bytes. Raises IntegrityError when it is longer, or no plain file."""
    with opened(files, path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        status = files.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise IntegrityError(
                f"{path} is not a plain file of at most {limit} bytes.", remedy="use another checkpoint."
            )
        data = bytearray(status.st_size)
        view = memoryview(data)
        done = 0
        while done < len(data) and (count := files.pread(fd, view[done:], done)) > 0:
            done += count
        return bytes(data[:done])


def set_aside(files: Files, path: Path) -> Path | None:
    """Rename a directory to a trash name. Return that name; None when another process has done it already."""
    trash = path.with_name(f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    try:
        files.rename(path, trash)
    except FileNotFoundError:
        return None
    return trash


def delete_tree(files: Files, path: Path, first: str = "") -> Iterator[Path]:
    """Delete a directory, the file named ``first`` before all others.

    Yields each name after it is gone. What another process deletes meanwhile counts as gone.
    """
    try:
        names = files.listdir(path)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda name: (name != first, name)):
        below = path / name
        try:
            if stat.S_ISDIR(files.stat(below).st_mode):
                yield from delete_tree(files, below)
            else:
                files.unlink(below)
        except FileNotFoundError:
            continue
        yield below
    with contextlib.suppress(FileNotFoundError):
        files.rmdir(path)
