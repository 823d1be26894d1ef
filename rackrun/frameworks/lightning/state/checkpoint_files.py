"""Which of ``ModelCheckpoint``'s files exist, as far as the names of new ones depend on it.

A file of a save that is done again is on disk already. It is not another file, so it gets no ``-v1``. What counts is
what lay in the folder before the training, and what committed saves have written.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["CheckpointFiles"]


class CheckpointFiles:
    """The files of all ``ModelCheckpoint`` of a Trainer."""

    def __init__(self, trainer: Any, checkpoint_class: type) -> None:
        self._callbacks: list[Any] = [one for one in trainer.callbacks if isinstance(one, checkpoint_class)]
        self.before: set[str] = set()
        """What was there before the training."""
        self.saved: set[str] = set()
        """What was saved in it, and not removed."""
        for callback in self._callbacks:
            callback.file_exists = self._exists

    def look(self) -> list[str]:
        """Return what the folders of the callbacks hold now."""
        found: list[str] = []
        for callback in self._callbacks:
            if callback.dirpath and callback._fs.isdir(callback.dirpath):
                found += [_path(one) for one in callback._fs.ls(callback.dirpath, detail=False)]
        return sorted(found)

    def save(self, path: Any) -> None:
        """Count ``path`` as saved."""
        self.saved.add(_path(path))

    def remove(self, path: Any) -> None:
        """Count ``path`` as removed."""
        self.saved.discard(_path(path))
        self.before.discard(_path(path))

    def _exists(self, path: Any, trainer: Any) -> bool:  # noqa: ARG002 - as Lightning calls it
        return _path(path) in self.saved | self.before


def _path(path: Any) -> str:
    text = str(path)
    return text if "://" in text else os.path.abspath(text)
