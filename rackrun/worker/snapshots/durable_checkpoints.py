"""Writes checkpoints to disk, from which a whole lost job starts again with any number of ranks.

All ranks write after the same steps, each its own part; replicas share the tensors that they have in common. The copy
overlaps with the next step, as a snapshot's does. Writing takes as long as it takes, and a step that is due meanwhile
is skipped. No storage error can stop training. `rackrun.worker.snapshots.resumption` reads the checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rackrun.checkpoint.base.digest import CHUNK_BYTES, chunk_crcs, content_digest
from rackrun.checkpoint.base.errors import CheckpointError, MemoryPlanError, Unreadable
from rackrun.checkpoint.base.location import is_remote, parse_location
from rackrun.checkpoint.base.messages import SaveWarnings
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.lease import InUse, Lease
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.retention import Retention, collect, sweep
from rackrun.checkpoint.image.host_copies import ImageCopy, copies_from
from rackrun.checkpoint.image.image_layout import ImageLayout
from rackrun.protocol.ids import Position
from rackrun.worker.membership.decisions.gate_sums import GateSums
from rackrun.worker.process.reports import Reports
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.snapshots.checkpoint_buffer import CheckpointBuffers
from rackrun.worker.snapshots.resumption import Resumption, refuse_other_training
from rackrun.worker.state.state_image import StateImages
from rackrun.worker.state.state_manifest import Lineage
from rackrun.worker.state.tracked_state import TrackedState

__all__ = ["DurableCheckpoints", "DurableOptions", "checkpoint_directory"]

JOB = "run"
_ORPHANS_S = 24 * 3600.0
_EVERY_S = 300.0
_SLICE_S = 0.05
_DISTRUST_S = 2.0
_PROBATION_STEPS = 10
"""After this many steps, with a finite loss, the checkpoint that the run was resumed from counts as good."""


def checkpoint_directory() -> str:
    """Return what the launcher was given as --checkpoint-dir; "" without it."""
    return os.environ.get("RACKRUN_CHECKPOINT_DIR", "")


@dataclass(frozen=True)
class DurableOptions:
    """Options of checkpoints on disk. ``every``: steps between two; None for about as many as take `_EVERY_S`.
    ``keep``: how many are kept. ``facts``: settings that must be equal for a resumption."""

    directory: Path
    every: int | None = None
    keep: int = 3
    facts: str = ""

    @classmethod
    def from_environment(cls, facts: str) -> DurableOptions | None:
        """Return the options that the launcher has put into the environment; None without --checkpoint-dir."""
        directory = checkpoint_directory()
        if not directory:
            return None
        every = os.environ.get("RACKRUN_CHECKPOINT_EVERY")
        keep = int(os.environ.get("RACKRUN_CHECKPOINT_KEEP", "3"))
        return cls(parse_location(directory), int(every) if every else None, keep, facts)


@dataclass
class _Flush:
    copied: threading.Event
    thread: threading.Thread


class DurableCheckpoints:
    """The checkpoints that this rank writes, and the job's lease of their directory."""

    def __init__(self, runtime: Runtime, state: TrackedState, options: DurableOptions) -> None:
        self._world, self._state, self._options = runtime.world, state, options
        self._reports = Reports(runtime)
        self._device = copies_from(runtime.device)
        self._images = StateImages(state)
        self._store = DurableStore(options.directory, JOB)
        self._probation = Probation(self._store.directory, self._store.files)
        self._flushes: list[_Flush] = []
        self._saved = self._given_up = -1
        self._doubtful = False
        """Whether a rank was lost that may not have written its part of the last checkpoint."""
        self._whole: dict[int, bool] = {}
        """Step -> whether its checkpoint is complete, as far as this rank has checked."""
        ranks = 1 if runtime.spare else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._buffers = CheckpointBuffers(ranks, self._device.pin, self._device.unpin)
        self._warnings = SaveWarnings()
        token = runtime.boot.token if runtime.boot else ""
        self._owner = content_digest(token.encode())[:16] if token else ""
        """The job's name in the lease; "" for a job without a token, which takes no lease."""
        self._lease: Lease | None = None

    # -- at the start
    def check_training(self) -> None:
        """Raise `DirectoryRefused` when the directory is of another training, before the script builds anything."""
        refuse_other_training(self._store, self._options.facts)

    def resume(self) -> Position | None:
        """Take the lease and resume from the newest usable checkpoint. Returns its position, or None. Collective;
        raises the errors of `rackrun.worker.snapshots.resumption.Resumption.run`."""
        began = time.monotonic()
        resumption = Resumption(self._world, self._state, self._store, self._options.facts)
        position, life = resumption.run(self._take_lease() if self._world.rank == 0 else None)
        if self._lease is not None:
            self._lease.fencing_token = life
            sweep(self._store, fencing_token=life)
            self._lease.keep(self._complain)
        if position is not None:
            self._reports.copied("resume", position.step, seconds=time.monotonic() - began)
        for number in resumption.not_used if self._world.rank == 0 else ():
            self._reports.copied("checkpoint", number, "not_used")
        self._saved = position.step if position else -1
        self._state.lineage = Lineage(
            began=self._saved, life=life, facts=self._options.facts, results=resumption.results
        )
        return position

    def _take_lease(self) -> tuple[str, str] | None:
        """Take the lease of the directory for this job. Returns None, or why that is impossible and what to do."""
        if not self._owner:
            return None
        lease = Lease(self._store, self._owner)
        try:
            self._store.files.make_root(self._store.root)
            lease.take()
        except InUse as error:
            lease.leave(ended=False)
            return error.what, error.remedy
        except (OSError, CheckpointError) as error:
            lease.leave(ended=False)
            why = error.what if isinstance(error, CheckpointError) else f"{error}."
            look = "its bucket, address and credentials" if is_remote(self._store.root) else "its room, rights and disk"
            return (
                f"the checkpoint directory {self._store.root} cannot be used: {why}",
                f"look at {look}, or give a --checkpoint-dir that can be read and written.",
            )
        self._lease = lease
        return None

    def _renew_lease(self) -> None:
        """Renew the lease on rank 0. A process that has become rank 0 takes it over, and one that is rank 0 no longer
        stops."""
        if self._world.rank != 0:
            if self._lease is not None:
                self._lease.leave(ended=False)
                self._lease = None
        elif self._lease is None and self._owner:
            lease = self._lease = Lease(self._store, self._owner, self._state.lineage.life)
            lease.keep(self._complain)

    def become(self, state: TrackedState) -> None:
        """Write checkpoints of ``state`` from here on, as ``main`` is entered again. What is being written
        continues."""
        self._state, self._images = state, StateImages(state)

    # -- while training
    def save_if_due(self, at: Position, gate: GateSums, *, last: bool) -> bool:
        """Begin a checkpoint if one is due after the committed step ``at``, on all ranks alike. Returns whether one was
        begun. ``last``: it is the run's last step."""
        began = self._state.lineage.began
        if at.step == began + _PROBATION_STEPS and math.isfinite(gate.loss) and self._world.rank == 0:
            threading.Thread(target=self._probation.confirm, args=[began], daemon=True).start()
        if not self._state.lineage.kin and not last:
            return False  # replicas have not been compared yet
        self._renew_lease()
        every = self._options.every or self._every(gate)
        if last or gate.draining:
            self.save(at.step, last=True)  # even while an older one is being written
            return True
        if self._doubtful and not gate.writing and began < self._saved < at.step:
            self._doubtful = False
            # in a thread, because storage may not respond
            threading.Thread(target=self._is_complete, args=[self._saved], daemon=True).start()
        if (at.step + 1) % every and (not gate.cut_short or gate.writing):
            return False
        if gate.writing:
            self._complain(f"the checkpoint of step {at.step} is skipped: an older one is still being written")
            if self._world.rank == 0:
                self._reports.copied("checkpoint", at.step, "passed_over")
            return False
        self.save(at.step)
        return True

    def mark_rank_lost(self) -> None:
        """Note that a rank was lost, so that the last checkpoint may be incomplete."""
        self._doubtful = True

    def distrust(self, step: int) -> None:
        """Quarantine the checkpoints that this start has written of steps after ``step``, because replicas differed then,
        so that no start uses them. Those of earlier starts may be right.

        Any rank may do so before it reports to the coordinator, because the next start may be near. Waits 2 s at most,
        as storage may not respond.
        """
        newest = self._saved

        def bar() -> None:
            with contextlib.suppress(OSError, CheckpointError):
                life = self._state.lineage.life
                there = {one.number for one in self._store.checkpoints() if one.fencing_token == life} | {newest}
                for number in sorted(one for one in there if one > step):
                    if not self._distrusted(number):
                        self._probation.quarantine(number, f"replicas differed then, or soon after {self._start}")

        thread = threading.Thread(target=bar, name="rackrun-distrust", daemon=True)
        thread.start()
        thread.join(_DISTRUST_S)

    @property
    def _start(self) -> str:
        """Names this start of the job in a note."""
        return f"(start {self._state.lineage.life})"

    def _distrusted(self, step: int) -> bool:
        """Whether replicas differed in this start, so that what it writes of ``step`` is not to be used."""
        return self._start in self._probation.quarantined().get(step, "")

    def cut_short(self, step: int) -> bool:
        """Whether the last checkpoint is known to be incomplete for good, so that the later ``step`` gets one now and
        not only when the next is due.

        One of a step that is done again is completed by the process that has taken the lost rank's place.
        """
        return self._saved < step and self._whole.get(self._saved) is False

    def _is_complete(self, step: int) -> bool:
        """Check whether the checkpoint of ``step`` is complete. Returns True as well when storage does not answer."""
        whole = True
        with contextlib.suppress(OSError):
            whole = self._is_there(step)
        self._whole = {step: whole}
        return whole

    def _is_there(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is published, and is not one that this start has passed over."""
        try:
            found, _ = self._store.manifest(step)
        except Unreadable:
            return True
        except CheckpointError:
            return False
        return step <= self._state.lineage.began or found.fencing_token >= self._state.lineage.life

    def _every(self, gate: GateSums) -> int:
        """Return the number of steps between two checkpoints: the power of two nearest to `_EVERY_S` of training."""
        step_s = gate.step_s / self._world.size
        return 2 ** max(round(math.log2(_EVERY_S / step_s)), 0) if step_s > 0 else 2**20

    def save(self, step: int, *, last: bool = False) -> None:
        """Begin the checkpoint of ``step``. The state may be changed before `settle` only by forward and backward
        passes. Errors are printed, not raised."""
        if step <= self._saved:
            return  # it exists: the step was done again after a rollback
        former, self._saved = self._saved, step
        ended = not last and former > self._state.lineage.began and former != self._given_up and not self.writing
        kin = self._state.lineage.kin or (self._world.rank,)
        shard = self._images.describe(
            self._world.replica_class,
            rank=self._world.rank,
            turn=kin.index(self._world.rank),
            turns=len(kin),
            digests=len(kin) < self._world.size,
        )
        began = time.monotonic()
        try:
            memory = self._buffers.acquire(shard.layout.total_bytes)
        except MemoryPlanError as error:
            remedy = "put fewer ranks on this host or shard the state over more; a larger --checkpoint-every asks less often."
            why = f"is given up, there is no memory for it: {error.what} Remedy: {remedy}"
            self._failed(step, why, reason="memory")
            return
        payload = memoryview(memory)[: shard.layout.total_bytes]
        rank, ranks = self._world.rank, self._world.size
        later = self._state.standing_until_gate(shard.tensors)
        copy, copied = ImageCopy(shard, later, payload, self._device), threading.Event()

        def flush() -> None:
            try:
                try:
                    unchanged = copy.finish()
                finally:
                    copied.set()
                if ended and not self._is_complete(former):
                    self._complain(
                        f"the checkpoint of step {former} is not whole: a rank was lost or has given it up, or {self._store.root} is not shared by all hosts"
                    )
                if not unchanged:
                    self._failed(step, "is given up: parameters were changed between two steps")
                else:
                    self._write(step, (rank, ranks), shard.layout, payload, began, last=last)
            except Exception as error:  # noqa: BLE001 - nothing that storage does may stop training
                self._failed(step, f"failed: {type(error).__name__}: {error}")
            finally:
                self._buffers.release(memory)

        thread = threading.Thread(target=flush, name=f"rackrun-checkpoint-{step}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # this process may have no more threads
            copy.abandon()
            self._buffers.release(memory)
            self._failed(step, f"failed: {error}")
            return
        self._flushes = [flush for flush in self._flushes if flush.thread.is_alive()] + [_Flush(copied, thread)]

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(flush.thread.is_alive() for flush in self._flushes)

    @property
    def copying(self) -> bool:
        """Whether the state is still being copied, so that it must not be changed."""
        return any(not flush.copied.is_set() for flush in self._flushes)

    def settle(self, waiting: Callable[[], None]) -> None:
        """Wait until the state has been copied. ``waiting`` is called at intervals."""
        for flush in self._flushes:
            while not flush.copied.wait(_SLICE_S):
                waiting()

    def make_whole(self, step: int) -> None:
        """Write this rank's part of the last step's checkpoint, if that is incomplete, on a rank that takes a place
        after the last step: its predecessor may not have written it. As `save`."""
        self._renew_lease()
        if not self._is_complete(step):
            self._saved = min(self._saved, step - 1)
            self.save(step, last=True)

    def is_over(self) -> None:
        """Print on rank 0 if the last checkpoint is incomplete. To be called when all ranks have written their
        parts."""
        step = self._saved
        if (
            self._world.rank == 0
            and step > max(self._state.lineage.began, self._given_up)
            and not self._is_complete(step)
        ):
            self._complain(
                f"the last checkpoint, of step {step}, is not whole: a rank was lost while it wrote its part"
            )

    def finish(self, enough: Callable[[], bool]) -> None:
        """Wait like `wait_written` at the end of the run, then confirm the checkpoint that it was resumed from, and
        release the lease."""
        self.wait_written(enough)
        if self._world.rank == 0 and not enough():
            self._probation.confirm(self._state.lineage.began)
            if self._lease is not None:
                self._lease.leave(ended=True)

    def wait_written(self, enough: Callable[[], bool]) -> None:
        """Wait until all checkpoints in progress are on disk or have failed, or until ``enough()`` is true."""
        for flush in self._flushes:
            while flush.thread.is_alive() and not enough():
                flush.thread.join(_SLICE_S)

    def _write(
        self, step: int, part: tuple[int, int], layout: ImageLayout, payload: memoryview, began: float, *, last: bool
    ) -> None:
        """Write this rank's part. ``part``: (rank, number of ranks) when the checkpoint was begun."""
        life, (rank, ranks) = self._state.lineage.life, part
        if self._lease is not None and self._lease.lost:
            raise CheckpointError(self._lease.lost + ".", remedy="give each job a --checkpoint-dir of its own.")
        if self._distrusted(step):
            return  # no start uses it
        noted = step in {*self._probation.quarantined(), *self._probation.attempts()}
        writer = self._store.writer(step, step, life, ranks, replaces=True)
        written = writer.write_shard(rank, payload, layout.layout_hash, chunk_crcs(payload, CHUNK_BYTES))
        whole = written and writer.finish()
        if (writer.replaced or (whole and noted)) and not self._distrusted(step):
            self._probation.forget(
                step
            )  # the notes were about the checkpoint of an earlier start, or one never written
        if whole:
            self._probation.confirm(self._state.lineage.began)
            self._reports.copied("checkpoint", step, size=layout.total_bytes, seconds=time.monotonic() - began)
        elif writer.failure is not None:
            failure = writer.failure
            self._failed(step, f"could not be written: {failure}", reason=f"{failure.kind} {failure.errno}")
        if whole or rank == 0:
            # All ranks had finished the checkpoint before when this one was begun: nobody will finish parts of it that
            # are missing.
            collect(
                self._store,
                Retention(self._options.keep),
                fencing_token=life,
                now=time.time,
                orphan_ttl_s=_ORPHANS_S,
                finished=step if not last else -1,
                began=self._state.lineage.began,
                over=lambda token: self._lease is not None and not self._lease.lost and token < life,
            )

    def _failed(self, step: int, why: str, reason: str = "") -> None:
        self._given_up = step
        self._reports.copied("checkpoint", step, "failed")
        self._complain(f"the checkpoint of step {step} {why}", reason)

    def _complain(self, what: str, reason: str = "") -> None:
        """Print a complaint once for each reason, because a full disk stays full."""
        self._warnings.say(self._world.rank, what, reason)
