"""The durable tier: the checkpoints of a job as directories, each of which is whole or not there.

A writer (`CheckpointWriter`) copies the sealed payload of one rank into ``.tmp-gen-...``. It computes the CRC32C of
each chunk from the very bytes that are written, and compares it with the sealed one. A file is written, synced, then
named; the rank's fragment follows in the same way. Whoever finds all fragments there writes the manifest, syncs the
directory, renames it to ``gen-...`` and syncs the parent. There are no locks and no roles: all ranks' writers, on any
host, may do each of this at once, again, or for a dead owner. Names are given by ``link``, so the first writer wins,
and later ones compare: equal bytes are success.

Nothing here raises into training: `CheckpointWriter` returns True or False, and ``failure`` says why it failed.

A reader trusts a directory only by its manifest's digest and the exact size of every file. `DurableStore.verify` reads
all bytes.

What is published is not changed. It is replaced only where a job says so (`CheckpointWriter`): a job that numbers its
checkpoints by their steps, and does a step again after it has passed over the checkpoint of that step.
"""

from __future__ import annotations

import contextlib
import errno
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rackrun.checkpoint.base.errors import (
    CheckpointError,
    IntegrityError,
    NotOurs,
    NoUsableCheckpoint,
    Unreadable,
    is_damage,
)
from rackrun.checkpoint.base.location import parse_location
from rackrun.checkpoint.durable.durable_manifest import (
    FRAGMENT_BYTES_MAX,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    VERIFIED,
    Fragment,
    Manifest,
    Record,
    TemporaryName,
    attempt_fencing_token,
    attempt_name,
    check_job,
    checkpoint_name,
    checkpoint_number,
    fragment_name,
    replaced_number,
    seal,
    shard_name,
    temporary_name,
    unseal,
)
from rackrun.checkpoint.durable.durable_reader import CheckpointReader, ShardReader
from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.durable.object_writer import ObjectWriter
from rackrun.checkpoint.durable.storage.files import Files, Unsynced, read_small, set_aside, sync_directory
from rackrun.checkpoint.durable.storage.object_store import files_at

__all__ = ["Damage", "DurableStore", "CheckpointInfo", "CheckpointWriter", "UnpublishedCheckpoint", "Verification"]


@dataclass(frozen=True)
class CheckpointInfo:
    """Describes a whole checkpoint. ``verified``: all its bytes were once read back and were right."""

    number: int
    step: int
    fencing_token: int
    world_size: int
    bytes: int
    digest: str
    verified: bool
    path: Path


@dataclass(frozen=True)
class Damage:
    """What is wrong, and where. ``rank`` and ``chunk`` are None when the damage is not in one of them."""

    what: str
    rank: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class Verification:
    """The outcome of reading all bytes of a checkpoint."""

    number: int
    bytes: int
    damage: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damage


@dataclass(frozen=True)
class UnpublishedCheckpoint:
    """The directory in which the writers with one fencing token have a checkpoint that is not published."""

    path: Path
    number: int
    fencing_token: int


@contextlib.contextmanager
def _typed(number: int) -> Iterator[None]:
    """Turn an OSError into IntegrityError (a file is missing) or Unreadable."""
    try:
        yield
    except OSError as error:
        kind = IntegrityError if isinstance(error, FileNotFoundError) else Unreadable
        what = f"{error.filename} is missing" if kind is IntegrityError and error.filename else str(error)
        raise kind(f"checkpoint {number} is not whole: {what}.", remedy="use another checkpoint.") from error


class DurableStore:
    """The checkpoints of ``job`` under ``root``: a directory that exists, or a place in an object store.

    Making a store touches no file. Raises UsageError for a place in a store that is not known.
    """

    def __init__(self, root: Path | str, job: str, *, files: Files | None = None) -> None:
        self.root = parse_location(root)
        self.job = check_job(job)
        self.directory = self.root / job
        self.files = files or files_at(self.root)
        self.doubtful: set[Path] = set()
        """Directories that were the subject of a failed fsync, or whose parent's fsync failed.

        This process does not count them as durable any more.
        """
        self._rooted = False
        """Whether the root's entry of the job's directory is known to be on disk."""

    def writer(
        self, number: int, step: int, fencing_token: int, world_size: int, *, replaces: bool = False
    ) -> CheckpointWriter:
        """Return a writer of one checkpoint. ``replaces``: see `CheckpointWriter`."""
        kind = ObjectWriter if self.files.objects else CheckpointWriter
        return kind(self, number, step, fencing_token, world_size, replaces=replaces)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the whole checkpoints, newest first. Checkpoints that are unreadable or not whole are left out.

        Raises CheckpointError when the job's directory cannot be listed.
        """
        return self.look()[0]

    def look(self) -> tuple[list[CheckpointInfo], dict[int, CheckpointError]]:
        """Return `checkpoints`, and checkpoint number -> why a listed one was left out, newest first."""
        try:
            names = self.files.listdir(self.directory)
        except FileNotFoundError:
            return [], {}
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be listed: {error.strerror or error}.",
                remedy="mount it, or check its rights.",
            ) from error
        found, left_out = [], {}
        for number in sorted((n for name in names if (n := checkpoint_number(name)) is not None), reverse=True):
            try:
                found.append(self._info(number))
            except NoUsableCheckpoint:
                continue  # it was deleted meanwhile
            except CheckpointError as error:
                left_out[number] = error
        return found, left_out

    def open(self, number: int) -> CheckpointReader:
        """Return a reader.

        Raises NoUsableCheckpoint when the checkpoint does not exist, IntegrityError when it is not whole.
        """
        manifest, _ = self.whole(number)
        return CheckpointReader(self.files, self.data(manifest), manifest)

    def verify(self, number: int, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Read all bytes of a checkpoint, and return what is damaged.

        ``progress`` gets (bytes done, bytes in all). The outcome is stored beside the manifest where the directory can
        be written. Raises NoUsableCheckpoint when there is no such checkpoint.
        """
        try:
            manifest, digest = self.whole(number)
        except IntegrityError as error:
            return Verification(number, 0, (Damage(error.what),))
        damage: list[Damage] = []
        total, done = sum(shard.size for shard in manifest.shards), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        for record in manifest.shards:
            try:
                with contextlib.closing(ShardReader(self.files, self.data(manifest), manifest, record)) as reader:
                    damage += [Damage(what, record.rank, chunk) for chunk, what in reader.verify(advance)]
            except IntegrityError as error:
                damage.append(Damage(error.what, record.rank))
        self._keep_outcome(number, digest if not damage else None)
        return Verification(number, total, tuple(damage))

    # -- for the writer and for retention
    def path(self, number: int) -> Path:
        return self.directory / checkpoint_name(number)

    def attempt(self, number: int, step: int, fencing_token: int, world_size: int) -> Path:
        """Return where writers put what is not published yet. In an object store the data stays there."""
        if self.files.objects:
            return self.path(number) / attempt_name(self.job, number, step, fencing_token, world_size)
        return self.directory / temporary_name(self.job, number, step, fencing_token, world_size)

    def data(self, manifest: Manifest) -> Path:
        """Return the directory of a whole checkpoint's shards and fragments."""
        if self.files.objects:
            return self.attempt(manifest.number, manifest.step, manifest.fencing_token, manifest.world_size)
        return self.path(manifest.number)

    def parts(self) -> list[UnpublishedCheckpoint]:
        """Return what writers have not published, because they are at work or died. Raises OSError."""
        found = []
        for name in self.files.listdir(self.directory):
            if (temporary := TemporaryName.parse(name)) is not None:
                found.append(UnpublishedCheckpoint(self.directory / name, temporary.number, temporary.fencing_token))
            elif self.files.objects and (number := checkpoint_number(name)) is not None:
                with contextlib.suppress(FileNotFoundError):
                    for below in self.files.listdir(self.directory / name):
                        fencing_token, path = attempt_fencing_token(below), self.directory / name / below
                        if fencing_token is not None and not self.is_used(path):
                            found.append(UnpublishedCheckpoint(path, number, fencing_token))
        return found

    def is_used(self, attempt: Path) -> bool:
        """Whether a published manifest refers to this attempt's prefix (object stores).

        True also when that cannot be read.
        """
        number = checkpoint_number(attempt.parent.name)
        if number is None:
            return True
        try:
            return self.data(self.manifest(number)[0]) == attempt
        except NoUsableCheckpoint:
            return False
        except CheckpointError:
            return True

    def complete(self) -> None:
        """Finish what a dead writer has broken off while it published a checkpoint, as a job begins. Best effort.

        On a disk, a checkpoint that was being replaced gets its name back. In an object store, checkpoints are
        published whose shards are all there and only the manifest is missing, because their writer died or it was lost.
        """
        if not self.files.objects:
            self.put_back()
            return
        with contextlib.suppress(OSError):
            for name in self.files.listdir(self.directory):
                number = checkpoint_number(name)
                names = self.files.listdir(self.directory / name) if number is not None else [MANIFEST]
                if MANIFEST not in names:
                    assert number is not None
                    for attempt in sorted(names, key=lambda one: attempt_fencing_token(one) or -1, reverse=True):
                        with contextlib.suppress(OSError, CheckpointError):
                            if self._finish(number, attempt):
                                break

    def replaced(self) -> dict[Path, int]:
        """Return the folders of checkpoints that others replace, each with its checkpoint number (on a disk)."""
        names = [] if self.files.objects else self.files.listdir(self.directory)
        return {self.directory / name: number for name in names if (number := replaced_number(name)) is not None}

    def put_back(self) -> list[int]:
        """Give checkpoints that were being replaced their names again, where no other has them; the rest becomes trash.

        No job may be at work in the directory. Best effort. Returns the numbers that have their names again.
        """
        done = []
        with contextlib.suppress(OSError):
            replaced = self.replaced()
            for number in dict.fromkeys(replaced.values()):
                with contextlib.suppress(OSError):
                    if self._put_one_back(number, [path for path, of in replaced.items() if of == number]):
                        done.append(number)
        return done

    def _put_one_back(self, number: int, formers: Sequence[Path]) -> bool:
        nameless = self.former_without_name(number, formers)
        if nameless is not None:
            self.files.rename(nameless, self.path(number))
        for former in formers:
            if former != nameless:  # another has its place
                with contextlib.suppress(OSError):
                    set_aside(self.files, former)
        return nameless is not None

    def former_without_name(self, number: int, formers: Sequence[Path]) -> Path | None:
        """Return which of ``formers``, folders of `replaced` with this number, `put_back` gives its name; None where the
        name is taken.

        There are several when a writer has died between its renames, and what it was replacing had itself just replaced
        another. The newest whole one is it. Raises OSError when one of several cannot be read, and nothing may be
        concluded.
        """
        with contextlib.suppress(FileNotFoundError):
            self.files.stat(self.path(number))
            return None
        return formers[0] if len(formers) == 1 else max(formers, key=self._standing)

    def _standing(self, former: Path) -> tuple[bool, int, int, str]:
        """Return whether the checkpoint in this folder is whole, then its fencing token, its step and its name."""
        try:
            manifest, _ = unseal(read_small(self.files, former / MANIFEST, MANIFEST_BYTES_MAX), Manifest, former)
            self._check_sizes(manifest, former)
        except (FileNotFoundError, NotADirectoryError):
            return False, -1, -1, former.name
        except CheckpointError as error:
            if not is_damage(error):  # another release wrote it
                raise OSError(error.what) from error
            return False, -1, -1, former.name
        return True, manifest.fencing_token, manifest.step, former.name

    def _finish(self, number: int, attempt: str) -> bool:
        """Publish the attempt of this name if all its shards are there. Return whether it is published."""
        fencing_token, directory = attempt_fencing_token(attempt), self.path(number) / attempt
        if fencing_token is None:
            return False
        first = next(
            (name for name in self.files.listdir(directory) if re.fullmatch(r"rank-0+-of-\d+\.json", name)), ""
        )
        if not first:
            return False
        fragment, _ = unseal(read_small(self.files, directory / first, FRAGMENT_BYTES_MAX), Fragment, directory / first)
        writer = self.writer(number, fragment.step, fencing_token, fragment.world_size)
        return self.attempt(number, fragment.step, fencing_token, fragment.world_size) == directory and writer.finish()

    def whole(self, number: int) -> tuple[Manifest, str]:
        """Return the manifest and its digest, after checking the sizes of all files. Raises as `open` does."""
        manifest, digest = self.manifest(number)
        with _typed(number):
            self._check_sizes(manifest, self.data(manifest))
        return manifest, digest

    def _check_sizes(self, manifest: Manifest, path: Path) -> None:
        """Raise `IntegrityError` if a file of ``manifest`` in ``path`` has another size, and OSError if one cannot be
        looked at."""
        wanted = dict[str, int]()
        for shard in manifest.shards:
            wanted[shard_name(shard.rank, manifest.world_size)] = shard.size
            wanted[fragment_name(shard.rank, manifest.world_size)] = shard.fragment_bytes
        sizes = self.files.sizes(path, list(wanted))
        for name, size in wanted.items():
            found = sizes[name]
            if found.st_size != size or not stat.S_ISREG(found.st_mode):
                raise IntegrityError(
                    f"{path / name} is not a file of {size} bytes ({found.st_size}).", remedy="use another checkpoint."
                )

    def is_foreign(self, number: int) -> bool:
        """Return whether what has a checkpoint's name is not rackrun's. Raises OSError."""
        try:
            self.manifest(number)
        except NotOurs:
            return True
        except CheckpointError:
            pass
        return False

    def manifest(self, number: int) -> tuple[Manifest, str]:
        """Return the manifest and its digest. The files that it names are not looked at. Raises as `open` does."""
        path = self.path(number)
        with _typed(number):
            try:
                # In an object store, a checkpoint without a manifest is not there yet, or was deleted.
                self.files.stat(path / MANIFEST if self.files.objects else path)
            except FileNotFoundError as error:
                raise NoUsableCheckpoint(
                    f"checkpoint {number} of {self.job} is not in {self.directory}.", remedy="list what is there."
                ) from error
            try:
                data = read_small(self.files, path / MANIFEST, MANIFEST_BYTES_MAX)
            except (FileNotFoundError, NotADirectoryError) as error:
                names = self.files.listdir(path) if isinstance(error, FileNotFoundError) else []
                if any(name.startswith("rank-") for name in names):
                    raise
                raise NotOurs(
                    f"{path} has nothing of a checkpoint in it.",
                    remedy="move it out of this directory, if you made it; remove it, if it is empty.",
                ) from None
        manifest, digest = unseal(data, Manifest, path)
        if (manifest.job, manifest.number) != (self.job, number):
            raise NotOurs(
                f"{path} holds checkpoint {manifest.number} of {manifest.job}, and is not used as checkpoint {number}.",
                remedy=f"move it out of this directory, if it is a copy; if {checkpoint_name(manifest.number)} of "
                f"{manifest.job} is missing, give it that name again.",
            )
        return manifest, digest

    def sync(self) -> None:
        """Sync the job's directory and its parent, so that the listed names are on disk. Raises OSError.

        A directory whose fsync failed before stays in doubt.
        """
        if self.files.objects:
            self.files.listdir(self.directory)  # checks that the store can be reached
            return
        sync_directory(self.files, self.directory)
        if self.root in self.doubtful and not self._rooted:
            raise Unsynced(errno.EIO, "an earlier fsync failed", str(self.root))
        try:
            sync_directory(self.files, self.root)
        except Unsynced:
            self.doubtful.add(self.root)
            raise
        self._rooted = True

    def _info(self, number: int) -> CheckpointInfo:
        manifest, digest = self.whole(number)
        path = self.path(number)
        verified = False
        with contextlib.suppress(OSError, CheckpointError):
            record, _ = unseal(read_small(self.files, path / VERIFIED, 4096), Record, path / VERIFIED)
            verified = record.manifest == digest
        size = sum(shard.size for shard in manifest.shards)
        return CheckpointInfo(
            number, manifest.step, manifest.fencing_token, manifest.world_size, size, digest, verified, path
        )

    def _keep_outcome(self, number: int, digest: str | None) -> None:
        name = self.path(number) / VERIFIED
        with contextlib.suppress(OSError):
            if digest is None:
                self.files.unlink(name)
                return
            self.files.replace(name, seal(Record(manifest=digest))[0])
