"""Copies snapshots to the agent of another tray, and keeps those of others: so a shard outlives its tray.

Pushed by the owner's agent, when a worker says so in its page (all ranks after the same steps, a new one when all have done
with the last). The holder verifies every chunk before it says yes, and keeps two of each worker: the newest, and the newest
that every rank of the world has on another tray. A push that fails costs nothing but the copy.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp

from rackrun.agent.worker import Worker
from rackrun.checkpoint.arena import Arena
from rackrun.checkpoint.crashpoints import crash_point, register
from rackrun.checkpoint.memory import ceilings
from rackrun.core.events import Event, SnapshotMirrored
from rackrun.core.ids import Incarnation, Step, TrayId
from rackrun.link.boot import SNAPSHOT_JOB

__all__ = ["Copies", "Mirror", "Refused", "verify"]

register("replicate.allocating", "replicate.verified", "replicate.replacing", "replicate.kept")

_CHUNK_BYTES = 4 << 20
_SILENCE_S = 60.0
"""Of the holder, before a push is given up."""
_HEADROOM = 8
"""One part in so many of the host's memory stays free."""


class Refused(Exception):
    """A copy is not taken, and why."""


@dataclass(frozen=True)
class _Owner:
    tray: str
    index: int
    incarnation: int


class Copies:
    """What this tray keeps of others' snapshots."""

    def __init__(self) -> None:
        self._held: dict[_Owner, dict[int, int]] = {}  # step -> descriptor

    def find(self, tray: str, index: int, incarnation: int, step: int) -> int | None:
        return self._held.get(_Owner(tray, index, incarnation), {}).get(step)

    def room(self, size: int) -> int:
        """A descriptor of so much memory. Raises `Refused`."""
        if size < 1 or any(size + ceiling.total // _HEADROOM > ceiling.free for ceiling in ceilings(None)):
            raise Refused(f"{size} bytes do not fit into this host's memory")
        crash_point("replicate.allocating")
        fd = os.memfd_create("rackrun-mirror", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise Refused(f"no memory for {size} bytes: {error.strerror}") from error
        return fd

    def keep(self, tray: str, index: int, incarnation: int, step: int, besides: int, fd: int) -> list[int]:
        """It was verified. Returns the steps that are now kept of this worker; workers that it had before are forgotten when
        they are two behind."""
        owner = _Owner(tray, index, incarnation)
        held = self._held.setdefault(owner, {})
        if (old := held.pop(step, None)) is not None:
            os.close(old)
        held[step] = fd
        crash_point("replicate.replacing")
        for other in [other for other in held if other not in (step, besides)]:
            os.close(held.pop(other))
        older = sorted(o.incarnation for o in self._held if (o.tray, o.index) == (tray, index))[:-2]
        for gone in older:
            for old in self._held.pop(_Owner(tray, index, gone)).values():
                os.close(old)
        crash_point("replicate.kept")
        return sorted(held)

    def close(self) -> None:
        for held in self._held.values():
            for fd in held.values():
                os.close(fd)
        self._held.clear()


def verify(fd: int, step: int) -> None:
    """Raises `rackrun.checkpoint.errors.CheckpointError` when it is not the whole snapshot of ``step``."""
    with Arena.attach(fd, job=SNAPSHOT_JOB) as arena:
        arena.reader(step, owner=arena.rank).verify()
    crash_point("replicate.verified")


class Mirror:
    """``holder`` says where to: ``host:port/tray``, or "" when there is no other tray."""

    def __init__(self, token: str, holder: Callable[[], str], tell: Callable[[Event], None]) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        self._holder, self._tell = holder, tell
        self._session: aiohttp.ClientSession | None = None
        self._pushing: dict[Worker, asyncio.Task[None]] = {}

    def look(self, worker: Worker) -> None:
        """Does it want a copy? Called now and then."""
        if worker.page.mirroring and worker not in self._pushing and self._holder():
            if self._session is None:
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_S)
                self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
            task = asyncio.create_task(self._push(self._session, worker), name=f"mirror-{worker.slot}")
            self._pushing[worker] = task
            task.add_done_callback(lambda _: self._pushing.pop(worker))

    async def close(self) -> None:
        tasks = list(self._pushing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()

    async def _push(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        step, besides = worker.page.mirror_wanted
        well = False
        try:
            well = await self._copy(session, worker, step, besides)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            _say(f"the snapshot of {worker.slot} after step {step} could not be copied to another tray: {error!r}")
        finally:
            worker.page.mirror_done(step, well=well)

    async def _copy(self, session: aiohttp.ClientSession, worker: Worker, step: int, besides: int) -> bool:
        address, _, holder = self._holder().partition("/")
        which = worker.page.snapshots().get(step)
        if not holder or which is None or worker.snapshot_fds[which] < 0:
            return False
        fd = os.dup(worker.snapshot_fds[which])  # outlives the slot's forgetting
        try:
            size = os.fstat(fd).st_size
            path = f"{worker.slot}/{worker.incarnation}"
            async with session.put(
                f"http://{address}/snapshot/{path}/{step}",
                params={"besides": str(besides)},
                headers={"Content-Length": str(size)},
                data=_read(fd, size, lambda: worker.page.snapshots().get(step) == which),
            ) as answer:
                if answer.status != 200:
                    _say(f"{holder} does not take the snapshot of {worker.slot}: {(await answer.text()).strip()}")
                    return False
                kept = await answer.json()
        finally:
            os.close(fd)
        self._tell(
            SnapshotMirrored(
                slot=worker.slot,
                incarnation=Incarnation(worker.incarnation),
                holder=TrayId(holder),
                where=f"{address}/{path}",
                steps=tuple(Step(one) for one in kept),
            )
        )
        return True


async def _read(fd: int, size: int, valid: Callable[[], bool]) -> AsyncIterator[bytes]:
    at = 0
    while at < size:
        chunk = await asyncio.to_thread(os.pread, fd, min(_CHUNK_BYTES, size - at), at)
        if not chunk or not valid():
            raise ConnectionResetError("it was overwritten")
        yield chunk
        at += len(chunk)


def _say(text: str) -> None:
    print(f"rackrun: agent: {text}", file=sys.stderr)
