"""The lease on a job's directory: a small file that one process of the job renews as long as it lives.

The owner is a job, not a process: when the renewing process is lost, another of the same job continues. A second job
calls `Lease.take`, and is refused while the first one lives. A process on this host is checked directly, by pid and
start time. For a process on another host the file is watched: if its beat moves the job lives, and if it has not moved
for `EXPIRY_S`, by the clock of the storage, the job is gone. So the crash of a host delays the next job by at most that
long.

There is no lock that all storage offers. Two jobs that find a dead one's file at the same moment both write, wait, and
read again: the one that reads the other's name is refused. Storage slower than that wait lets both begin, and the one
whose name is not in the file stops saving at its next beat. The same happens to a job that stood still for longer than
`EXPIRY_S`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.base.process_identity import ProcessIdentity, begin_session, boot_id, end_session, namespace
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.storage.files import read_small
from rackrun.checkpoint.durable.storage.partial_files import partial_path
from rackrun.errors import UsageError

__all__ = ["EXPIRY_S", "InUse", "Lease", "living_fencing_token"]

BEAT_S = 5.0
EXPIRY_S = 30.0
_DYING_S = 10.0
"""Seconds for which a process that was just killed may still exist without any sign that it is dying."""
_DEAD_S = 600.0
"""Seconds that a process may take to die."""
_LEAVING_S = 2.0
_SILENT_S = 24 * 3600.0
"""Seconds without a save after which a process counts as gone, if it cannot be seen from here and renews nothing."""
_LOOK_S = 0.25
_SETTLE_S = 0.5
NAME = "OWNER.json"
_BYTES_MAX = 65536


class InUse(CheckpointError, UsageError):
    """Another job, which is alive, saves to the directory."""


class _Owner(msgspec.Struct, frozen=True, kw_only=True, rename={"fencing_token": "epoch"}):
    """The content of the lease file."""

    owner: str
    fencing_token: int
    """Fencing token of the job's start. Unfinished data with another one belongs to no living job."""
    boot: str = ""
    host: str = ""
    process: tuple[int, int, int, int] = (0, 0, 0, 0)
    beat: int = 0
    renewed: bool = True
    """Whether a thread renews the file. Otherwise the file is written at each save."""
    ended: bool = False


class Lease:
    """One process's hold on a job's directory.

    ``owner`` is the same for all processes of a job, and unique to the job.
    """

    def __init__(self, store: DurableStore, owner: str, fencing_token: int = 0) -> None:
        self._store, self._owner, self.fencing_token = store, owner, fencing_token
        self._path = store.directory / NAME
        self._me = begin_session()
        self._beat = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._held = False
        self.lost = ""
        """Why this job must not save any more; empty while it may."""

    def take(self) -> None:
        """Become the owner of the directory, waiting for a dying one.

        Raises `InUse` when another job lives, and OSError.
        """
        with contextlib.suppress(FileExistsError):
            self._store.files.mkdir(self._store.directory)
        began, seen = time.monotonic(), None
        while True:
            found = _read(self._store, self._path)
            if found is None:
                with contextlib.suppress(FileExistsError):
                    self._store.files.create(self._path, self._said())
                    return
                if _read(self._store, self._path) is None:
                    self._store.files.replace(self._path, self._said())  # the file is damaged and names no owner
                continue
            if found.owner == self._owner:
                # a full disk must not keep a job from its own directory; the file is renewed later
                with contextlib.suppress(OSError):
                    self._store.files.replace(self._path, self._said())
                return
            alive = _is_alive(self._store, self._path, found)
            if not alive:
                self._store.files.replace(self._path, self._said())
                time.sleep(_SETTLE_S)
                continue  # it is ours now, unless another job wrote a moment later
            moved = seen is not None and found.beat != seen
            seen = found.beat if seen is None else seen
            if _is_near(found):
                process = ProcessIdentity(*found.process)
                wait_s = _DEAD_S if process.dying() else _DYING_S
                refused = time.monotonic() - began > wait_s and process.alive()  # it may have died meanwhile
            else:
                refused = moved
            if refused:
                raise InUse(
                    f"{self._store.directory} is in use by another job: process {found.process[0]} on {found.host} saves there.",
                    remedy="give this job a --checkpoint-dir of its own, or end the other one.",
                )
            time.sleep(_LOOK_S)

    def hold(self) -> str:
        """Renew the lease before a save, instead of `take` and `keep`. A later start of a job fences the earlier one.

        Return why this start must not save any more; "" when it may, or when storage does not answer.
        """
        with contextlib.suppress(OSError):
            found = _read(self._store, self._path)
            if self._held and found is not None and found.owner != self._owner:
                self.lost = f"{self._store.directory} was taken over by a later start of the job, on {found.host}"
            if not self.lost:
                self._beat += 1
                self._store.files.replace(self._path, self._said(renewed=False))
                self._held = True
        return self.lost

    def keep(self, told: Callable[[str], None] = lambda _: None) -> None:
        """Renew the lease from now on, in a thread.

        ``told`` gets the reason when another job has taken the directory.
        """
        self._thread = threading.Thread(target=self._renew, args=[told], name="rackrun-lease", daemon=True)
        self._thread.start()

    def _renew(self, told: Callable[[str], None]) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError):  # until storage answers again
                found = _read(self._store, self._path)
                if found is not None and found.owner != self._owner and not found.ended:
                    self.lost = f"{self._store.directory} was taken over by another job, on {found.host}"
                    told(self.lost)
                    return
                if self._over.is_set():
                    return
                self._beat += 1
                self._store.files.replace(self._path, self._said())

    def leave(self, *, ended: bool) -> None:
        """Stop renewing. ``ended``: the job is over, and the next one may begin at once."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_LEAVING_S)
        if ended:
            with contextlib.suppress(OSError):
                found = _read(self._store, self._path)
                if found is not None and found.owner == self._owner:
                    self._store.files.replace(self._path, self._said(ended=True, renewed=False))
        end_session(self._me)

    def _said(self, *, ended: bool = False, renewed: bool = True) -> bytes:
        """Return the file's content as JSON."""
        return msgspec.json.encode(
            _Owner(
                owner=self._owner,
                fencing_token=self.fencing_token,
                boot=boot_id(),
                host=socket.gethostname(),
                process=(self._me.pid, self._me.start, self._me.namespace, self._me.session),
                beat=self._beat,
                renewed=renewed,
                ended=ended,
            )
        )


def living_fencing_token(store: DurableStore) -> tuple[bool, int | None]:
    """Return whether the directory names an owner, and its fencing token if it is alive, else None. Raises OSError."""
    path = store.directory / NAME
    found = _read(store, path)
    if found is None:
        return False, None
    return True, found.fencing_token if _is_alive(store, path, found) else None


def _read(store: DurableStore, path: Path) -> _Owner | None:
    """Read the lease file; None when it is missing or damaged. Raises OSError."""
    try:
        return msgspec.json.decode(read_small(store.files, path, _BYTES_MAX), type=_Owner)
    except (FileNotFoundError, CheckpointError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_alive(store: DurableStore, path: Path, owner: _Owner) -> bool:
    """Whether the owner is alive: by its process if that can be seen from here, else by the age of the file."""
    if owner.ended:
        return False
    if _is_near(owner):
        return ProcessIdentity(*owner.process).alive()
    return _age_s(store, path) <= (EXPIRY_S if owner.renewed else _SILENT_S)


def _is_near(owner: _Owner) -> bool:
    """Whether the owner's process is on this host and in this pid namespace, so that it can be checked."""
    return owner.boot == boot_id() and ProcessIdentity(*owner.process).namespace == namespace()


def _age_s(store: DurableStore, path: Path) -> float:
    """Return the age of a file in seconds, by the clock of the storage."""
    probe = partial_path(store.directory / "clock")
    store.files.replace(probe, b"?")
    try:
        return store.files.stat(probe).st_mtime - store.files.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            store.files.unlink(probe)
