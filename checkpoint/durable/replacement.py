"""How a checkpoint on disk gives way to another of its number.

A job that numbers its checkpoints by their steps, and does a step again after it has passed over the checkpoint of that
step, writes that checkpoint again. The former one stays until the new one is whole, and is deleted once the name of the
new one is on disk.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.checkpoint.base.errors import CheckpointError, NotOurs, NoUsableCheckpoint, is_damage
from rackrun.checkpoint.durable.durable_manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    kept_name,
    replaced_name,
    replaced_number,
    unseal,
)
from rackrun.checkpoint.durable.storage.files import delete_tree, read_small, set_aside

if TYPE_CHECKING:
    from rackrun.checkpoint.durable.durable_store import DurableStore

__all__ = ["Replacement"]


class Replacement:
    """Puts a checkpoint in the place of what has its name, where that gives way.

    ``allowed``: what is of an earlier fencing token and no later step, or not whole, gives way; otherwise nothing does.
    """

    def __init__(self, store: DurableStore, number: int, step: int, fencing_token: int, *, allowed: bool) -> None:
        self.done = False
        """Whether the new checkpoint has taken the place of one that had its name."""
        self._number, self._step, self._fencing_token, self._allowed = number, step, fencing_token, allowed
        self._former: Path | None = None
        """Where the checkpoint is that gave way, until the new one's name is on disk."""
        self._store, self._files, self._final = store, store.files, store.path(number)

    def passed_over(self, found: Manifest) -> bool:
        """Whether a published checkpoint of this number may be replaced: it is of an earlier fencing token, and of no
        later step. A job that began anew under the same name has not come so far."""
        return self._allowed and found.fencing_token < self._fencing_token and found.step <= self._step

    def gives_way(self) -> bool:
        """Whether what has this checkpoint's name may be replaced: it is of an earlier fencing token, or not whole."""
        try:
            return self.passed_over(self._store.manifest(self._number)[0])
        except NoUsableCheckpoint:
            return self._allowed  # another writer is replacing it just now
        except NotOurs:
            return self._allowed and not self._files.objects  # there its manifest could not be kept
        except CheckpointError as error:
            return self._allowed and is_damage(error)

    def take_place(self, new: Path, manifest: Manifest) -> bool:
        """Rename the directory ``new`` to this checkpoint's final name, after what has that name now was renamed.

        A directory that is not a checkpoint of this store is kept under another name. A former checkpoint is deleted
        later, by `delete_former`.

        Returns False when another writer has published the checkpoint of ``manifest`` meanwhile; ``new`` is left as it
        is then. Between the two renames no process deletes the former checkpoint. If this process dies between
        them, `DurableStore.complete` gives the former checkpoint its name back. Raises OSError.
        """
        aside = self._set_aside()
        if aside is not None and self._is_own(aside, manifest):  # another writer was faster
            self._files.rename(aside, self._final)
            return False
        if aside is not None and replaced_number(aside.name) is not None:
            self._former = aside
        try:
            self._files.rename(new, self._final)
        except FileNotFoundError:
            raise  # another writer was faster
        except OSError:
            self._former = None
            if aside is not None:
                with contextlib.suppress(OSError):
                    self._files.rename(aside, self._final)
            raise
        self.done = True
        return True

    def delete_former(self) -> None:
        """Delete the checkpoint that gave way, now that the new one's name is on disk. Best effort: the next start makes
        the rest trash."""
        former, self._former = self._former, None
        if former is not None:
            with contextlib.suppress(OSError):
                if (trash := set_aside(self._files, former)) is not None:
                    for _ in delete_tree(self._files, trash, first=MANIFEST):
                        pass

    def _set_aside(self) -> Path | None:
        """Rename what has this checkpoint's name. Return its new name; None when another writer has done it."""
        name = replaced_name(self._number)
        try:
            self._store.manifest(self._number)
        except NotOurs:
            name = kept_name(self._number)
        except CheckpointError:
            pass
        with contextlib.suppress(FileNotFoundError):
            self._files.rename(self._final, self._final.with_name(name))
            return self._final.with_name(name)
        return None

    def _is_own(self, directory: Path, manifest: Manifest) -> bool:
        with contextlib.suppress(OSError, CheckpointError):
            data = read_small(self._files, directory / MANIFEST, MANIFEST_BYTES_MAX)
            return unseal(data, Manifest, directory)[0] == manifest
        return False
