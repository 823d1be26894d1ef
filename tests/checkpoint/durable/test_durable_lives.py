"""A job that saves, crashes and starts again, a thousand times or fewer over one directory: what it restores is one
state, whole.

As the runtime does it (`rackrun.worker.snapshots.durable_checkpoints`): every rank by itself writes its shard, tries
to finish the checkpoint, and collects when it has; the next start restores the newest with any number of ranks. A
checkpoint's number is its step, so later starts write some numbers again, with other bytes. Ranks take turns at
random, one alone or all of them crash, at a named point or at any file operation, and now and then ranks of a former
start come back and go on where they stood.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rackrun.checkpoint.base.digest import chunk_crcs
from rackrun.checkpoint.durable.durable_reader import CheckpointReader
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.retention import Retention, collect
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, TensorEntry, header_bytes, parse_image, plan_image
from rackrun.checkpoint.image.reshard import fill, plan_reshard
from rackrun.checkpoint.image.safetensors_image import write_image
from rackrun.protocol import crash_points
from tests.checkpoint.storage import JOB, Crash, Hooked

POINTS = [name for name in crash_points.CRASH_POINTS if name.startswith(("durable.", "retention."))]
CHUNK = 2048
WORLD_MAX = 3
SAVES_MAX = 3
OLD_S = 100.0
SHAPES = {"weight": (7, 3), "bias": (5,), "step": ()}

State = dict[str, torch.Tensor]


# -- states
def state_of(life: int, step: int) -> State:
    """No two of them share an element."""
    return {
        name: torch.arange(math.prod(shape)).reshape(shape) * 10**12 + life * 10**6 + step
        for name, shape in SHAPES.items()
    }


def box_of(name: str, rank: int, world: int) -> Box:
    """Rows, unevenly; what has none is everybody's."""
    shape = SHAPES[name]
    if not shape:
        return Box((), ())
    each = math.ceil(shape[0] / world)
    start, stop = (min(at * each, shape[0]) for at in (rank, rank + 1))
    return Box((start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:]))


def entries_of(rank: int, world: int) -> list[TensorEntry]:
    return [TensorEntry(name, "int64", shape, box_of(name, rank, world)) for name, shape in SHAPES.items()]


def part_of(state: State, entry: TensorEntry) -> torch.Tensor:
    return state[entry.name][tuple(slice(o, o + s) for o, s in zip(entry.box.offsets, entry.box.sizes, strict=True))]


# -- what ends a life
class Fate:
    """Strikes when ``name`` (None: anything) is passed for the n-th time."""

    def __init__(self, name: str | None, nth: int) -> None:
        self.name, self.left = name, nth
        self.struck: str | None = None

    def passed(self, what: str) -> bool:
        if self.name in (None, what):
            self.left -= 1
            if self.left == 0:
                self.struck = what
                return True
        return False


class Mortal(Hooked):
    """The files of one rank's process. After its death every call is one too many, so nothing is cleaned up."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self.dead = False

    def around(self, operation: str, real: Callable[..., Any], *args: Any) -> Any:
        if not self.dead and self.fate.passed(operation):
            self.dead = True
            if operation == "write":
                real(args[0], args[1][: len(args[1]) // 2])
        if self.dead and operation != "close":  # the kernel closes what the dead had open
            raise Crash
        return real(*args)

    def point(self, name: str) -> None:
        self.dead = self.dead or self.fate.passed(name)
        if self.dead:
            raise Crash


# -- a rank
class Rank:
    def __init__(self, root: Path, life: int, rank: int, world: int, fate: Fate) -> None:
        self.life, self.rank, self.world = life, rank, world
        self.files = Mortal(fate)
        self.store = DurableStore(root, JOB, files=self.files)

    def alive(self, work: Callable[[], Any]) -> Any:
        crash_points.enable(self.files.point)
        try:
            return work()
        finally:
            crash_points.enable(None)

    def restore(self) -> int:
        """The newest checkpoint's step, -1 without any. This rank's part of it was one state's."""
        for info in self.store.checkpoints():
            with self.store.open(info.number) as reader:
                sources = [_layout(reader, rank) for rank in range(reader.world_size)]
                plain = {bytes(reader.read(rank, *of.extents[PLAIN])) for rank, of in enumerate(sources)}
                targets = entries_of(self.rank, self.world)
                tensors = {entry.name: torch.empty(entry.box.sizes, dtype=torch.int64) for entry in targets}
                fill(plan_reshard(sources, targets, turn=self.rank), tensors, reader.read)
            assert len(plain) == 1, "shards of several starts or steps"
            life, step = map(int, plain.pop().split())
            assert (info.number, info.step) == (step, step)
            wanted = state_of(life, step)
            for entry in targets:
                assert torch.equal(tensors[entry.name], part_of(wanted, entry)), (life, step, entry)
            return info.number
        return -1

    def save(self, step: int, rng: random.Random) -> Iterator[int]:
        """Yields between its calls: the step once it is finished, else -1."""
        state, plain = state_of(self.life, step), f"{self.life:8} {step:8}".encode()
        entries = entries_of(self.rank, self.world)
        layout = plan_image(entries, len(plain))
        image = memoryview(bytearray(layout.total_bytes))
        write_image(layout, {entry.name: part_of(state, entry) for entry in entries}, plain, image)
        writer = self.store.writer(step, step, self.life, self.world)
        crcs = chunk_crcs(image, CHUNK)
        written = writer.write_shard(self.rank, image, layout.layout_hash, crcs, chunk_bytes=CHUNK)
        yield -1
        if written and writer.finish():
            yield step
            now = rng.choice((time.time, lambda: 1e12))
            done = collect(self.store, Retention(2), fencing_token=self.life, now=now, orphan_ttl_s=OLD_S)
            assert done.failures == []


def _layout(reader: CheckpointReader, rank: int) -> ImageLayout:
    shard = reader.reader(rank)
    length = header_bytes(shard.read(0, 8), limit=shard.size)
    return parse_image(shard.read(0, length), limit=shard.size)


Saving = tuple[Rank, Iterator[int]]


class Job:
    """All starts of it, one after the other."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng = root, rng
        self.promised = -1
        self.late: list[Saving] = []
        """Of former starts: stopped, not dead."""

    def start(self, life: int, fate: Fate) -> None:
        """One life, until fate strikes or enough is saved."""
        world = self.rng.randint(1, WORLD_MAX)
        ranks = [Rank(self.root, life, rank, world, fate) for rank in range(world)]
        try:
            restored = {rank.alive(rank.restore) for rank in ranks}
        except Crash:
            return
        assert len(restored) == 1, "ranks went on from different steps"
        (at,) = restored
        assert at >= self.promised, "older than what was finished"
        for step in range(at + 1, at + 1 + self.rng.randint(1, SAVES_MAX)):
            late, self.late = self.late, []
            left = self.take_turns([(rank, rank.save(step, self.rng)) for rank in ranks] + late)
            if fate.struck:
                if self.rng.random() < 0.1:
                    self.late = left
                return

    def take_turns(self, savings: list[Saving]) -> list[Saving]:
        """Those that were stopped on the way, because the job was ended when a rank had crashed."""
        going = list(savings)
        while going:
            rank, saving = self.rng.choice(going)
            try:
                self.promised = max(self.promised, rank.alive(lambda saving=saving: next(saving)))  # type: ignore[misc]
            except StopIteration:
                going.remove((rank, saving))
            except Crash:
                going.remove((rank, saving))
                if self.rng.random() < 0.5:
                    return going
        return []


@pytest.mark.parametrize("crashes", [300, pytest.param(1000, marks=pytest.mark.stories)])
def test_after_any_of_many_crashes_a_start_restores_one_whole_state_and_none_older_than_was_finished(
    tmp_path: Path, crashes: int
) -> None:
    rng = random.Random(1733)
    job = Job(tmp_path, rng)
    died_at: list[str] = []
    life = 0
    while len(died_at) < crashes:
        life += 1
        named = rng.random() < 0.5
        fate = Fate(rng.choice(POINTS), rng.randint(1, 3)) if named else Fate(None, rng.randint(1, 200))
        job.start(life, fate)
        if fate.struck is not None:
            died_at.append(fate.struck)
    assert set(died_at) >= {*POINTS, "write", "rename", "link", "unlink", "pread", "fsync", "open"}
    job.late.clear()
    job.start(life + 1, Fate(None, 10**9))
    last = Rank(tmp_path, life + 2, 0, 1, Fate(None, 10**9))
    assert last.restore() >= job.promised > crashes // 10
    done = collect(last.store, Retention(1), fencing_token=life + 2, now=lambda: 1e12, orphan_ttl_s=OLD_S)
    assert done.failures == []
    assert [path.name for path in (tmp_path / JOB).iterdir() if path.name.startswith(".")] == []
