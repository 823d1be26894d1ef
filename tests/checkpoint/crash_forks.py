"""Lives of a job with a `CheckpointManager` whose ranks are processes, killed by SIGKILL: by themselves at the n-th crash point
that they pass, or by the parent some microseconds after one has said something. Their store is a folder (a
server of torch's would be a thread, which a fork must not meet); what they say to the oracle goes through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec
import torch.distributed as dist

from rackrun.checkpoint.base.errors import NoUsableCheckpoint
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from rackrun.checkpoint.manager import restoring, user_state
from rackrun.protocol import crash_points
from tests.checkpoint.crash_job import Oracle, Plan, Restored, Wrong, draw, entries_with_boxes, make, script

__all__ = ["Forks"]


STUCK_S = 100.0


class _Tagged(msgspec.Struct, tag=True):
    rank: int


class _Restored(_Tagged, tag=True):
    found: Restored


class _Saving(_Tagged, tag=True):
    number: int
    step: int


class _Committed(_Tagged, tag=True):
    number: int


class _Durable(_Tagged, tag=True):
    number: int


class _Trying(_Tagged, tag=True):
    number: int


class _Closing(_Tagged, tag=True):
    pass


class _Unusable(_Tagged, tag=True):
    why: str


class _Wrong(_Tagged, tag=True):
    why: str


_Said: TypeAlias = _Restored | _Saving | _Committed | _Durable | _Trying | _Closing | _Unusable | _Wrong


class Forks:
    """All lives over one folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.oracle = Oracle(folder, self.rng)
        self.life = 0

    def live(self) -> str:
        """``kill``: the parent has killed; else the point at which a rank has killed itself, or "" when none was killed."""
        self.life += 1
        rng, oracle = self.rng, self.oracle
        plan = draw(rng, self.life)
        oracle.begin(plan)
        victims = list(range(plan.world)) if rng.random() < 0.3 else [rng.randrange(plan.world)]
        point = rng.randint(1, 120) if rng.random() < 0.5 else 0
        read, write = os.pipe()
        struck_read, struck_write = os.pipe()
        (oracle.folder / "store" / str(self.life)).mkdir(parents=True)
        pids = []
        for rank in range(plan.world):
            pid = os.fork()
            if pid == 0:
                os.close(read)
                _child(rank, plan, oracle.folder, write, struck_write, point if rank == victims[0] else 0)
            pids.append(pid)
        os.close(write)
        os.close(struck_write)
        try:
            struck = self._watch(pids, victims, point, read, struck_read)
        except BaseException as error:
            error.add_note("\n".join([*oracle.story, str(plan)]))
            raise
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            os.close(read)
            os.close(struck_read)
            shutil.rmtree(oracle.folder / "store")
        oracle.end(struck)
        return struck

    def _watch(self, pids: list[int], victims: list[int], point: int, read: int, struck_read: int) -> str:
        """Until all have ended; who is left when one was killed is killed too."""
        rng = self.rng
        lines = 0 if point else rng.randint(1, 25)
        after_s = rng.random() * 0.004
        buffer, struck = b"", ""
        unusable: list[str] = []
        pidfds = [os.pidfd_open(pid) for pid in pids]
        watched = [read, *([pidfds[victims[0]]] if point else [])]
        try:
            while True:
                ready, _, _ = select.select(watched, [], [], STUCK_S)
                assert ready, f"stuck for {STUCK_S} s"
                if read in ready:
                    data = os.read(read, 65536)
                    if not data:
                        break
                    *whole, buffer = (buffer + data).split(b"\n")
                    for line in whole:
                        self._hear(msgspec.json.decode(line, type=_Said), unusable)
                        lines -= 1
                    if lines <= 0 and not point and not struck:
                        select.select([], [], [], after_s)  # the moment is what is drawn
                        struck = "kill"
                        for victim in victims:
                            os.kill(pids[victim], signal.SIGKILL)
                        select.select([], [], [], rng.random() * 0.004)
                        self._kill(pids)
                elif point and not struck:  # the victim has ended, by its own hand or well
                    struck = os.read(struck_read, 100).decode() if _is_there(struck_read) else ""
                    watched.pop()
                    if struck:
                        self._kill(pids)
        finally:
            for fd in pidfds:
                os.close(fd)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert set(codes) <= {0, -signal.SIGKILL}, codes
        if unusable:
            self.oracle.nothing_usable(NoUsableCheckpoint(unusable[0]))
            self.oracle.begin_anew()
        return struck if -signal.SIGKILL in codes else ""

    @staticmethod
    def _kill(pids: list[int]) -> None:
        for pid in pids:  # none has been waited for: the numbers are still theirs
            os.kill(pid, signal.SIGKILL)

    def _hear(self, said: _Said, unusable: list[str]) -> None:
        oracle = self.oracle
        match said:
            case _Restored():
                oracle.restored(said.rank, said.found)
            case _Saving():
                oracle.save_begun(said.rank, said.number, said.step)
            case _Committed():
                oracle.committed(said.number)
            case _Durable():
                oracle.durable(said.number)
            case _Trying():
                oracle.tried[said.number] += 1
            case _Closing():
                oracle.closing()
            case _Unusable():
                unusable.append(said.why)
            case _Wrong():
                raise Wrong(said.why)

    def mishap(self) -> str:
        return self.oracle.mishap()

    def close(self) -> None:
        pass


def _is_there(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


# -- in the child


class _Store:
    """A file for each key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clone(self) -> _Store:
        return self

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def set(self, key: str, value: str) -> None:
        part = self._folder / f".{key.replace('/', '-')}-{os.getpid()}"
        part.write_text(value)
        os.rename(part, self._path(key))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not all(self._path(key).exists() for key in keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError("wait timeout")
            select.select([], [], [], 0.0005)  # other processes' files: nothing tells of them

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._path(key).read_bytes() for key in keys]

    def delete_key(self, key: str) -> bool:
        self._path(key).unlink(missing_ok=True)
        return True


class _Teller:
    def __init__(self, rank: int, fd: int) -> None:
        self._rank, self._fd = rank, fd

    def say(self, said: _Said) -> None:
        os.write(self._fd, msgspec.json.encode(said) + b"\n")

    def restored(self, rank: int, found: Restored) -> None:
        self.say(_Restored(rank, found))

    def save_begun(self, rank: int, number: int, step: int) -> None:
        self.say(_Saving(rank, number, step))

    def durable(self, number: int) -> None:
        self.say(_Durable(self._rank, number))

    def closing(self) -> None:
        self.say(_Closing(self._rank))


def _child(rank: int, plan: Plan, folder: Path, fd: int, struck: int, point: int) -> NoReturn:
    code = 1
    told = _Teller(rank, fd)
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        user_state.entries_of = restoring.entries_of = entries_with_boxes  # type: ignore[attr-defined,assignment]
        store = _Store(folder / "store" / str(plan.life))
        Peers.of_default_group = lambda _: Peers(store, rank, plan.world)  # type: ignore[arg-type,assignment,method-assign]
        one = make(plan, folder)
        passed = 0

        def handler(name: str) -> None:
            nonlocal passed
            passed += 1
            if name == "restore.counting" and one._restored is not None:
                told.say(_Trying(rank, one._restored.number))
            if name == "commit.retired" and one._saver.newest is not None:
                told.say(_Committed(rank, one._saver.newest.number))
            if passed == point:
                os.write(struck, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        crash_points.enable(handler)
        try:
            script(rank, plan, one, told)
        except NoUsableCheckpoint as error:
            told.say(_Unusable(rank, error.what))
        except PeersGone:
            pass
        except Wrong as error:
            told.say(_Wrong(rank, str(error)))
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the fork ends here
        with contextlib.suppress(OSError):
            told.say(_Wrong(rank, traceback.format_exc()))
    finally:
        sys.stderr.flush()
        os._exit(code)
