"""One save: the handle its caller holds, and the work of its two threads (copy, seal and commit; then write to disk).

Nothing here raises into training. A failure is recorded in the `SaveHandle.failure` of that save.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_slot import SlotReader, SlotWriter
from rackrun.checkpoint.base.deprecation import warn_renamed
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.commit.peers import Peers
from rackrun.checkpoint.durable.durable_store import CheckpointWriter, DurableStore
from rackrun.checkpoint.durable.retention import Retention, collect
from rackrun.checkpoint.image.host_copies import ImageCopy
from rackrun.checkpoint.image.image_layout import ImageLayout
from rackrun.checkpoint.manager.replica_writers import Share, SharedTensors, agree, held_in
from rackrun.protocol.crash_points import crash_point, register

__all__ = ["Counters", "DurableTier", "Flush", "SaveHandle", "Saving"]

register("save.copied", "save.sealed", "flush.leased", "flush.written", "flush.gathered", "flush.finished")

_ORPHANS_S = 24 * 3600.0
_FLUSH_S = 3600.0


@dataclass
class Counters:
    """This rank's totals over all saves. ``stall_s``: seconds that training waited, in `save` and at the fence."""

    saves: int = 0
    committed: int = 0
    failed: int = 0
    durable: int = 0
    durable_failed: int = 0
    durable_passed_over: int = 0
    """Checkpoints that were due on disk while an older one was still being written."""
    stall_s: float = 0.0


class SaveHandle:
    """The progress of one save, as four futures of a bool: True when the state is reached, False when it never will be.

    They are set in the order ``staged``, ``sealed``, ``committed``, ``durable``.
    """

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step
        self.staged: Future[bool] = Future()
        """The copy is done, so the training state may be changed."""
        self.sealed: Future[bool] = Future()
        """This rank's image is whole."""
        self.committed: Future[bool] = Future()
        """Every rank's image is whole, and the checkpoint is committed."""
        self.durable: Future[bool] = Future()
        """The checkpoint is on disk. False also where that was not due."""
        self.failure = ""

    @property
    def generation(self) -> int:
        """Deprecated: ``number``."""
        warn_renamed("SaveHandle.generation", "number")
        return self.number

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self.end()

    def end(self) -> None:
        """Set every future that is not set yet to False."""
        for future in (self.staged, self.sealed, self.committed, self.durable):
            if not future.done():
                future.set_result(False)

    def __repr__(self) -> str:
        done = [
            n for n in ("staged", "sealed", "committed", "durable") if (f := getattr(self, n)).done() and f.result()
        ]
        return f"SaveHandle(number={self.number}, step={self.step}, {', '.join(done) or 'begun'}{self.failure and ': '}{self.failure})"


@dataclass
class Saving:
    """One rank's shard while it is copied into a slot."""

    handle: SaveHandle
    layout: ImageLayout
    settled: frozenset[str]
    """The tensors that neither forward nor backward changes."""
    writer: SlotWriter | None = None
    copy: ImageCopy | None = None
    failure: str = ""
    """Why there is no slot, or why the copy failed."""

    def copy_and_seal(self) -> None:
        """Copy the tensors into the slot and seal it.

        Runs in the helper thread; records a failure instead of raising.
        """
        writer, copy = self.writer, self.copy
        if writer is None or copy is None:
            self.handle.staged.set_result(False)
            return
        try:
            unchanged = copy.finish()
            crash_point("save.copied")
            self.handle.staged.set_result(unchanged)
            if not unchanged:
                self.failure = (
                    "parameters were changed before they were copied: call guard() before whatever changes them"
                )
                writer.abandon()
                return
            writer.seal(self.layout.total_bytes, self.layout.layout_hash)
            self.handle.sealed.set_result(True)
            crash_point("save.sealed")
        except Exception as error:  # noqa: BLE001 - reported to all ranks as this rank's failure
            self.failure = f"{type(error).__name__}: {error}"
            writer.abandon()
        finally:
            self.writer = self.copy = None
            if not self.handle.staged.done():
                self.handle.staged.set_result(False)


@dataclass(frozen=True)
class DurableTier:
    """Where checkpoints become durable, and how many stay. ``began``: the checkpoint that was restored; -1 for none."""

    store: DurableStore
    fencing_token: int
    keep: int
    began: int
    hold: Callable[[], str] = str
    """Returns why nothing may be written any more (a later start has taken the directory), else "".

    Rank 0's answer counts.
    """


class Flush:
    """Writes a committed checkpoint to disk. A tensor that several ranks hold is written by one of them.

    The checkpoint's slot is leased, so that it is not overwritten meanwhile.
    """

    def __init__(
        self,
        saving: Saving,
        disk: DurableTier,
        arena: Arena,
        *,
        peers: Peers,
        former: int,
    ) -> None:
        """Lease the slot. ``former``: the checkpoint flushed before, whose outcome all ranks have heard."""
        self._handle, self._disk, self._arena = saving.handle, disk, arena
        self._layout, self._settled = saving.layout, saving.settled
        self._peers, self._former = peers, former
        self._lease = contextlib.ExitStack()
        self._reader: SlotReader | None = None
        self._failure = ""
        self.remark = ""
        """A warning to report besides the outcome."""
        try:
            self._lease.enter_context(arena.lease(self._handle.number))
            self._reader = arena.reader(self._handle.number)
        except CheckpointError as error:
            self._failure = error.what

    def run(self) -> str:
        """Write this rank's shard; rank 0 then makes the checkpoint whole. All ranks run this.

        Return why the checkpoint is not on disk; "" when it is. Raises `PeersGone` when another rank does not answer.
        """
        number, peers = self._handle.number, self._peers
        disk = self._disk
        writer = disk.store.writer(number, self._handle.step, disk.fencing_token, peers.world_size, replaces=True)
        with self._lease:
            crash_point("flush.leased")
            elsewhere = self._elsewhere() if peers.world_size > 1 else {}
            if self._reader is not None and not self._failure:
                self._write(writer, self._reader, elsewhere)
        crash_point("flush.written")
        peers.say(f"written/{number}/{peers.rank}", self._failure)
        if peers.rank != 0:
            return peers.hear([f"durable/{number}"], str, seconds=_FLUSH_S)[0]
        keys = [f"written/{number}/{rank}" for rank in range(peers.world_size)]
        outcome = next((one for one in peers.hear(keys, str, seconds=_FLUSH_S) if one), "")
        fenced = disk.hold()
        outcome = outcome or fenced
        crash_point("flush.gathered")
        if not outcome and not writer.finish():
            outcome = str(writer.failure or "a shard is gone")
        crash_point("flush.finished")
        peers.say(f"durable/{number}", outcome)
        peers.forget([*keys, f"durable/{self._former}"])
        if outcome:
            writer.give_up()  # all ranks have said that they are done with it
        collect(
            disk.store, Retention(disk.keep), fencing_token=disk.fencing_token, now=time.time, orphan_ttl_s=_ORPHANS_S,
            finished=number, began=disk.began, over=lambda token: token < disk.fencing_token and not fenced,
        )  # fmt: skip
        return outcome

    def _elsewhere(self) -> dict[str, int]:
        """Agree with all ranks which of this rank's tensors other ranks write: name -> rank.

        A rank that fails shares nothing.
        """
        names, held = list[str](), SharedTensors()
        try:
            if self._reader is not None:
                names, held = held_in(self._reader, self._layout, self._settled, self._arena.chunk_bytes)
        except CheckpointError as error:
            self._failure = error.what
        writers = agree(self._peers, self._handle.number, held, seconds=_FLUSH_S)
        if writers.apart:
            self.remark = (
                f"{len(writers.apart)} tensors, such as {names[writers.apart[0]]!r:.200}, are not the same as on its replicas: "
                "each writes its own"
            )
        return {name: rank for name, rank in zip(names, writers.ranks, strict=True) if rank != self._peers.rank}

    def _write(self, writer: CheckpointWriter, reader: SlotReader, elsewhere: dict[str, int]) -> None:
        rank = self._peers.rank
        try:
            if elsewhere:
                share = Share(reader, self._layout, elsewhere, self._arena.chunk_bytes)
                whole = reader.manifest_digest, reader.layout_hash
                written = writer.write_shard(rank, share, share.layout.layout_hash, share.crcs(), share_of=whole)
            else:
                written = writer.write_shard(
                    rank, reader, reader.layout_hash, reader.crcs, chunk_bytes=self._arena.chunk_bytes
                )
        except CheckpointError as error:
            self._failure = error.what
        else:
            self._failure = "" if written else f"rank {rank}: {writer.failure}"
