"""Write one checkpoint into an object store: data first, the manifest last.

::

    <root>/<job>/gen-000000000123/
        data-<epoch>-<nonce>/       uploads of the writers of one attempt: shards and fragments, by their usual names
        MANIFEST.json               the checkpoint is whole when this exists; step, token, world size name the attempt

An object appears whole or not at all, so there are no temporary names and no renames. Attempts that differ in anything
have different prefixes, so a late writer overwrites nothing that was published. The manifest is created only where none
exists, as far as the store supports that; of two whole attempts, either may stay. That of a checkpoint that gives way
(`CheckpointWriter`) is replaced in one request, on the condition that it is still the manifest that was judged. A store
without such requests keeps the former checkpoint: a late writer of an earlier start could replace a newer one there.
"""

from __future__ import annotations

import contextlib
import errno

from rackrun.checkpoint.durable.durable_manifest import MANIFEST, Fragment, Manifest, fragment_name, seal, shard_name
from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.durable.shard_bytes import SliceReadable, checked_chunks, read_back
from rackrun.checkpoint.durable.storage.files import FailureKind, FileRefused, delete_tree, write_new
from rackrun.checkpoint.durable.storage.object_store import ObjectFiles
from rackrun.protocol.crash_points import crash_point

__all__ = ["ObjectWriter"]

_TRIES = 5


class ObjectWriter(CheckpointWriter):
    """Writes shards of one checkpoint into an object store. `_temporary` is this attempt's prefix."""

    def _write(self, fragment: Fragment, data: memoryview | SliceReadable) -> None:
        name = self._temporary / shard_name(fragment.rank, self.world_size)
        write_new(self._files, name, checked_chunks(data, fragment))
        crash_point("durable.data_named")
        read_back(self._files, name, fragment)
        crash_point("durable.read_back")
        self._files.replace(self._temporary / fragment_name(fragment.rank, self.world_size), seal(fragment)[0])
        crash_point("durable.fragment_named")

    def _publish(self, manifest: Manifest) -> None:
        for _ in range(_TRIES):
            if self._is_published(manifest):
                break
            if self._write_manifest(seal(manifest)[0]):
                crash_point("durable.manifest_named")
                break
        else:
            raise FileRefused(FailureKind.DISAGREES, f"{self._final} is there, and is not whole")
        self._discard()

    def _write_manifest(self, data: bytes) -> bool:
        """Write the manifest where there is none, or in the place of one that gives way.

        Returns False when another process was faster, or what is there does not give way.
        """
        path = self._final / MANIFEST
        try:
            self._files.create(path, data)
            return True
        except FileExistsError:
            if not self._replacement.gives_way():
                return False
        assert isinstance(self._files, ObjectFiles)
        try:
            version = self._files.version(path)
            if not self._replacement.gives_way():  # it is judged after its version was read
                return False
            self._files.replace_version(path, data, version)
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            why = f"{self._final} stays: this store cannot replace an object on a condition ({error.strerror})"
            raise FileRefused(
                FailureKind.DISAGREES, f"{why}; to have the step saved anew, delete {MANIFEST} there"
            ) from error
        self._replacement.done = True
        return True

    def _sync_name(self) -> None:
        """Do nothing: a completed upload is durable."""

    def _discard(self) -> None:
        """Delete this attempt's prefix, unless it is the published one."""
        with contextlib.suppress(OSError):
            if not self._store.is_used(self._temporary):
                for _ in delete_tree(self._files, self._temporary):
                    pass
