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
outlive workers that torchrun starts again. `rackrun.checkpoint.commit.peer_commit` says what keeps a commit true,
`rackrun.checkpoint.manager.restoring` how all ranks agree on one.

The traps: `prepare`, `restore`, `save` and `close` are called by all ranks in the same order. Memory protects against the
death of processes; a host's memory is lost with it, and that is what the directory is for.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from rackrun.checkpoint.arena.arena_folder import ArenaFolder, MemoryTier
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.base.location import parse_location
from rackrun.checkpoint.commit.checkpoint_choice import Tier
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.lease import Lease
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.image.user_state import Contents
from rackrun.checkpoint.manager.checkpoint_sources import Seen, Sources
from rackrun.checkpoint.manager.restoring import RestoreReport, restore
from rackrun.checkpoint.manager.save_handle import Counters, SaveHandle
from rackrun.checkpoint.manager.saver import Place, Saved, Saver
from rackrun.checkpoint.manager.staging import Staging
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["CheckpointManager", "MemoryTier", "RestoreReport", "SaveHandle", "Saved"]

register("restore.looked", "restore.epoch_agreed", "close.gathered")

_SECONDS = 300.0
"""How long ranks wait for each other."""


class _Hello(msgspec.Struct, frozen=True):
    seen: Seen
    host: str
    clock_ms: int
    quarantined: tuple[int, ...]


class _Agreed(msgspec.Struct, frozen=True):
    epoch: int
    """It fences every earlier writer."""
    first: int
    """Generation."""
    hosts: dict[str, int]
    """Host -> its ranks."""

    @classmethod
    def of(cls, everyone: Sequence[_Hello]) -> _Agreed:
        used = [g for one in everyone for g in (one.seen.newest_generation, *one.quarantined)]
        epoch = max(everyone[0].clock_ms, *(one.seen.newest_epoch + 1 for one in everyone))
        return cls(epoch, 1 + max(0, *used), dict(collections.Counter(one.host for one in everyone)))


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
        """Checkpoints of ``job`` under ``directory``, which all ranks see: a path, or a place in an object store (``s3://bucket/folder``).
        Nothing is touched before `prepare`.

        ``memory``: None keeps no arena that outlives this process. ``durable_every``: steps whose number is a multiple of it
        go to disk too; None: only those saved with ``durable=True``. ``keep``: durable generations that stay, beside the
        newest one that was read back whole.
        """
        if (durable_every is not None and durable_every < 1) or keep < 1:
            raise CheckpointError(
                f"durable_every is {durable_every}, keep {keep}.",
                remedy="give a number of steps, or None; keep 1 or more.",
            )
        self.directory, self.job, self.counters = parse_location(directory), job, Counters()
        self._memory, self._durable_every, self._keep = memory, durable_every, keep
        self._store = DurableStore(self.directory, job)
        self._probation = Probation(self._store.directory, self._store.files)
        self._contents: Contents | None = None
        self._folder: ArenaFolder | None = None
        self._restored: Saved | None = None
        self._hooks: list[Any] = []
        self._seen: list[Seen] = []
        """Every rank's, on rank 0."""
        self._epoch = -1
        self._lease: Lease | None = None
        self._begun = self._closed = False

    # -- before training
    def prepare(self, state: Mapping[str, Any]) -> None:
        """Collective, once, after the process group is made. ``state``: modules, optimizers, tensors, objects with
        ``state_dict``, and plain data, by name. Each optimizer's ``step`` waits for the copy from now on.

        Raises `LayoutMismatch` for what cannot be stored, `MemoryPlanError` when the arenas do not fit, `CheckpointError` when
        the directory cannot be made.
        """
        if self._contents is not None or self._closed:
            raise CheckpointError("prepare was called already.", remedy="make another manager for another state.")
        contents = Contents(state)
        image = contents.describe()
        self._make_directory()
        peers = self._peers = Peers.of_default_group(self.job)
        if self._memory is not None:
            self._folder = ArenaFolder(self._memory, self.job, self.directory, peers.rank, peers.world_size)
        self._sources = Sources(self._folder, self._store, rank=peers.rank, world=peers.world_size)
        try:
            self._saver = Saver(self._agree(), Staging(contents.device), self.counters)
        except BaseException:
            self._sources.close()
            raise
        self._contents = contents
        atexit.register(self._break_off)
        if contents.complete:  # else the first save makes the arena, once the optimizers have state
            self._saver.reserve(image.layout.total_bytes)
        for optimizer in contents.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.before_optimizer_step()))

    def _agree(self) -> Place:
        """With all ranks."""
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        clock_ms, quarantined = time.time_ns() // 1_000_000, tuple(self._probation.quarantined())
        peers, agreed = self._peers, None
        seen = self._sources.look()
        crash_point("restore.looked")
        peers.say(f"hello/{peers.rank}", _Hello(seen, host, clock_ms, quarantined))
        if peers.rank == 0:
            keys = [f"hello/{rank}" for rank in range(peers.world_size)]
            everyone = peers.hear(keys, _Hello, seconds=_SECONDS)
            self._seen = [one.seen for one in everyone]
            agreed = _Agreed.of(everyone)
            peers.forget(keys)
        agreed = peers.hear_first("agreed", agreed, _Agreed, seconds=2 * _SECONDS)
        crash_point("restore.epoch_agreed")
        self._epoch = agreed.epoch
        if peers.rank == 0:
            self._lease = Lease(self._store, f"{self.job}-{self._epoch}", self._epoch)
        slots = self._memory.slots if self._memory is not None else None
        return Place(
            job=self.job,
            peers=peers,
            store=self._store,
            folder=self._folder,
            epoch=agreed.epoch,
            first=agreed.first,
            slots=slots or (3 if self._durable_every else 2),
            local_ranks=agreed.hosts[host],
            keep=self._keep,
            seconds=_SECONDS,
            hold=self._lease.hold if self._lease is not None else str,
        )

    def restore(self) -> RestoreReport | None:
        """Collective, after `prepare` and before training: the newest committed generation, the same on all ranks, from this
        rank's arena or from the directory. None: there is nothing yet.

        Raises `NoUsableGeneration` when there are some and none is whole, `LayoutMismatch` when they are of another state.
        """
        contents = self._prepared()
        if self._begun:
            raise CheckpointError("there was a restore or a save already.", remedy="restore once, right after prepare.")
        self._begun = True
        report = restore(contents, self._sources, self._seen, self._peers, self._probation)
        self._sources.close()
        if report is not None:
            self._restored = Saved(report.generation, report.step)
            same_world = report.world_size == self._peers.world_size
            here = same_world and report.tiers[self._peers.rank] == Tier.OWN_TRAY.name.lower()
            self._saver.begin_from(self._restored, here=here)
            if self._peers.rank == 0:
                self._probation.restored(report.generation)
                by = f"saved by {report.world_size} rank{'s' if report.world_size > 1 else ''}"
                print(
                    f"rackrun: restored step {report.step} (generation {report.generation}, {by})",
                    file=sys.stderr,
                    flush=True,
                )
        return report

    # -- while training
    def save(self, step: int, *, durable: bool | None = None) -> SaveHandle:
        """Begin a generation of the state as it is now. What forward and backward may change is copied before this returns;
        parameters and optimizer state must not change before `before_optimizer_step`, which optimizers call themselves.

        ``durable``: whether it goes to disk as well; None: as ``durable_every`` says, unless an older one is still being written. One
        that is asked for with True is never passed over: it waits its turn. What goes wrong is in the handle, on
        stderr and in `counters`; only `MemoryPlanError` (the first save may have to make the arena) and `LayoutMismatch` are
        raised.
        """
        contents = self._prepared()
        began = time.monotonic()
        self._begun = True
        self._sources.close()
        self._saver.wait_committed()
        due = durable if durable is not None else self._durable_every is not None and step % self._durable_every == 0
        handle = self._saver.save(contents.describe(), step, due=due, asked=durable is True)
        self.counters.saves += 1
        self.counters.stall_s += time.monotonic() - began
        return handle

    def before_optimizer_step(self) -> None:
        """Wait until the last save's copy is done: the state may be changed then."""
        self._prepared()
        began = time.monotonic()
        self._saver.wait_staged()
        self.counters.stall_s += time.monotonic() - began

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """``with checkpoints.guard():`` around whatever changes parameters, where that is no prepared optimizer's step."""
        self.before_optimizer_step()
        yield

    def latest(self) -> Saved | None:
        """The newest generation that is known here to be committed, or was restored."""
        self._prepared()
        return self._saver.newest

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
        self._prepared()
        self._saver.finish()

    def close(self, *, keep_memory: bool = False) -> None:
        """Collective. When what was due last is not on disk yet, the newest generation is written. The arenas go when all ranks have come here, unless ``keep_memory``,
        and unless the newest that was due could not be written: that is said, and the same job finds it in memory."""
        if self._closed:
            return
        remove = not keep_memory
        if self._contents is not None:
            self._saver.finish()
            try:
                owed = self._peers.gather("owed", self._saver.owed(), seconds=_SECONDS)
                if owed[0] >= 0 and len(set(owed)) == 1:
                    self._saver.write_newest()
                if self._saver.owed() >= 0 and remove and self._memory is not None:
                    self._saver.complain("what is in memory was due on disk and is not there: the arenas stay")
                    remove = False
                remove = all(self._peers.gather("close", remove, seconds=_SECONDS))
            except PeersGone as error:
                remove = False
                self._saver.complain(error.what)
            crash_point("close.gathered")
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
        if self._contents is not None:
            self._peers.stop()
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
            self._saver.close(seconds=2.0)
        if self._lease is not None:
            self._lease.leave(ended=remove and self._saver.durable)
        if self._folder is not None:
            self._folder.leave(remove=remove, epoch=self._epoch)

    # -- helpers
    def _prepared(self) -> Contents:
        if self._contents is None or self._closed:
            raise CheckpointError(
                f"the manager is {'closed' if self._closed else 'not prepared'}.", remedy="call prepare(state) first."
            )
        return self._contents

    def _make_directory(self) -> None:
        try:
            self._store.files.make_root(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"the directory {self.directory} cannot be made: {error.strerror or error}.",
                remedy="give one that all ranks can write to.",
            ) from error
