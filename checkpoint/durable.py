"""The durable tier: generations of a job as directories that are whole or not there.

A writer (`GenerationWriter`) copies the sealed payload of one rank into ``.tmp-gen-...``; the CRC32C of each chunk is taken of the very bytes
that are written and compared with the sealed one. File, fsync, name; then the rank's fragment, the same way. Whoever finds
all fragments there writes the manifest, syncs the directory, renames it to ``gen-...`` and syncs the parent. There are no
locks and no roles: all ranks' writers, on any hosts, may do each of this at once, again, or for a dead owner. Names are
given by ``link``, so the first wins and whoever comes later compares; equal bytes are success.

Nothing here raises into training: `GenerationWriter` answers True or False, and ``failure`` says why not.

A reader trusts a directory only by its manifest's digest and the exact size of every file. `DurableStore.verify` reads all
bytes.

Nothing that is published is ever replaced or changed.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rackrun.checkpoint.durable_reader import GenerationReader, ShardReader
from rackrun.checkpoint.durable_writer import GenerationWriter
from rackrun.checkpoint.errors import CheckpointError, IntegrityError, NoUsableGeneration, Unreadable
from rackrun.checkpoint.files import (
    Files,
    Unsynced,
    read_small,
    sync_directory,
    write_new,
)
from rackrun.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    VERIFIED,
    Manifest,
    Record,
    check_job,
    fragment_name,
    generation_name,
    generation_of,
    seal,
    shard_name,
    unseal,
)

__all__ = ["Damage", "DurableStore", "GenerationInfo", "GenerationWriter", "Verification"]


@dataclass(frozen=True)
class GenerationInfo:
    """A whole generation. ``verified``: all its bytes were once read back and were right."""

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
    """What is wrong where; ``rank`` and ``chunk`` are None when it is not in one of them."""

    what: str
    rank: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class Verification:
    generation: int
    bytes: int
    damage: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damage


class DurableStore:
    """The generations of ``job`` under ``root``, a directory that exists. Making a store touches nothing."""

    def __init__(self, root: Path | str, job: str, *, files: Files | None = None) -> None:
        self.root = Path(root)
        self.job = check_job(job)
        self.directory = self.root / job
        self.files = files or Files()
        self.doubtful: set[Path] = set()
        """Directories that an fsync failed on, or on the one that lists them: this process does not call them durable any more."""
        self._rooted = False
        """That the root lists the job's directory is on disk."""

    def writer(self, generation: int, step: int, epoch: int, world_size: int) -> GenerationWriter:
        return GenerationWriter(self, generation, step, epoch, world_size)

    def generations(self) -> list[GenerationInfo]:
        """The whole ones, newest first. What cannot be read or does not check is left out.

        Raises CheckpointError when the job's directory cannot be listed at all.
        """
        return self.look()[0]

    def look(self) -> tuple[list[GenerationInfo], dict[int, CheckpointError]]:
        """`generations`, and why each of those that are listed and are not among them was left out, the newest first."""
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
                continue  # it went meanwhile
            except CheckpointError as error:
                left_out[generation] = error
        return found, left_out

    def open(self, generation: int) -> GenerationReader:
        """Raises NoUsableGeneration when it is not there, and IntegrityError when it is not whole."""
        manifest, _ = self.whole(generation)
        return GenerationReader(self.files, self.path(generation), manifest)

    def verify(self, generation: int, progress: Callable[[int, int], None] | None = None) -> Verification:
        """Read all bytes; ``progress`` gets (bytes done, bytes in all). The outcome is kept beside the manifest where the
        directory can be written. Raises NoUsableGeneration when there is no such generation."""
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
                with contextlib.closing(ShardReader(self.files, self.path(generation), manifest, record)) as reader:
                    damage += [Damage(what, record.rank, chunk) for chunk, what in reader.verify(advance)]
            except IntegrityError as error:
                damage.append(Damage(error.what, record.rank))
        self._keep_outcome(generation, digest if not damage else None)
        return Verification(generation, total, tuple(damage))

    # -- for the writer and for retention
    def path(self, generation: int) -> Path:
        return self.directory / generation_name(generation)

    def whole(self, generation: int) -> tuple[Manifest, str]:
        """The manifest and its digest, once all files have their sizes. Raises as `open` does."""
        path = self.path(generation)
        try:
            try:
                self.files.stat(path)
            except FileNotFoundError as error:
                raise NoUsableGeneration(
                    f"generation {generation} of {self.job} is not in {self.directory}.", remedy="list what is there."
                ) from error
            manifest, digest = unseal(read_small(self.files, path / MANIFEST, MANIFEST_BYTES_MAX), Manifest, path)
            if (manifest.job, manifest.generation) != (self.job, generation):
                raise IntegrityError(
                    f"{path} holds generation {manifest.generation} of {manifest.job}.", remedy="rename it back."
                )
            for shard in manifest.shards:
                names = (shard_name(shard.rank, manifest.world_size), fragment_name(shard.rank, manifest.world_size))
                for name, size in zip(names, (shard.size, shard.fragment_bytes), strict=True):
                    found = self.files.stat(path / name)
                    if found.st_size != size or not stat.S_ISREG(found.st_mode):
                        raise IntegrityError(
                            f"{path / name} is not a file of {size} bytes ({found.st_size}).",
                            remedy="use another generation.",
                        )
        except OSError as error:
            kind = IntegrityError if isinstance(error, FileNotFoundError) else Unreadable
            raise kind(f"generation {generation} is not whole: {error}.", remedy="use another generation.") from error
        return manifest, digest

    def sync(self) -> None:
        """What the job's directory lists is on disk, but for what this has failed on before. Raises OSError."""
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
            temporary = name.with_name(f".{VERIFIED}-{secrets.token_hex(4)}.part")
            write_new(self.files, temporary, [memoryview(seal(Record(manifest=digest))[0])])
            self.files.rename(temporary, name)
