"""Takes and restores snapshots of shards without a live copy, in memory that the agent owns and that outlives this
process.

Two arenas of one slot each are written in turn. The heartbeat page says which snapshots they hold complete, and which
one the agent has to copy to other trays (`rackrun.agent.snapshots.mirror`); the next is copied only when all ranks have
finished the last. All ranks take snapshots after the same steps, because all of them go back together. The interval
follows from figures that every gate sums up.

The copy overlaps with the next step: forward and backward change no parameter and no optimizer state. What they may
change (buffers, other tracked objects) is copied at once. Every rank has sealed its snapshot before it enters the next
gate, so a rank that overwrites an older one knows that all others have a newer one.

A snapshot's id is made of its step and of the layout that the world's shards had. Snapshots of another layout than the
current one are those that the ranks filled their state from when ``main`` was entered again
(`rackrun.worker.restore.reshard_from_snapshots`). They are kept until a gate has passed in the new layout, and are
never loaded as if they belonged to it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_slot import SlotReader, SlotWriter
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.commit.snapshot_interval import IntervalPolicy, ObservedCosts, choose_interval, due_early
from rackrun.checkpoint.image.host_copies import ImageCopy, copies_from
from rackrun.checkpoint.image.image_layout import ImageLayout
from rackrun.protocol.boot import SNAPSHOT_JOB
from rackrun.protocol.commands import Restore
from rackrun.protocol.ids import Position, Step, snapshot_id, step_in
from rackrun.worker.membership.decisions.gate_sums import GateSums
from rackrun.worker.process.reports import say
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.restore.snapshot_fetch import CorruptSnapshot, fetch_snapshot
from rackrun.worker.snapshots.snapshot_memory import SnapshotMemory
from rackrun.worker.state.state_image import StateImages, load_image
from rackrun.worker.state.state_manifest import StateManifest
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.optimizer_sizes import bytes_to_come

__all__ = ["Snapshots"]

_CORES_A_THREAD = 8
_THREADS_MAX = 4
_DIGESTING_MAX = 8
"""The most threads that compute digests beside a device that copies: the bus delivers about 50 GB/s, and a thread
digests about 10."""
_SLICE_S = 0.05
_COSTS = 3
"""Of so many snapshots the least cost counts: a busy machine makes single ones slow."""
_PINNED_STEPS = 1000
"""For this many steps a snapshot that other trays hold is worth keeping on this rank when no newer one reaches them."""


@dataclass
class _Copying:
    """A snapshot that is being copied."""

    named: int
    slot: int
    mirror: bool
    generation: int
    copy: ImageCopy
    thread: threading.Thread | None = None
    cpu_s: float = 0.0
    out_of_date: bool = False
    error: BaseException | None = None


class Snapshots:
    """The snapshots of this rank: takes them, keeps up to two, and loads them after a rollback. ``every``: steps
    between two; None chooses the interval."""

    def __init__(self, runtime: Runtime, state: TrackedState, every: int | None) -> None:
        self._runtime, self._state, self._every = runtime, state, every
        self._fds = runtime.boot.snapshot_fds if runtime.boot else (-1, -1)
        self._images = StateImages(state)
        self._held: dict[int, int] = {}  # id -> slot
        self._copying: _Copying | None = None
        self._device = copies_from(runtime.device)
        beside = _threads() if runtime.device.type == "cpu" else _threads_of_all()  # a device leaves the cores idle
        self._arenas = SnapshotMemory(self._fds, self._device, (beside, _threads_of_all()))
        self._mirrored = -1
        """Id of the newest snapshot that every rank can get without its own tray; -1 for none. It stays in its slot,
        because what other trays hold may be parity, which is of use only beside it."""
        self.cost_s = 0.0
        """Seconds of training that the last snapshot took on this rank: the wait; on CPUs the work; on GPUs what the
        device copies ahead of the next step."""
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._generation, self._since = 0, 0
        """The generation, and the first step after which it could have a snapshot. The same on all ranks."""
        self.bytes = 0
        """Bytes of the last snapshot on this rank."""

    def oldest_kept(self) -> Position | None:
        """Return the oldest position that the world may go back to, as far as this rank's snapshots go; None if it
        holds none."""
        named = [*self._held, *([self._mirrored] if self._mirrored >= 0 else [])]
        steps = [step for one in named if (step := step_in(self._runtime.world.layout, Step(one))) is not None]
        return Position(min(steps)) if steps else None

    def named(self, step: int) -> int:
        """Return the id of this world's snapshot of ``step``."""
        return snapshot_id(self._runtime.world.layout, Step(step))

    def take_if_due(self, at: Position, gate: GateSums, *, now: bool) -> bool:
        """Begin a snapshot if one is due after ``at``, and return whether one was begun: the same on all ranks.

        ``gate`` holds the sums of all ranks' snapshot costs and step times, from which the interval follows. ``now``:
        take one in any case, after a recovery, because a newcomer cannot go back to a time before it joined.
        """
        if self._generation != self._runtime.world.generation:
            self._generation, self._since = self._runtime.world.generation, at.step
        if gate.mirrored == self._runtime.world.size:
            everywhere = self._runtime.page.mirrored
            self._mirrored = -1 if step_in(self._runtime.world.layout, Step(everywhere)) is None else everywhere
        elif 0 <= self._mirrored < self.named(at.step) - _PINNED_STEPS:
            self._mirrored = -1
            say(
                f"rank {self._runtime.world.rank}: for {_PINNED_STEPS} steps no snapshot has come through to other trays"
            )
        mirrored = self._runtime.world.has_mirrors
        if self._fds[0] < 0 or (mirrored and gate.mirroring and not now):
            # a snapshot on its way to other trays must not be overwritten, nor the one that all have there
            return False
        due = now or (at.step % self._every == 0 if self._every else self._due(at, gate))
        if due:
            self.take(at.step, mirror=mirrored and not gate.mirroring)
        return due

    def take_to_compare(self, step: int, *, keep: int) -> bool:
        """Begin the snapshot of ``step``, whose state is about to be compared with that of replicas, and return whether
        it was begun. The snapshot of ``keep``, which was found good, stays."""
        if self._fds[0] < 0:
            return False
        self._mirrored = -1  # replicas need no copies on other trays
        self.take(step, besides=self.named(keep))
        return True

    @property
    def usual_cost_s(self) -> float:
        """Seconds of training that a snapshot takes on this rank: the least of the last few, because a loaded machine
        makes single ones slow."""
        return min(self._costs, default=0.0)

    def _due(self, at: Position, gate: GateSums) -> bool:
        """Whether the interval is over, or an early snapshot is due. The interval is a power of two, so that noise in
        the estimates seldom changes it, and the former interval need not be known."""
        size = self._runtime.world.size
        observed = ObservedCosts(
            steps=1,
            step_ns=round(gate.step_s / size * 1e9),
            snapshots=1,
            snapshot_ns=round(gate.snapshot_cost_s / size * 1e9),
            run_ns=round(gate.step_s / size * at.step * 1e9),
            failures=self._runtime.world.generation - 1,
        )
        steps: int = 2 ** round(math.log2(choose_interval(observed, IntervalPolicy()).steps))
        return at.step % steps == 0 or due_early(observed, at.step - self._since)

    # -- take
    def take(
        self,
        step: int,
        *,
        mirror: bool = False,
        besides: int = -1,
        unless: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        """Begin the snapshot of ``step``. The state may be changed before `settle` only by forward and backward passes.

        ``mirror``: other trays are to get a copy of it, or its parity. ``besides``: the id of a snapshot that is not
        overwritten; by default the newest one that other trays protect. ``unless`` calls its argument only while this
        rank has not yet reported for the next plan which snapshots it holds; otherwise no snapshot is begun. By default
        it is `WorkerMembership.unless_broken`.

        Raises `MemoryPlanError`, and `RuntimeError` when no thread can be started.
        """
        self.settle()
        began = time.monotonic()
        named = self.named(step)
        free = [slot for slot in (0, 1) if slot not in self._held.values()]
        stays = self._mirrored if besides not in self._held else besides
        older = [held for held in self._held if held != stays]
        slot = free[0] if free else self._held[min(older)]
        if not (unless or self._runtime.world.unless_broken)(lambda: self._runtime.page.seal_snapshot(slot, -1)):
            return
        self._held = {s: i for s, i in self._held.items() if i != slot}
        shard = self._images.describe(self._runtime.world.replica_class, digests=self._state.sharded())
        described, self.bytes = time.monotonic() - began, shard.layout.total_bytes
        writer = self._begin(slot, named, shard.layout.total_bytes)
        self.warm(shard.layout.total_bytes)  # for the next one, in the other arena
        began = time.monotonic()  # an arena is allocated once, so that time is not part of the cost
        later = self._state.standing_until_gate(shard.tensors)
        copy = ImageCopy(shard, later, writer.payload, self._device)
        copying = _Copying(named, slot, mirror, self._runtime.world.generation, copy)
        copying.thread = threading.Thread(
            target=self._copy, args=[copying, shard.layout, writer], name=f"rackrun-snapshot-{step}", daemon=True
        )
        try:
            copying.thread.start()
        except RuntimeError:  # this process may have no more threads; the next step may take one
            copy.abandon()
            writer.abandon()
            raise
        self._copying = copying
        self.cost_s = described + time.monotonic() - began

    def hold(self, step: int) -> None:
        """Begin the snapshot of ``step``, after which the state has not changed, unless it exists."""
        if self.named(step) not in self._held:
            self.take(step)

    @property
    def copying(self) -> bool:
        """Whether a snapshot is being copied."""
        return self._copying is not None

    def settle(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until the snapshot in progress, if any, is sealed; raises its error. ``waiting`` is called at
        intervals."""
        copying, self._copying = self._copying, None
        if copying is None or copying.thread is None:
            return
        began = time.monotonic()
        while copying.thread.is_alive():
            copying.thread.join(_SLICE_S)
            waiting()
        copying.copy.drop()
        if copying.error is not None:
            raise copying.error
        if not copying.out_of_date:
            self._held[copying.named] = copying.slot
        waited = time.monotonic() - began
        self.cost_s += max(waited, copying.cpu_s) if self._runtime.device.type == "cpu" else waited
        self.cost_s += self._device.held_up_s()
        self._costs.append(self.cost_s)

    def warm(self, size: int | None = None) -> None:
        """Begin to allocate the memory for two snapshots of ``size`` bytes each, by default the size of one now.
        Returns at once; errors are raised when a snapshot is taken."""
        if self._fds[0] < 0 or self._arenas.complete:
            return
        size = self._images.describe("").layout.total_bytes if size is None else size
        self._arenas.ahead(size, rank=self._runtime.world.rank, fencing_token=self._runtime.world.generation)

    def expect(self) -> None:
        """Begin to allocate memory like `warm`, perhaps before the first step, with room for what optimizers will hold.

        Does nothing where that size is unknown, or where optimizers will use host memory: they come first, and
        snapshots are planned with what they leave.
        """
        if self._fds[0] < 0 or self._arenas.complete:
            return
        to_come = bytes_to_come(self._state.optimizers.values())
        on_host = any(parameter.device.type == "cpu" for parameter in self._state.parameters())
        if to_come is not None and not (to_come and on_host):
            self.warm(self._images.describe("").layout.total_bytes + to_come)

    def finish(self) -> None:
        """Stop allocating memory: no more snapshots are taken."""
        self._arenas.stop()

    def _begin(self, slot: int, named: int, size: int) -> SlotWriter:
        """Return a writer for the snapshot ``named`` in ``slot``. Raises `MemoryPlanError` when there is not enough
        memory."""
        world = self._runtime.world
        arena = self._arenas.arena(
            slot, size, rank=world.rank, fencing_token=world.generation, waiting=self._runtime.page.progress
        )
        for info in arena.slots():
            if info.number == named and info.manifest_digest:  # the step is being done again
                arena.release(named)
        return arena.begin(named, named)

    def _copy(self, copying: _Copying, layout: ImageLayout, writer: SlotWriter) -> None:
        began = time.thread_time()
        try:
            threads = _digesting_threads() if self._runtime.device.type != "cpu" else 0
            copying.out_of_date = not copying.copy.finish(lambda upto: writer.filled(upto, threads), drop=False)
            if copying.out_of_date:  # the script has changed parameters between two units
                writer.abandon()
                return
            writer.seal(layout.total_bytes, layout.layout_hash, threads=_threads())
            self._runtime.page.seal_snapshot(copying.slot, copying.named)
            if copying.mirror:
                self._runtime.page.want_mirror(copying.named, self._mirrored, copying.generation)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            copying.error = error
            with contextlib.suppress(CheckpointError):
                writer.abandon()
        finally:
            copying.cpu_s = time.thread_time() - began

    # -- go back
    def fetch(self, step: int, restore: Restore, overtaken: Callable[[], bool]) -> int:
        """Fetch the snapshot of ``step`` of the lost rank that ``restore`` names, from the agents that keep it or its
        parity, and return the descriptor of its arena. Raises the errors of `fetch_snapshot`."""
        token = self._runtime.boot.token if self._runtime.boot else ""
        return fetch_snapshot(restore, self.named(step), token, overtaken)

    def load(self, step: int, fetched: int | None, *, all_go_back: bool = True) -> StateManifest:
        """Load the state of ``step`` from this rank's own snapshot or from what `fetch` returned, and return its
        manifest.

        ``all_go_back``: the whole world goes back to ``step``. Raises `CorruptSnapshot` when a chunk is not what was sealed.
        The state is unchanged then, and an older snapshot of this rank still exists.
        """
        self.settle()
        named = self.named(step)
        arena: Arena | None = None
        try:
            arena = self._own(named) if fetched is None else Arena.attach(fetched, job=SNAPSHOT_JOB)
            reader = arena.reader(named, owner=arena.rank)
            threads = _threads_of_all()
            reader.verify(threads)
            manifest = load_image(self._state, reader.payload, threads, cuts=self._device.cuts)
        except CheckpointError as error:
            if fetched is None:
                self._drop(named)
            raise CorruptSnapshot(error.what) from error
        finally:
            if fetched is not None:
                if arena is not None:
                    arena.close()
                os.close(fetched)
        for later in [other for other in self._held if other > named]:
            self._drop(later)
        if self._runtime.world.has_mirrors and all_go_back:
            self._mirrored = named  # all ranks go back to it, and keep it until other trays hold a newer one
        return manifest

    # -- main is entered again
    def hand_over(self, at: Position, unless: Callable[[Callable[[], None]], bool]) -> None:
        """Seal the current state, which is the one at ``at``, for the ranks of another world to read. An existing
        snapshot of the step is enough, unless a phase may have changed the state since. Raises `MemoryPlanError`."""
        named = self.named(at.step)
        former = self._held.get(named)
        if former is not None and not at.phase:
            return
        self.take(at.step, unless=unless)
        self.settle()
        if former is not None and self._held.get(named) != former:
            self._runtime.page.seal_snapshot(former, -1)

    def become(self, state: TrackedState) -> None:
        """Take snapshots of ``state`` from here on. Those of the former state are kept until `drop_former`."""
        self._state, self._images = state, StateImages(state)
        self._mirrored = -1
        self.cost_s = 0.0
        self._costs.clear()

    def keep(self, step: int, unless: Callable[[Callable[[], None]], bool], besides: int) -> None:
        """Seal the new state of a new layout and keep the old snapshot ``besides``. Raises `MemoryPlanError`.

        Other trays get a copy soon, because what they hold of the old snapshot is useless without what this rank will
        drop.
        """
        self.take(step, mirror=self._runtime.world.has_mirrors, unless=unless, besides=besides)
        self.settle()

    def drop_former(self) -> None:
        """Drop the snapshots of other layouts. A gate has passed in the current one, so nobody will need them."""
        layout = self._runtime.world.layout
        for named in [one for one in self._held if step_in(layout, Step(one)) is None]:
            self._drop(named)

    def drop_all(self) -> None:
        """Drop all snapshots, because this rank is given another rank's state."""
        for named in list(self._held):
            self._drop(named)

    def drop_upto(self, step: int) -> None:
        """Drop the snapshots up to ``step``: all ranks have live copies of their state, so nobody goes back that
        far."""
        for named in [one for one in self._held if one <= self.named(step)]:
            self._drop(named)

    def own_image(self, named: int) -> SlotReader | None:
        """Return the snapshot with the id ``named`` if this process holds it, else None."""
        arena = self._arenas[self._held[named]] if named in self._held else None
        return None if arena is None else arena.reader(named, owner=arena.rank)

    def _own(self, named: int) -> Arena:
        arena = self._arenas[self._held[named]] if named in self._held else None
        if arena is None:
            raise CorruptSnapshot("it is not there")
        return arena

    def _drop(self, named: int) -> None:
        if (slot := self._held.pop(named, None)) is not None:
            self._runtime.page.seal_snapshot(slot, -1)


def _threads() -> int:
    """Return the number of threads for work beside training."""
    return max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // _CORES_A_THREAD))


def _digesting_threads() -> int:
    """Return the number of threads for digests while a device computes and copies: half of this rank's share of the
    host's cores, which are idle then."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_DIGESTING_MAX, len(os.sched_getaffinity(0)) // ranks // 2))


def _threads_of_all() -> int:
    """Return the number of threads for work while no rank trains: this rank's share of the host's cores, at most 4."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // ranks))
