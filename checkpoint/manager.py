"""Checkpoints for a training script of its own, under torchrun or alone: in memory at every save, on disk now and then.

::

    with CheckpointManager("checkpoints", durable_every=500) as checkpoints:
        checkpoints.prepare({"model": model, "optim": optimizer, "progress": progress})
        checkpoints.restore()
        for step in range(progress["step"], steps):
            ...  # forward and backward
            optimizer.step()  # waits until the last save's copy is done
            progress["step"] = step + 1
            checkpoints.save(step)

`save` returns at once: a helper thread copies parameters and optimizer state while the next forward and backward run, seals
them in this rank's arena, and commits the generation once every rank has sealed. The arenas are files on a tmpfs, so they
outlive workers that torchrun starts again. See `rackrun.checkpoint.commit_desk` for what keeps a commit true,
`rackrun.checkpoint.restoring` for how all ranks agree on one.

The traps: `prepare`, `restore`, `save` and `close` are called by all ranks in the same order. Memory protects against the
death of processes; a host's memory is lost with it, and that is what the directory is for.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from rackrun.checkpoint.arena import Arena, SlotState
from rackrun.checkpoint.arena_folder import ArenaFolder, MemoryTier
from rackrun.checkpoint.commit_desk import CommitDesk, Sealed
from rackrun.checkpoint.contents import Contents
from rackrun.checkpoint.durable import DurableStore
from rackrun.checkpoint.errors import CheckpointError, MemoryPlanError
from rackrun.checkpoint.image import write_head, write_tensor
from rackrun.checkpoint.peers import Peers, PeersGone
from rackrun.checkpoint.probation import Probation
from rackrun.checkpoint.restoring import RestoreReport, restore
from rackrun.checkpoint.saving import Counters, Flush, SaveHandle, Saving
from rackrun.checkpoint.sources import Seen, Sources
from rackrun.checkpoint.staging import Staging

__all__ = ["CheckpointManager", "MemoryTier", "RestoreReport", "SaveHandle", "Saved"]

_SECONDS = 300.0
"""How long ranks wait for each other."""
_SPARE_ROOM = 64
"""An arena has room for an image larger by one part in so many."""


class Saved(NamedTuple):
    generation: int
    step: int


class _Hello(msgspec.Struct, frozen=True):
    seen: Seen
    host: str


class CheckpointManager:
    def __init__(
        self,
        directory: Path | str,
        *,
        job: str = "run",
        memory: MemoryTier | None = MemoryTier(),  # noqa: B008 - frozen
        durable_every: int | None = None,
        keep: int = 3,
    ) -> None:
        """Checkpoints of ``job`` under ``directory``, which all ranks see; nothing is touched before `prepare`.

        ``memory``: None keeps no arena that outlives this process. ``durable_every``: steps whose number is a multiple of it
        go to disk too; None: only those saved with ``durable=True``. ``keep``: durable generations that stay.
        """
        if durable_every is not None and durable_every < 1:
            raise CheckpointError(f"durable_every is {durable_every}.", remedy="give a number of steps, or None.")
        self.directory, self.job, self.counters = Path(directory), job, Counters()
        self._memory, self._durable_every, self._keep = memory, durable_every, keep
        self._store = DurableStore(self.directory, job)
        self._probation = Probation(self._store.directory)
        self._contents: Contents | None = None
        self._folder: ArenaFolder | None = None
        self._arena: Arena | None = None
        self._outgrown: list[Arena] = []
        self._saving: SaveHandle | None = None
        self._threads: list[threading.Thread] = []
        self._flushing: threading.Thread | None = None
        self._newest: Saved | None = None
        self._restored: Saved | None = None
        self._lost = ""
        """Why no more is saved."""
        self._complained: set[str] = set()
        self._hooks: list[Any] = []
        self._closed = False

    # -- before training
    def prepare(self, state: Mapping[str, Any]) -> None:
        """Collective, once. ``state``: modules, optimizers, tensors, objects with ``state_dict``, and plain data, by name.
        Each optimizer's ``step`` waits for the copy from now on.

        Raises `LayoutMismatch` for what cannot be stored, `MemoryPlanError` when the arenas do not fit, `CheckpointError` when
        the directory cannot be made.
        """
        if self._contents is not None:
            raise CheckpointError("prepare was called already.", remedy="make another manager for another state.")
        contents = Contents(state)
        image = contents.describe()
        self._make_directory()
        peers = self._peers = Peers.of_default_group(self.job)
        if self._memory is not None:
            self._folder = ArenaFolder(self._memory, self.job, self.directory, peers.rank, peers.world_size)
        atexit.register(self._break_off)
        self._contents = contents
        self._staging = Staging(contents.device)
        self._sources = Sources(self._folder, self._store, rank=peers.rank, world=peers.world_size)
        self._seen = self._sources.look()
        self._begin_epoch()
        if contents.complete:
            self._arena_for(image.layout.total_bytes)
        for optimizer in contents.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.before_optimizer_step()))

    def _begin_epoch(self) -> None:
        """All ranks agree on a number that fences every earlier writer, and on the first generation."""
        hello = _Hello(self._seen, _host())
        everyone = self._peers.gather("hello", hello, seconds=_SECONDS)
        clocks = self._peers.gather("clock", time.time_ns() // 1_000_000, seconds=_SECONDS)
        self._epoch = max(clocks[0], *(one.seen.newest_epoch + 1 for one in everyone))
        quarantined = self._peers.gather("quarantined", sorted(self._probation.quarantined()), seconds=_SECONDS)
        self._next = 1 + max(*(one.seen.newest_generation for one in everyone), *sum(quarantined, [-1]), 0)
        self._everyone = [one.seen for one in everyone]
        self._local_ranks = sum(one.host == hello.host for one in everyone)
        self._desk = CommitDesk(self._peers.another(), self._epoch, seconds=_SECONDS)
        if self._folder is not None:
            for path, mine in self._folder.arenas().items():
                if mine == (self._peers.rank, self._peers.world_size) and self._arena is None:
                    self._arena = self._folder.attach(path, self._epoch)
            if self._arena is not None:
                self._staging.pin(self._arena)

    def restore(self) -> RestoreReport | None:
        """Collective, after `prepare` and before training: the newest committed generation, the same on all ranks, from this
        rank's arena or from the directory. None: there is nothing yet.

        Raises `NoUsableGeneration` when there are some and none is whole, `LayoutMismatch` when they are of another state.
        """
        contents = self._prepared()
        report = restore(contents, self._sources, self._everyone, self._peers, self._probation)
        self._sources.close()
        if report is not None:
            self._restored = self._newest = Saved(report.generation, report.step)
            if self._arena is not None:
                _settle_slots(self._arena, report.generation)
            if self._peers.rank == 0:
                self._probation.restored(report.generation)
                self._say(
                    f"restored step {report.step} (generation {report.generation}, saved by {report.world_size} ranks)"
                )
        return report

    # -- while training
    def save(self, step: int, *, durable: bool | None = None) -> SaveHandle:
        """Begin a generation of the state as it is now. What forward and backward may change is copied before this returns;
        parameters and optimizer state must not change before `before_optimizer_step`, which optimizers call themselves.

        ``durable``: whether it goes to disk as well; None: as ``durable_every`` says. What goes wrong is in the handle, on
        stderr and in `counters`; only `MemoryPlanError` (the first save may have to make the arena) and `LayoutMismatch` are
        raised.
        """
        contents = self._prepared()
        began = time.monotonic()
        self._settle()
        self._sources.close()
        handle = SaveHandle(self._next, step)
        self._next += 1
        self.counters.saves += 1
        if self._lost:
            handle.fail(self._lost)
            return handle
        saving = Saving(handle, contents.describe())
        self._begin(saving)
        due = durable if durable is not None else bool(self._durable_every) and step % (self._durable_every or 1) == 0
        self._saving = handle
        self._start(lambda: self._carry_out(saving, due), f"rackrun-save-{step}")
        self.counters.stall_s += time.monotonic() - began
        return handle

    def before_optimizer_step(self) -> None:
        """Wait until the last save's copy is done: the state may be changed then."""
        if self._saving is not None and not self._saving.staged.done():
            began = time.monotonic()
            self._saving.staged.result()
            self.counters.stall_s += time.monotonic() - began

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """``with checkpoints.guard():`` around whatever changes parameters, where that is no prepared optimizer's step."""
        self.before_optimizer_step()
        yield

    def latest(self) -> Saved | None:
        """The newest generation that is known here to be committed, or was restored."""
        return self._newest

    def confirm(self, step: int) -> None:
        """The restored state has proven good up to ``step``: restoring it again is not held against it."""
        self._prepared()
        if self._restored is not None and step > self._restored.step and self._peers.rank == 0:
            self._probation.confirm(self._restored.generation)

    def quarantine(self, generation: int, reason: str) -> None:
        """It turned out bad: no restore takes it again. One rank's word is enough."""
        self._prepared()
        self._probation.quarantine(generation, reason)

    # -- at the end
    def wait_until_finished(self) -> None:
        """Until every save so far is committed, and on disk where that was due; or has failed."""
        self._settle()
        while self._flushing is not None and self._flushing.is_alive():
            self._flushing.join(1.0)

    def close(self, *, keep_memory: bool = False) -> None:
        """Collective. The arenas go when all ranks have come here, unless ``keep_memory``."""
        if self._closed:
            return
        remove = not keep_memory
        if self._contents is not None:
            self.wait_until_finished()
            try:
                remove = all(self._peers.gather("close", remove, seconds=_SECONDS))
            except PeersGone as error:
                remove = False
                self._complain(error.what)
            with contextlib.suppress(PeersGone):  # whoever hosts the store may end once all have heard
                self._peers.gather("closed", remove, seconds=_SECONDS)
        self._leave(remove=remove)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._break_off()

    def _break_off(self) -> None:
        """This process ends before its time: what is committed stays."""
        if not self._closed and self._contents is not None:
            self._peers.stop()
            for thread in list(self._threads):
                thread.join(1.0)
        self._leave(remove=False)

    def _leave(self, *, remove: bool) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._break_off)
        for hook in self._hooks:
            hook.remove()
        if self._contents is not None:
            self._sources.close()
        for arena in [*self._outgrown, *([self._arena] if self._arena is not None else [])]:
            self._staging.unpin(arena)
            arena.close()
        if self._folder is not None:
            self._folder.leave(remove=remove)

    # -- a save
    def _begin(self, saving: Saving) -> None:
        """Take a slot, and copy what may change at once."""
        image = saving.image
        try:
            arena = self._arena_for(image.layout.total_bytes)
            keep = [self._newest.generation] if self._newest is not None else []
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

    def _carry_out(self, saving: Saving, due: bool) -> None:
        """In a thread of its own."""
        handle = saving.handle
        try:
            saving.copy_and_seal(self._staging)
            if not handle.staged.done():
                handle.staged.set_result(False)
            arena = self._arena
            mine = Sealed(step=handle.step, failure=saving.failure)
            if not saving.failure and arena is not None:
                reader = arena.reader(handle.generation)
                writing = self._flushing is not None and self._flushing.is_alive()
                mine = Sealed(
                    step=handle.step,
                    digest=reader.manifest_digest,
                    layout_hash=reader.layout_hash,
                    due=due,
                    writing=writing,
                )
            outcome = self._desk.settle(handle.generation, mine)
            if outcome.record is None or arena is None:
                if handle.sealed.done() and arena is not None:
                    arena.release(handle.generation)
                self._fail(handle, outcome.reason)
                return
            if self._folder is not None:
                self._folder.remember(outcome.record)
            arena.commit(handle.generation)
            self._newest = Saved(handle.generation, handle.step)
            self.counters.committed += 1
            self._retire()
            if outcome.flush:
                self._begin_flush(handle, arena)
            if outcome.passed_over:
                self.counters.durable_passed_over += 1
                self._complain("a generation was not written to disk: an older one is still being written")
            handle.committed.set_result(True)
            if not outcome.flush:
                handle.end()
        except PeersGone as error:
            self._lost = f"no more is saved: {error.what}"
            self._fail(handle, error.what)
        except Exception as error:  # noqa: BLE001 - nothing that a save does may stop training
            self._fail(handle, f"{type(error).__name__}: {error}")

    def _retire(self) -> None:
        """After a commit: what only an older world could have used."""
        if self._folder is not None:
            self._folder.sweep(self._epoch)
        while self._outgrown:
            arena = self._outgrown.pop()
            if self._folder is not None:
                arena.unlink()
            self._staging.unpin(arena)
            arena.close()

    def _begin_flush(self, handle: SaveHandle, arena: Arena) -> None:
        flush = Flush(handle, self._store, arena, epoch=self._epoch, keep=self._keep, peers=self._peers.another())

        def run() -> None:
            try:
                failure = flush.run()
            except Exception as error:  # noqa: BLE001 - nothing that storage does may stop training
                failure = f"{type(error).__name__}: {error}"
            if failure:
                self.counters.durable_failed += 1
                handle.failure = handle.failure or failure
                self._complain(f"generation {handle.generation} is not on disk: {failure}")
            else:
                self.counters.durable += 1
            handle.durable.set_result(not failure)

        self._flushing = self._start(run, f"rackrun-flush-{handle.step}")

    def _arena_for(self, size: int) -> Arena:
        """This rank's, made anew when an image does not fit into it."""
        if self._arena is not None and self._arena.payload_bytes >= size:
            return self._arena
        if self._arena is not None:
            self._outgrown.append(self._arena)
            self._arena = None
        slots = (self._memory and self._memory.slots) or (3 if self._durable_every else 2)
        room = size + size // _SPARE_ROOM
        if self._folder is not None:
            self._arena = self._folder.create(
                self._epoch, slots=slots, payload_bytes=room, local_ranks=self._local_ranks
            )
        else:
            self._arena = _private_arena(self.job, self._peers.rank, self._epoch, slots, room)
        self._staging.pin(self._arena)
        return self._arena

    # -- helpers
    def _prepared(self) -> Contents:
        if self._contents is None or self._closed:
            raise CheckpointError(
                f"the manager is {'closed' if self._closed else 'not prepared'}.", remedy="call prepare(state) first."
            )
        return self._contents

    def _settle(self) -> None:
        """Until the last save is committed, or never will be."""
        if self._saving is not None:
            self._saving.committed.result()
            self._saving = None

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"the directory {self.directory} cannot be made: {error.strerror or error}.",
                remedy="give one that all ranks can write to.",
            ) from error

    def _fail(self, handle: SaveHandle, why: str) -> None:
        self.counters.failed += 1
        self._complain(f"the save of step {handle.step} failed: {why}")
        handle.fail(why)

    def _complain(self, what: str) -> None:
        """Once for each reason: a full disk stays full."""
        reason = what.partition(": ")[2] or what
        if reason not in self._complained:
            self._complained.add(reason)
            self._say(f"rank {self._peers.rank}: {what}; training goes on")

    @staticmethod
    def _say(what: str) -> None:
        print(f"rackrun: {what}", file=sys.stderr, flush=True)


def _settle_slots(arena: Arena, restored: int) -> None:
    """The restored generation is what must not be written over; newer ones could not be used by all."""
    for info in arena.slots():
        if info.state in (SlotState.SEALED, SlotState.COMMITTED) and info.generation > restored:
            arena.mark_bad(info.generation, f"generation {restored} was restored instead")
        elif info.state is SlotState.SEALED and info.generation == restored:
            arena.commit(restored)


def _private_arena(job: str, rank: int, epoch: int, slots: int, payload_bytes: int) -> Arena:
    fd = os.memfd_create("rackrun-checkpoint", os.MFD_CLOEXEC)
    try:
        return Arena.create(fd, job=job, rank=rank, epoch=epoch, slots=slots, payload_bytes=payload_bytes)
    finally:
        os.close(fd)


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
