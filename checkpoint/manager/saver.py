"""How a rank saves: a slot, a copy that overlaps with training, a seal, the commit with all others, and then the disk.

One save at a time is on its way to its commit, and one generation on its way to disk; the next save waits for the commit of
the last, which is there long before in the ordinary case. Nothing here raises into training but what the first save may
find: that the arena does not fit (`MemoryPlanError`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rackrun.checkpoint.arena.arena import Arena, SlotState
from rackrun.checkpoint.arena.arena_folder import ArenaFolder
from rackrun.checkpoint.base.errors import CheckpointError, MemoryPlanError
from rackrun.checkpoint.commit.peer_commit import CommitDesk, Sealed
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.safetensors_image import write_head, write_tensor
from rackrun.checkpoint.image.user_state import Image
from rackrun.checkpoint.manager.save_handle import Counters, Disk, Flush, SaveHandle, Saving
from rackrun.checkpoint.manager.staging import Staging
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["Place", "Saved", "Saver"]

register("restore.marking", "restore.marked", "save.begun", "commit.heard", "commit.done", "commit.retired")

_SPARE_ROOM = 64
"""An arena has room for an image larger by one part in so many."""


class Saved(NamedTuple):
    generation: int
    step: int


@dataclass(frozen=True)
class Place:
    """What a rank saves for, as all ranks have agreed."""

    job: str
    peers: Peers
    store: DurableStore
    folder: ArenaFolder | None
    """None: arenas are this process's own, and go with it."""
    epoch: int
    first: int
    """Generation."""
    slots: int
    local_ranks: int
    keep: int
    """Durable generations."""
    seconds: float
    """How long ranks wait for each other."""
    hold: Callable[[], str] = str
    """Why nothing goes to disk any more. Rank 0's counts."""


class Saver:
    def __init__(self, place: Place, staging: Staging, counters: Counters) -> None:
        self._place, self._staging, self._counters = place, staging, counters
        self._desk = CommitDesk(place.peers.another(), place.epoch, seconds=place.seconds)
        self._next = place.first
        self._arena: Arena | None = None
        self._outgrown: list[Arena] = []
        self._saving: SaveHandle | None = None
        self._threads: list[threading.Thread] = []
        self._flushing: list[threading.Thread] = []
        """One writes; those that were asked for by name wait behind it."""
        self._flushed = -1
        """The generation that went to disk last."""
        self._owed = -1
        """The generation that was due, and is not on disk: an older one was being written, or storage has failed."""
        self._last: Saving | None = None
        """The newest that was committed."""
        self._began = -1
        """The generation that was restored."""
        self._lost = ""
        """Why no more is saved."""
        self._complained: set[str] = set()
        self.newest: Saved | None = None
        """Committed or restored: not to be written over."""
        self._attach()

    def _attach(self) -> None:
        """Take over the arena that this rank's last process has left."""
        folder, peers = self._place.folder, self._place.peers
        for path, mine in folder.arenas().items() if folder is not None else ():
            if folder is not None and mine == (peers.rank, peers.world_size) and self._arena is None:
                self._arena = folder.attach(path, self._place.epoch)
        if self._arena is not None:
            self._staging.pin(self._arena)

    def begin_from(self, restored: Saved, *, here: bool) -> None:
        """``restored`` must not be written over, when it came from ``here``, this rank's arena. What is newer could not be used
        by all, and what was not used here is damaged."""
        self.newest = restored
        self._began = restored.generation
        for info in self._arena.slots() if self._arena is not None else ():
            assert self._arena is not None
            if info.state not in (SlotState.SEALED, SlotState.COMMITTED) or info.generation < restored.generation:
                continue
            crash_point("restore.marking")
            if here and info.generation == restored.generation:
                self._arena.commit(info.generation)
            else:
                self._arena.mark_bad(info.generation, f"generation {restored.generation} was restored from elsewhere")
        crash_point("restore.marked")

    def reserve(self, size: int) -> Arena:
        """This rank's arena, made anew when an image of ``size`` bytes does not fit into it. Raises `MemoryPlanError`."""
        if self._arena is not None and self._arena.payload_bytes >= size:
            return self._arena
        if self._arena is not None:
            self._outgrown.append(self._arena)
            self._arena = None
        place, room = self._place, size + size // _SPARE_ROOM
        if place.folder is not None:
            self._arena = place.folder.create(
                place.epoch, slots=place.slots, payload_bytes=room, local_ranks=place.local_ranks
            )
        else:
            self._arena = _private_arena(place.job, place.peers.rank, place.epoch, place.slots, room)
        self._staging.pin(self._arena)
        return self._arena

    # -- a save
    def save(self, image: Image, step: int, *, due: bool, asked: bool) -> SaveHandle:
        """Begin the next generation. ``due``: it is to go to disk too. ``asked``: also when an older one is being written; where memory
        has no slot beside that, this waits, and so does the save after it."""
        writing = self._alive()
        held = len(writing) + (self.newest is not None and self.newest.generation != self._flushed)
        if writing and held >= self._place.slots and (asked or len(writing) > 1):
            writing[0].join()
        handle = SaveHandle(self._next, step)
        self._next += 1
        if self._lost:
            self._desk.decline(handle.generation, Sealed(step=step, failure=self._lost))
            handle.fail(self._lost)
            return handle
        saving = Saving(handle, image)
        self._begin(saving)
        self._saving = handle
        self._start(lambda: self._carry_out(saving, due, asked), f"rackrun-save-{step}")
        return handle

    def wait_staged(self) -> None:
        """Until the last save's copy is done."""
        if self._saving is not None:
            self._saving.staged.result()

    def wait_committed(self) -> None:
        """Until the last save is committed, or never will be."""
        if self._saving is not None:
            self._saving.committed.result()
            self._saving = None

    def finish(self) -> None:
        """Until all that was begun is on disk where it was due, or has failed."""
        self.wait_committed()
        for thread in self._alive():
            thread.join()

    @property
    def durable(self) -> bool:
        """Something was to go to disk."""
        return self._flushed >= 0

    def owed(self) -> int:
        """After `finish`: the generation that was due and is not on disk, nor is a newer one; -1: none."""
        return self._owed

    def write_newest(self) -> None:
        """Collective, after `finish`: to disk."""
        if self._last is not None and self._arena is not None:
            self._begin_flush(self._last, self._arena)
            self.finish()

    def _alive(self) -> list[threading.Thread]:
        self._flushing = [thread for thread in self._flushing if thread.is_alive()]
        return self._flushing

    def close(self, *, seconds: float) -> None:
        """Threads that do not end within ``seconds`` are left."""
        for thread in self._threads:
            thread.join(seconds)
        for arena in [*self._outgrown, *([self._arena] if self._arena is not None else [])]:
            self._staging.unpin(arena)
            arena.close()

    def complain(self, what: str) -> None:
        """On stderr, once for each reason: a full disk stays full."""
        reason = what.partition(": ")[2] or what
        if reason not in self._complained:
            self._complained.add(reason)
            print(f"rackrun: rank {self._place.peers.rank}: {what}; training goes on", file=sys.stderr, flush=True)

    # -- the steps of a save
    def _begin(self, saving: Saving) -> None:
        """Take a slot, and copy what may change at once."""
        image = saving.image
        try:
            arena = self.reserve(image.layout.total_bytes)
            keep = [self.newest.generation] if self.newest is not None else []
            saving.writer = arena.begin(saving.handle.generation, saving.handle.step, keep=keep)
        except MemoryPlanError:
            raise
        except CheckpointError as error:
            saving.failure = error.what
            return
        payload = saving.writer.payload
        write_head(image.layout, image.plain, payload)
        for name in image.tensors.keys() - image.later:
            write_tensor(image.layout, name, image.tensors[name], payload)
        saving.versions = [(image.tensors[name], image.tensors[name]._version) for name in image.later]
        saving.ready = self._staging.ready()
        crash_point("save.begun")

    def _carry_out(self, saving: Saving, due: bool, asked: bool) -> None:
        """In a thread of its own."""
        handle = saving.handle
        try:
            saving.copy_and_seal(self._staging)
            self._settle(saving, due, asked)
        except PeersGone as error:
            self._lost = f"no more is saved: {error.what}"
            self._fail(handle, error.what)
        except Exception as error:  # noqa: BLE001 - nothing that a save does may stop training
            self._fail(handle, f"{type(error).__name__}: {error}")

    def _settle(self, saving: Saving, due: bool, asked: bool) -> None:
        """Commit with all others, or give it up with them."""
        handle, arena = saving.handle, self._arena
        assert arena is not None
        outcome = self._desk.settle(handle.generation, self._said(saving, arena, due, asked))
        if outcome.record is None:
            if not saving.failure:
                arena.release(handle.generation)
            self._fail(handle, outcome.reason)
            return
        crash_point("commit.heard")
        if self._place.folder is not None:
            self._place.folder.remember(outcome.record)
        arena.commit(handle.generation)
        self.newest, self._last = Saved(handle.generation, handle.step), saving
        self._counters.committed += 1
        crash_point("commit.done")
        self._retire()
        crash_point("commit.retired")
        if outcome.passed_over:
            self._owed = handle.generation
            self._counters.durable_passed_over += 1
            self.complain("a generation was not written to disk: an older one is still being written")
        if outcome.flush:
            self._begin_flush(saving, arena)
        handle.committed.set_result(True)
        if not outcome.flush:
            handle.durable.set_result(False)

    def _said(self, saving: Saving, arena: Arena, due: bool, asked: bool) -> Sealed:
        step = saving.handle.step
        if not saving.failure:
            try:
                reader = arena.reader(saving.handle.generation)
            except CheckpointError as error:
                saving.failure = error.what
        if saving.failure:
            return Sealed(step=step, failure=saving.failure)
        return Sealed(
            step=step, digest=reader.manifest_digest, layout_hash=reader.layout_hash, due=due, asked=asked,
            writing=bool(self._alive()),
        )  # fmt: skip

    def _retire(self) -> None:
        """After a commit: what only an older world, or a smaller state, could have used."""
        folder = self._place.folder
        if folder is not None:
            folder.sweep(self._place.epoch)
        while self._outgrown:
            arena = self._outgrown.pop()
            if folder is not None:
                arena.unlink()
            self._staging.unpin(arena)
            arena.close()

    def _begin_flush(self, saving: Saving, arena: Arena) -> None:
        place, handle = self._place, saving.handle
        flush = Flush(
            handle,
            saving.image,
            Disk(place.store, place.epoch, place.keep, self._began, place.hold),
            arena,
            peers=place.peers.another(),
            former=self._flushed,
        )
        self._flushed = handle.generation
        before = self._alive()[-1:]

        def run() -> None:
            for older in before:
                older.join()
            try:
                failure = flush.run()
            except Exception as error:  # noqa: BLE001 - nothing that storage does may stop training
                failure = f"{type(error).__name__}: {error}"
            if flush.remark:
                self.complain(flush.remark)
            if failure:
                self._counters.durable_failed += 1
                self.complain(f"generation {handle.generation} is not on disk: {failure}")
                handle.failure = handle.failure or failure
                self._owed = max(self._owed, handle.generation)
            else:
                self._counters.durable += 1
                if self._owed <= handle.generation:
                    self._owed = -1
            if not handle.durable.done():
                handle.durable.set_result(not failure)

        self._flushing.append(self._start(run, f"rackrun-flush-{handle.step}"))

    def _fail(self, handle: SaveHandle, why: str) -> None:
        self._counters.failed += 1
        self.complain(f"the save of step {handle.step} failed: {why}")
        handle.fail(why)

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread


def _private_arena(job: str, rank: int, epoch: int, slots: int, payload_bytes: int) -> Arena:
    fd = os.memfd_create("rackrun-checkpoint", os.MFD_CLOEXEC)
    try:
        return Arena.create(fd, job=job, rank=rank, epoch=epoch, slots=slots, payload_bytes=payload_bytes)
    finally:
        os.close(fd)
