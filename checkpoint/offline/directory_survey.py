"""List what a checkpoint directory contains: jobs, whole and damaged checkpoints, unfinished data, and trash.

It only reads, and trusts only `DurableStore`. Jobs may write and delete meanwhile; what is gone by then is left out.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rackrun.checkpoint.base.errors import CheckpointError, NotOurs, NoUsableCheckpoint
from rackrun.checkpoint.base.location import absolute
from rackrun.checkpoint.durable.durable_manifest import (
    MANIFEST,
    TemporaryName,
    check_job,
    checkpoint_number,
    replaced_number,
)
from rackrun.checkpoint.durable.durable_store import CheckpointInfo, DurableStore, UnpublishedCheckpoint
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.checkpoint.durable.storage.object_store import files_at
from rackrun.errors import UsageError

__all__ = [
    "DamagedCheckpoint",
    "Leftover",
    "DirectorySurvey",
    "nothing_in",
    "one_store",
    "stores_in",
    "survey",
    "unnamed",
]

_TRASH = re.compile(r"\.trash-(?:tmp-|replaced-)?gen-(\d+)-", re.ASCII)
_FRAGMENT = re.compile(r"rank-\d+-of-(\d+)\.json", re.ASCII)


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A directory with a checkpoint's name that is not a whole checkpoint.

    ``ours``: False when it is no checkpoint of that number at all, such as a copy of another.
    """

    number: int
    path: Path
    what: str
    remedy: str
    ours: bool = True

    @property
    def summary(self) -> str:
        """What is wrong, in a sentence that names the checkpoint or its directory."""
        named = self.what.startswith(f"checkpoint {self.number} ") or not self.ours
        return self.what if named else f"checkpoint {self.number} is not whole: {self.what}"


@dataclass(frozen=True)
class Leftover:
    """Unfinished data or trash. *unfinished*: a writer is at work on it, or died. *trash*: it is being deleted.

    *replaced*: the former checkpoint of this number, until the new one's name is on disk. *unnamed*: the same, where no
    checkpoint has its name: it is just now being replaced, or the writer died between the two renames.
    """

    kind: Literal["unfinished", "trash", "replaced", "unnamed"]
    path: Path
    number: int
    fencing_token: int
    """Fencing token of the writers of unfinished data; -1 otherwise."""
    shards: int
    """How many ranks' shards it has whole."""
    world_size: int | None
    """None when there is no fragment that states it."""
    bytes: int
    touched_s: float
    """Newest file time, in Unix seconds."""


@dataclass(frozen=True)
class DirectorySurvey:
    """The content of one job's directory. Checkpoints are newest first."""

    job: str
    directory: Path
    whole: tuple[CheckpointInfo, ...]
    written_s: Mapping[int, float]
    """Checkpoint number -> when its manifest was written, in Unix seconds."""
    damaged: tuple[DamagedCheckpoint, ...]
    leftovers: tuple[Leftover, ...]
    barred: Mapping[int, str]
    """Checkpoint number -> why no restore takes it."""

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, whole, damaged or without their name, newest first."""
        found = [info.number for info in self.whole] + [one.number for one in self.damaged if one.ours]
        return sorted({*found, *(one.number for one in self.leftovers if one.kind == "unnamed")}, reverse=True)


def stores_in(directory: Path | str, job: str | None = None) -> list[DurableStore]:
    """Return the stores of the jobs under ``directory``, or of the one job whose own directory it is.

    ``job``: only that one. Raises UsageError when ``directory`` is not a directory, and when there is no such job.
    """
    path = absolute(directory, but=("memory",)).resolve()
    files = files_at(path)
    names = _listed(files, path)
    if checkpoint_number(path.name) is not None and MANIFEST in names:
        raise UsageError(
            f"{path} is one checkpoint.",
            remedy=f"give {path.parent}, and {checkpoint_number(path.name)} as the checkpoint's number.",
        )
    if any(map(_belongs, names)):
        found = [DurableStore(path.parent, path.name)]
    else:
        found = [DurableStore(path, name) for name in names if _is_job(files, path, name)]
    if job is None:
        return found
    wanted = [store for store in found if store.job == job]
    if not wanted:
        there = ", ".join(store.job for store in found) or "none"
        raise UsageError(f"there is no job {job!r} in {path}.", remedy=f"choose one that is there: {there}.")
    return wanted


def one_store(directory: Path, job: str | None) -> DurableStore:
    """Return the store of the only job there is, or of ``job``.

    Raises UsageError like `stores_in` and when there are several jobs, `NoUsableCheckpoint` when there is none.
    """
    stores = stores_in(directory, job)
    if len(stores) > 1:
        raise UsageError(
            f"{directory} has several jobs: {', '.join(store.job for store in stores)}.",
            remedy="choose one with --job.",
        )
    if not stores:
        raise nothing_in(directory)
    return stores[0]


def nothing_in(directory: Path) -> NoUsableCheckpoint:
    """Return the error for a directory without checkpoints."""
    return NoUsableCheckpoint(
        f"there is no checkpoint in {directory}.",
        remedy="is it the directory of --checkpoint-dir? See rackctl ckpt ls.",
    )


def unnamed(store: DurableStore, number: int, error: NoUsableCheckpoint) -> NoUsableCheckpoint:
    """Return the error for a checkpoint that is not there: another than ``error`` where it is there without its name."""
    with contextlib.suppress(OSError):
        if number in store.replaced().values() and not _is_there(store, number):
            folder = next(path.name for path, of in store.replaced().items() if of == number)
            return NoUsableCheckpoint(
                f"checkpoint {number} of {store.job} is without its name, in {store.directory / folder}: it is being "
                "replaced, or the process that did so died.",
                remedy="if the job runs, try again; otherwise rackctl ckpt gc, or the next start of the job, gives it "
                "its name back.",
            )
    return error


def survey(store: DurableStore) -> DirectorySurvey:
    """List the content of a job's directory. Raises CheckpointError when it cannot be listed."""
    whole = store.checkpoints()
    names = _listed(store.files, store.directory)
    seen = {info.number for info in whole}
    damaged = []
    for number in sorted({n for name in names if (n := checkpoint_number(name)) is not None} - seen, reverse=True):
        try:
            store.whole(number)
        except NoUsableCheckpoint:
            continue  # deleted meanwhile
        except CheckpointError as error:
            ours = not isinstance(error, NotOurs)
            damaged.append(DamagedCheckpoint(number, store.path(number), error.what, error.remedy, ours))
    written = {}
    for info in whole:
        with contextlib.suppress(OSError):
            written[info.number] = store.files.stat(info.path / MANIFEST).st_mtime
    leftovers = [found for name in names if (found := _trash(store, name)) is not None]
    with contextlib.suppress(OSError):
        leftovers += [found for one in store.replaced().items() if (found := _replaced(store, *one)) is not None]
    with contextlib.suppress(OSError):
        leftovers += [found for part in store.parts() if (found := _unfinished(store, part)) is not None]
    barred = {n: why for n, why in Probation(store.directory, store.files).barred().items() if n in seen}
    return DirectorySurvey(store.job, store.directory, tuple(whole), written, tuple(damaged), tuple(leftovers), barred)


def _listed(files: Files, path: Path) -> list[str]:
    try:
        return files.listdir(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not there.", remedy="give the directory of --checkpoint-dir.") from error
    except NotADirectoryError as error:
        raise UsageError(f"{path} is a file.", remedy="give the directory of --checkpoint-dir.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", remedy="be the user who wrote it.") from error


def _belongs(name: str) -> bool:
    """Whether this name is one that rackrun gives in a job's directory."""
    numbers = (checkpoint_number(name), replaced_number(name), TemporaryName.parse(name), _TRASH.match(name))
    return any(one is not None for one in numbers)


def _is_job(files: Files, root: Path, name: str) -> bool:
    with contextlib.suppress(CheckpointError, FileNotFoundError):
        check_job(name)
        is_directory = stat.S_ISDIR(files.stat(root / name).st_mode) or (root / name).is_dir()
        return is_directory and any(map(_belongs, _listed(files, root / name)))
    return False


def _trash(store: DurableStore, name: str) -> Leftover | None:
    match = _TRASH.match(name)
    return _leftover(store, "trash", store.directory / name, int(match[1]), -1) if match else None


def _replaced(store: DurableStore, path: Path, number: int) -> Leftover | None:
    formers = [other for other, of in store.replaced().items() if of == number]
    with contextlib.suppress(OSError):  # otherwise nobody can tell which of several it is
        if store.former_without_name(number, formers) != path:
            return _leftover(store, "replaced", path, number, -1)
    return _leftover(store, "unnamed", path, number, -1)


def _is_there(store: DurableStore, number: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        store.files.stat(store.path(number))
        return True
    return False


def _unfinished(store: DurableStore, part: UnpublishedCheckpoint) -> Leftover | None:
    return _leftover(store, "unfinished", part.path, part.number, part.fencing_token)


def _leftover(
    store: DurableStore,
    kind: Literal["unfinished", "trash", "replaced", "unnamed"],
    path: Path,
    number: int,
    fencing_token: int,
) -> Leftover | None:
    size, shards, world_size = 0, 0, None
    try:
        touched = store.files.stat(path).st_mtime
        for below in store.files.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                status = store.files.stat(path / below)
                size, touched = size + status.st_size, max(touched, status.st_mtime)
                if fragment := _FRAGMENT.fullmatch(below):
                    shards, world_size = shards + 1, int(fragment[1])
    except OSError:
        return None  # finished or deleted meanwhile
    return Leftover(kind, path, number, fencing_token, shards, world_size, size, touched)
