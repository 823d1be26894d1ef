"""`CheckpointManager`: checkpoints for a training script, in memory at every save and on disk at some of them.

It works under torchrun or in a single process.

::

    with CheckpointManager("checkpoints", durable_every=500) as checkpoints:
        checkpoints.prepare({"model": model, "optim": optimizer, "progress": progress})
        checkpoints.restore()
        for step in range(progress["step"], steps):
            ...  # forward and backward
            optimizer.step()  # waits until the last save's copy is done
            progress["step"] = step + 1
            checkpoints.save(step)

`save` returns at once. A helper thread copies parameters and optimizer state while the next forward and backward run,
seals the copy in this rank's arena, and commits the checkpoint once every rank has sealed. Arenas are files on a tmpfs,
so they outlive workers that torchrun restarts. `rackrun.checkpoint.commit.peer_commit` explains what makes a commit
hold, and `rackrun.checkpoint.manager.restoring` how all ranks agree on the checkpoint to restore.

All ranks must call `prepare`, `restore`, `save` and `close`, in the same order. Memory protects against the death of
processes only: when a host is lost its memory is lost too, and the directory is needed.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from rackrun.checkpoint.arena.arena_folder import ArenaFolder, MemoryTier
from rackrun.checkpoint.base.deprecation import renamed_argument
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.base.location import parse_location
from rackrun.checkpoint.base.messages import say
from rackrun.checkpoint.commit.checkpoint_choice import Tier
from rackrun.checkpoint.commit.commit_records import NUMBER_MAX
from rackrun.checkpoint.commit.peers import Peers, PeersGone
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.lease import Lease
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.image.host_copies import copies_from
from rackrun.checkpoint.manager.checkpoint_sources import RestorableData, Sources
from rackrun.checkpoint.manager.restoring import RestoreReport, restore
from rackrun.checkpoint.manager.save_handle import Counters, SaveHandle
from rackrun.checkpoint.manager.saver import Saved, SaveLocation, Saver
from rackrun.checkpoint.manager.user_state import Contents
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["CheckpointManager", "MemoryTier", "RestoreReport", "SaveHandle", "Saved"]

register("restore.looked", "restore.epoch_agreed", "close.gathered")

_SECONDS = 300.0
"""How long ranks wait for each other, in seconds."""


class _Hello(msgspec.Struct, frozen=True):
    """What each rank reports to rank 0 in `prepare`."""

    seen: RestorableData
    host: str
    clock_ms: int
    quarantined: tuple[int, ...]


class _Agreed(msgspec.Struct, frozen=True, rename={"fencing_token": "epoch"}):
    """What rank 0 decides for all ranks in `prepare`."""

    fencing_token: int
    """The fencing token of this start: larger than that of every earlier writer."""
    first: int
    """The number of the first checkpoint that this start saves."""
    hosts: dict[str, int]
    """Host -> the number of its ranks."""

    @classmethod
    def of(cls, everyone: Sequence[_Hello]) -> _Agreed:
        """Choose a fencing token and a first number above all that any rank has seen, and count the ranks of each
        host."""
        used = [n for one in everyone for n in (one.seen.newest_number, *one.quarantined)]
        fencing_token = max(everyone[0].clock_ms, *(one.seen.newest_fencing_token + 1 for one in everyone))
        return cls(fencing_token, 1 + max(0, *used), dict(collections.Counter(one.host for one in everyone)))


class CheckpointManager:
    """Saves and restores the training state of one job: in memory, and in a directory that all ranks see."""

    def __init__(
        self,
        directory: Path | str,
        *,
        job: str = "run",
        memory: MemoryTier | None = MemoryTier(),  # noqa: B008 - frozen
        durable_every: int | None = None,
        keep: int = 3,
    ) -> None:
        """Configure checkpoints of ``job`` under ``directory``. No file is touched before `prepare`.

        directory: a path that all ranks see, or a place in an object store (``s3://bucket/folder``).
        memory: the arenas' settings; None keeps no arena that outlives this process.
        durable_every: steps whose number is a multiple of it are written to disk too; None writes only those saved with
            ``durable=True``.
        keep: how many durable checkpoints stay: the newest that a restore would take.

        Raises CheckpointError when ``durable_every`` or ``keep`` is below 1.
        """
        if (durable_every is not None and durable_every < 1) or keep < 1:
            raise CheckpointError(
                f"durable_every={durable_every} and keep={keep} cannot be used.",
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
        self._seen: list[RestorableData] = []
        """What every rank has seen. Set on rank 0 only."""
        self._fencing_token = -1
        self._lease: Lease | None = None
        self._begun = self._closed = False

    # -- before training
    def prepare(self, state: Mapping[str, Any]) -> None:
        """Register the state to save, and agree with all ranks on a fencing token.

        Collective; once, after the process group is made.

        ``state``: modules, optimizers, tensors, objects with ``state_dict``, and plain data, by name. From now on each
        optimizer's ``step`` waits for the copy of the last save.

        Raises `LayoutMismatch` for state that cannot be stored, `MemoryPlanError` when the arenas do not fit, and
        `CheckpointError` when the directory cannot be made or `prepare` was called before.
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
            self._saver = Saver(self._agree(), copies_from(contents.device), self.counters)
        except BaseException:
            self._sources.close()
            raise
        self._contents = contents
        atexit.register(self._break_off)
        if contents.complete:  # otherwise the first save makes the arena, once the optimizers have state
            self._saver.reserve(image.layout.total_bytes)
        before_step = torch.compiler.disable(lambda *_: self.before_optimizer_step())
        for optimizer in contents.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(before_step))

    def _agree(self) -> SaveLocation:
        """Exchange with all ranks what each has seen, and agree on the fencing token and the first number."""
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
        self._fencing_token = agreed.fencing_token
        if peers.rank == 0:
            self._lease = Lease(self._store, f"{self.job}-{self._fencing_token}", self._fencing_token)
        slots = self._memory.slots if self._memory is not None else None
        return SaveLocation(
            job=self.job,
            peers=peers,
            store=self._store,
            folder=self._folder,
            fencing_token=agreed.fencing_token,
            first=agreed.first,
            slots=slots or (3 if self._durable_every else 2),
            local_ranks=agreed.hosts[host],
            keep=self._keep,
            seconds=_SECONDS,
            hold=self._lease.hold if self._lease is not None else str,
            proven=self._forget_attempts,
        )

    def restore(self) -> RestoreReport | None:
        """Load the newest usable checkpoint into the prepared state.

        Return what was restored; None when nothing was ever saved.

        Collective, after `prepare` and before training. All ranks restore the same committed checkpoint, each from its
        own arena or from the directory.

        Raises `NoUsableCheckpoint` when there are checkpoints and none is whole, and `LayoutMismatch` when the saved
        state does not fit the prepared one.
        """
        contents = self._prepared()
        if self._begun:
            raise CheckpointError("there was a restore or a save already.", remedy="restore once, right after prepare.")
        self._begun = True
        report = restore(contents, self._sources, self._seen, self._peers, self._probation)
        self._sources.close()
        if report is not None:
            self._restored = Saved(report.number, report.step)
            same_world = report.world_size == self._peers.world_size
            here = same_world and report.tiers[self._peers.rank] == Tier.OWN_TRAY.name.lower()
            self._saver.begin_from(self._restored, here=here)
            if self._peers.rank == 0:
                self._probation.restored(report.number)
                by = f"saved by {report.world_size} rank{'s' if report.world_size > 1 else ''}"
                say(f"restored step {report.step} (checkpoint {report.number}, {by})")
        return report

    # -- while training
    def save(self, step: int, *, durable: bool | None = None) -> SaveHandle:
        """Begin to save the state as it is now, and return a handle of the save.

        What forward and backward may change is copied before this returns. Parameters and optimizer state must not
        change before `before_optimizer_step`, which prepared optimizers call themselves.

        ``durable``: whether the checkpoint is written to disk as well. None follows ``durable_every``, and skips the
        disk while an older checkpoint is still being written. True never skips: the write waits its turn.

        Failures are reported by the handle, on stderr and in `counters`. Only `MemoryPlanError` (the first save may
        have to make the arena) and `LayoutMismatch` are raised.
        """
        contents = self._prepared()
        began = time.monotonic()
        self._begun = True
        self._sources.close()
        self._saver.wait_committed()
        due = durable if durable is not None else self._durable_every is not None and step % self._durable_every == 0
        image = contents.describe()
        settled = contents.settled(image.tensors)
        handle = self._saver.save(image, settled, step, due=due, asked=durable is True)
        self.counters.saves += 1
        self.counters.stall_s += time.monotonic() - began
        return handle

    def before_optimizer_step(self) -> None:
        """Wait until the copy of the last save is done; after that the state may be changed."""
        self._prepared()
        began = time.monotonic()
        self._saver.wait_staged()
        self.counters.stall_s += time.monotonic() - began

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Protect code that changes parameters outside a prepared optimizer's step: ``with checkpoints.guard():``.

        On entry it waits until the copy of the last save is done.
        """
        self.before_optimizer_step()
        yield

    def latest(self) -> Saved | None:
        """Return the newest checkpoint that this rank knows to be committed or has restored; None for none."""
        self._prepared()
        return self._saver.newest

    def confirm(self, step: int) -> None:
        """Record that the restored state has proven good up to ``step``.

        Restoring the checkpoint again is then not counted against it.
        """
        self._prepared()
        if self._restored is not None and step > self._restored.step:
            self._forget_attempts()

    def _forget_attempts(self) -> None:
        if self._restored is not None and self._peers.rank == 0:
            self._probation.confirm(self._restored.number)

    @renamed_argument("generation", "number")
    def quarantine(self, number: int, reason: str) -> None:
        """Mark checkpoint ``number`` as bad: no restore takes it again. It is enough that one rank calls this.

        Raises CheckpointError for a number that no checkpoint can have.
        """
        self._prepared()
        if not 0 <= number <= NUMBER_MAX:
            raise CheckpointError(
                f"no checkpoint has the number {number}.", remedy="give the number of a handle, or of rackctl ckpt ls."
            )
        self._probation.quarantine(number, reason)

    # -- at the end
    def wait_until_finished(self) -> None:
        """Wait until every save so far is committed, and on disk where that was due, or has failed."""
        self._prepared()
        self._saver.finish()

    def close(self, *, keep_memory: bool = False) -> None:
        """Finish all saves and release the memory. Collective.

        If the last checkpoint that was due is not on disk yet, the newest one is written. The arenas are removed once
        all ranks have reached this call. They stay with ``keep_memory``, or when the newest checkpoint that was due
        could not be written: that is reported on stderr, and the next start of the same job finds it in memory.
        """
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
            with contextlib.suppress(PeersGone):  # the process that hosts the store may end once all have heard
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
        """End early, after an error or at interpreter exit. Committed checkpoints stay in memory."""
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
            self._folder.leave(remove=remove, fencing_token=self._fencing_token)

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
