"""Check that a rollback goes back no further than necessary.

The bound is the newest step that every rank can be given, by what the coordinator has been told, also of who is whose
replica. What was reported is compared with what really exists, so snapshots lost in between do not count. Parity is left out: a rebuild that was
possible and was not made is not found here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.chaos.simulator.base.ground_truth import StateHistory, must
from rackrun.chaos.simulator.cluster.restore_sources import Owner, named
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import Event, SnapshotDamaged, SnapshotMirrored, WorkerExited, WorkerParked, WorkerReady
from rackrun.protocol.ids import SlotId, TrayId, tray_of

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.agent_model import Agent
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["Rollbacks"]

FORMER_MAX = 2
"""The number of former owners of a rank that have to be remembered, at least."""


class Rollbacks:
    """The checker for one job."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._told: dict[tuple[TrayId, Owner], tuple[Agent, dict[int, None]]] = {}
        """Snapshots of an owner on a tray, those last reported at the end, and the agent that had them."""
        self._last: dict[int, int] = {}
        """Life of the job -> the step to which its last rollback went."""
        self._ends: list[tuple[int, int]] = []
        """Each generation that rolled back, and the step: what earlier generations computed beyond it no longer
        counts."""
        self._ranks: dict[Owner, int] = {}
        """The rank of each member of the last plan."""
        self._classes: dict[int, str] = {}
        """Rank -> its replica class, as last reported with these shards."""

    def on_event(self, event: Event) -> None:
        """Take in an event of the coordinator, right before the core does."""
        match event:
            case WorkerReady():
                self._learn(event)
            case WorkerParked() | WorkerExited():
                if isinstance(event, WorkerParked):
                    self._learn(event)
                self._tell(tray_of(event.slot), (event.slot, int(event.incarnation)), event.snapshots)
            case SnapshotMirrored():
                self._tell(event.holder, (event.slot, int(event.incarnation)), event.steps)
            case SnapshotDamaged():
                self._damaged(event)
            case _:
                pass

    def _learn(self, event: WorkerReady | WorkerParked) -> None:
        rank = self._ranks.get((event.slot, int(event.incarnation)))
        if rank is not None and event.replica_class:
            self._classes[rank] = event.replica_class

    def _tell(self, tray: TrayId, owner: Owner, names: tuple[int, ...]) -> None:
        agent = self._sim.agents.get(tray)
        self._told.pop((tray, owner), None)
        if agent is not None and names:
            self._told[tray, owner] = agent, {int(name): None for name in names}

    def _damaged(self, event: SnapshotDamaged) -> None:
        owner = event.slot, int(event.incarnation)
        tray, where = tray_of(event.slot), event.where.split("/")
        if len(where) == 3:
            return  # the damage is in a row
        if event.where:
            address, slot_tray, index, incarnation = where
            tray, owner = TrayId(address.partition(":")[0]), (SlotId(f"{slot_tray}/{index}"), int(incarnation))
        if (tray, owner) in self._told:
            self._told[tray, owner][1].pop(int(event.step), None)

    def planned(self, plan: GenerationPlan, *, launch: bool) -> None:
        """Check a new plan: if it rolls back, no newer step may have been available to every rank."""
        self._ranks = {(member.slot, int(member.incarnation)): int(member.rank) for member in plan.members}
        if plan.rollback is not None:
            self._rolls_back(plan, int(plan.rollback))
        if launch or plan.reshard is not None:
            self._classes.clear()

    def _rolls_back(self, plan: GenerationPlan, to: int) -> None:
        limit, life = int(plan.committed.step), self._sim.life(int(plan.generation))
        if to < self._last.get(life, -1):
            self._sim.marks.sometimes("a rollback went behind the one before")
        self._last[life] = to
        if plan.anew:  # a corrupted state is left behind, however far that goes
            limit = min(limit, self._sim.truth.good)
        for step in range(limit, to, -1):
            must(
                not self._all_have(plan, step),
                f"generation {plan.generation} goes back to step {to}, and everybody could have had step {step}",
            )
        self._ends.append((int(plan.generation), to))
        newest = named(plan, to)
        for owner, (agent, names) in self._told.items():  # of a step that is done again, nothing has been told yet
            self._told[owner] = agent, {name: None for name in names if name <= newest}

    def _all_have(self, plan: GenerationPlan, step: int) -> bool:
        there: set[StateHistory] | None = None
        for rank in range(plan.world_size):
            found = self._of(plan, rank, step)
            there = found if there is None else there & found
            if not there:
                return False
        return True

    def _of(self, plan: GenerationPlan, rank: int, step: int) -> set[StateHistory]:
        """Return the states of ``step`` that ``rank`` can be given, without their flaws."""
        name = named(plan, step)
        members = {member.rank: (member.slot, int(member.incarnation)) for member in plan.members if not member.fresh}
        kind, classes = self._classes.get(rank, ""), self._classes
        survivors = [
            owner for other, owner in members.items() if other == rank or (kind and classes.get(int(other)) == kind)
        ]
        found = [self._kept(tray_of(owner[0]), owner, name) for owner in survivors]
        if not plan.anew:  # nothing of a corrupt rank is used
            former = [key for key in reversed(self._told) if self._held(plan, rank, key[1])]
            found += [self._kept(*key, name) for key in former[:FORMER_MAX]]
        return {state.plain for state in found if state is not None and self._counts(state)}

    def _counts(self, state: StateHistory) -> bool:
        return not any(state.generation < generation and state.unit > end for generation, end in self._ends)

    def _held(self, plan: GenerationPlan, rank: int, owner: Owner) -> bool:
        """Whether ``owner`` held this rank in this life of the job."""
        process, sim = self._sim.processes.get(owner), self._sim
        alike = process is not None and process.rank == rank and process.layout == plan.layout
        return alike and process is not None and sim.life(process.generation) == sim.life(int(plan.generation))

    def _kept(self, tray: TrayId, owner: Owner, name: int) -> StateHistory | None:
        """Return the snapshot, if it was reported and really exists."""
        sim = self._sim
        agent, names = self._told.get((tray, owner), (None, {}))
        if agent is None or name not in names or sim.agents.get(tray) is not agent or not agent.is_heard:
            return None
        return None if (tray, owner, name) in sim.memory.rotten else sim.memory.of(tray, owner).get(name)
