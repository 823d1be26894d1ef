"""A world whose ranks enter ``main`` again, as other ranks: the plans are the test's own.

`Reshaped` begins as a `TinyCluster`, under the real core. At its first change it takes over: from there on it breaks generations
itself, collects who is parked, and makes the plan of each `Change`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rackrun.protocol.commands import (
    BreakGeneration,
    GenerationPlan,
    Member,
    ReleaseWorkers,
    Reshard,
    ResumeGeneration,
    Worker,
)
from rackrun.protocol.events import (
    Event,
    SnapshotDamaged,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
)
from rackrun.protocol.ids import Generation, Position, Rank, Step
from rackrun.protocol.wire import UnitCommitted
from tests.worker.harness import Ended, TinyCluster

__all__ = ["Change", "Reshaped", "Seen", "differences", "noted"]


NOTED = mmap.mmap(-1, 1)
"""The last generation of which all have resumed, and all is noted in `Reshaped.seen`: workers can wait for that (`noted`)."""


def noted(generation: int) -> bool:
    return NOTED[0] >= generation


@dataclass(frozen=True)
class Change:
    """Another world: ``slots`` by rank."""

    slots: tuple[int, ...]
    told_after: Position | None = None
    """All are told to pause when somebody tells of this as committed, and change then; None: as soon as a member is lost, or something
    is damaged."""
    rollback: int | None = None
    edit: Callable[[Reshaped, GenerationPlan], GenerationPlan] = lambda _, plan: plan
    lost: int | None = None
    """The slot of a worker that is killed once all have paused: nothing but what it has sealed is left of it."""


@dataclass
class Seen:
    """What the coordinator was told in a generation that it has planned itself."""

    plan: GenerationPlan
    resumed: set[Worker] = field(default_factory=set)
    ready: dict[Worker, WorkerReady] = field(default_factory=dict)
    pages: dict[Worker, tuple[int, ...]] = field(default_factory=dict)
    """Snapshots in the page when it has said that it has resumed."""


class Reshaped(TinyCluster):
    def __init__(
        self, main: Callable[[Any], None], *, changes: Sequence[Change], distant: bool = False, **how: Any
    ) -> None:
        super().__init__(main, **how)
        self._service.distant, NOTED[0] = distant, 0
        self._changes = list(changes)
        self._took_over = self._asked = False
        self._plan: GenerationPlan | None = None
        self._old: tuple[Reshard, Position, tuple[float, ...]] | None = None
        """Of the last plan, until all have resumed in it."""
        self._paused_workers: set[Worker] = set()
        self._parked: dict[Worker, WorkerParked] | None = None
        self._finished: set[Worker] = set()
        self.seen: list[Seen] = []
        self.damaged: list[SnapshotDamaged] = []
        self.parked: list[dict[Worker, WorkerParked]] = []
        """For each generation that it broke."""

    # -- what the core would do
    def _resume(self, command: ResumeGeneration) -> None:
        self._plan = command.plan
        super()._resume(command)

    def _event(self, event: Event) -> None:  # noqa: PLR0912 - one case for each event
        if isinstance(event, WorkerPaused) and self._changes:
            self._paused_workers.add(Worker(event.slot, event.incarnation))
            if self._paused_workers >= set(self._members()):
                self._paused_workers.clear()
                self._took_over = True
                if (lost := self._changes[0].lost) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._children[self._worker_in(lost)].pid, signal.SIGKILL)
                else:
                    self._break()
            return
        if isinstance(event, WorkerExited) and self._changes and self._changes[0].told_after is None:
            self._took_over = True
        if not self._took_over:
            super()._event(event)
            return
        self._tell(f"{type(event).__name__} {getattr(event, 'slot', '')}")
        said: Any = event
        worker: Any = Worker(said.slot, said.incarnation) if hasattr(said, "slot") else None
        match event:
            case WorkerParked() if self._parked is not None and event.generation == self._next:
                self._parked[worker] = event
                self._plan_if_all_are_parked()
            case WorkerReady() if self.seen:
                self.seen[-1].ready[worker] = event
            case WorkerResumed() if self._plan is not None and event.generation == self._plan.generation:
                self.seen[-1].resumed.add(worker)
                self.seen[-1].pages[worker] = tuple(sorted(self._children[worker].page.snapshots()))
                if self.seen[-1].resumed >= set(self._members()):
                    self._old, NOTED[0] = None, event.generation
            case SnapshotDamaged():
                self.damaged.append(event)
                if self._parked is None:
                    self._break()
            case WorkerFinished():
                self._finished.add(worker)
                if self._finished >= set(self._members()):
                    self._carry_out(ReleaseWorkers(workers=tuple(self._children)))
            case WorkerExited():
                self._gone(worker, event)
            case _:
                pass

    def _committed(self, message: UnitCommitted) -> None:
        super()._committed(message)
        change = self._changes[0] if self._changes else None
        if change is not None and change.told_after == message.at and not self._asked:
            self._asked = True
            self._tell_to_pause(message.generation)

    def snapshot_of(self, slot: int, named: int) -> int:
        """The descriptor of the memory that holds it."""
        child = next(one for worker, one in self._children.items() if worker.slot == f"t/{slot}")
        return child.fds[1 + child.page.snapshots()[named]]

    # -- helpers
    def _members(self) -> list[Worker]:
        assert self._plan is not None
        return [Worker(member.slot, member.incarnation) for member in self._plan.members]

    def _worker_in(self, slot: int) -> Worker:
        return next(worker for worker in self._children if worker.slot == f"t/{slot}")

    @property
    def _next(self) -> Generation:
        assert self._plan is not None
        return Generation(self._plan.generation + (1 if self._parked is None else self._ahead))

    _ahead = 1

    def _break(self) -> None:
        self._ahead = 1 if self._parked is None else self._ahead + 1
        self._parked = {}
        self._broken = [worker for worker in self._members() if worker in self._children]
        self._carry_out(
            BreakGeneration(generation=self._next, workers=tuple(self._broken), because="the test wants it")
        )

    def _plan_if_all_are_parked(self) -> None:
        if self._parked is None or any(w in self._children and w not in self._parked for w in self._broken):
            return
        assert self._plan is not None
        change, former, parked = self._changes.pop(0), self._plan, self._parked
        self.parked.append(parked)
        generation, self._parked, self._asked = self._next, None, False
        newest = max(parked.values(), key=lambda report: report.passed)
        committed, gate = max((newest.passed, newest.gate), (former.committed, former.gate))
        addresses = tuple(f"{self._service.address}/{w.slot}/{w.incarnation}" for w in self._members())
        of = Reshard(layout=former.layout, images=addresses)
        if self._old is not None and committed == self._old[1]:
            of, committed, gate = self._old
        if change.rollback is not None:
            committed, gate = Position(change.rollback), ()
            for found in (self._ended.ids, self._ended.sealed):
                for at in [at for at in found if at > committed]:
                    del found[at]
        here, before = [self._worker_in(slot) for slot in change.slots], set(self._members())
        plan = GenerationPlan(
            generation=generation,
            world_size=len(here),
            members=tuple(
                Member(rank=Rank(rank), slot=w.slot, incarnation=w.incarnation, fresh=w not in before)
                for rank, w in enumerate(here)
            ),
            store=former.store,
            committed=committed,
            gate=gate,
            rollback=None if change.rollback is None else Step(change.rollback),
            layout=generation,
            reshard=of,
            full=len(here),
        )
        plan = change.edit(self, plan)
        self._old = (plan.reshard, committed, gate) if plan.reshard is not None else None
        dropped = before - set(here)
        self.seen.append(Seen(plan))
        self._finished.clear()
        super()._resume(ResumeGeneration(plan=plan, because="the test wants it"))
        self._plan = plan
        for worker in dropped & self._children.keys():
            os.kill(self._children[worker].pid, signal.SIGKILL)

    def _gone(self, worker: Worker, event: WorkerExited) -> None:
        member = worker in self._members()
        if event.failure is not None or (member and worker not in self._finished and not self._changes):
            self._ended.exit_code, self._ended.because, self._ended.failure = 1, f"{event}", event.failure
            self._over = True
        elif self._finished >= set(self._members()) and not any(w in self._children for w in self._members()):
            self._ended.exit_code, self._over = 0, True
        elif member and worker not in self._finished and self._parked is None:
            self._break()
        elif self._parked is not None:
            self._plan_if_all_are_parked()


def differences(ended: Ended, other: Ended, key: str = "whole") -> list[str]:
    """What is not the same, bit for bit: losses, samples, and what rank 0 has said of the whole state."""
    found = [f"exit codes {ended.exit_code}, {other.exit_code}"] if (ended.exit_code or other.exit_code) else []
    found += [
        f"loss of step {step}: {ended.losses.get(step)} and {other.losses.get(step)}"
        for step in sorted(ended.losses.keys() | other.losses.keys())
        if ended.losses.get(step) != other.losses.get(step)
    ]
    found += [
        f"samples of {at}"
        for at in sorted(ended.ids.keys() | other.ids.keys())
        if ended.samples(at) != other.samples(at)
    ]
    if ended.said.get(0, {}).get(key) != other.said.get(0, {}).get(key):
        found.append(f"{key} of rank 0: {ended.said.get(0)} and {other.said.get(0)}")
    return found
