"""The durable tier: the generations of a job as directories, each of which is whole or not there.

A writer (`GenerationWriter`) copies the sealed payload of one rank into ``.tmp-gen-...``. It computes the CRC32C of
each chunk from the very bytes that are written, and compares it with the sealed one. A file is written, synced, then
named; the rank's fragment follows in the same way. Whoever finds all fragments there writes the manifest, syncs the
directory, renames it to ``gen-...`` and syncs the parent. There are no locks and no roles: all ranks' writers, on any
host, may do each of this at once, again, or for a dead owner. Names are given by ``link``, so the first writer wins,
and later ones compare: equal bytes are success.

Nothing here raises into training: `GenerationWriter` returns True or False, and ``failure`` says why it failed.

A reader trusts a directory only by its manifest's digest and the exact size of every file. `DurableStore.verify` reads
all bytes.

Nothing that is published is ever replaced or changed.
"""

from __future__ import annotations

import contextlib
import errno
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, NoUsableGeneration, Unreadable
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
    attempt_epoch,
    attempt_name,
    check_job,
    fragment_name,
    generation_name,
    generation_of,
    seal,
    shard_name,
    temporary_name,
    unseal,
)
from rackrun.checkpoint.durable.durable_reader import GenerationReader, ShardReader
from rackrun.checkpoint.durable.durable_writer import GenerationWriter
from rackrun.checkpoint.durable.files import Files, Unsynced, read_small, sync_directory
from rackrun.checkpoint.durable.object_store import files_at
from rackrun.checkpoint.durable.object_writer import ObjectWriter

__all__ = ["Damage", "DurableStore", "GenerationInfo", "GenerationWriter", "UnpublishedGeneration", "Verification"]


@dataclass(frozen=True)
class GenerationInfo:
    """Describes a whole generation. ``verified``: all its bytes were once read back and were right."""

    generation: int
    step: int
    epoch: int
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
    """The outcome of reading all bytes of a generation."""

    generation: int
    bytes: int
    damage: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damage


@dataclass(frozen=True)
class UnpublishedGeneration:
    """The directory in which the writers of one epoch have a generation that is not published."""

    path: Path
    generation: int
    epoch: int


@contextlib.contextmanager
def _typed(generation: int) -> Iterator[None]:
    """Turn an OSError into IntegrityError (a file is missing) or Unreadable."""
    try:
        yield
    except OSError as error:
        kind = IntegrityError if isinstance(error, FileNotFoundError) else Unreadable
        raise kind(f"generation {generation} is not whole: {error}.", remedy="use another generation.") from error


class DurableStore:
    """The generations of ``job`` under ``root``: a directory that exists, or a place in an object store.

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

    def writer(self, generation: int, step: int, epoch: int, world_size: int) -> GenerationWriter:
        """Return a writer of one generation."""
        kind = ObjectWriter if self.files.objects else GenerationWriter
        return kind(self, generation, step, epoch, world_size)

    def generations(self) -> list[GenerationInfo]:
        """Return the whole generations, newest first. Generations that are unreadable or not whole are left out.

        Raises CheckpointError when the job's directory cannot be listed.
        """
        return self.look()[0]

    def look(self) -> tuple[list[GenerationInfo], dict[int, CheckpointError]]:
        """Return `generations`, and generation -> why a listed one was left out, newest first."""
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
        for generation in sorted((g for name in names if (g := generation_of(name)) is not None), reverse=True):
            try:
                found.append(self._info(generation))
            except NoUsableGeneration:
                continue  # it was deleted meanwhile
            except CheckpointError as error:
                left_out[generation] = error
        return found, left_out

    def open(self, generation: int) -> GenerationReader:
        """Return a reader.

        Raises NoUsableGeneration when the generation does not exist, IntegrityError when it is not whole.
        """
        manifest, _ = self.whole(generation)
        return GenerationReader(self.files, self.data(manifest), manifest)

    def verify(self, generation: int, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Read all bytes of a generation, and return what is damaged.

        ``progress`` gets (bytes done, bytes in all). The outcome is stored beside the manifest where the directory can
        be written. Raises NoUsableGeneration when there is no such generation.
        """
        try:
            manifest, digest = self.whole(generation)
        except IntegrityError as error:
            return Verification(generation, 0, (Damage(error.what),))
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
        self._keep_outcome(generation, digest if not damage else None)
        return Verification(generation, total, tuple(damage))

    # -- for the writer and for retention
    def path(self, generation: int) -> Path:
        return self.directory / generation_name(generation)

    def attempt(self, generation: int, step: int, epoch: int, world_size: int) -> Path:
        """Return where writers put what is not published yet. In an object store the data stays there."""
        if self.files.objects:
            return self.path(generation) / attempt_name(self.job, generation, step, epoch, world_size)
        return self.directory / temporary_name(self.job, generation, step, epoch, world_size)

    def data(self, manifest: Manifest) -> Path:
        """Return the directory of a whole generation's shards and fragments."""
        if self.files.objects:
            return self.attempt(manifest.generation, manifest.step, manifest.epoch, manifest.world_size)
        return self.path(manifest.generation)

    def parts(self) -> list[UnpublishedGeneration]:
        """Return what writers have not published, because they are at work or died. Raises OSError."""
        found = []
        for name in self.files.listdir(self.directory):
            if (temporary := TemporaryName.parse(name)) is not None:
                found.append(UnpublishedGeneration(self.directory / name, temporary.generation, temporary.epoch))
            elif self.files.objects and (generation := generation_of(name)) is not None:
                with contextlib.suppress(FileNotFoundError):
                    for below in self.files.listdir(self.directory / name):
                        epoch, path = attempt_epoch(below), self.directory / name / below
                        if epoch is not None and not self.is_used(path):
                            found.append(UnpublishedGeneration(path, generation, epoch))
        return found

    def is_used(self, attempt: Path) -> bool:
        """Whether a published manifest refers to this attempt's prefix (object stores).

        True also when that cannot be read.
        """
        generation = generation_of(attempt.parent.name)
        if generation is None:
            return True
        try:
            return self.data(self._manifest(generation)[0]) == attempt
        except NoUsableGeneration:
            return False
        except CheckpointError:
            return True

    def complete(self) -> None:
        """Publish the generations of an object store whose shards are all there and only the manifest is missing.

        The manifest is missing when its writer died before it, or when it was lost. Best effort; no effect on a disk.
        """
        if not self.files.objects:
            return
        with contextlib.suppress(OSError):
            for name in self.files.listdir(self.directory):
                generation = generation_of(name)
                names = self.files.listdir(self.directory / name) if generation is not None else [MANIFEST]
                if MANIFEST not in names:
                    assert generation is not None
                    for attempt in sorted(names, key=lambda one: attempt_epoch(one) or -1, reverse=True):
                        with contextlib.suppress(OSError, CheckpointError):
                            if self._finish(generation, attempt):
                                break

    def _finish(self, generation: int, attempt: str) -> bool:
        """Publish the attempt of this name if all its shards are there. Return whether it is published."""
        epoch, directory = attempt_epoch(attempt), self.path(generation) / attempt
        if epoch is None:
            return False
        first = next(
            (name for name in self.files.listdir(directory) if re.fullmatch(r"rank-0+-of-\d+\.json", name)), ""
        )
        if not first:
            return False
        fragment, _ = unseal(read_small(self.files, directory / first, FRAGMENT_BYTES_MAX), Fragment, directory / first)
        writer = self.writer(generation, fragment.step, epoch, fragment.world_size)
        return self.attempt(generation, fragment.step, epoch, fragment.world_size) == directory and writer.finish()

    def whole(self, generation: int) -> tuple[Manifest, str]:
        """Return the manifest and its digest, after checking the sizes of all files. Raises as `open` does."""
        manifest, digest = self._manifest(generation)
        path, wanted = self.data(manifest), dict[str, int]()
        for shard in manifest.shards:
            wanted[shard_name(shard.rank, manifest.world_size)] = shard.size
            wanted[fragment_name(shard.rank, manifest.world_size)] = shard.fragment_bytes
        with _typed(generation):
            sizes = self.files.sizes(path, list(wanted))
        for name, size in wanted.items():
            found = sizes[name]
            if found.st_size != size or not stat.S_ISREG(found.st_mode):
                raise IntegrityError(
                    f"{path / name} is not a file of {size} bytes ({found.st_size}).", remedy="use another generation."
                )
        return manifest, digest

    def _manifest(self, generation: int) -> tuple[Manifest, str]:
        path = self.path(generation)
        with _typed(generation):
            try:
                # In an object store, a generation without a manifest is not there yet, or was deleted.
                self.files.stat(path / MANIFEST if self.files.objects else path)
            except FileNotFoundError as error:
                raise NoUsableGeneration(
                    f"generation {generation} of {self.job} is not in {self.directory}.", remedy="list what is there."
                ) from error
            data = read_small(self.files, path / MANIFEST, MANIFEST_BYTES_MAX)
        manifest, digest = unseal(data, Manifest, path)
        if (manifest.job, manifest.generation) != (self.job, generation):
            raise IntegrityError(
                f"{path} holds generation {manifest.generation} of {manifest.job}.", remedy="rename it back."
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

    def _info(self, generation: int) -> GenerationInfo:
        manifest, digest = self.whole(generation)
        path = self.path(generation)
        verified = False
        with contextlib.suppress(OSError, CheckpointError):
            record, _ = unseal(read_small(self.files, path / VERIFIED, 4096), Record, path / VERIFIED)
            verified = record.manifest == digest
        size = sum(shard.size for shard in manifest.shards)
        return GenerationInfo(
            generation, manifest.step, manifest.epoch, manifest.world_size, size, digest, verified, path
        )

    def _keep_outcome(self, generation: int, digest: str | None) -> None:
        name = self.path(generation) / VERIFIED
        with contextlib.suppress(OSError):
            if digest is None:
                self.files.unlink(name)
                return
            self.files.replace(name, seal(Record(manifest=digest))[0])
