"""Storage that misbehaves on purpose, and small checkpoints to try it with.

`Failing` reports an error at the n-th call. `Crashing` ends the "process" there: every later call ends it again, so no
clean-up runs. `PowerLoss` also takes away what was not synced: the bytes of files, and names, latest first, in each
directory by itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.durable.storage.files import Files
from rackrun.protocol import crash_points

CHUNK = 64
WORLD = 2
JOB = "job"
OPERATIONS = (
    "open", "write", "pread", "fsync", "fstat", "close", "stat", "listdir", "mkdir", "link", "rename", "unlink",
    "rmdir",
)  # fmt: skip


class Crash(BaseException):
    """The process is dead."""


class Quick(Files):
    """Without the fsync: no power is lost in most tests."""

    def fsync(self, fd: int) -> None:
        os.fstat(fd)


class Hooked(Quick):
    """`around` sees every call."""

    def around(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        return real(*args)


def _hook(operation: str) -> Callable[..., Any]:
    real = getattr(Quick, operation)

    def call(self: Hooked, *args: Any) -> Any:
        return self.around(operation, lambda *given: real(self, *given), *args)

    return call


for _operation in OPERATIONS:
    setattr(Hooked, _operation, _hook(_operation))


class Recording(Hooked):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def around(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        self.calls.append(operation)
        return real(*args)


class Failing(Hooked):
    """``how`` at call ``at`` (from 1), and at all later ones when ``onward``. ``how`` is an errno, "short" and
    "nothing" (writes), or "vanish" (the job's directory is gone before the call)."""

    def __init__(self, at: int, how: int | str, job: Path, *, onward: bool = False) -> None:
        self.at, self.how, self.job, self.onward = at, how, job, onward
        self.count = 0

    def around(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        self.count += 1
        if self.count < self.at or (self.count > self.at and not self.onward):
            return real(*args)
        if self.how == "vanish":
            shutil.rmtree(self.job, ignore_errors=True)
        elif isinstance(self.how, int):
            if operation == "close":
                real(*args)
            if operation == "fsync" and stat.S_ISREG(os.fstat(args[0]).st_mode):
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)  # the pages that it could not write are lost
            raise OSError(self.how, os.strerror(self.how))
        elif operation == "write":
            if self.how == "nothing":
                return 0
            return real(args[0], args[1][: max(1, len(args[1]) // 2)])
        return real(*args)


class Crashing(Hooked):
    """Dead at call ``at``; a write is cut in half."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.dead = False

    def around(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        self.count += 1
        if self.count >= self.at and not self.dead:
            self.dead = True
            if operation == "write":
                real(args[0], args[1][: len(args[1]) // 2])
        if self.dead:
            if operation == "close":
                real(*args)
            raise Crash
        return self.alive(operation, real, *args)

    def alive(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        return real(*args)

    def die(self) -> None:
        """What the crash leaves is to be looked at now."""


class PowerLoss(Crashing):
    """Names that are not synced are undone when the power goes, as many of the latest in each directory as ``rng``
    says; files that are not synced lose their end."""

    def __init__(self, at: int, rng: random.Random, aside: Path) -> None:
        super().__init__(at)
        self.rng, self.aside = rng, aside
        self.saved = 0
        self.undo: list[tuple[int, Callable[[], None]]] = []  # (inode of the directory, how)
        self.directories: dict[int, int] = {}  # inode -> descriptor
        self.dirty: dict[int, int] = {}

    def alive(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        if operation == "fsync":
            self._synced(os.fstat(args[0]))
        elif operation == "open" and args[1] & os.O_CREAT:
            fd = real(*args)
            self.dirty[os.fstat(fd).st_ino] = os.open(args[0], os.O_RDWR)
            self._remember(args[0], lambda at, name: os.unlink(name, dir_fd=at))
            return fd
        elif operation in ("unlink", "rename", "link", "mkdir", "rmdir"):
            return getattr(self, "_" + operation)(real, *args)
        return real(*args)

    def _synced(self, status: os.stat_result) -> None:
        if stat.S_ISDIR(status.st_mode):
            self.undo = [entry for entry in self.undo if entry[0] != status.st_ino]
        elif status.st_ino in self.dirty:
            os.close(self.dirty.pop(status.st_ino))

    def _remember(self, path: Path, how: Callable[[int, str], None]) -> None:
        inode = path.parent.stat().st_ino
        if inode not in self.directories:
            self.directories[inode] = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self.undo.append((inode, lambda: how(self.directories[inode], path.name)))

    def _save(self, path: Path) -> Path | None:
        if not path.is_file():
            return None
        self.saved += 1
        kept = self.aside / str(self.saved)
        os.link(path, kept)
        return kept

    def _unlink(self, real: Callable[..., Any], path: Path) -> None:
        kept = self._save(path)
        real(path)
        if kept is not None:
            self._remember(path, lambda at, name: os.link(kept, name, dst_dir_fd=at))

    def _rename(self, real: Callable[..., Any], old: Path, new: Path) -> None:
        kept = self._save(new)
        real(old, new)

        def back(at: int, name: str) -> None:
            os.rename(name, old.name, src_dir_fd=at, dst_dir_fd=at)
            if kept is not None:
                os.link(kept, name, dst_dir_fd=at)

        self._remember(new, back)

    def _link(self, real: Callable[..., Any], old: Path, new: Path) -> None:
        real(old, new)
        self._remember(new, lambda at, name: os.unlink(name, dir_fd=at))

    def _mkdir(self, real: Callable[..., Any], path: Path) -> None:
        real(path)
        self._remember(path, lambda at, name: shutil.rmtree(f"/proc/self/fd/{at}/{name}"))

    def _rmdir(self, real: Callable[..., Any], path: Path) -> None:
        real(path)
        self._remember(path, lambda at, name: os.mkdir(name, dir_fd=at))

    def die(self) -> None:
        by_directory: dict[int, int] = {}
        for inode, _ in self.undo:
            by_directory[inode] = by_directory.get(inode, 0) + 1
        lost = {inode: self.rng.randint(0, count) for inode, count in by_directory.items()}
        for inode, how in reversed(self.undo):
            if lost[inode] > 0:
                lost[inode] -= 1
                with contextlib.suppress(OSError):
                    how()
        for fd in self.dirty.values():
            os.ftruncate(fd, self.rng.randint(0, os.fstat(fd).st_size))
        for fd in (*self.dirty.values(), *self.directories.values()):
            os.close(fd)
        for kept in self.aside.iterdir():
            kept.unlink()
        self.undo, self.dirty, self.directories = [], {}, {}


# -- checkpoints
def payload_of(number: int, rank: int) -> bytes:
    return random.Random(f"{number}/{rank}").randbytes(3 * CHUNK + 10 * rank + number % 7)


def shard_args(number: int, rank: int) -> tuple[int, memoryview, str, Any]:
    payload = memoryview(payload_of(number, rank))
    return rank, payload, f"layout-{rank}", chunk_crcs(payload, CHUNK)


def write_shard(writer: CheckpointWriter, rank: int) -> bool:
    return writer.write_shard(*shard_args(writer.number, rank), chunk_bytes=CHUNK)


def save(store: DurableStore, number: int, *, fencing_token: int = 1, world: int = WORLD) -> bool:
    writer = store.writer(number, 10 * number, fencing_token, world)
    written = [write_shard(writer, rank) for rank in range(world)]
    return writer.finish() and all(written)


def store_at(root: Path, files: Files | None = None) -> DurableStore:
    return DurableStore(root, JOB, files=files or Quick())


def whole(root: Path) -> list[int]:
    """The checkpoints that a reader sees, newest first, after all their bytes were read and compared."""
    store = store_at(root)
    found = store.checkpoints()
    for info in found:
        verification = store.verify(info.number)
        assert verification.ok, verification
        assert info.step == 10 * info.number
        with store.open(info.number) as reader:
            for rank in range(info.world_size):
                expected = payload_of(info.number, rank)
                assert bytes(reader.read(rank, 0, len(expected))) == expected
                assert reader.reader(rank).size == len(expected)
    return [info.number for info in found]


# -- processes
def in_child(work: Callable[[], object]) -> int:
    """Fork; how the child ended, as `os.waitstatus_to_exitcode` says it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of pytest do not matter to the child
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(name: str, work: Callable[[], object], nth: int = 1) -> bool:
    """Run ``work`` in a child that is killed when it passes the crash point ``name`` for the n-th time. False: it did
    not come by, and ended well."""

    def child() -> None:
        passed = 0

        def handler(point: str) -> None:
            nonlocal passed
            passed += point == name
            if passed == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        crash_points.enable(handler)
        work()

    code = ended(in_child(child))
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def calls_of(work: Callable[[Files], object]) -> list[str]:
    files = Recording()
    work(files)
    return files.calls
