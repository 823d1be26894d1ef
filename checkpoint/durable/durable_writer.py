"""Write one durable checkpoint: any rank's shard, by any process, and the last step that makes the checkpoint whole.

Each item is on disk before the next: a shard's bytes under a temporary name, the shard's name, its fragment, the
manifest, the directory, the directory's name. `rackrun.checkpoint.durable.durable_store` says who may do what.

A file or directory whose fsync failed is not synced again: a file is written anew, a temporary directory is set aside.
When the sync of the parent fails after the rename, the checkpoint is whole but its name may be lost in a power failure.
`finish` returns False then, and retention, which syncs the same directory first, deletes nothing on its account.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rackrun.checkpoint.base.digest import CHUNK_BYTES
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, NoUsableCheckpoint
from rackrun.checkpoint.durable.durable_manifest import (
    FRAGMENT_BYTES_MAX,
    MANIFEST,
    Fragment,
    Manifest,
    ManifestEntry,
    fragment_name,
    seal,
    shard_name,
    unseal,
)
from rackrun.checkpoint.durable.replacement import Replacement
from rackrun.checkpoint.durable.shard_bytes import SealedPayload, SliceReadable, checked_chunks, read_back
from rackrun.checkpoint.durable.storage.files import (
    FailureKind,
    FileFailure,
    FileRefused,
    Unsynced,
    delete_tree,
    failure_of,
    put_name,
    read_small,
    set_aside,
    sync_directory,
    write_new,
)
from rackrun.checkpoint.durable.storage.partial_files import partial_path
from rackrun.protocol.crash_points import crash_point, register

if TYPE_CHECKING:
    from rackrun.checkpoint.durable.durable_store import DurableStore

__all__ = ["CheckpointWriter"]

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


class CheckpointWriter:
    """Writes shards of one checkpoint, and makes it whole.

    Any number of writers, anywhere, may work on one checkpoint.

    ``replaces``: what has this checkpoint's name and is of an earlier fencing token and no later step, or not whole, was
    passed over by the job of this token. It gives way once this checkpoint is whole.
    """

    def __init__(
        self,
        store: DurableStore,
        number: int,
        step: int,
        fencing_token: int,
        world_size: int,
        *,
        replaces: bool = False,
    ) -> None:
        if number < 0 or fencing_token < 0 or world_size < 1:
            raise ValueError(
                f"checkpoint {number}, fencing token {fencing_token} or world size {world_size} is too small: "
                "give 0, 0 and 1 or more"
            )
        self.number, self.step, self.fencing_token, self.world_size = number, step, fencing_token, world_size
        self.failure: FileFailure | None = None
        """Why the last call returned False. None: fragments of other ranks are not there yet."""
        self._replacement = Replacement(store, number, step, fencing_token, allowed=replaces)
        self._store, self._files = store, store.files
        self._final = store.path(number)
        self._temporary = store.attempt(number, step, fencing_token, world_size)

    @property
    def replaced(self) -> bool:
        """Whether this writer has put its checkpoint in the place of one that had its name."""
        return self._replacement.done

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
        """Write a rank's file and fragment. Return True once both are on disk, whoever wrote them.

        ``crcs``: the sealed CRC32C of each ``chunk_bytes`` of ``payload``. ``share_of``: see `Fragment`. Errors of
        storage or of the payload are not raised: they are in ``failure``. Raises ValueError for a rank outside the
        world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks that write this checkpoint")
        fragment: Fragment | None = None
        try:
            data = payload if isinstance(payload, memoryview) else payload.payload
            fragment = self._fragment(rank, data.nbytes, layout_hash, crcs, chunk_bytes)
            fragment = msgspec.structs.replace(fragment, share_of=share_of)
            if not self._has(fragment):
                self._write(fragment, data.cast("B") if isinstance(data, memoryview) else data)
        except (OSError, FileRefused, CheckpointError) as error:
            return self._failed(error, fragment)
        except (ValueError, BufferError) as error:  # the lease has ended, and the view was released
            return self._failed(
                FileRefused(FailureKind.SOURCE, f"the payload of rank {rank} is gone: {error}"), fragment
            )
        self.failure = None
        return True

    def finish(self) -> bool:
        """Make the checkpoint whole. Return True once it is whole and on disk, whoever finished it.

        When it returns False, ``failure`` says why; None means that shards are missing. Any rank may call it, at any
        time, more than once.
        """
        self.failure = None
        try:
            manifest = self._manifest()
            if manifest is not None:
                self._publish(manifest)
            elif self._is_published(None):
                self._discard()  # shards that were written again after the checkpoint was published
            else:
                return False
            self._sync_name()
            crash_point("durable.parent_synced")
            if not self._is_published(manifest):
                raise FileRefused(
                    FailureKind.VANISHED, f"{self._final} was published, and has been deleted, moved or damaged since"
                )
            self._replacement.delete_former()  # not before the name of the new one is on disk
        except (OSError, FileRefused, CheckpointError) as error:
            self.failure = failure_of(error)
        return self.failure is None

    def give_up(self) -> None:
        """Delete this attempt, which no process writes any more. Best effort: retention deletes the rest later."""
        self._discard()

    # -- a shard
    def _fragment(
        self, rank: int, size: int, layout_hash: str, crcs: np.ndarray | Sequence[int], chunk_bytes: int
    ) -> Fragment:
        fragment = Fragment(
            job=self._store.job,
            number=self.number,
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
            raise FileRefused(FailureKind.SOURCE, error.what) from error
        return fragment

    def _has(self, fragment: Fragment) -> bool:
        """Whether this very shard is on disk already, in the temporary or the published directory.

        Raises FileRefused when another shard of the rank is there.
        """
        sealed, digest = seal(fragment)
        with contextlib.suppress(CheckpointError):
            found, _ = self._store.whole(self.number)
            if not self._replacement.passed_over(found):
                if [shard.fragment for shard in found.shards[fragment.rank : fragment.rank + 1]] != [digest]:
                    raise FileRefused(FailureKind.DISAGREES, f"{self._final} has another shard of rank {fragment.rank}")
                return True
        if self._temporary in self._store.doubtful:
            return False
        with contextlib.suppress(FileNotFoundError):
            path = self._temporary / fragment_name(fragment.rank, self.world_size)
            if read_small(self._files, path, FRAGMENT_BYTES_MAX) != sealed:
                raise FileRefused(FailureKind.DISAGREES, f"{path} describes another shard")
            return self._files.stat(path.with_name(shard_name(fragment.rank, self.world_size))).st_size == fragment.size
        return False

    def _write(self, fragment: Fragment, data: memoryview | SliceReadable) -> None:
        """Write, sync and name the shard; read it back; then write its fragment."""
        self._make_directories()
        crash_point("durable.directory")
        name = shard_name(fragment.rank, self.world_size)
        with self._new_file(name, checked_chunks(data, fragment)) as part:
            crash_point("durable.data_synced")
            put_name(self._files, part, self._temporary / name)
        crash_point("durable.data_named")
        read_back(self._files, self._temporary / name, fragment)
        crash_point("durable.read_back")
        name = fragment_name(fragment.rank, self.world_size)
        with self._new_file(name, [memoryview(seal(fragment)[0])]) as part:
            crash_point("durable.fragment_synced")
            if not put_name(self._files, part, self._temporary / name) and not self._has(fragment):
                raise FileRefused(FailureKind.IO, f"{self._temporary / name} exists, and its shard does not")
        crash_point("durable.fragment_named")

    @contextlib.contextmanager
    def _new_file(self, name: str, parts: Iterable[memoryview]) -> Iterator[Path]:
        """Write a file under a temporary name and yield its path. The name is removed afterwards.

        The caller gives the file its final name. Other writers may publish the directory meanwhile.
        """
        part = partial_path(self._temporary / name).name
        try:
            write_new(self._files, self._temporary / part, parts)
            yield self._temporary / part
        finally:
            for directory in (self._temporary, self._final):
                with contextlib.suppress(OSError):
                    self._files.unlink(directory / part)
                    break

    def _make_directories(self) -> None:
        if self._temporary in self._store.doubtful:  # an earlier fsync failed, and so did setting the directory aside
            set_aside(self._files, self._temporary)
            self._store.doubtful.discard(self._temporary)
        for path in (self._store.directory, self._temporary):
            with contextlib.suppress(FileExistsError):
                self._files.mkdir(path)

    def _failed(self, error: Exception, fragment: Fragment | None) -> bool:
        """Record an error. Return True if another writer has written the shard meanwhile."""
        self.failure = failure_of(error)
        if fragment is not None:
            with contextlib.suppress(OSError, FileRefused, CheckpointError):
                if self._has(fragment):
                    self.failure = None
        return self.failure is None

    # -- the checkpoint
    def _manifest(self) -> Manifest | None:
        """Build the manifest from the fragments; None while some are missing.

        Raises FileRefused for a fragment that does not fit.
        """
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
            if (found.number, found.step, found.world_size, found.rank, found.job, found.size) != (
                self.number,
                self.step,
                self.world_size,
                rank,
                self._store.job,
                size,
            ):
                raise FileRefused(
                    FailureKind.IO, f"{path} describes another shard than the one beside it, which has {size} bytes"
                )
            shards.append(
                ManifestEntry(
                    rank=rank, size=size, layout_hash=found.layout_hash, fragment=digest, fragment_bytes=len(data)
                )
            )
        return Manifest(
            job=self._store.job,
            number=self.number,
            step=self.step,
            fencing_token=self.fencing_token,
            world_size=self.world_size,
            shards=tuple(shards),
        )

    def _publish(self, manifest: Manifest) -> None:
        """Write the manifest into the temporary directory, then rename the directory to its final name."""
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
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
                    raise
                replaced = False
                if not self._is_published(manifest):
                    if self._replacement.gives_way():
                        replaced = self._replacement.take_place(self._temporary, manifest)
                    elif not self._is_published(manifest):  # by another writer, since the first look
                        raise FileRefused(FailureKind.DISAGREES, f"{self._final} is there, and is not whole") from error
                if not replaced:
                    self._discard()
            crash_point("durable.renamed")
        except FileNotFoundError:  # another writer was faster
            if not self._is_published(manifest):
                raise

    def _is_published(self, manifest: Manifest | None) -> bool:
        """Whether the checkpoint is published, whole and the same (None: of the same step and world size).

        Raises FileRefused when another checkpoint has its name, unless that was passed over.
        """
        try:
            found, _ = self._store.whole(self.number)
        except (NoUsableCheckpoint, IntegrityError):
            return False
        if self._replacement.passed_over(found):
            return False
        same = (
            found.same_content(manifest) if manifest else (found.step, found.world_size) == (self.step, self.world_size)
        )
        if not same:
            raise FileRefused(FailureKind.DISAGREES, f"{self._final} exists with other content")
        return True

    def _sync_name(self) -> None:
        """Sync the directory that lists the checkpoint.

        A sync after a failed one may succeed although this name is lost, so this checkpoint stays in doubt. For the
        names of later checkpoints the sync is valid.
        """
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
        """Remove partial files that dead writers left.

        A living writer whose file is removed finds its shard written already.
        """
        for name in self._files.listdir(self._temporary):
            if name.startswith(".rank-") and name.endswith(".part"):
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(self._temporary / name)

    def _discard(self) -> None:
        """Delete the temporary directory. Best effort: retention deletes what stays."""
        with contextlib.suppress(OSError):
            if (trash := set_aside(self._files, self._temporary)) is not None:
                for _ in delete_tree(self._files, trash):
                    pass
