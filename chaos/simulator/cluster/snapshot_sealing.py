"""Model of how one worker keeps its state: it seals snapshots, which its agent copies to other trays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.chaos.simulator.base.ground_truth import StateHistory
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import SnapshotMirrored, SnapshotStriped
from rackrun.protocol.ids import Generation, Step, TrayId, snapshot_id

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker

__all__ = ["Sealing"]


class Sealing:
    """The snapshots of one worker."""

    def __init__(self, of: SimulatedWorker) -> None:
        self._of, self._sim = of, of.sim
        self._seals, self._sealing = 0, -1

    def break_off(self) -> None:
        """Abandon the snapshot that is being sealed."""
        self._seals += 1

    def soon(self) -> None:
        """Begin to seal a snapshot, unless one is being sealed.

        There is room for two, so everything older than the newest is overwritten from now on.
        """
        if self._sealing == self._seals:
            return
        self._seals += 1
        self._sealing = self._seals
        arena = self._sim.memory.of(self._of.agent.tray, self._of.owner)
        for name in sorted(arena)[:-1]:
            del arena[name]
        costs, draw = self._sim.costs, self._sim.draw["snapshots"]
        late_s = 5 * draw.random() if self._sim.buggify("worker: a slow seal") else 0.0
        what = (self._seals, self._of.history, self._of.layout, self._of.generation)
        self._sim.engine.after(costs.of(costs.seal_s, draw) + late_s, self._of.do, self._sealed, *what)

    def _sealed(self, seals: int, history: StateHistory, layout: int, generation: int, besides: int = -1) -> None:
        if seals == self._seals and not self._sim.crashes("worker: sealing", self._of):
            self._keep(history, layout, generation, besides)

    def to_compare(self, good: int) -> None:
        """Begin to seal a snapshot for a comparison, and abandon one that is being sealed.

        The last snapshot found good stays beside it. No other tray gets a copy, because replicas need none.
        """
        self._seals += 1
        arena = self._sim.memory.of(self._of.agent.tray, self._of.owner)
        kept = int(snapshot_id(Generation(self._of.layout), Step(good))) if good >= 0 else -1
        for name in [name for name in arena if name != kept]:
            del arena[name]
        costs, draw = self._sim.costs, self._sim.draw["snapshots"]
        what = (self._seals, self._of.history, self._of.layout, self._of.generation, kept)
        self._sim.engine.after(costs.of(costs.seal_s, draw), self._of.do, self._sealed, *what)

    def now(self, *, besides: int = -1) -> None:
        """Seal a snapshot of the present state at once."""
        self._seals += 1
        self._keep(self._of.state_now, self._of.layout, self._of.generation, besides)

    def _keep(self, history: StateHistory, layout: int, generation: int, besides: int = -1) -> None:
        """Keep a sealed snapshot. There is room for two: this one, and ``besides`` or the newest other."""
        name = int(snapshot_id(Generation(layout), Step(history.unit)))
        tray, memory = self._of.agent.tray, self._sim.memory
        memory.seal(tray, self._of.owner, name, history)
        self._of.damaged.discard(name)
        arena = memory.of(tray, self._of.owner)
        others = sorted(one for one in arena if one != name)
        kept = besides if besides in arena else (others[-1] if others else name)
        for one in others:
            if one != kept:
                del arena[one]
        self._seals += 1
        costs = self._sim.costs
        seconds = costs.of(costs.copy_s, self._sim.draw["snapshots"])
        self._of.agent.later(
            seconds, self._copy, name, history, generation, tuple(arena), memory.files[self._of.owner, name]
        )

    def _copy(self, name: int, history: StateHistory, generation: int, besides: tuple[int, ...], file: int) -> None:
        """The agent copies a sealed snapshot to other trays, even if the worker has ended by now."""
        plan, memory = self._of.agent.plan, self._sim.memory
        if plan is None or plan.generation != generation or name not in memory.of(self._of.agent.tray, self._of.owner):
            return
        if (
            not self._of.alive
            or self._sim.cuts[self._of.agent.tray].peers
            or (self._of.agent.tray, self._of.owner, name) in memory.rotten
        ):
            return
        if (holder := plan.mirrors.get(self._of.agent.tray)) is not None:
            self._mirror(TrayId(holder.partition("/")[2]), name, history, generation, besides)
        elif self._of.rank is not None:
            self._stripe(plan, name, history, file)

    def _mirror(
        self, holder: TrayId, name: int, history: StateHistory, generation: int, besides: tuple[int, ...]
    ) -> None:
        agent, memory = self._sim.agents.get(holder), self._sim.memory
        if agent is None or not agent.alive or agent.paused or self._sim.cuts[holder].peers:
            return
        before = memory.of(holder, self._of.owner)
        kept = {one: state for one, state in before.items() if one in besides} | {name: history}
        memory.kept[holder, self._of.owner] = kept
        where = f"{holder}:2/{self._of.slot}/{self._of.incarnation}"
        steps = tuple(Step(one) for one in sorted(kept))
        self._of.say(SnapshotMirrored, generation=Generation(generation), holder=holder, where=where, steps=steps)

    def _stripe(self, plan: GenerationPlan, name: int, history: StateHistory, file: int) -> None:
        sets = [of for of in plan.sets if self._of.rank in [keeper.rank for keeper in of]]
        others = [keeper for of in sets for keeper in of if keeper.rank != self._of.rank]
        agents = [self._sim.agents.get(keeper.tray) for keeper in others]
        away = (
            agent is None or not agent.alive or agent.paused or self._sim.cuts[agent.tray].peers for agent in agents
        )
        if not others or any(away):
            return
        for keeper in others:
            key = (keeper.tray, int(plan.generation), int(keeper.rank), name)
            self._sim.memory.rows.setdefault(key, {})[self._of.its_rank] = (file, history)
        self._of.say(SnapshotStriped, generation=plan.generation, step=Step(name))
