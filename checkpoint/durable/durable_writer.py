"""Writing one durable generation: any rank's shard, by anyone, and the last step that makes it whole.

The order, each line on disk before the next: a shard's bytes under a name of their own, its name, its fragment, the
manifest, the directory, the directory's name. See `rackrun.checkpoint.durable.durable_store` for who may do what.

Traps. What an fsync failed on is not synced again: a file is written anew, a temporary directory is set aside. When the
sync of the parent fails after the rename, the generation is whole but its name may not outlive a power loss: `finish` says
False, and retention, which syncs the same directory first, deletes nothing on its account. The payload may be overwritten
while it is read, so each chunk is copied first, and the copy is what is checked and written.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from rackrun.checkpoint.base.digest import CHUNK_BYTES, crc
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, NoUsableGeneration
from rackrun.checkpoint.durable.durable_manifest import (
    FRAGMENT_BYTES_MAX,
    MANIFEST,
    Fragment,
    Manifest,
    ShardRecord,
    fragment_name,
    seal,
    shard_name,
    unseal,
)
from rackrun.checkpoint.durable.durable_reader import fill
from rackrun.checkpoint.durable.files import (
    Failure,
    FailureKind,
    Refused,
    Unsynced,
    delete_tree,
    failure_of,
    opened,
    put_name,
    read_small,
    set_aside,
    sync_directory,
    write_new,
)
from rackrun.protocol.crash_points import crash_point, register

if TYPE_CHECKING:
    from rackrun.checkpoint.durable.durable_store import DurableStore

__all__ = ["GenerationWriter", "SealedPayload", "Sliced"]

register(
    "durable.directory",
    "durable.chunk",
    "durable.data_synced",
    "durable.data_named",
    "durable.read_back",
    "durable.fragment_synced",
    "durable.fragment_named",
    "durable.manifest_synced",
    "durable.manifest_named",
    "durable.directory_synced",
    "durable.renamed",
    "durable.parent_synced",
)


class Sliced(Protocol):
    """Bytes that are read by slices."""

    nbytes: int

    def __getitem__(self, wanted: slice, /) -> memoryview: ...


class SealedPayload(Protocol):
    """What an arena's reader offers."""

    @property
    def payload(self) -> memoryview | Sliced: ...


class GenerationWriter:
    """Writes shards of one generation, and makes it whole. Any number of them, anywhere, work on one generation."""

    def __init__(self, store: DurableStore, generation: int, step: int, epoch: int, world_size: int) -> None:
        if generation < 0 or epoch < 0 or world_size < 1:
            raise ValueError(f"generation {generation}, epoch {epoch}, world size {world_size}")
        self.generation, self.step, self.epoch, self.world_size = generation, step, epoch, world_size
        self.failure: Failure | None = None
        """Why the last call answered False. None: fragments of other ranks are not there yet."""
        self._store, self._files = store, store.files
        self._final = store.path(generation)
        self._temporary = store.attempt(generation, step, epoch, world_size)

    def write_shard(
        self,
        rank: int,
        payload: memoryview | SealedPayload,
        layout_hash: str,
        crcs: np.ndarray | Sequence[int],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        share_of: tuple[str, str] | None = None,
    ) -> bool:
        """True once the rank's file and fragment are on disk, whoever wrote them. ``crcs``: the sealed CRC32C of each
        ``chunk_bytes`` of ``payload``; ``share_of`` as in `Fragment`. Never raises for what storage or the payload does."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of {self.world_size}")
        fragment: Fragment | None = None
        try:
            data = payload if isinstance(payload, memoryview) else payload.payload
            fragment = self._fragment(rank, data.nbytes, layout_hash, crcs, chunk_bytes)
            fragment = msgspec.structs.replace(fragment, share_of=share_of)
            if not self._has(fragment):
                self._write(fragment, data.cast("B") if isinstance(data, memoryview) else data)
        except (OSError, Refused, CheckpointError) as error:
            return self._failed(error, fragment)
        except (ValueError, BufferError) as error:  # the lease is over and the view released
            return self._failed(Refused(FailureKind.SOURCE, f"the payload of rank {rank} is gone: {error}"), fragment)
        self.failure = None
        return True

    def finish(self) -> bool:
        """True once the generation is whole and on disk, whoever finished it. False: see ``failure``. Any rank may call
        it, at any time, more than once."""
        self.failure = None
        try:
            manifest = self._manifest()
            if manifest is not None:
                self._publish(manifest)
            elif self._is_published(None):
                self._discard()  # shards that were written once more, too late
            else:
                return False
            self._sync_name()
            crash_point("durable.parent_synced")
            if not self._is_published(manifest):
                raise Refused(FailureKind.VANISHED, f"{self._final} was there and is gone")
        except (OSError, Refused, CheckpointError) as error:
            self.failure = failure_of(error)
        return self.failure is None

    def give_up(self) -> None:
        """Nobody writes this attempt any more: what there is of it goes. Best effort, as retention does the same later."""
        self._discard()

    # -- a shard
    def _fragment(
        self, rank: int, size: int, layout_hash: str, crcs: np.ndarray | Sequence[int], chunk_bytes: int
    ) -> Fragment:
        fragment = Fragment(
            job=self._store.job,
            generation=self.generation,
            step=self.step,
            world_size=self.world_size,
            rank=rank,
            size=size,
            chunk_bytes=chunk_bytes,
            crcs=np.asarray(crcs, dtype="<u4").tobytes(),
            layout_hash=layout_hash,
        )
        try:
            fragment.check()
        except IntegrityError as error:
            raise Refused(FailureKind.SOURCE, error.what) from error
        return fragment

    def _has(self, fragment: Fragment) -> bool:
        """This very shard is there already, in the temporary or the published directory. Refused: another one is."""
        sealed, digest = seal(fragment)
        with contextlib.suppress(CheckpointError):
            record = self._store.whole(self.generation)[0].shards
            if [shard.fragment for shard in record[fragment.rank : fragment.rank + 1]] != [digest]:
                raise Refused(FailureKind.DISAGREES, f"{self._final} has another shard of rank {fragment.rank}")
            return True
        if self._temporary in self._store.doubtful:
            return False
        with contextlib.suppress(FileNotFoundError):
            path = self._temporary / fragment_name(fragment.rank, self.world_size)
            if read_small(self._files, path, FRAGMENT_BYTES_MAX) != sealed:
                raise Refused(FailureKind.DISAGREES, f"{path} tells of another shard")
            return self._files.stat(path.with_name(shard_name(fragment.rank, self.world_size))).st_size == fragment.size
        return False

    def _write(self, fragment: Fragment, data: memoryview | Sliced) -> None:
        self._make_directories()
        crash_point("durable.directory")
        name = shard_name(fragment.rank, self.world_size)
        with self._new_file(name, _checked_chunks(data, fragment)) as part:
            crash_point("durable.data_synced")
            put_name(self._files, part, self._temporary / name)
        crash_point("durable.data_named")
        self._read_back(self._temporary / name, fragment)
        crash_point("durable.read_back")
        name = fragment_name(fragment.rank, self.world_size)
        with self._new_file(name, [memoryview(seal(fragment)[0])]) as part:
            crash_point("durable.fragment_synced")
            if not put_name(self._files, part, self._temporary / name) and not self._has(fragment):
                raise Refused(FailureKind.IO, f"{self._temporary / name} is there without its shard")
        crash_point("durable.fragment_named")

    @contextlib.contextmanager
    def _new_file(self, name: str, parts: Iterable[memoryview]) -> Iterator[Path]:
        """A finished file under a name that nobody else uses, and that is gone afterwards. The directory may be published
        meanwhile, by others."""
        part = f".{name}-{secrets.token_hex(8)}.part"
        try:
            write_new(self._files, self._temporary / part, parts)
            yield self._temporary / part
        finally:
            for directory in (self._temporary, self._final):
                with contextlib.suppress(OSError):
                    self._files.unlink(directory / part)
                    break

    def _make_directories(self) -> None:
        if self._temporary in self._store.doubtful:  # an earlier fsync failed, and so did setting it aside
            set_aside(self._files, self._temporary)
            self._store.doubtful.discard(self._temporary)
        for path in (self._store.directory, self._temporary):
            with contextlib.suppress(FileExistsError):
                self._files.mkdir(path)

    def _read_back(self, name: Path, fragment: Fragment) -> None:
        """From the disk, so that a fragment is there only for bytes that were read and were right. Another writer, or an earlier
        attempt, may have been first: all is well if its bytes are the same."""
        with opened(self._files, name) as fd:
            self._files.forget(fd)
            if self._files.fstat(fd).st_size == fragment.size:
                buffer = memoryview(bytearray(min(fragment.chunk_bytes, fragment.size)))
                for index, wanted in enumerate(fragment.chunk_crcs()):
                    start = index * fragment.chunk_bytes
                    chunk = buffer[: min(fragment.chunk_bytes, fragment.size - start)]
                    fill(self._files, fd, chunk, start, name)
                    if crc(chunk) != int(wanted):
                        break
                else:
                    return
        raise Refused(FailureKind.DISAGREES, f"{name} has other bytes")

    def _failed(self, error: Exception, fragment: Fragment | None) -> bool:
        """What failed here may have been done by another writer meanwhile."""
        self.failure = failure_of(error)
        if fragment is not None:
            with contextlib.suppress(OSError, Refused, CheckpointError):
                if self._has(fragment):
                    self.failure = None
        return self.failure is None

    # -- the generation
    def _manifest(self) -> Manifest | None:
        """From the fragments; None while some are missing."""
        if self._temporary in self._store.doubtful:
            return None
        shards = []
        for rank in range(self.world_size):
            path = self._temporary / fragment_name(rank, self.world_size)
            try:
                data = read_small(self._files, path, FRAGMENT_BYTES_MAX)
                size = self._files.stat(path.with_name(shard_name(rank, self.world_size))).st_size
            except FileNotFoundError:
                return None
            found, digest = unseal(data, Fragment, path)
            if (found.generation, found.step, found.world_size, found.rank, found.job, found.size) != (
                self.generation,
                self.step,
                self.world_size,
                rank,
                self._store.job,
                size,
            ):
                raise Refused(FailureKind.IO, f"{path} does not belong here, or its shard has {size} bytes")
            shards.append(
                ShardRecord(
                    rank=rank, size=size, layout_hash=found.layout_hash, fragment=digest, fragment_bytes=len(data)
                )
            )
        return Manifest(
            job=self._store.job,
            generation=self.generation,
            step=self.step,
            epoch=self.epoch,
            world_size=self.world_size,
            shards=tuple(shards),
        )

    def _publish(self, manifest: Manifest) -> None:
        try:
            if self._is_published(manifest):
                self._discard()
                return
            self._sweep()
            with self._new_file(MANIFEST, [memoryview(seal(manifest)[0])]) as part:
                crash_point("durable.manifest_synced")
                self._files.rename(part, self._temporary / MANIFEST)
            crash_point("durable.manifest_named")
            self._sync_temporary()
            crash_point("durable.directory_synced")
            try:
                self._files.rename(self._temporary, self._final)
            except OSError as error:
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                    raise
                if not self._is_published(manifest):
                    raise Refused(FailureKind.DISAGREES, f"{self._final} is there, and is not whole") from error
                self._discard()
            crash_point("durable.renamed")
        except FileNotFoundError:  # another writer was faster
            if not self._is_published(manifest):
                raise

    def _is_published(self, manifest: Manifest | None) -> bool:
        """The generation is there, whole, and the same. Refused: another one has its name."""
        try:
            found, _ = self._store.whole(self.generation)
        except (NoUsableGeneration, IntegrityError):
            return False
        same = (
            found.same_content(manifest) if manifest else (found.step, found.world_size) == (self.step, self.world_size)
        )
        if not same:
            raise Refused(FailureKind.DISAGREES, f"{self._final} has other content")
        return True

    def _sync_name(self) -> None:
        """A later sync succeeds over a name that this one has lost; over those of later generations it means what it says."""
        if self._final in self._store.doubtful:
            raise Unsynced(errno.EIO, "an earlier fsync failed", str(self._final))
        try:
            self._store.sync()
        except Unsynced:
            self._store.doubtful.add(self._final)
            raise

    def _sync_temporary(self) -> None:
        try:
            sync_directory(self._files, self._temporary)
        except Unsynced:
            self._store.doubtful.add(self._temporary)
            with contextlib.suppress(OSError):
                set_aside(self._files, self._temporary)
                self._store.doubtful.discard(self._temporary)
            raise

    def _sweep(self) -> None:
        """What writers left that died. A writer that lives finds its shard there already."""
        for name in self._files.listdir(self._temporary):
            if name.startswith(".rank-") and name.endswith(".part"):
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(self._temporary / name)

    def _discard(self) -> None:
        """Best effort: retention deletes what stays."""
        with contextlib.suppress(OSError):
            if (trash := set_aside(self._files, self._temporary)) is not None:
                for _ in delete_tree(self._files, trash):
                    pass


def _checked_chunks(data: memoryview | Sliced, fragment: Fragment) -> Iterator[memoryview]:
    """Private copies of the chunks, each compared with its sealed CRC32C."""
    buffer = memoryview(bytearray(min(fragment.chunk_bytes, fragment.size)))
    for index, wanted in enumerate(fragment.chunk_crcs()):
        start = index * fragment.chunk_bytes
        chunk = buffer[: min(fragment.chunk_bytes, fragment.size - start)]
        chunk[:] = data[start : start + len(chunk)]
        if crc(chunk) != int(wanted):
            raise Refused(
                FailureKind.SOURCE, f"chunk {index} of the payload of rank {fragment.rank} does not match its CRC32C"
            )
        yield chunk
        crash_point("durable.chunk")
