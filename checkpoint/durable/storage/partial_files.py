"""Names of files that are being written, and which of them no living process writes any more.

A small file is written under a name that says which process writes it, and then renamed. A writer that is killed in
between leaves that file. Another process of this host and pid namespace sees whether the writer lives. A writer
elsewhere, or of an earlier release, is not seen: its file,
and one of this process, counts as left when it is older than the caller's limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.checkpoint.base.process_identity import ProcessIdentity, boot_id, namespace, process_of

if TYPE_CHECKING:
    from rackrun.checkpoint.durable.storage.files import Files

__all__ = ["left_files", "partial_path"]

_PARTIAL = re.compile(r"\.\S+-[0-9a-f]{8}(?:[0-9a-f]{8})?\.part", re.ASCII)
_PROBE = re.compile(r"\.clock-[0-9a-f]{8}", re.ASCII)
"""A file that `rackrun.checkpoint.durable.lease` of an earlier release wrote to read the clock of the storage."""
_WRITER = re.compile(r"-([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{8}\.part", re.ASCII)


def partial_path(path: Path) -> Path:
    """Return a new name beside ``path``, under which this process writes it."""
    return path.with_name(f".{path.name}-{_place()}-{_me(os.getpid())}-{secrets.token_hex(4)}.part")


def left_files(files: Files, directory: Path, before: float | None) -> Iterator[Path]:
    """Yield the files in a directory that a writer has left unfinished. Raises OSError.

    ``before``: Unix time in seconds; older files of writers that cannot be seen count as left. None: none of them does.
    """
    if files.objects:
        return  # an object appears whole
    for name in files.listdir(directory):
        if not _PARTIAL.fullmatch(name) and not _PROBE.fullmatch(name):
            continue
        lives = _writer_lives(name)
        if lives is None:
            with contextlib.suppress(FileNotFoundError):
                lives = before is None or files.stat(directory / name).st_mtime >= before
        if lives is False:
            yield directory / name


def _writer_lives(name: str) -> bool | None:
    """Whether the process that the name of a file names still exists. None when that cannot be seen from here, and for
    this process, which may have failed to delete what it could not finish."""
    found = _WRITER.search(name)
    if found is None or found[1] != _place():
        return None
    pid, start = int(found[2]), int(found[3])
    if pid == os.getpid():
        return None if process_of(pid).start == start else False
    return ProcessIdentity(pid, start, namespace(), 0).alive()


def _place() -> str:
    """Return what tells this start of this host, and this pid namespace, from others."""
    return _digest(boot_id(), namespace())


@cache
def _digest(boot: str, space: int) -> str:
    return blake2b(f"{boot} {space}".encode(), digest_size=4).hexdigest()


@cache
def _me(pid: int) -> str:
    return f"{pid}-{process_of(pid).start}"
