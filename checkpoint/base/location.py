"""Where checkpoints are stored: a local directory, or a place in an object store (``s3://bucket/folder``).

A place in an object store is a `RemotePath`. It has parts and can be joined like any path, but no system call accepts
it: code that does not know object stores raises, and never makes a local folder called ``s3:``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path, PosixPath
from urllib.parse import unquote

from rackrun.errors import UsageError

__all__ = ["REMOTE", "RemotePath", "absolute", "is_remote", "local_path", "parse_location"]

REMOTE = ("s3", "gs", "az", "abfs", "memory")
"""URL schemes of the supported object stores."""
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.*)", re.DOTALL)

Location = str | os.PathLike[str]


class RemotePath(PosixPath):
    """A place in an object store, such as ``RemotePath("s3:", "bucket", "folder")``."""

    def __str__(self) -> str:
        scheme, *rest = self.parts
        return f"{scheme}//{'/'.join(rest)}"

    def __fspath__(self) -> str:
        raise UsageError(
            f"{self} is in an object store: this needs a local directory.", remedy="give a directory that is mounted."
        )

    def resolve(self, strict: bool = False) -> RemotePath:  # noqa: ARG002 - pathlib's own
        return self

    def absolute(self) -> RemotePath:
        return self

    def exists(self, **_: bool) -> bool:
        raise TypeError(self.__fspath__())  # pathlib would return False

    is_dir = is_file = is_symlink = exists

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def key(self) -> str:
        """The bucket and the name in it, as fsspec takes them."""
        return "/".join(self.parts[1:])


def parse_location(given: Location, *, but: Collection[str] = ()) -> Path:
    """Return a local path or a `RemotePath`. Raises UsageError for an unknown scheme or a place without a bucket.

    ``but``: schemes that the caller does not take, so that no remedy names them.
    """
    if isinstance(given, RemotePath):
        return given
    text = os.fspath(given)
    match = _SCHEME.fullmatch(text)
    if match is None:
        return Path(text)
    scheme = _ALIASES.get(match[1].lower(), match[1].lower())
    if scheme == "file":
        return _of_file(text, match[2])
    if scheme not in REMOTE:
        stores = [f"{one}://" for one in REMOTE if one not in but]
        remedy = f"give a directory, or one of {', '.join(stores)}." if stores else "give a local directory."
        raise UsageError(f"{text}: {match[1]}:// is not supported.", remedy=remedy)
    parts = [part for part in match[2].split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        raise UsageError(f"{text} names no place in an object store.", remedy=f"give {scheme}://BUCKET/FOLDER.")
    return RemotePath(f"{scheme}:", *parts)


def _of_file(text: str, rest: str) -> Path:
    """Return the path of a ``file:`` URL (RFC 8089). Raises UsageError when the URL names another host."""
    after = text.split(":", 1)[1]
    if after.startswith("//") and not after.startswith("///"):
        host, _, rest = rest.partition("/")
        if host != "localhost":
            raise UsageError(f"{text} is a file of the host {host}.", remedy="give file:///PATH, or the path itself.")
    return Path("/" + unquote(rest))


def is_remote(path: Path) -> bool:
    """Whether ``path`` is in an object store."""
    return isinstance(path, RemotePath)


def absolute(given: Location, *, but: Collection[str] = ()) -> Path:
    """Parse like `parse_location`, and make a local path absolute, with ``~`` expanded to the home directory."""
    path = parse_location(given, but=but)
    return path if is_remote(path) else path.expanduser().absolute()


def local_path(given: Location, what: str) -> Path:
    """Return a local path. Raises UsageError, naming ``what``, for a place in an object store."""
    path = parse_location(given, but=REMOTE)
    if is_remote(path):
        raise UsageError(f"{what} {path} is in an object store.", remedy="give a local directory.")
    return path
