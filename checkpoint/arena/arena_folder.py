"""The folder in which the ranks of one host keep their arenas without an agent: private, on a tmpfs, one for each job.

::

    <folder>/rackrun-<uid>/               0700
        lock                              held while a job starts or leaves; the last to leave removes it
        <job>-<digest of its directory>/
            keeper-<pid>-<start>-...      a process that may come back for the arenas: a worker, or torchrun itself
            rank-00001-of-00004-<epoch>.arena
            commit-000000000012.json      the record of a committed checkpoint

The files outlive a worker that torchrun restarts, and the new worker finds them by name. A keeper is identified by pid
*and* start time. When all keepers of a job are dead, the next job of the same user removes its folder.

A commit's record is written before the arena is marked, and before the older checkpoint may be overwritten: whatever is
lost of the older one, a record of the newer exists. An arena of another world size stays until the first commit of this
world.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.memory_plan import MemoryPlan, ceilings
from rackrun.checkpoint.base.digest import content_digest
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, MemoryPlanError
from rackrun.checkpoint.base.location import local_path
from rackrun.checkpoint.base.messages import say
from rackrun.checkpoint.base.process_identity import ProcessIdentity, begin_session, end_session, process_of
from rackrun.checkpoint.commit.commit_records import CommitRecord, decode_record
from rackrun.checkpoint.redundancy.shard_placement import Redundancy
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["ArenaFolder", "MemoryTier", "commits_in", "job_folder", "keepers_in"]

_ARENA = re.compile(r"rank-(\d{5})-of-(\d{5})-(\d+)-[0-9a-f]+\.arena", re.ASCII)
_KEEPER = re.compile(r"keeper-(\d+)-(\d+)-(\d+)-(\d+)", re.ASCII)
_COMMIT = re.compile(r"commit-(\d{12,20})\.json", re.ASCII)
_COMMITS_KEPT = 4
_LOCK = "lock"

register("commit.record_written", "commit.record_named", "commit.sweeping")


@dataclass(frozen=True)
class MemoryTier:
    """Settings of arenas in ``folder``, a tmpfs.

    ``slots``: images that each rank keeps; None for 2, or 3 where checkpoints are also written to disk. ``usable``: the
    share of the free memory that arenas may take.
    """

    folder: Path | str = "/dev/shm"  # noqa: S108 - arenas are in a private folder below it
    slots: int | None = None
    usable: float = 0.9


class ArenaFolder:
    """One rank's view of its job's folder.

    Raises `CheckpointError` when the folder cannot be used, `IntegrityError` when it is not private to this user.
    """

    def __init__(self, tier: MemoryTier, job: str, directory: Path, rank: int, world_size: int) -> None:
        self._tier, self._job, self._rank, self._world_size = tier, job, rank, world_size
        self.path = job_folder(local_path(tier.folder, "the folder of a MemoryTier"), job, directory)
        self._base = self.path.parent
        self._me = begin_session()
        try:
            with self._locked():
                self._remove_orphans()
                _private(self.path)
                for keeper in (self._me, *_restarter()):
                    (self.path / _keeper_name(keeper)).touch(mode=0o600)
        except OSError as error:
            end_session(self._me)
            raise CheckpointError(
                f"{self._base} cannot be used for arenas: {error.strerror or error}.",
                remedy="give a tmpfs that you may write to.",
            ) from error
        except BaseException:
            end_session(self._me)
            raise

    @property
    def place(self) -> str:
        """Identifies host, folder and file system. Ranks with the same place see the same files."""
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{self.path}:{os.stat(self.path).st_dev}"

    # -- arenas
    def arenas(self) -> dict[Path, tuple[int, int]]:
        """Return path -> (rank, world size) of all arenas in the folder."""
        found = {}
        for name in sorted(self._names()):
            if match := _ARENA.fullmatch(name):
                found[self.path / name] = int(match[1]), int(match[2])
        return found

    def attach(self, path: Path, fencing_token: int | None = None) -> Arena | None:
        """Open an arena to write in ``fencing_token``, or to read.

        Return None, and report on stderr, when it cannot be used.
        """
        try:
            return Arena.attach(path, job=self._job, writable=fencing_token is not None, fencing_token=fencing_token)
        except CheckpointError as error:
            say(f"the arena {path} is not used: {error.what}")
            return None

    def create(self, fencing_token: int, *, slots: int, payload_bytes: int, local_ranks: int) -> Arena:
        """Make this rank's arena. Arenas with older fencing tokens are removed if there is no room beside them.

        ``payload_bytes``: room of one slot. Raises `MemoryPlanError` when ``local_ranks`` such arenas do not fit.
        """
        try:
            return self._create(fencing_token, slots, payload_bytes, local_ranks)
        except MemoryPlanError:
            if not self.sweep(fencing_token):
                raise
            say(f"no room beside older arenas in {self.path}: they are gone")
            return self._create(fencing_token, slots, payload_bytes, local_ranks)

    def _create(self, fencing_token: int, slots: int, payload_bytes: int, local_ranks: int) -> Arena:
        held = sum(path.stat().st_size for path in self.arenas() if path.exists())
        MemoryPlan(
            local_ranks, payload_bytes, Redundancy.local(), ceilings(self.path), slots=slots, held_bytes=held,
            usable=self._tier.usable,
        ).check()  # fmt: skip
        name = f"rank-{self._rank:05d}-of-{self._world_size:05d}-{fencing_token}-{secrets.token_hex(4)}.arena"
        return Arena.create(
            self.path / name,
            job=self._job,
            rank=self._rank,
            fencing_token=fencing_token,
            slots=slots,
            payload_bytes=payload_bytes,
        )

    def sweep(self, fencing_token: int) -> int:
        """Remove the arenas with older fencing tokens than ``fencing_token``. Return how many were removed."""
        gone = 0
        for path in self.arenas():
            with contextlib.suppress(FileNotFoundError):
                if _fencing_token_of(path, self._job) < fencing_token:
                    crash_point("commit.sweeping")
                    path.unlink()
                    gone += 1
        return gone

    # -- commits
    def remember(self, record: CommitRecord) -> None:
        """Store a commit record in this host's memory.

        It is there when this returns. The newest few records are kept.
        """
        name = self.path / f"commit-{record.number:012d}.json"
        part = name.with_name(f".{name.name}-{secrets.token_hex(4)}")
        part.write_bytes(record.encode())
        crash_point("commit.record_written")
        os.rename(part, name)
        crash_point("commit.record_named")
        others = sorted(n for n in self._names() if _COMMIT.fullmatch(n) and n != name.name)
        for old in others[: 1 - _COMMITS_KEPT]:
            (self.path / old).unlink(missing_ok=True)

    def commits(self) -> tuple[list[CommitRecord], dict[int, str]]:
        """Return the commit records that can be read, and checkpoint number -> why its record cannot be read."""
        return commits_in(self.path)

    # -- end
    def leave(self, *, remove: bool, fencing_token: int) -> None:
        """Leave the folder.

        With ``remove`` nobody comes back: this rank's arenas are removed, except those that a later fencing token has
        taken, and the last process to leave removes the folder, and the folder of this user if no other job is in it.
        Otherwise the arenas stay for the next start of the same job.
        """
        with contextlib.suppress(OSError, CheckpointError), self._locked():
            if remove:
                (self.path / _keeper_name(self._me)).unlink(missing_ok=True)
                for path, (rank, _) in self.arenas().items():
                    if rank == self._rank and _fencing_token_of(path, self._job) <= fencing_token:
                        path.unlink(missing_ok=True)
                mine = {self._me, *_restarter()}
                if not any(keeper.alive() for keeper in keepers_in(self.path) if keeper not in mine):
                    shutil.rmtree(self.path, ignore_errors=True)
                if os.listdir(self._base) == [_LOCK]:
                    (self._base / _LOCK).unlink()
                    self._base.rmdir()  # fails if another process has made a new lock meanwhile
        end_session(self._me)

    # -- helpers
    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of this user's folder. Makes both if they are not there.

        Whoever holds the lock may remove it with the folder. So a lock that is not in the folder any more is of no use,
        and another one is taken.
        """
        fd = self._lock()
        while fd is None:
            fd = self._lock()
        try:
            yield
        finally:
            os.close(fd)

    def _lock(self) -> int | None:
        """Return a descriptor that holds the lock; None if the lock was removed meanwhile."""
        _private(self._base)
        name = self._base / _LOCK
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(name)):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _remove_orphans(self) -> None:
        """Remove folders of jobs whose keepers are all dead.

        In this job's folder, remove only the names of dead keepers.
        """
        for name in os.listdir(self._base):
            path = self._base / name
            if not stat.S_ISDIR(path.lstat().st_mode):
                continue
            keepers = keepers_in(path)
            dead = [keeper for keeper in keepers if not keeper.alive()]
            if path == self.path:
                for keeper in dead:
                    (path / _keeper_name(keeper)).unlink(missing_ok=True)
            elif keepers and len(dead) == len(keepers):
                shutil.rmtree(path, ignore_errors=True)
                say(f"removed {path}, of a job that is gone")


def job_folder(tier: Path, job: str, directory: Path) -> Path:
    """Return the folder below ``tier`` for the arenas of ``job``, whose checkpoints are under ``directory``."""
    return tier / f"rackrun-{os.geteuid()}" / f"{job}-{content_digest(os.fsencode(str(directory.resolve())))[:12]}"


def commits_in(folder: Path) -> tuple[list[CommitRecord], dict[int, str]]:
    """Return the commit records in ``folder`` that can be read, and checkpoint number -> why its record cannot be
    read."""
    found, unreadable = list[CommitRecord](), dict[int, str]()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(folder)):
            if match := _COMMIT.fullmatch(name):
                try:
                    found.append(decode_record((folder / name).read_bytes()))
                except FileNotFoundError:
                    continue  # a newer record has taken its place
                except (CheckpointError, OSError) as error:
                    unreadable[int(match[1])] = f"the commit record {folder / name} cannot be read: {error}"
    return found, unreadable


def keepers_in(folder: Path) -> list[ProcessIdentity]:
    """Return the processes that may come back for the arenas in ``folder``."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        matches = [_KEEPER.fullmatch(name) for name in os.listdir(folder)]
        return [ProcessIdentity(*map(int, match.groups())) for match in matches if match]
    return []


def _private(path: Path) -> None:
    """Make a folder that only this user may enter. Raises `IntegrityError` when another kind of thing is there."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # the last process to leave has removed it just now
            status = path.lstat()
            break
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise IntegrityError(
            f"{path} must be a folder of user {os.geteuid()} that nobody else can enter; its owner is {status.st_uid}, its mode {stat.S_IMODE(status.st_mode):o}.",
            remedy="if it is yours, chmod 700 it; otherwise find out who made it, and remove it.",
        )


def _restarter() -> tuple[ProcessIdentity, ...]:
    """Return the process that would restart this worker: torchrun's. Empty when torchrun did not start it."""
    return (process_of(os.getppid()),) if "TORCHELASTIC_RUN_ID" in os.environ else ()


def _keeper_name(process: ProcessIdentity) -> str:
    return "keeper-{}-{}-{}-{}".format(*process)


def _fencing_token_of(path: Path, job: str) -> int:
    """Return the fencing token of an arena; -1 when it cannot be read."""
    try:
        with Arena.attach(path, job=job) as arena:
            return arena.fencing_token
    except CheckpointError:
        return -1
