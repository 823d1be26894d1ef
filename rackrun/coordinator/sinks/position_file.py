"""How far a sink is, in a small file of the run's directory: which training and which run of the target it is, and the
newest record that was delivered."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path

import msgspec

from rackrun.coordinator.sinks.sink import Key

__all__ = ["PositionFile", "Saved", "lock"]

_LOCK_S = 15.0
_POLL_S = 0.05


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file."""

    target: str
    training: str
    """Id of the run that began this training at step 0."""
    run: str = ""
    newest: Key | None = None


class PositionFile:
    """The file of one target. It is locked while it is open: the process of a launcher that was killed may still write
    what it has received.

    Raises OSError if it cannot be opened, TimeoutError if another process keeps it.
    """

    def __init__(self, directory: Path, target: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(target.encode()).hexdigest()[:12]
        self.path = directory / f"{target.partition(':')[0]}-{name}.json"
        self.log = self.path.with_suffix(".log")
        """Where the sink's libraries print."""
        self._target = target
        self._lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock(self._lock, self.path)
        except BaseException:
            os.close(self._lock)
            raise

    def load(self) -> Saved | None:
        """Return what was saved last; None: nothing that can be read."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Saved)
        except (OSError, msgspec.MsgspecError):
            return None

    def save(self, training: str, run: str, newest: Key | None) -> None:
        """Write the file, whole or not at all, and return when it is on disk."""
        saved = Saved(target=self._target, training=training, run=run, newest=newest)
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(msgspec.json.encode(saved) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def close(self) -> None:
        """Let another process have the file."""
        os.close(self._lock)


def lock(fd: int, path: Path, within_s: float = _LOCK_S) -> None:
    """Lock a file for this process, waiting up to ``within_s`` seconds for another. Raises TimeoutError."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process writes to {path}") from None
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks
            return
