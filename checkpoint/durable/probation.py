"""Notes on checkpoints across restarts: which turned out bad, and how often each was restored without being confirmed.

A job that fails again and again after the same restore goes on to an older checkpoint.

The notes are files of a few bytes beside the checkpoints. What storage refuses to store is not remembered; that is
never an error.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.commit.checkpoint_choice import ATTEMPTS_MAX
from rackrun.checkpoint.commit.commit_records import NUMBER_MAX
from rackrun.checkpoint.durable.storage.files import Files, read_small
from rackrun.checkpoint.durable.storage.object_store import files_at
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["Probation"]

register("restore.counting", "restore.counted")

_QUARANTINED, _RESTORED = "quarantined", "restored"
_NAME = re.compile(r"(quarantined|restored)-(\d{12,20})", re.ASCII)
_REASON_BYTES_MAX = 4096
_NOTE_BYTES_MAX = 2**20


class Probation:
    """The notes in ``directory``, which all ranks see. One rank writes."""

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        self.directory, self._files = directory, files or files_at(directory)

    def quarantined(self) -> dict[int, str]:
        """Return checkpoint number -> why it was quarantined."""
        found = {}
        for number, path in self._of(_QUARANTINED):
            try:
                found[number] = self._read(path)[:_REASON_BYTES_MAX].decode(errors="replace")
            except FileNotFoundError:
                continue  # the quarantine was lifted just now
            except (OSError, CheckpointError) as error:
                found[number] = f"why cannot be read: {error}"
        return found

    def attempts(self) -> dict[int, int]:
        """Return checkpoint number -> how many restores of it were not confirmed."""
        found = {}
        for number, path in self._of(_RESTORED):
            with contextlib.suppress(OSError):
                found[number] = self._files.stat(path).st_size
        return found

    def barred(self) -> dict[int, str]:
        """Return checkpoint number -> why no restore takes it."""
        tried = {
            number: f"passed over: resumed from {times} times, and nothing newer was finished"
            for number, times in self.attempts().items()
            if times >= ATTEMPTS_MAX
        }
        return tried | {number: f"quarantined: {why}" for number, why in self.quarantined().items()}

    def quarantine(self, number: int, reason: str) -> None:
        """Record that a checkpoint turned out bad, so that no restore takes it again."""
        self._append(_QUARANTINED, number, reason.encode()[:_REASON_BYTES_MAX])

    def restored(self, number: int) -> None:
        """Count one more restore of a checkpoint."""
        self._append(_RESTORED, number, b".")

    def confirm(self, number: int) -> None:
        """Clear the count of a checkpoint: a run restored from it went on to something newer, or to the end."""
        with contextlib.suppress(OSError):
            self._files.unlink(self.directory / _name(_RESTORED, number))

    def forget(self, number: int) -> None:
        """Delete all notes on a checkpoint that is gone, or that may be restored again."""
        self.confirm(number)
        with contextlib.suppress(OSError):
            self._files.unlink(self.directory / _name(_QUARANTINED, number))

    def _read(self, path: Path) -> bytes:
        return read_small(self._files, path, _NOTE_BYTES_MAX)

    def _append(self, what: str, number: int, data: bytes) -> None:
        if self._files.objects:
            with contextlib.suppress(OSError, CheckpointError):
                self._append_to_object(self.directory / _name(what, number), data)
            crash_point("restore.counted")
            return
        with contextlib.suppress(OSError):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self.directory / _name(what, number)).open("ab") as file:
                crash_point("restore.counting")
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        crash_point("restore.counted")

    def _append_to_object(self, path: Path, data: bytes) -> None:
        former = b""
        with contextlib.suppress(FileNotFoundError):
            former = self._read(path)
        crash_point("restore.counting")
        self._files.replace(path, former + data)

    def _of(self, what: str) -> Iterator[tuple[int, Path]]:
        """Yield checkpoint number and path of each note of one kind."""
        with contextlib.suppress(OSError):
            for name in self._files.listdir(self.directory):
                match = _NAME.fullmatch(name)
                if match and match[1] == what and int(match[2]) <= NUMBER_MAX:
                    yield int(match[2]), self.directory / name


def _name(what: str, number: int) -> str:
    return f"{what}-{number:012d}"
