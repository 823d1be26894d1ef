"""Provides the memory for snapshots: two arenas, allocated beside training as soon as their size is known.

Allocating tens of gigabytes takes the kernel seconds. Nothing waits for an allocation in advance, and its errors are
raised only when the memory is needed: `arena` waits for an allocation in progress, or starts one. So which steps have a
snapshot does not depend on when memory is available.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.memory_plan import MemoryPlan, ceilings, with_spare_room
from rackrun.checkpoint.base.digest import CHUNK_BYTES
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.host_memory.populate import Populating
from rackrun.checkpoint.image.host_copies import HostCopies
from rackrun.checkpoint.redundancy.shard_placement import Redundancy
from rackrun.protocol.boot import SNAPSHOT_JOB

__all__ = ["SnapshotMemory", "chunk_bytes_for"]

_SLICE_S = 0.05
_CHUNKS = 64
_CHUNK_BYTES_MAX = 32 * 2**20
"""A larger chunk would be digested longer than the last copies take, and more bytes would be fetched with those that a
rank of another world needs."""


def chunk_bytes_for(payload_bytes: int) -> int:
    """Return the chunk size of a snapshot with room for ``payload_bytes``, in bytes.

    `CHUNK_BYTES`, or twice that or four times, where there would be more than `_CHUNKS`: each chunk makes a thread take
    the interpreter's lock beside training.
    """
    size = CHUNK_BYTES
    while payload_bytes > _CHUNKS * size and size < _CHUNK_BYTES_MAX:
        size *= 2
    return size


@dataclass
class _Making:
    """An arena that is being allocated by a thread of its own."""

    size: int
    threads: int
    thread: threading.Thread | None = None
    wanted: bool = True
    error: BaseException | None = None


class SnapshotMemory:
    """``fds``: the agent's empty memfds, one for each arena. ``device``: pins the new memory. ``threads``: how many
    threads touch the pages beside training, and while training waits."""

    def __init__(self, fds: Sequence[int], device: HostCopies, threads: tuple[int, int]) -> None:
        self._fds, self._device = fds, device
        self._threads_beside, self._threads_alone = threads
        self._arenas: list[Arena | None] = [None] * len(fds)
        self._making: list[_Making | None] = [None] * len(fds)
        self._one_by_one = threading.Lock()
        """Held during an allocation. The second arena is planned only when the first has its memory, and the kernel
        allocates two no faster at once."""

    def __getitem__(self, slot: int) -> Arena | None:
        """Return the arena in ``slot``; None if it was not needed yet."""
        return self._arenas[slot]

    @property
    def complete(self) -> bool:
        """Whether each arena exists, is being allocated, or could not be."""
        return not self._lacking()

    def ahead(self, size: int, *, rank: int, fencing_token: int) -> None:
        """Begin to allocate the missing arenas for images of ``size`` bytes, and return at once. Existing ones stay,
        whatever their size, because they may hold a snapshot."""
        for slot in self._lacking():
            self._make(slot, size, self._threads_beside, rank=rank, fencing_token=fencing_token)

    def stop(self) -> None:
        """Give up allocations in progress, because they will not be needed. Their threads end soon."""
        for making in self._making:
            if making is not None:
                making.wanted = False

    def arena(
        self, slot: int, size: int, *, rank: int, fencing_token: int, waiting: Callable[[], None] = lambda: None
    ) -> Arena:
        """Return the arena in ``slot`` with room for an image of ``size`` bytes. A smaller one is replaced, and its
        content lost.

        ``waiting`` is called at intervals during a wait. Raises `MemoryPlanError` when there is not enough memory.
        """
        for making in self._making:
            if making is not None and making.size < size:
                making.wanted = False
        making = self._making[slot]
        if making is not None:
            self._wait(making, waiting)
        arena = self._arenas[slot]
        if arena is None or arena.payload_bytes < size:
            if arena is not None:
                self._device.unpin(arena.memory()[0])
                arena.close()
                self._arenas[slot] = None
            making = self._make(slot, size, self._threads_alone, rank=rank, fencing_token=fencing_token)
            self._wait(making, waiting)
            if making.error is not None:
                self._making[slot] = None
                raise making.error
            arena = self._arenas[slot]
            assert arena is not None, "it was made without an error"
        self._making[slot] = None
        return arena

    def _lacking(self) -> list[int]:
        makings = enumerate(zip(self._arenas, self._making, strict=True))
        return [slot for slot, (arena, making) in makings if arena is None and (making is None or not making.wanted)]

    def _wait(self, making: _Making, waiting: Callable[[], None]) -> None:
        assert making.thread is not None
        while making.thread.is_alive():
            making.thread.join(_SLICE_S)
            waiting()

    def _make(self, slot: int, size: int, threads: int, *, rank: int, fencing_token: int) -> _Making:
        making = self._making[slot] = _Making(with_spare_room(size), threads)

        def make() -> None:
            try:
                with self._one_by_one:
                    if self._arenas[slot] is not None:
                        return  # an earlier allocation finished just after it was given up
                    self._arenas[slot] = arena = self._made(slot, size, making, rank, fencing_token)
                self._device.pin(*arena.memory())
            except BaseException as error:  # noqa: BLE001 - raised by who needs it
                making.error = error

        making.thread = threading.Thread(target=make, name=f"rackrun-snapshot-memory-{slot}", daemon=True)
        try:
            making.thread.start()
        except RuntimeError as error:  # this process may have no more threads
            making.error = error
        return making

    def _made(self, slot: int, size: int, making: _Making, rank: int, fencing_token: int) -> Arena:
        if not making.wanted:
            raise CheckpointError(
                "the preparation of snapshot memory was given up, because it is no longer needed.",
                remedy="none needed.",
            )
        if not any(self._arenas):  # better to refuse now than to have the kernel end a process later
            MemoryPlan(1, size, Redundancy.local(), ceilings(None)).check()
        os.ftruncate(self._fds[slot], 0)
        return Arena.create(
            self._fds[slot],
            job=SNAPSHOT_JOB,
            rank=rank,
            fencing_token=fencing_token,
            slots=1,
            payload_bytes=making.size,
            chunk_bytes=chunk_bytes_for(making.size),
            populating=Populating(making.threads, lambda: making.wanted),
        )
