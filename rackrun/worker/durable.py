"""Checkpoints on disk: what a whole job that is lost begins again from, with any number of ranks.

All ranks write after the same steps, each its own part: replicas share what they have in common. The copy overlaps with the
next step, as a snapshot's does; the writing goes on for as long as it takes, and a step that is due meanwhile is passed over.
Nothing that storage does can stop training. At the start all ranks agree on the newest generation that every one of them
can read, and each fills its tensors from whichever shards hold them.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rackrun.checkpoint.digest import CHUNK_BYTES, chunk_crcs
from rackrun.checkpoint.durable import DurableStore
from rackrun.checkpoint.durable_reader import GenerationReader
from rackrun.checkpoint.errors import CheckpointError, LayoutMismatch
from rackrun.checkpoint.image import header_bytes, parse_image, write_head, write_tensor
from rackrun.checkpoint.layout import PLAIN, ImageLayout, TensorEntry
from rackrun.checkpoint.probation import Probation
from rackrun.checkpoint.reshard import fill, plan_reshard
from rackrun.checkpoint.retention import Retention, collect
from rackrun.core.ids import Position
from rackrun.errors import StateLost, UsageError
from rackrun.worker.copies import copies_from
from rackrun.worker.gate import GateSums
from rackrun.worker.image import StateImages, entry_of, manifest_in
from rackrun.worker.manifest import Lineage
from rackrun.worker.runtime import Runtime
from rackrun.worker.state import TrackedState

__all__ = ["DurableCheckpoints", "DurableOptions"]

JOB = "run"
_LISTED_MAX = 32
_TRIED_MAX = 5
_ORPHANS_S = 24 * 3600.0
_EVERY_S = 300.0
_SLICE_S = 0.05


@dataclass(frozen=True)
class DurableOptions:
    """``every``: steps; None for about as many as take `_EVERY_S`. ``facts``: what must be the same to go on."""

    directory: Path
    every: int | None = None
    keep: int = 3
    facts: str = ""

    @classmethod
    def from_environment(cls, facts: str) -> DurableOptions | None:
        """As the launcher's options say; None without --checkpoint-dir."""
        directory = os.environ.get("RACKRUN_CHECKPOINT_DIR")
        if not directory:
            return None
        every = os.environ.get("RACKRUN_CHECKPOINT_EVERY")
        keep = int(os.environ.get("RACKRUN_CHECKPOINT_KEEP", "3"))
        return cls(Path(directory), int(every) if every else None, keep, facts)


@dataclass
class _Flush:
    copied: threading.Event
    thread: threading.Thread


class DurableCheckpoints:
    def __init__(self, runtime: Runtime, state: TrackedState, options: DurableOptions) -> None:
        self._world, self._state, self._options = runtime.world, state, options
        self._device = copies_from(runtime.device)
        self._images = StateImages(state)
        self._store = DurableStore(options.directory, JOB)
        self._probation = Probation(self._store.directory)
        self._flushes: list[_Flush] = []
        self._saved = -1
        self._doubtful = False
        """Whoever was lost may not have written its part of the last one."""
        self._complained: set[str] = set()

    # -- at the start
    def resume(self) -> Position | None:
        """Collective, before the first step: fill the state from the newest generation that all ranks can read, and that has not
        been resumed from again and again in vain. None: there is none yet. Raises `StateLost` when there are some and none can
        be used."""
        try:
            self._options.directory.mkdir(parents=True, exist_ok=True)
            mine: list[list[Any]] = [[info.generation, info.digest] for info in self._store.generations()][:_LISTED_MAX]
        except (OSError, CheckpointError) as error:
            raise UsageError(
                f"the checkpoint directory {self._options.directory} cannot be used: {error}.",
                remedy="give one that all ranks can read and write.",
            ) from error
        barred = self._probation.barred() if self._world.rank == 0 else {}
        everyone = self._gather((time.time_ns() // 1_000_000, mine, barred))
        life, barred = max(at for at, *_ in everyone), everyone[0][2]
        seen = [theirs for _, theirs, _ in everyone]
        common: list[int] = [found[0] for found in mine if all(found in theirs for theirs in seen)]
        if not common and any(seen):
            raise UsageError(
                f"the ranks see different checkpoints in {self._store.directory}: {sum(not theirs for theirs in seen)} of {len(seen)} see none.",
                remedy="give a directory that all hosts share, and see that it is mounted on all of them.",
            )
        position = self._first_usable(common, barred)
        if common and position is None:
            raise StateLost(
                f"none of {len(common)} checkpoints in {self._store.directory} can be {_story(barred, common)}.",
                remedy="see what is said above, and why the job ended after them; let one be taken again with "
                "`rackctl ckpt quarantine DIR GENERATION --lift`, or give another --checkpoint-dir to begin anew.",
            )
        began = position.step if position else -1
        self._saved = began
        self._state.lineage = Lineage(began=began, life=life, facts=self._options.facts)
        return position

    def _first_usable(self, common: list[int], barred: dict[int, str]) -> Position | None:
        """The same on all ranks. A resumption is remembered before anything is trained on it."""
        tried = 0
        for generation in common:
            if generation in barred:
                if self._world.rank == 0:
                    _say(f"the checkpoint of step {generation} is {barred[generation]}")
                continue
            if (position := self._try(generation)) is not None:
                if self._world.rank == 0:
                    self._probation.restored(generation)
                return position
            tried += 1
            if tried == _TRIED_MAX:
                break
        return None

    def _try(self, generation: int) -> Position | None:
        """Whether every rank could read it."""
        problem, step, world_size = "", -1, 0
        try:
            with self._store.open(generation) as reader:
                step, world_size = reader.step, reader.world_size
                self._fill_from(reader)
        except CheckpointError as error:
            problem = str(error)
        said = [one for one in self._gather(problem) if one]
        if self._world.rank == 0:
            if said:
                _say(f"the checkpoint of step {step} is not used: {said[0]}")
            else:
                ranks = "" if world_size == self._world.size else f", which {world_size} ranks have written"
                _say(f"resumed after step {step}, from {self._store.path(generation)}{ranks}")
        return None if said else Position(step)

    def _fill_from(self, reader: GenerationReader) -> None:
        layouts = [_layout_in(reader, rank) for rank in range(reader.world_size)]
        rank, same = self._world.rank, reader.world_size == self._world.size
        own = rank if same else 0
        manifest = manifest_in(bytes(reader.read(own, *layouts[own].extents[PLAIN])))
        if manifest.lineage.facts != self._options.facts:
            raise UsageError(
                f"{reader.directory} is of a run with {manifest.lineage.facts}; this one has {self._options.facts}.",
                remedy="resume with the same, or give another --checkpoint-dir.",
            )
        if same:  # what is not its own is its replicas'
            holders = [layouts[kin] for kin in manifest.lineage.kin or (own,)]
            readers = list(manifest.lineage.kin or (own,))
        else:
            holders, readers = layouts, list(range(reader.world_size))
            _check_alike(reader, layouts)
        manifest = self._state.fitted(manifest)
        tensors = self._state.allocate(manifest)
        parts = self._state.parts()
        mine: list[TensorEntry] = []
        others: list[TensorEntry] = []
        places: dict[str, torch.Tensor] = {}
        for path, tensor in tensors.items():
            target = entry_of(path, parts.get(path, tensor), rank)
            places[target.name] = tensor
            first = same or self._state.is_buffer(path)  # its own; in a world of another size, rank 0's count for all
            (mine if first and layouts[own].by_name.get(target.name) == target else others).append(target)
        fill(plan_reshard([layouts[own]], mine), places, lambda _, start, stop: reader.read(own, start, stop))
        fill(
            plan_reshard(holders, others, turn=rank),
            places,
            lambda holder, start, stop: reader.read(readers[holder], start, stop),
        )
        self._state.load_plain(manifest, tensors)

    def _gather(self, mine: Any) -> list[Any]:
        """From every rank: plain data."""
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
        sizes = [int(row.item()) for row in self._gather_rows(torch.tensor([encoded.numel()]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: encoded.numel()] = encoded
        rows = self._gather_rows(padded)
        return [msgspec.msgpack.decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _gather_rows(self, mine: torch.Tensor) -> list[torch.Tensor]:
        row = mine.to(self._world.device)
        rows = [torch.empty_like(row) for _ in range(self._world.size)]
        dist.all_gather(rows, row)
        return [other.cpu() for other in rows]

    # -- while training
    def save_if_due(self, at: Position, gate: GateSums, *, last: bool) -> bool:
        """After a step was committed, on all ranks alike. Whether one was begun."""
        if not self._state.lineage.kin and not last:
            return False  # replicas have not been compared yet
        every = self._options.every or self._every(gate)
        if last or gate.draining:
            self.save(at.step, last=True)  # whether or not an older one is still being written
            return True
        if not gate.writing and at.step > self._saved:
            self._doubtful = False
        if (at.step + 1) % every and (not gate.cut_short or gate.writing):
            return False
        if gate.writing:
            self._complain(f"the checkpoint of step {at.step} is passed over: an older one is still being written")
            return False
        self.save(at.step)
        return True

    def somebody_was_lost(self) -> None:
        self._doubtful = True

    def cut_short(self, step: int) -> bool:
        """Whether the last checkpoint is not whole and will not be: ``step``, beyond it, is to be one, rather than the next that is due.
        One that is done again is made whole by whoever has taken a place."""
        begun = self._state.lineage.began < self._saved < step
        return self._doubtful and begun and not self.writing and not self._store.path(self._saved).exists()

    def _every(self, gate: GateSums) -> int:
        step_s = gate.step_s / self._world.size
        return 2 ** max(round(math.log2(_EVERY_S / step_s)), 0) if step_s > 0 else 2**20

    def save(self, step: int, *, last: bool = False) -> None:
        """Begin the checkpoint of ``step``. The state must not be changed before `settle`, but by a forward and backward."""
        if step <= self._saved:
            return  # done again after a rollback: it is there
        if (
            not last
            and self._saved > self._state.lineage.began
            and not self._store.path(self._saved).exists()
            and not self.writing
        ):
            self._complain(
                f"the checkpoint of step {self._saved} is not whole: a rank was lost, or {self._store.root} is not shared by all hosts"
            )
        self._saved = step
        kin = self._state.lineage.kin or (self._world.rank,)
        shard = self._images.describe(
            self._world.replica_class,
            rank=self._world.rank,
            turn=kin.index(self._world.rank),
            turns=len(kin),
            digests=len(kin) < self._world.size,
        )
        memory = mmap.mmap(-1, max(shard.layout.total_bytes, 1))
        payload = memoryview(memory)[: shard.layout.total_bytes]
        later = {path for path in shard.tensors if self._state.is_settled(path)}
        write_head(shard.layout, shard.plain, payload)
        for path in shard.tensors.keys() - later:
            write_tensor(shard.layout, path, shard.tensors[path], payload)
        versions = [(shard.tensors[path], shard.tensors[path]._version) for path in later]
        ready, copied = self._device.ready(), threading.Event()

        def flush() -> None:
            try:
                try:
                    self._device.copy(shard, payload, later, ready)
                    torn = any(tensor._version != version for tensor, version in versions)
                finally:
                    shard.tensors.clear()
                    copied.set()
                if torn:
                    self._complain(
                        f"the checkpoint of step {step} is given up: parameters were changed between two steps"
                    )
                else:
                    self._write(step, shard.layout, payload, last=last)
            except Exception as error:  # noqa: BLE001 - nothing that storage does may stop training
                self._complain(f"the checkpoint of step {step} failed: {type(error).__name__}: {error}")

        thread = threading.Thread(target=flush, name=f"rackrun-checkpoint-{step}", daemon=True)
        self._flushes = [flush for flush in self._flushes if flush.thread.is_alive()] + [_Flush(copied, thread)]
        thread.start()

    @property
    def writing(self) -> bool:
        return any(flush.thread.is_alive() for flush in self._flushes)

    @property
    def copying(self) -> bool:
        """The state must not be changed yet."""
        return any(not flush.copied.is_set() for flush in self._flushes)

    def settle(self, waiting: Callable[[], None]) -> None:
        """Wait until the state has been copied. ``waiting`` is called now and then."""
        for flush in self._flushes:
            while not flush.copied.wait(_SLICE_S):
                waiting()

    def finish(self, enough: Callable[[], bool]) -> None:
        """Wait until what was begun is on disk or has failed, or until there is something better to do."""
        for flush in self._flushes:
            while flush.thread.is_alive() and not enough():
                flush.thread.join(_SLICE_S)
        if self._world.rank == 0 and not enough():
            self._probation.confirm(self._state.lineage.began)  # the run has come to its end

    def _write(self, step: int, layout: ImageLayout, payload: memoryview, *, last: bool) -> None:
        life = self._state.lineage.life
        writer = self._store.writer(step, step, life, self._world.size)
        written = writer.write_shard(self._world.rank, payload, layout.layout_hash, chunk_crcs(payload, CHUNK_BYTES))
        if written and writer.finish():
            self._probation.confirm(self._state.lineage.began)
            # This one was begun when all ranks had done with the one before: what is unfinished of that, nobody will finish.
            collect(
                self._store,
                Retention(self._options.keep),
                epoch=life,
                now=time.time,
                orphan_ttl_s=_ORPHANS_S,
                finished=step if not last else -1,
            )
        elif writer.failure is not None:
            self._complain(f"the checkpoint of step {step} could not be written: {writer.failure}")

    def _complain(self, what: str) -> None:
        """Once for each reason: a full disk stays full."""
        reason = what.partition(":")[2] or what
        if reason not in self._complained:
            self._complained.add(reason)
            _say(f"rank {self._world.rank}: {what}; training goes on")


def _layout_in(reader: GenerationReader, rank: int) -> ImageLayout:
    shard = reader.reader(rank)
    length = header_bytes(shard.read(0, min(8, shard.size)), limit=shard.size)
    return parse_image(shard.read(0, length), limit=shard.size)


def _check_alike(reader: GenerationReader, layouts: Sequence[ImageLayout]) -> None:
    """Raises `LayoutMismatch` when ranks had different tensors of one name: whose are the new ranks to have?"""
    seen: dict[str, int] = {}
    for rank, layout in enumerate(layouts):
        manifest = manifest_in(bytes(reader.read(rank, *layout.extents[PLAIN])))
        for path, mine in manifest.whole.items():
            if seen.setdefault(path, mine) != mine:
                raise LayoutMismatch(
                    f"{path} is not the same on all of the {reader.world_size} ranks that wrote {reader.directory}.",
                    remedy=f"resume with {reader.world_size} ranks, or shard it as a DTensor.",
                )


def _story(barred: dict[int, str], common: list[int]) -> str:
    told = "; ".join(f"step {generation} is {barred[generation]}" for generation in common if generation in barred)
    return f"used: {told}" if told else "read"


def _say(what: str) -> None:
    print(f"rackrun: {what}", file=sys.stderr, flush=True)
