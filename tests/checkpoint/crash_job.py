"""What a job with a `CheckpointManager` does in one life, and what it may restore: the same for ranks that play on a stage and
for real processes.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from rackrun.checkpoint import CheckpointManager, MemoryTier, SaveHandle
from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.commit.checkpoint_choice import ATTEMPTS_MAX
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import TensorEntry
from rackrun.checkpoint.image.tensor_entries import entries_of

__all__ = [
    "JOB",
    "Oracle",
    "Plan",
    "Restored",
    "State",
    "Told",
    "Wrong",
    "draw",
    "entries_with_boxes",
    "make",
    "script",
]

JOB = "run"
ROWS = 7
WORLD_MAX = 4
SAVES_MAX = 4
Which = tuple[int, int]
"""(life, step): what a state is."""


class Wrong(AssertionError):
    """A restore that must not be: its first word says which kind."""


# -- the state


class State:
    """A replica's parameters and buffers, its rows of a sharded tensor, and plain data whose size changes now and then."""

    def __init__(self, rank: int, world: int) -> None:
        self.model = nn.Module()
        self.weight = self.model.weight = nn.Parameter(torch.zeros(6, 3, dtype=torch.float64), requires_grad=False)
        self.mean = torch.zeros(5, dtype=torch.float64)
        self.model.register_buffer("mean", self.mean)
        each = math.ceil(ROWS / world)
        self._start, stop = (min(at * each, ROWS) for at in (rank, rank + 1))
        self.rows = torch.zeros(stop - self._start, 2, dtype=torch.float64)
        self.rows.box = Box((self._start, 0), (stop - self._start, 2))  # type: ignore[attr-defined]
        self.progress: dict[str, Any] = {"life": -1, "step": -1, "log": ""}

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "rows": self.rows, "progress": self.progress}

    def become(self, life: int, step: int) -> None:
        with torch.no_grad():
            for tensor, wanted in self._tensors(life, step):
                tensor.copy_(wanted)
        self.progress.update(life=life, step=step, log=_log_of(life, step))

    def which(self) -> Which:
        """What it is."""
        life, step = self.progress["life"], self.progress["step"]
        if self.progress["log"] != _log_of(life, step):
            raise Wrong(f"torn: the plain state of {(life, step)}")
        for tensor, wanted in self._tensors(life, step):
            if not torch.equal(tensor, wanted):
                raise Wrong(f"torn: {tensor} is not of {(life, step)}")
        return life, step

    def _tensors(self, life: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """No two states share an element."""
        for tensor, first in ((self.weight, 0), (self.mean, 100), (self.rows, 200 + 2 * self._start)):
            numbers = torch.arange(first, first + tensor.numel(), dtype=torch.float64)
            yield tensor, life * 1000 + step + numbers.reshape(tensor.shape) / 1024


def _log_of(life: int, step: int) -> str:
    return "x" * (9000 if (life * 7 + step) % 23 == 0 else 3)


def entries_with_boxes(state: dict[str, torch.Tensor]) -> list[TensorEntry]:
    """As `entries_of`, for sharded tensors that are no DTensors: those need a process group."""
    found = []
    for name, tensor in state.items():
        box = getattr(tensor, "box", None)
        found += [TensorEntry(name, "float64", (ROWS, 2), box)] if box is not None else entries_of({name: tensor})
    return found


# -- a life


@dataclass(frozen=True)
class Plan:
    life: int
    world: int
    steps: int
    durable_every: int | None
    torn: int
    """The save during which the last rank changes a parameter behind the fence; -1: none."""
    skew: bool
    """Ranks say different steps."""
    wait: bool
    confirm: bool
    end: str
    """``close``: the run is over; ``keep``: close, but it goes on later; ``exit``: without close."""


def draw(rng: random.Random, life: int) -> Plan:
    return Plan(
        life=life,
        world=2 if rng.random() < 0.6 else rng.randint(1, WORLD_MAX),
        steps=rng.randint(0, SAVES_MAX),
        durable_every=rng.choice([None, 1, 2]),
        torn=rng.choice([-1] * 9 + [0, 1, 2]),
        skew=rng.random() < 0.03,
        wait=rng.random() < 0.4,
        confirm=rng.random() < 0.3,
        end=rng.choice(["close", "keep", "exit", "keep"]),
    )


@dataclass(frozen=True)
class Restored:
    """By one rank. ``number`` -1: nothing."""

    number: int = -1
    which: Which = (-1, -1)
    step: int = -1
    tiers: tuple[str, ...] = ()


class Told(Protocol):
    def restored(self, rank: int, found: Restored) -> None: ...
    def save_begun(self, rank: int, number: int, step: int) -> None: ...
    def durable(self, number: int) -> None: ...
    def closing(self) -> None: ...


def make(plan: Plan, folder: Path) -> CheckpointManager:
    return CheckpointManager(
        folder / "disk", job=JOB, memory=MemoryTier(folder / "memory"), durable_every=plan.durable_every, keep=2
    )


def script(rank: int, plan: Plan, one: CheckpointManager, told: Told) -> None:
    """Raises `NoUsableCheckpoint` where nothing can be restored, `PeersGone` when others have died."""
    state = State(rank, plan.world)
    one.prepare(state.parts)
    report = one.restore()
    if report is None:
        told.restored(rank, Restored())
    else:
        tiers = tuple(sorted(set(report.tiers.values())))
        told.restored(rank, Restored(report.number, state.which(), report.step, tiers))
    step = report.step if report is not None else 0
    handles: list[SaveHandle] = []

    def look() -> None:
        for handle in [handle for handle in handles if handle.durable.done()]:
            handles.remove(handle)
            if handle.durable.result():
                told.durable(handle.number)

    for index in range(plan.steps):
        one.before_optimizer_step()
        step += 1
        state.become(plan.life, step)
        told.save_begun(rank, one._saver._next, step)
        handles.append(one.save(step + rank if plan.skew else step))
        if plan.torn == index and rank == plan.world - 1:
            with torch.no_grad():
                state.weight.add_(1.0)
        if plan.confirm and index == 1:
            one.confirm(step)
        if plan.wait:
            one.wait_until_finished()
        look()
    if plan.end == "exit":
        one.wait_until_finished()
        look()
        one.__exit__(RuntimeError, None, None)
    else:
        if plan.end == "close":
            told.closing()
        one.close(keep_memory=plan.end == "keep")
        look()


# -- what may be restored


@dataclass
class Oracle:
    """Of all lives of a job over one folder."""

    folder: Path
    rng: random.Random
    saved: dict[int, dict[Which, set[int]]] = field(default_factory=dict)
    """Checkpoint number -> state -> ranks that have begun to save it."""
    worlds: dict[Which, int] = field(default_factory=dict)
    tried: Counter[int] = field(default_factory=Counter)
    """Checkpoint number -> restores that were written down, or nearly."""
    in_memory: int = -1
    on_disk: int = -1
    """Committed, flushed: a restore must not fall behind them, unless what holds them is lost or they were given up."""
    story: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def __post_init__(self) -> None:
        (self.folder / "memory").mkdir(parents=True)

    # -- a life
    def begin(self, plan: Plan) -> None:
        attempts = self.probation.attempts()
        for number, count in attempts.items():
            if count > self.tried[number]:
                raise Wrong(f"{count} restores of checkpoint {number} are remembered, of {self.tried[number]}")
        worn = {number for number, count in attempts.items() if count >= ATTEMPTS_MAX}
        self._given_up = worn | set(self.probation.quarantined())
        self._plan, self._found = plan, dict[int, Restored]()
        self._closing = False

    def restored(self, rank: int, found: Restored) -> None:
        self._found[rank] = found
        if len({(one.number, one.which, one.step) for one in self._found.values()}) != 1:
            raise Wrong(f"mixed: {self._found}")
        n, floor = found.number, self.floor()
        if n < floor:
            raise Wrong(f"older: checkpoint {n} was restored, {floor} was committed")
        if n < 0:
            return
        if n in self._given_up or found.step != found.which[1]:
            raise Wrong(f"unverified: {found}, with {self._given_up} given up")
        if len(self.saved.get(n, {}).get(found.which, ())) != self.worlds.get(found.which):
            raise Wrong(f"unverified: {found} was never saved by all ranks: {self.saved.get(n)}")
        if len(self._found) == self._plan.world:
            tiers = {tier for one in self._found.values() for tier in one.tiers}
            self.in_memory = n if tiers == {"own_tray"} else -1
            self.on_disk = n if "shared" in tiers else (self.on_disk if self.on_disk <= n else -1)

    def save_begun(self, rank: int, number: int, step: int) -> None:
        which = self._plan.life, step
        self.saved.setdefault(number, {}).setdefault(which, set()).add(rank)
        self.worlds[which] = self._plan.world

    def committed(self, number: int) -> None:
        if not self._closing:
            self.in_memory = max(self.in_memory, number)

    def durable(self, number: int) -> None:
        self.on_disk = max(self.on_disk, number)

    def closing(self) -> None:
        """The run is over, and its memory goes."""
        self._closing, self.in_memory = True, -1

    def nothing_usable(self, error: Exception) -> None:
        """Some rank has said so."""
        if self.floor() >= 0 or self._found:
            raise Wrong(f"older: checkpoint {self.floor()} was committed, and {self._found} restored; but {error}")

    def floor(self) -> int:
        return max((n for n in (self.in_memory, self.on_disk) if n not in self._given_up), default=-1)

    def end(self, struck: str) -> None:
        told = next(iter(self._found.values()), None)
        self.story.append(
            f"{self._plan}: restored {told}, struck at {struck or 'nothing'}; {self.in_memory=} {self.on_disk=}"
        )

    # -- between lives
    @property
    def probation(self) -> Probation:
        return Probation(self.folder / "disk" / JOB)

    def begin_anew(self) -> None:
        """Nothing can be restored: the user gives the job a new directory."""
        for name in ("memory", "disk"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "memory").mkdir()
        self.in_memory = self.on_disk = -1
        self.saved.clear()
        self.tried.clear()

    def mishap(self) -> str:
        """What may happen to what a dead job has left; "" mostly."""
        chance = self.rng.random()
        memory = self.folder / "memory"
        arenas = sorted(memory.glob("rackrun-*/*/*.arena"))
        if chance < 0.02:
            shutil.rmtree(memory)
            memory.mkdir()
            what = "host lost"
        elif chance < 0.04 and arenas:
            self.rng.choice(arenas).unlink()
            what = "arena lost"
        elif chance < 0.08 and arenas and _flip(self.rng.choice(arenas), self.rng):
            what = "bit flipped"
        elif chance < 0.10 and self.in_memory >= 0:
            self.probation.quarantine(self.in_memory, "the loss is not a number")
            self.story.append(f"quarantined {self.in_memory}")
            return "quarantined"
        else:
            return ""
        self.in_memory = -1
        self.story.append(what)
        return what


def _flip(path: Path, rng: random.Random) -> bool:
    """One bit of the newest payload of an arena."""
    with contextlib.suppress(CheckpointError), Arena.attach(path, job=JOB) as arena:
        sealed = [info for info in arena.slots() if info.manifest_digest]
        if not sealed:
            return False
        newest = max(sealed, key=lambda info: info.number)
        at = arena._superblock.geometry.payload_at(newest.index) + rng.randrange(newest.payload_bytes)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0] ^ (1 << rng.randrange(8))
            file.seek(at)
            file.write(bytes([byte]))
        return True
    return False
