"""Model of what the workers of one generation do together: they meet at its exchange, and pass its gates.

A gate is an all-reduce over the whole world, complete when every rank of the generation has entered it. Each rank sees
the result a moment later; a member that ends in that moment may keep others from seeing it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rackrun.chaos.simulator.base.ground_truth import StateHistory, must
from rackrun.chaos.simulator.cluster.replica_comparison import ReplicaDifference, compare
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import TrayId

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation
    from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker

__all__ = ["SimulatedGeneration"]


@dataclass(slots=True)
class _Gate:
    """The gate of one unit."""

    entered: dict[int, SimulatedWorker] = field(default_factory=dict)
    open: bool = False
    """All ranks have entered and reach each other; they only have to see it."""
    blind: dict[int, None] = field(default_factory=dict)
    """Ranks that will not see the gate pass."""
    pausing: bool = False
    draining: bool = False
    unit: int = 0
    states: dict[int, StateHistory] = field(default_factory=dict)
    """Rank -> the state with which it computed its gradients."""
    compared: bool = False
    difference: ReplicaDifference | None = None
    """The conclusion of the ranks that compared their states; None if they are alike or were not compared."""


class SimulatedGeneration:
    """One generation."""

    def __init__(self, sim: Simulation, plan: GenerationPlan) -> None:
        self.sim, self.plan = sim, plan
        self.generation, self.world = plan.generation, plan.world_size
        self.members: dict[int, SimulatedWorker] = {}
        """The members that take part or once did, by rank."""
        self.broken = False
        self._arrived: dict[int, SimulatedWorker] = {}
        self.met = False
        """Whether all members have come and reach each other."""
        self._gates: dict[int, _Gate] = {}
        self.entered = -1
        """The unit that was committed when all last entered main again, in this life of the job."""
        self.compares_soon = -1
        """The unit in which states are compared because the generation is new."""
        self._first = -1

    @property
    def since(self) -> int:
        """The unit after which the world of these ranks began."""
        return max(self.sim.began(self.generation), self.entered)

    # -- the exchange
    def takes_part(self, process: SimulatedWorker, rank: int) -> None:
        other = self.members.setdefault(rank, process)
        must(other is process, f"two workers are rank {rank} in generation {self.generation}")

    def arrive(self, process: SimulatedWorker, rank: int) -> None:
        """Note that a member has its plan and wants to build groups."""
        self.takes_part(process, rank)
        self._arrived[rank] = process
        self.check()

    def check(self) -> None:
        """Check whether something has healed, so that members meet or gates open."""
        if not self.met and len(self._arrived) == self.world and not self.broken and not self._cut(store=True):
            self.met = True
            for process in self._arrived.values():
                process.met()
        for gate in self._gates.values():
            self._try(gate)

    def is_cut_off(self, tray: TrayId) -> bool:
        """Whether a tray does not reach the exchange."""
        host = TrayId(self.plan.store.partition(":")[0])
        if host not in self.sim.agents or not self.sim.agents[host].alive:
            return True
        return tray != host and (self.sim.cuts[tray].peers > 0 or self.sim.cuts[host].peers > 0)

    def _cut(self, *, store: bool = False) -> bool:
        trays = dict.fromkeys(member.agent.tray for member in self.members.values())
        if len(trays) == 1 and not store:
            return False
        cuts = self.sim.cuts
        host = self.plan.store.partition(":")[0]
        there = [*trays, TrayId(host)] if store and host else list(trays)
        away = store and (host not in self.sim.agents or not self.sim.agents[TrayId(host)].alive)
        return away or any(cuts[tray].peers > 0 for tray in there if len(set(there)) > 1)

    # -- gates
    def enter(self, process: SimulatedWorker, *, pausing: bool, draining: bool) -> None:
        """A member enters the gate of its next unit."""
        unit, rank = process.passed + 1, process.its_rank
        self.takes_part(process, rank)
        gate = self._gates.setdefault(unit, _Gate(unit=unit))
        gate.entered[rank], gate.states[rank] = process, process.state_now
        process.gate_states = gate.states
        gate.pausing |= pausing
        gate.draining |= draining
        if len(gate.entered) == self.world and not self.broken:
            heard = any(member.agent.is_heard for member in gate.entered.values())
            self.sim.truth.gate_full(self.generation, unit, list(gate.entered), self.world, heard=heard)
            if not heard and self.generation < self.sim.truth.acting:
                self.sim.marks.sometimes("a world that was given up went on alone")
            self._gates = {one: kept for one, kept in self._gates.items() if one >= unit - 1}
        self._try(gate)
        if self.broken:
            process.collective_fails()

    def _try(self, gate: _Gate) -> None:
        if gate.open or len(gate.entered) < self.world or self._cut():
            return
        if self.broken or any(member.paused for member in gate.entered.values()):
            return
        if not gate.compared:
            gate.compared = True
            gate.difference = compare(self.sim, self, gate.unit, [gate.entered[rank] for rank in range(self.world)])
            if gate.difference is not None:
                self._differ(gate, gate.difference)
        if gate.difference is not None:
            return
        gate.open = True
        if self._first < 0:
            self._first, self.compares_soon = gate.unit, gate.unit + 1
        costs, draw = self.sim.costs, self.sim.draw["gates"]
        for process in gate.entered.values():
            process.later(costs.of(costs.gate_s, draw), process.see, self.generation)

    def _differ(self, gate: _Gate, difference: ReplicaDifference) -> None:
        self.sim.differences[self.generation] = difference
        costs, draw = self.sim.costs, self.sim.draw["gates"]
        for process in gate.entered.values():
            process.later(costs.of(costs.gate_s, draw), process.differs, difference)

    def sees(self, process: SimulatedWorker) -> _Gate | None:
        """Return the gate that a member has entered, or None if it will not see it pass."""
        gate = self._gates.get(process.passed + 1)
        if gate is None or process.its_rank in gate.blind:
            return None
        return gate

    def leave(self, process: SimulatedWorker) -> None:
        """A member has ended or broken its collectives, so what others wait for may never come."""
        if self.members.get(process.rank if process.rank is not None else -1) is not process or self.broken:
            return
        self.broken = True
        draw = self.sim.draw["gates"]
        for gate in self._gates.values():
            if gate.open:
                for rank, member in gate.entered.items():
                    if member is not process and member.entered_in is not None and draw.random() < 0.5:
                        gate.blind[rank] = None
                        self.sim.marks.sometimes("a collective was seen by some only")
        for member in self.members.values():
            member.collective_fails()
