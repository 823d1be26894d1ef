"""Flip one bit of a job's saved state from outside: in a snapshot in memory, or in a checkpoint on disk."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rackrun.chaos.injectors.common.injection import CONFIRM_S, StrikeOutcome
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError
from rackrun.checkpoint.durable.durable_manifest import VERIFIED
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.protocol.boot import SNAPSHOT_JOB

__all__ = ["Flipped", "checkpoint_bit", "snapshot_bit"]


class Flipped:
    """A bit flip that is tried again until there is something to damage."""

    def __init__(self, flip: Callable[[random.Random], str], seed: int, of: str) -> None:
        self._began_s, self._flip, self._of = time.monotonic(), flip, of
        self._draw = random.Random(seed)

    def outcome(self) -> StrikeOutcome | None:
        if detail := self._flip(self._draw):
            return StrikeOutcome(True, detail)
        late = time.monotonic() - self._began_s > CONFIRM_S
        return StrikeOutcome(False, f"there is no whole {self._of}") if late else None

    def take_back(self) -> None:
        raise AssertionError("it does not last")


def snapshot_bit(agent: Process, slot: str, incarnation: int, draw: random.Random) -> str:
    """Flip a bit in the newest sealed snapshot of the worker in ``slot``, which its agent holds in memory.

    Returns what was flipped, or "" if there is no snapshot or it has just been replaced.
    """
    newest = (-1, -1)
    with contextlib.ExitStack() as stack:
        for fd in _descriptors(agent, f"/memfd:rackrun-snapshot-{slot}-{incarnation}-"):
            stack.callback(os.close, fd)
            with contextlib.suppress(CheckpointError), Arena.attach(fd, job=SNAPSHOT_JOB) as arena:
                newest = max([newest, *((one.number, fd) for one in arena.slots() if one.manifest_digest)])
        named, fd = newest
        if named < 0:
            return ""
        with contextlib.suppress(CheckpointError), Arena.attach(fd, job=SNAPSHOT_JOB) as arena:
            reader = arena.reader(named, owner=arena.rank)
            payload = np.frombuffer(reader.payload, dtype=np.uint8)
            at, bit = draw.randrange(len(payload)), draw.randrange(8)
            offset = payload.ctypes.data - arena.memory()[0] + at
            del payload
            _flip(fd, offset, bit)
            try:
                reader.verify()
            except IntegrityError:
                return f"bit {bit} of byte {at} of the snapshot of step {named}, of {slot}"
    return ""


def checkpoint_bit(root: Path, draw: random.Random) -> str:
    """Flip a bit in a file of the newest checkpoint in ``root``. Returns what was flipped, or "" if there is no
    checkpoint."""
    with contextlib.suppress(OSError, CheckpointError):
        found = [
            one for job in sorted(root.iterdir()) if job.is_dir() for one in DurableStore(root, job.name).checkpoints()
        ]
        newest = max(found, key=lambda one: one.number, default=None)
        if newest is None:
            return ""
        path = draw.choice(
            [path for path in sorted(newest.path.iterdir()) if path.name != VERIFIED and path.name[0] != "."]
        )
        at, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _flip(fd, at, bit)
        finally:
            os.close(fd)
        if newest.path.is_dir():  # it was not being deleted meanwhile
            return f"bit {bit} of byte {at} of {path.name}, in the checkpoint of step {newest.step}"
    return ""


def _flip(fd: int, at: int, bit: int) -> None:
    (before,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([before ^ 1 << bit]), at)


def _descriptors(process: Process, name: str) -> Iterator[int]:
    """Yield file descriptors of this process for the files that ``process`` has open under names beginning with
    ``name``."""
    folder, names = f"/proc/{process.pid}/fd", []
    with contextlib.suppress(OSError):  # the process is gone, with all that it held
        names = sorted(os.listdir(folder), key=int)
    for one in names:
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{one}").startswith(name):
                yield os.open(f"{folder}/{one}", os.O_RDWR | os.O_CLOEXEC)
