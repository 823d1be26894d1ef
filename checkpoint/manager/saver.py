"""How a rank saves: take a slot, copy while training goes on, seal, commit with all ranks, then write to disk.

At most one save waits for its commit, and one checkpoint is written to disk at a time. The next save waits for the
commit of the last, which is usually done long before. The only error raised into training is `MemoryPlanError`, when
the first save finds that the arena does not fit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rackrun.checkpoint.arena.arena import Arena, SlotState
from rackrun.checkpoint.arena.arena_folder import ArenaFolder
from rackrun.checkpoint.arena.memory_plan import with_spare_room
from rackrun.checkpoint.base.deprecation import warn_renamed
from rackrun.checkpoint.base.errors import CheckpointError, MemoryPlanError
from rackrun.checkpoint.base.messages import SaveWarnings
from rackrun.checkpoint.commit.peer_commit import CommitParticipant, Sealed
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.host_copies import HostCopies, ImageCopy
from rackrun.checkpoint.image.rank_image import Image
from rackrun.checkpoint.manager.save_handle import Counters, DurableTier, Flush, SaveHandle, Saving
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["SaveLocation", "Saved", "Saver"]

register("restore.marking", "restore.marked", "save.begun", "commit.heard", "commit.done", "commit.retired")


class Saved(NamedTuple):
    """A checkpoint and its step."""

    number: int
    step: int

    @property
    def generation(self) -> int:
        """Deprecated: ``number``."""
        warn_renamed("Saved.generation", "number")
        return self.number


@dataclass(frozen=True)
class SaveLocation:
    """Where a rank saves, as all ranks have agreed."""

    job: str
    peers: Peers
    store: DurableStore
    folder: ArenaFolder | None
    """None: arenas are private to this process, and end with it."""
    fencing_token: int
    first: int
    """Number of the first checkpoint."""
    slots: int
    local_ranks: int
    keep: int
    """How many durable checkpoints stay."""
    seconds: float
    """How long ranks wait for each other, in seconds."""
    hold: Callable[[], str] = str
    """Returns why nothing may be written to disk any more, else "". Rank 0's answer counts."""
    proven: Callable[[], object] = str
    """Called once, when something newer than the restored checkpoint is committed."""


class Saver:
    """Carries out one rank's saves, in threads of their own."""

    def __init__(self, place: SaveLocation, device: HostCopies, counters: Counters) -> None:
        self._place, self._device, self._counters = place, device, counters
        self._commits = CommitParticipant(place.peers.another(), place.fencing_token, seconds=place.seconds)
        self._next = place.first
        self._arena: Arena | None = None
        self._outgrown: list[Arena] = []
        self._saving: SaveHandle | None = None
        self._threads: list[threading.Thread] = []
        self._flushing: list[threading.Thread] = []
        """Threads that write checkpoints to disk.

        One writes; those whose write was explicitly asked for wait behind it.
        """
        self._flushed = -1
        """The newest checkpoint whose write to disk was begun; -1 for none."""
        self._owed = -1
        """The checkpoint that was due on disk and is not there; -1 for none.

        An older one was being written, or storage failed.
        """
        self._last: Saving | None = None
        """The newest save that was committed."""
        self._began = -1
        """The checkpoint that was restored; -1 for none."""
        self._lost = ""
        """Why nothing more is saved; empty while saving works."""
        self._warnings = SaveWarnings()
        self.newest: Saved | None = None
        """The newest checkpoint that is committed or was restored. Its slot must not be overwritten."""
        self._attach()

    def _attach(self) -> None:
        """Attach the arena that this rank's previous process has left."""
        folder, peers = self._place.folder, self._place.peers
        for path, mine in folder.arenas().items() if folder is not None else ():
            if folder is not None and mine == (peers.rank, peers.world_size) and self._arena is None:
                self._arena = folder.attach(path, self._place.fencing_token)
        if self._arena is not None:
            self._device.pin(*self._arena.memory())

    def begin_from(self, restored: Saved, *, here: bool) -> None:
        """Protect the ``restored`` checkpoint from being overwritten, and mark unusable slots as bad.

        ``here``: the restore read this rank's arena. Newer slots could not be used by all ranks. The slot of the
        restored checkpoint itself is damaged when it was not read.
        """
        self.newest = restored
        self._began = restored.number
        for info in self._arena.slots() if self._arena is not None else ():
            assert self._arena is not None
            if info.state not in (SlotState.SEALED, SlotState.COMMITTED) or info.number < restored.number:
                continue
            crash_point("restore.marking")
            if here and info.number == restored.number:
                self._arena.commit(info.number)
            else:
                self._arena.mark_bad(info.number, f"checkpoint {restored.number} was restored from elsewhere")
        crash_point("restore.marked")

    def reserve(self, size: int) -> Arena:
        """Return this rank's arena; make a new one when an image of ``size`` bytes does not fit.

        Raises `MemoryPlanError`.
        """
        if self._arena is not None and self._arena.payload_bytes >= size:
            return self._arena
        if self._arena is not None:
            self._outgrown.append(self._arena)
            self._arena = None
        place, room = self._place, with_spare_room(size)
        if place.folder is not None:
            self._arena = place.folder.create(
                place.fencing_token, slots=place.slots, payload_bytes=room, local_ranks=place.local_ranks
            )
        else:
            self._arena = _private_arena(place.job, place.peers.rank, place.fencing_token, place.slots, room)
        self._device.pin(*self._arena.memory())
        return self._arena

    # -- a save
    def save(self, image: Image, settled: frozenset[str], step: int, *, due: bool, asked: bool) -> SaveHandle:
        """Begin the next checkpoint and return its handle.

        ``settled``: the tensors of ``image`` that neither forward nor backward changes.
        ``due``: it is to be written to disk too. ``asked``: it is written to disk even if the write of an older one is
        still in progress. If the arena then has no free slot, this call waits until an older write has ended. So does
        the next save.
        """
        writing = self._alive()
        held = len(writing) + (self.newest is not None and self.newest.number != self._flushed)
        if writing and held >= self._place.slots and (asked or len(writing) > 1):
            writing[0].join()
        handle = SaveHandle(self._next, step)
        self._next += 1
        if self._lost:
            self._commits.decline(handle.number, Sealed(step=step, failure=self._lost))
            handle.fail(self._lost)
            return handle
        saving = Saving(handle, image.layout, settled)
        self._begin(saving, image)
        self._saving = handle
        self._start(lambda: self._carry_out(saving, due, asked), f"rackrun-save-{step}")
        return handle

    def wait_staged(self) -> None:
        """Wait until the copy of the last save is done."""
        if self._saving is not None:
            self._saving.staged.result()

    def wait_committed(self) -> None:
        """Wait until the last save is committed or has failed."""
        if self._saving is not None:
            self._saving.committed.result()
            self._saving = None

    def finish(self) -> None:
        """Wait until all saves are committed, and on disk where that was due, or have failed."""
        self.wait_committed()
        for thread in self._alive():
            thread.join()

    @property
    def durable(self) -> bool:
        """Whether any checkpoint was to be written to disk."""
        return self._flushed >= 0

    def owed(self) -> int:
        """Return the checkpoint that was due on disk when neither it nor a newer one is there; -1 for none.

        After `finish`.
        """
        return self._owed

    def write_newest(self) -> None:
        """Write the newest committed checkpoint to disk. Collective, after `finish`."""
        if self._last is not None and self._arena is not None:
            self._begin_flush(self._last, self._arena)
            self.finish()

    def _alive(self) -> list[threading.Thread]:
        self._flushing = [thread for thread in self._flushing if thread.is_alive()]
        return self._flushing

    def close(self, *, seconds: float) -> None:
        """Join the threads and close the arenas. Threads that do not end within ``seconds`` each are left running."""
        for thread in self._threads:
            thread.join(seconds)
        if any(thread.is_alive() for thread in self._threads):
            return  # it may still copy into this memory; the process is about to end
        for arena in [*self._outgrown, *([self._arena] if self._arena is not None else [])]:
            self._device.unpin(arena.memory()[0])
            arena.close()

    def complain(self, what: str) -> None:
        """Report a problem on stderr, once for each reason: a full disk stays full."""
        self._warnings.say(self._place.peers.rank, what)

    # -- the steps of a save
    def _begin(self, saving: Saving, image: Image) -> None:
        """Take a slot, and copy at once the tensors that forward and backward may change."""
        try:
            arena = self.reserve(image.layout.total_bytes)
            keep = [self.newest.number] if self.newest is not None else []
            saving.writer = arena.begin(saving.handle.number, saving.handle.step, keep=keep)
        except MemoryPlanError:
            raise
        except CheckpointError as error:
            saving.failure = error.what
            return
        # The script has streams of its own, and may write in any of them once `save` has returned.
        saving.copy = ImageCopy(image, saving.settled, saving.writer.payload, self._device, waits=True)
        crash_point("save.begun")

    def _carry_out(self, saving: Saving, due: bool, asked: bool) -> None:
        """Copy, seal and commit. Runs in a thread of its own."""
        handle = saving.handle
        try:
            saving.copy_and_seal()
            self._settle(saving, due, asked)
        except PeersGone as error:
            self._lost = f"no more is saved: {error.what}"
            self._fail(handle, error.what)
        except Exception as error:  # noqa: BLE001 - nothing that a save does may stop training
            self._fail(handle, f"{type(error).__name__}: {error}")

    def _settle(self, saving: Saving, due: bool, asked: bool) -> None:
        """Commit the checkpoint with all ranks, or give it up with them."""
        handle, arena = saving.handle, self._arena
        assert arena is not None
        outcome = self._commits.settle(handle.number, self._said(saving, arena, due, asked))
        if outcome.record is None:
            if not saving.failure:
                arena.release(handle.number)
            self._fail(handle, outcome.reason)
            return
        crash_point("commit.heard")
        if self._place.folder is not None:
            self._place.folder.remember(outcome.record)
        arena.commit(handle.number)
        self.newest, self._last = Saved(handle.number, handle.step), saving
        self._counters.committed += 1
        crash_point("commit.done")
        self._retire()
        crash_point("commit.retired")
        if outcome.passed_over:
            self._owed = handle.number
            self._counters.durable_passed_over += 1
            self.complain("a checkpoint was not written to disk: an older one is still being written")
        if outcome.flush:
            self._begin_flush(saving, arena)
        handle.committed.set_result(True)
        if not outcome.flush:
            handle.durable.set_result(False)
        if self._began >= 0 and self._counters.committed == 1:
            self._place.proven()

    def _said(self, saving: Saving, arena: Arena, due: bool, asked: bool) -> Sealed:
        """Return what this rank reports of its save: the sealed image's digest, or why there is none."""
        step = saving.handle.step
        if not saving.failure:
            try:
                reader = arena.reader(saving.handle.number)
            except CheckpointError as error:
                saving.failure = error.what
        if saving.failure:
            return Sealed(step=step, failure=saving.failure)
        return Sealed(
            step=step, digest=reader.manifest_digest, layout_hash=reader.layout_hash, due=due, asked=asked,
            writing=bool(self._alive()),
        )  # fmt: skip

    def _retire(self) -> None:
        """After a commit, remove the arenas that only an older world or a smaller state could have used."""
        folder = self._place.folder
        if folder is not None:
            folder.sweep(self._place.fencing_token)
        while self._outgrown:
            arena = self._outgrown.pop()
            if folder is not None:
                arena.unlink()
            self._device.unpin(arena.memory()[0])
            arena.close()

    def _begin_flush(self, saving: Saving, arena: Arena) -> None:
        place, handle = self._place, saving.handle
        flush = Flush(
            saving,
            DurableTier(place.store, place.fencing_token, place.keep, self._began, place.hold),
            arena,
            peers=place.peers.another(),
            former=self._flushed,
        )
        self._flushed = handle.number
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
                self.complain(f"checkpoint {handle.number} is not on disk: {failure}")
                handle.failure = handle.failure or failure
                self._owed = max(self._owed, handle.number)
            else:
                self._counters.durable += 1
                if self._owed <= handle.number:
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


def _private_arena(job: str, rank: int, fencing_token: int, slots: int, payload_bytes: int) -> Arena:
    fd = os.memfd_create("rackrun-checkpoint", os.MFD_CLOEXEC)
    try:
        return Arena.create(
            fd, job=job, rank=rank, fencing_token=fencing_token, slots=slots, payload_bytes=payload_bytes
        )
    finally:
        os.close(fd)
