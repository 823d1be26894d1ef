"""This worker's membership of the world: its groups, its generation, and its part in every verdict.

Two threads meet here. The *main thread* runs the user's script: collectives, gates, recoveries. The *control thread*
(`rackrun.worker.control`) brings the coordinator's words: a generation is broken, a plan has come. What decides whether a
unit counts - the gate entered, the gate passed, the generation broken - changes under one lock, so the report that the
control thread sends is final the moment it is sent, even while the main thread still computes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rackrun.core.commands import BreakGeneration, Plan
from rackrun.core.events import WorkerParked
from rackrun.core.ids import BEGIN, Generation, Incarnation, Position, SlotId, Step
from rackrun.errors import CollectiveBroken, StepError
from rackrun.worker.builder import Builder
from rackrun.worker.group import ElasticGroup

if TYPE_CHECKING:
    from rackrun.link.page import HeartbeatPage
    from rackrun.worker.communicator import Communicator

__all__ = ["Abandoned", "Scope", "Superseded", "World"]


class Abandoned(BaseException):
    """The unit in hand will not count: leave it, discard what it did, recover. Never raised inside autograd."""


class Superseded(Exception):
    """A newer generation was announced while this one was being joined."""


class Scope(Enum):
    """Where the script is, which decides what a collective may do."""

    SETUP = "before run.steps()"
    UNIT = "in a step or phase"
    OUTSIDE = "outside steps and phases"


class World:
    def __init__(self, page: HeartbeatPage, device: torch.device, slot: SlotId, incarnation: Incarnation) -> None:
        self.page = page
        self.device = device
        self.scope = Scope.SETUP
        self.groups: list[ElasticGroup] = []
        self.families: list[tuple[tuple[int, ...], str]] = []
        """Every group the script ever asked for, in order, member or not: a promoted spare finds its new place in it."""
        self.generation = 0
        """The one that this worker's communicators belong to; 0 before the first."""
        self.replica_class = ""
        self.unit_passed = False
        """The gate of the unit in hand has passed: what it does from here on cannot be taken back."""
        self.torn = False
        """A collective broke after that."""
        self.drain = False

        self._slot, self._incarnation = slot, incarnation
        self._changed = threading.Condition()
        self._broken = False
        self._announced = 0
        self._plan: Plan | None = None
        self._builder: Builder | None = None
        self._passed = BEGIN
        self._entered = BEGIN
        self._gate: tuple[float, ...] = ()
        self._released = False
        self._fixed: tuple[dist.Store, Callable[[dist.Store, int, int], Communicator]] | None = None

    # -- groups
    def create_default(self, rank: int, size: int) -> ElasticGroup:
        group = ElasticGroup(self, range(size), rank, "default", "default_pg", "world")
        self.groups.append(group)
        return group

    def new_group(self, ranks: Sequence[int], name: str, desc: str) -> ElasticGroup | None:
        """Called by every rank for every group, in the same order (torch's own rule)."""
        if self.scope is not Scope.SETUP:
            raise StepError("a process group was made after run.steps() began.", remedy="make all groups and meshes before.")
        self.families.append((tuple(ranks), desc))
        if self.rank not in ranks:
            return None
        group = ElasticGroup(self, ranks, list(ranks).index(self.rank), name, desc, self._key(ranks, desc))
        self.groups.append(group)
        if self._fixed is not None and len(ranks) > 1:
            store, build = self._fixed
            group.communicator = build(dist.PrefixStore(group.key, store), group.rank(), group.size())
        elif self.generation and self._plan is not None:
            builder = Builder(self._plan, [group], self.device, patient=True)
            builder.start()
            self._wait_built(self._plan, builder)
            group.communicator = builder.communicators.get(group)
        return group

    def _key(self, ranks: Sequence[int], desc: str) -> str:
        """The same on every member, and on a spare that takes a member's place: not torch's name, which counts per process."""
        turn = sum(asked == (tuple(ranks), desc) for asked in self.families)
        return f"{desc}/{'-'.join(map(str, ranks))}/{turn}"

    @property
    def rank(self) -> int:
        return self.groups[0].rank()

    @property
    def size(self) -> int:
        return self.groups[0].size()

    # -- collectives
    def enter_collective(self) -> int | None:
        """The generation to run in; None for a loopback."""
        if self.scope is Scope.OUTSIDE and self.size > 1:
            raise StepError(
                "a collective was called outside steps and phases, where a lost peer could not be replaced.",
                remedy="move it into the @run.step function, or register the function that needs it with run.every or run.at_end.",
            )
        self.page.collective_entered()
        if not self._broken:
            return self.generation or None
        if self.scope is Scope.SETUP and self.generation:
            raise CollectiveBroken("a peer was lost before the first step.", remedy="none needed: the world starts again.")
        if self.unit_passed:
            self.torn = True
        return None

    def collective_failed(self, generation: int, error: RuntimeError) -> None:
        """A collective of ``generation`` ended with an error: nothing of that generation counts any more."""
        del error  # the reason is with whoever died; a survivor's text only names a socket
        with self._changed:
            if generation == self.generation:
                self._broken = True
                if self.unit_passed:
                    self.torn = True

    @property
    def broken(self) -> bool:
        return self._broken

    # -- gates
    @property
    def passed(self) -> Position:
        """The last unit that is known here to be committed."""
        return self._passed

    @property
    def gate_values(self) -> tuple[float, ...]:
        """What the gate of ``passed`` reduced to."""
        return self._gate

    def pass_gate(self, at: Position, mine: Sequence[float]) -> None:
        """Enter the gate of ``at`` and see it pass; raises `Abandoned` if the unit will not count.

        The gate is one small all-reduce over the whole world. If anyone saw it pass then everyone had entered it, so
        all gradients of the unit are complete everywhere: it is committed, also for those whose gate broke. If nobody
        alive saw it pass, everybody does the unit again.
        """
        with self._changed:
            if self._broken or not self.generation:
                raise Abandoned
            self._entered = at
        values = torch.tensor([1.0, *mine], dtype=torch.float64)
        if self.size > 1:
            on_device = values.to(self.device)
            dist.all_reduce(on_device)
            values = on_device.cpu()
        result = tuple(values.tolist())
        with self._changed:
            if not self._broken and result[0] == self.size:
                self._passed, self._gate, self.unit_passed = at, result[1:], True
                return
        self.wait_plan()  # which carries the verdict
        if self._passed < at:
            raise Abandoned
        self.unit_passed = True

    def abandon(self) -> None:
        """Leave the unit in hand."""
        raise Abandoned

    def begin_unit(self) -> None:
        self.scope = Scope.UNIT
        self.unit_passed = self.torn = False

    def stand_at(self, position: Position, gate: tuple[float, ...]) -> None:
        """A newcomer, and everyone after a rollback: what is committed is what the plan says."""
        with self._changed:
            self._passed = self._entered = position
            self._gate = gate

    def stand_alone(self) -> None:
        """A world of one rank, without a coordinator: loopbacks are exact."""
        self.generation = 1

    # -- called by the control thread
    def on_break(self, command: BreakGeneration, snapshots: tuple[Step, ...]) -> WorkerParked | None:
        with self._changed:
            if command.generation <= self._announced:
                return None
            self._announced = command.generation
            self._broken = True
            report = WorkerParked(
                slot=self._slot,
                incarnation=self._incarnation,
                generation=command.generation,
                passed=self._passed,
                entered=self._entered,
                gate=self._gate,
                snapshots=snapshots,
                replica_class=self.replica_class,
            )
            communicators = [group.communicator for group in self.groups if group.communicator]
            builder = self._builder
            self._changed.notify_all()
        for communicator in communicators:
            communicator.break_()
        if builder is not None:
            builder.abandon()
        return report

    def on_plan(self, plan: Plan, *, build: bool) -> None:
        """``build`` at once when this worker's place is known; a spare first takes its new one."""
        with self._changed:
            if plan.generation < self._announced or (self._plan and plan.generation <= self._plan.generation):
                return
            self._announced = plan.generation
            self._plan = plan
            if self._entered > self._passed:
                if plan.committed >= self._entered:
                    self._passed, self._gate = self._entered, plan.gate
                else:
                    self._entered = self._passed
            if build:
                self._start_build(plan)
            self._changed.notify_all()

    def on_release(self) -> None:
        with self._changed:
            self._released = True
            self._changed.notify_all()

    # -- joining a generation
    def wait_plan(self) -> Plan:
        """The plan of the newest announced generation, once it has come. Ends the process when the job ends first: a spare
        that was never needed."""
        with self._changed:
            self._changed.wait_for(lambda: self._plan_has_come() or self._released)
            if not self._plan_has_come():
                raise SystemExit(0)
            assert self._plan is not None
            return self._plan

    def wait_released(self) -> bool:
        """For a finished rank: True when the job is over, False when there is something to recover first."""
        with self._changed:
            self._changed.wait_for(lambda: self._released or self._plan_has_come())
            return self._released

    def start_build(self, plan: Plan) -> None:
        with self._changed:
            if plan.generation == self._announced:
                self._start_build(plan)

    def join(self, plan: Plan) -> None:
        """Adopt the communicators of ``plan``; raises `Superseded` when a newer generation was announced meanwhile."""
        builder = self._builder
        assert builder is not None, "a plan without a build"
        self._wait_built(plan, builder)
        with self._changed:
            if self._announced != plan.generation:
                raise Superseded
            dropped: list[Communicator | None] = []
            for group in self.groups:
                dropped.append(group.communicator)
                group.communicator = builder.communicators.get(group)
                assert group.communicator is not None or group.size() == 1, f"group {group.key} has no communicator"
            self.generation = plan.generation
            self._broken = False
            self.page.new_generation(plan.generation)
        threading.Thread(target=dropped.clear, name="rackrun-drop", daemon=True).start()  # 3 to 30 ms each
        del dropped

    def join_fixed(self, store: dist.Store, build: Callable[[dist.Store, int, int], Communicator]) -> None:
        """Under torchrun: one communicator for good."""
        self.groups[0].communicator = build(store, self.rank, self.size)
        self._fixed = (store, build)
        self.generation = 1

    def close(self) -> None:
        """Let go of the communicators before the interpreter ends: gloo's threads must not outlive it."""
        if self._fixed is not None:
            self.groups[0].communicator.inner.barrier().wait()  # type: ignore[union-attr]
        for group in self.groups:
            group.communicator = None

    def promote(self, rank: int) -> list[tuple[ElasticGroup, tuple[int, ...]]]:
        """A spare takes the place of ``rank`` in every group: in a family of disjoint groups, the one that holds it."""
        moved: list[tuple[ElasticGroup, tuple[int, ...]]] = []
        for group in self.groups:
            if group.key == "world":
                group.become(group.ranks, rank)
                continue
            kin = [ranks for ranks, desc in self.families if desc == group.group_desc and len(ranks) == len(group.ranks) and rank in ranks]
            if not kin:
                raise StepError(
                    f"rank {rank} is in no group like {group.group_desc!r} {list(group.ranks)}, so a spare cannot take its place.",
                    remedy="make groups that cover all ranks (a DeviceMesh does).",
                )
            group.become(kin[0], kin[0].index(rank))
            moved.append((group, kin[0]))
        return moved

    def superseded(self, generation: Generation | int) -> bool:
        return self._announced != generation

    def _plan_has_come(self) -> bool:
        return self._plan is not None and self._plan.generation == self._announced and self._plan.generation > self.generation

    def _start_build(self, plan: Plan) -> None:
        if self._builder is not None:
            self._builder.abandon()
        patient = plan.generation == 1 or not plan.restores and plan.committed == BEGIN
        self._builder = Builder(plan, list(self.groups), self.device, patient=patient, done=self._wake)
        self._builder.start()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_built(self, plan: Plan, builder: Builder) -> None:
        with self._changed:
            self._changed.wait_for(lambda: builder.over or self._announced != plan.generation)
            if self._announced != plan.generation:
                raise Superseded
        if builder.error is not None:
            print(f"rackrun: rank {self.rank} could not build generation {plan.generation}: {builder.error}", file=sys.stderr, flush=True)
            # A peer did not come. Its agent, or the resume timeout, finds out which; the next generation leaves it out.
            with self._changed:
                self._changed.wait_for(lambda: self._announced != plan.generation)
            raise Superseded
