"""Copies of snapshots on other trays' agents, so that a shard outlives its tray.

The owner's agent pushes a snapshot when the worker asks for it on its page. All ranks do so after the same steps, and
again when all have finished the last. A snapshot goes as a whole to a holder, or as stripes to the keepers of a set
(`rackrun.agent.snapshots.snapshot_parity`). The holder verifies every chunk before it accepts. It keeps two snapshots
of each worker: the newest, and the newest that every rank of the world has on another tray. A failed push costs nothing
but the copy.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

import aiohttp

from rackrun.agent.snapshots.memory_limit import OverMemoryLimit, check_room
from rackrun.agent.snapshots.snapshot_parity import RankParitySet, SnapshotSource, give_stripes
from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.checkpoint.arena.arena import Arena
from rackrun.protocol.boot import SNAPSHOT_JOB
from rackrun.protocol.crash_points import crash_point, register
from rackrun.protocol.events import SnapshotMirrored, SnapshotStriped
from rackrun.protocol.ids import Generation, Incarnation, Step, TrayId, step_of

__all__ = ["SnapshotCopies", "CopyHolder", "Mirror", "verify"]

register("replicate.allocating", "replicate.verified", "replicate.replacing", "replicate.kept")

_SILENCE_S = 60.0
"""Seconds without progress of the holder after which a push is given up."""


@dataclass(frozen=True)
class _Owner:
    """The worker that a copy belongs to."""

    tray: str
    index: int
    incarnation: int


class SnapshotCopies:
    """Copies of other trays' snapshots that this tray keeps, as memfds."""

    def __init__(self) -> None:
        self._held: dict[_Owner, dict[int, int]] = {}  # step -> descriptor

    def find(self, tray: str, index: int, incarnation: int, step: int) -> int | None:
        """Return the descriptor of the copy of one snapshot; None if this tray does not keep it."""
        return self._held.get(_Owner(tray, index, incarnation), {}).get(step)

    def room(self, size: int) -> int:
        """Return a descriptor of ``size`` bytes of memory. Raises `OverMemoryLimit`."""
        if size < 1:
            raise OverMemoryLimit("there is nothing to keep")
        check_room(size)
        crash_point("replicate.allocating")
        fd = os.memfd_create("rackrun-mirror", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise OverMemoryLimit(f"no memory for a snapshot's copy of {size} bytes: {error.strerror}") from error
        return fd

    def keep(self, tray: str, index: int, incarnation: int, step: int, fd: int) -> None:
        """Keep a verified copy."""
        held = self._held.setdefault(_Owner(tray, index, incarnation), {})
        if (old := held.pop(step, None)) is not None:
            os.close(old)
        held[step] = fd
        crash_point("replicate.replacing")

    def steps(self, tray: str, index: int, incarnation: int) -> list[int]:
        """Return the steps that are kept of this worker."""
        return sorted(self._held.get(_Owner(tray, index, incarnation), ()))

    def prune(self, everywhere: int) -> None:
        """For each worker, keep the step ``everywhere`` and the latest one, if it is newer. Drop the others."""
        for owner in list(self._held):
            held = self._held[owner]
            last = next(reversed(held))
            for step in [step for step in held if step != everywhere and (step != last or step < everywhere)]:
                os.close(held.pop(step))
            if not held:
                del self._held[owner]
        crash_point("replicate.kept")

    def close(self) -> None:
        for held in self._held.values():
            for fd in held.values():
                os.close(fd)
        self._held.clear()


def verify(fd: int, step: int) -> None:
    """Check that a copy is the complete snapshot of ``step``. Raises
    `rackrun.checkpoint.base.errors.CheckpointError`."""
    with Arena.attach(fd, job=SNAPSHOT_JOB) as arena:
        arena.reader(step, owner=arena.rank).verify()
    crash_point("replicate.verified")


@dataclass(frozen=True)
class CopyHolder:
    """The tray that holds whole copies, in one generation."""

    generation: int
    tray: str
    address: str


class Mirror:
    """Pushes snapshots of this tray's workers.

    ``destination`` returns where a worker's snapshots go according to the latest plan: to a holder, to the keepers of a
    set, or nowhere if there is no other tray.
    """

    def __init__(
        self,
        token: str,
        destination: Callable[[WorkerHandle], CopyHolder | RankParitySet | None],
        tell: Callable[[SnapshotMirrored | SnapshotStriped], None],
    ) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        self._destination, self._tell = destination, tell
        self._session: aiohttp.ClientSession | None = None
        self._pushing: dict[WorkerHandle, asyncio.Task[None]] = {}
        self._to: dict[WorkerHandle, CopyHolder | RankParitySet] = {}

    def update(self, worker: WorkerHandle) -> None:
        """Begin a push if the worker wants one, and cancel one whose destination is outdated. Called regularly."""
        to = self._destination(worker)
        if worker in self._pushing and self._to[worker] != to:
            self._pushing[worker].cancel()
        if worker.page.mirroring and worker not in self._pushing and to:
            if self._session is None:
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_S)
                self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
            task = asyncio.create_task(self._push(self._session, worker, to), name=f"mirror-{worker.slot}")
            self._pushing[worker], self._to[worker] = task, to
            task.add_done_callback(lambda _: (self._pushing.pop(worker), self._to.pop(worker)))

    def cancel_all_but(self, living: Collection[WorkerHandle]) -> None:
        """Cancel the pushes of workers that have ended. The world goes on from copies that are elsewhere already."""
        for worker, task in self._pushing.items():
            if worker not in living:
                task.cancel()

    async def close(self) -> None:
        tasks = list(self._pushing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()

    async def _push(self, session: aiohttp.ClientSession, worker: WorkerHandle, to: CopyHolder | RankParitySet) -> None:
        step, besides, generation = worker.page.mirror_wanted
        which = worker.page.snapshots().get(step)
        well, fd = False, -1
        try:
            if which is None or worker.snapshot_fds[which] < 0 or to.generation != generation:
                return  # of an older generation: others may have sent theirs to another set
            fd = os.dup(worker.snapshot_fds[which])  # still valid after the slot has dropped the worker
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(_SILENCE_S) as limit:
                source = SnapshotSource(
                    fd,
                    step,
                    os.fstat(fd).st_size,
                    lambda: worker.page.snapshots().get(step) == which,
                    lambda: limit.reschedule(loop.time() + _SILENCE_S),
                )
                if isinstance(to, CopyHolder):
                    event: SnapshotMirrored | SnapshotStriped = await self._copy(session, worker, to, source, besides)
                else:
                    await give_stripes(session, to, source, besides)
                    event = SnapshotStriped(
                        slot=worker.slot,
                        incarnation=Incarnation(worker.incarnation),
                        generation=Generation(generation),
                        step=Step(step),
                        besides=Step(besides),
                    )
            self._tell(event)
            well = True
        except (aiohttp.ClientError, OSError, TimeoutError, OverMemoryLimit) as error:
            why = str(error) if isinstance(error, OverMemoryLimit) else repr(error)
            _say(f"the snapshot of {worker.slot} after step {step_of(Step(step))} is not on other trays: {why}")
        finally:
            if fd >= 0:
                os.close(fd)
            worker.page.mirror_done(step, well=well)

    async def _copy(
        self, session: aiohttp.ClientSession, worker: WorkerHandle, to: CopyHolder, source: SnapshotSource, besides: int
    ) -> SnapshotMirrored:
        path = f"{worker.slot}/{worker.incarnation}"
        async with session.put(
            f"http://{to.address}/snapshot/{path}/{source.step}",
            params={"besides": str(besides), "generation": str(to.generation)},
            headers={"Content-Length": str(source.size)},
            data=source.read(0, source.size),
        ) as answer:
            if answer.status != 200:
                raise OverMemoryLimit(f"{to.tray} does not take it: {(await answer.text()).strip()}")
            kept = await answer.json()
        return SnapshotMirrored(
            slot=worker.slot,
            incarnation=Incarnation(worker.incarnation),
            generation=Generation(to.generation),
            holder=TrayId(to.tray),
            where=f"{to.address}/{path}",
            steps=tuple(Step(one) for one in kept),
        )


def _say(text: str) -> None:
    print(f"rackrun: agent: {text}", file=sys.stderr)
