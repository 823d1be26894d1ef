"""An object store behind the file operations of the durable tier, through fsspec.

An object is there whole or not at all. There are no directories: a prefix exists as long as an object lies below it.
There is nothing to sync, and there are neither links nor renames; `rackrun.checkpoint.durable.object_writer` does
without them.

fsspec's implementations do not always raise an OSError, and their OSErrors do not always have a number; here they do.
Their listing caches would hide what other ranks have written. A buffered file that is dropped is uploaded by its
destructor. A file of ``memory://`` is visible as soon as it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rackrun.checkpoint.base.digest import content_digest
from rackrun.checkpoint.base.location import RemotePath
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.errors import UsageError

__all__ = ["ObjectFiles", "files_at"]

_NEEDS = {
    "s3": ("s3fs", "s3fs"),
    "gs": ("gcsfs", "gcsfs"),
    "az": ("adlfs", "adlfs"),
    "abfs": ("adlfs", "adlfs"),
}
"""Scheme -> (module, distribution) that it needs."""
_PART_BYTES = 32 * 2**20
"""Size of one part of a multi-part upload. S3 takes at most 10,000 parts."""
_memory_lock = threading.Lock()
"""``memory://`` is one store for the whole process."""


def files_at(path: Path) -> Files:
    """Return the file operations of the store that ``path`` is in.

    Raises UsageError when the store's package is missing.
    """
    return ObjectFiles(path.scheme) if isinstance(path, RemotePath) else Files()


@dataclass
class _Open:
    """An open object, found by its number."""

    path: RemotePath
    size: int
    kind: int = stat.S_IFREG
    upload: Any = None


class ObjectFiles(Files):
    """File operations on objects. All errors are OSErrors with a number."""

    objects = True

    def __init__(self, scheme: str) -> None:
        self._fs = _filesystem(scheme)
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1 << 30)
        self._lock = threading.Lock()
        self._conditional = False
        """Whether the store is known to heed the condition of `replace_version`."""

    # -- one object
    def open(self, path: Path, flags: int) -> int:
        remote = _remote(path)
        with _typed(path):
            if flags & os.O_WRONLY:
                found = _Open(remote, 0, upload=self._upload(remote))
            else:
                info = self._fs.info(remote.key)
                kind = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
                found = _Open(remote, int(info.get("size") or 0), kind)
        with self._lock:
            number = next(self._numbers)
            self._open[number] = found
        return number

    def _upload(self, path: RemotePath) -> Any:
        if path.scheme == "memory":
            return _Held(self._fs, path.key)
        return self._fs.open(path.key, "wb", block_size=_PART_BYTES)

    def write(self, fd: int, data: memoryview) -> int:
        one = self._open[fd]
        with _typed(one.path):
            one.upload.write(bytes(data))
        one.size += len(data)
        return len(data)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        one = self._open[fd]
        if one.kind != stat.S_IFREG:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(one.path))
        end = min(offset + len(into), one.size)
        if end <= offset:
            return 0
        with _typed(one.path):
            data = self._fs.cat_file(one.path.key, start=offset, end=end)
        count = min(len(data), len(into))
        into[:count] = data[:count]
        return count

    def fsync(self, fd: int) -> None:
        """Do nothing: an object is durable when its upload is complete, which `close` waits for."""

    def forget(self, fd: int) -> None:
        """Do nothing: reads come from the store."""

    def fstat(self, fd: int) -> os.stat_result:
        one = self._open[fd]
        return _status(one.kind, one.size, 0.0)

    def close(self, fd: int) -> None:
        one = self._open.pop(fd)
        if one.upload is not None:
            try:
                with _typed(one.path):
                    one.upload.close()
            except OSError:
                _drop(one.upload)
                raise

    def abandon(self, fd: int) -> None:
        one = self._open.pop(fd)
        if one.upload is not None:
            _drop(one.upload)

    def replace(self, path: Path, data: bytes) -> None:
        with _typed(path):
            self._fs.pipe_file(_remote(path).key, data)

    def create(self, path: Path, data: bytes) -> None:
        """Create an object only if there is none, as far as the store supports that. Raises FileExistsError."""
        key = _remote(path).key
        with _typed(path):
            if self._there(key):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            try:
                self._fs.pipe_file(key, data, mode="create")
            except FileExistsError:
                raise
            except (TypeError, ValueError, NotImplementedError, OSError):  # a store without conditional writes
                if self._there(key):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
                self._fs.pipe_file(key, data)

    def version(self, path: Path) -> str:
        """Return what `replace_version` takes. Raises FileNotFoundError, and OSError ENOTSUP where it cannot be done."""
        remote = _remote(path)
        with _typed(path):
            info = self._fs.info(remote.key)
            if remote.scheme == "memory":
                return content_digest(self._fs.cat_file(remote.key))
            if remote.scheme == "s3" and info.get("ETag"):
                return str(info["ETag"])
        raise OSError(errno.ENOTSUP, f"{remote.scheme}:// has no conditional writes here", str(path))

    def replace_version(self, path: Path, data: bytes, version: str) -> None:
        """Replace an object only if it is still the one of this `version`.

        Raises FileExistsError when it is another one by now, FileNotFoundError when it is gone, and OSError ENOTSUP when
        the store does not heed the condition.
        """
        remote = _remote(path)
        if remote.scheme == "memory":
            with _memory_lock, _typed(path):
                if content_digest(self._fs.cat_file(remote.key)) != version:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
                self._fs.pipe_file(remote.key, data)
            return
        self._check_conditions(path)
        with _typed(path):
            try:
                self._fs.pipe_file(remote.key, data, IfMatch=version)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBUSY):  # 412, and 409: another process writes it just now
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
                raise

    def _check_conditions(self, path: Path) -> None:
        """Write an object that is not there under the condition that it is. Raises OSError ENOTSUP if that succeeds:
        servers and clients that do not know the condition ignore it."""
        if self._conditional:
            return
        probe = _remote(path.with_name(f".condition-{secrets.token_hex(8)}"))
        with _typed(path):
            try:
                self._fs.pipe_file(probe.key, b"?", IfMatch='"0"')
            except OSError as error:
                if isinstance(error, FileNotFoundError) or error.errno == errno.EINVAL:
                    self._conditional = True
                    return
                raise
            self._fs.rm_file(probe.key)
        raise OSError(errno.ENOTSUP, "the store ignores If-Match", str(path))

    def _there(self, key: str) -> bool:
        try:
            self._fs.info(key)
        except FileNotFoundError:
            return False
        return True

    def unlink(self, path: Path) -> None:
        with _typed(path):
            self._fs.rm_file(_remote(path).key)

    # -- prefixes
    def stat(self, path: Path) -> os.stat_result:
        with _typed(path):
            info = self._fs.info(_remote(path).key)
        if info["type"] == "directory":
            return _status(stat.S_IFDIR, 0, 0.0)
        return _status(stat.S_IFREG, int(info.get("size") or 0), _time_of(info))

    def sizes(self, directory: Path, names: list[str]) -> dict[str, os.stat_result]:
        """Return the status of each file, from one listing instead of a request for each."""
        found = {name: status for name, status in self._list(directory) if stat.S_ISREG(status.st_mode)}
        for name in names:
            if name not in found:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory / name))
        return found

    def listdir(self, path: Path) -> list[str]:
        return sorted(name for name, _ in self._list(path))

    def _list(self, path: Path) -> list[tuple[str, os.stat_result]]:
        key = _remote(path).key
        with _typed(path):
            self._fs.invalidate_cache()
            infos = self._fs.ls(key, detail=True)
        found = []
        for info in infos:
            below = str(info["name"]).rstrip("/").removeprefix("/")
            if below == key.removeprefix("/"):
                if info["type"] != "directory" and int(info.get("size") or 0):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
                continue  # an empty object that stands for the directory
            kind = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
            found.append((below.rpartition("/")[2], _status(kind, int(info.get("size") or 0), _time_of(info))))
        return found

    def make_root(self, path: Path) -> None:
        """Check that the bucket exists and answers. There is nothing to make."""
        bucket = RemotePath(*path.parts[:2])
        with _typed(bucket):
            if bucket.scheme != "memory":
                self._fs.invalidate_cache()
                self._fs.info(bucket.key)

    def mkdir(self, path: Path) -> None:
        """Do nothing: there are no directories to make."""

    def rmdir(self, path: Path) -> None:
        if _remote(path).scheme == "memory":
            with contextlib.suppress(OSError):
                self._fs.rmdir(_remote(path).key)

    def link(self, old: Path, new: Path) -> None:  # noqa: ARG002
        raise OSError(errno.ENOTSUP, "an object store has no links", str(new))

    def rename(self, old: Path, new: Path) -> None:  # noqa: ARG002
        raise OSError(errno.ENOTSUP, "an object store cannot rename", str(new))


class _Held:
    """An upload for a store that shows a file as soon as it is opened: it is written at once, when closed."""

    def __init__(self, fs: Any, key: str) -> None:
        self._fs, self._key, self._data = fs, key, io.BytesIO()

    def write(self, data: bytes) -> None:
        self._data.write(data)

    def close(self) -> None:
        self._fs.pipe_file(self._key, self._data.getvalue())

    def discard(self) -> None:
        self._data = io.BytesIO()


def _drop(upload: Any) -> None:
    """Drop an upload so that no object appears.

    The store's own rules remove unfinished uploads that it refuses to drop.
    """
    with contextlib.suppress(Exception):
        upload.discard()
    upload.closed = True  # otherwise its destructor completes the upload


def _remote(path: Path) -> RemotePath:
    if not isinstance(path, RemotePath):
        raise UsageError(f"{path} is in no object store.", remedy="give scheme://BUCKET/FOLDER.")
    return path


def _filesystem(scheme: str) -> Any:
    module, package = _NEEDS.get(scheme, ("fsspec", "fsspec"))
    try:
        import fsspec

        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        extra = "" if package == "fsspec" else f" {package}"
        raise UsageError(
            f"{scheme}:// needs the package {module}: {error}.",
            remedy=f"pip install 'rackrun[object-storage]'{extra}",
        ) from error
    except Exception as error:
        raise UsageError(
            f"{scheme}:// cannot be set up: {type(error).__name__}: {error}.",
            remedy=f"see fsspec's configuration (FSSPEC_{scheme.upper()}_...) and the credentials of {package}.",
        ) from error


def _status(kind: int, size: int, time_s: float) -> os.stat_result:
    return os.stat_result((kind | 0o600, 0, 0, 1, 0, 0, size, time_s, time_s, time_s))


_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created", "timeCreated", "creation_time")


def _time_of(info: dict[str, Any]) -> float:
    """Return when an object was written, in seconds by the store's clock; 0.0 when the store does not say."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


@contextlib.contextmanager
def _typed(path: Path) -> Iterator[None]:
    """Turn every exception into an OSError with a number."""
    try:
        yield
    except OSError as error:
        number = error.errno or _number_of(error)
        raise OSError(number, error.strerror or str(error) or os.strerror(number), str(path)) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(path)) from error


def _number_of(error: OSError) -> int:
    for kind, number in (
        (FileNotFoundError, errno.ENOENT),
        (FileExistsError, errno.EEXIST),
        (PermissionError, errno.EACCES),
        (IsADirectoryError, errno.EISDIR),
        (NotADirectoryError, errno.ENOTDIR),
        (TimeoutError, errno.ETIMEDOUT),
    ):
        if isinstance(error, kind):
            return number
    return errno.EIO
