"""Carry out the faults of `rackrun.chaos.faults` in virtual time.

A fault without a model is refused by name before the job starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.faults.fault_types import WORKERS, BaseFault, Subjects, name_of
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.faults.targets import Subject
from rackrun.chaos.faults.virtual_strike import CallFault, VirtualAgent, VirtualWorker
from rackrun.chaos.plan.conductor import StrikeOrder
from rackrun.chaos.plan.definition import FlipFlop, Inject, Plan, Swizzle, kind_of, parts_of
from rackrun.chaos.simulator.cluster.agent_model import Agent
from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker
from rackrun.protocol.events import DeviceChecked, DeviceJudged
from rackrun.protocol.gpu_health import Evidence, GpuVerdict, Health, response_to
from rackrun.protocol.ids import SlotId, TrayId, tray_of

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["Injectors"]

Undo = Callable[[], object]


def _why_not(fault: BaseFault, kind: Subjects, *, disk: bool) -> str:
    """Return why the model cannot have this fault, or "" if it can."""
    if kind is Subjects.STORAGE:
        return "" if disk else "nothing is written to disk"
    row = row_of(fault)
    return "it has no model of that" if row.simulate is None else row.not_simulated(fault, kind)


@dataclass(slots=True)
class _Crash:
    """A process or agent that will end at a point."""

    point: str
    victim: VirtualWorker | VirtualAgent
    left: int
    """How often it still has to come to the point."""


class Injectors:
    """The faults of one simulated job. Raises `Unsupported` for a plan with a fault that has no model."""

    def __init__(self, sim: Simulation, plan: Plan) -> None:
        self._sim = sim
        self._in_force: dict[int, list[Undo]] = {}
        self.crashes: list[_Crash] = []
        self.poison: dict[int, None] = {}
        """Units in which one sample raises."""
        self.flips = 0
        self.delayed_s = 0.0
        """The sum of all delays of ranks, which at worst come one after the other."""
        for part in parts_of(plan.plan):
            if isinstance(part, Inject | FlipFlop | Swizzle):
                why = _why_not(part.fault, kind_of(part.target), disk=bool(sim.job.checkpoint_every))
                if why:
                    raise Unsupported(
                        f"the simulator cannot have the fault {name_of(part.fault)}: {why}.",
                        remedy="leave it out, or run the plan with a real job.",
                    )

    # -- orders
    def strike(self, order: StrikeOrder) -> tuple[bool, str]:
        """Carry out a strike. Returns whether it took effect, and why not."""
        undo: list[Undo] = []
        simulate = row_of(order.fault).simulate
        assert simulate is not None, "refused at the start"
        took = [
            simulate(order.fault, _Strike(self._sim, self, order.number, subject, undo)) for subject in order.subjects
        ]
        if order.fault.lasts:
            self._in_force[order.number] = undo
        self._sim.check_generations()
        self._sim.wake_conductor()
        return any(took), "" if any(took) else "nobody was there any more"

    def take_back(self, number: int) -> None:
        for undo in self._in_force.pop(number, []):
            undo()
        self._sim.check_generations()

    def end(self, heals: Callable[[], bool]) -> None:
        """End all faults. ``heals`` says whether one that is in force is taken back; the others stay for good."""
        for number in list(self._in_force):
            if heals() or self._sim.coordinator_asleep:
                self.take_back(number)
        self.crashes.clear()

    def crash(self, point: str, who: SimulatedWorker | Agent) -> bool:
        """End ``who`` at a named point if a fault says so. Returns whether it has ended."""
        for at, crash in enumerate(self.crashes):
            if crash.point == point and crash.victim is who:
                crash.left -= 1
                if crash.left <= 0:
                    del self.crashes[at]
                    self._sim.marks.sometimes("a worker crashed at a point")
                    who.die() if isinstance(who, Agent) else who.end(signal=9)
                    return True
        return False


class _Strike:
    """One strike at one subject, as `rackrun.chaos.faults.virtual_strike.VirtualStrike`."""

    def __init__(self, sim: Simulation, injectors: Injectors, number: int, subject: Subject, undo: list[Undo]) -> None:
        self._sim, self._injectors, self._undo = sim, injectors, undo
        self.number, self.subject = number, subject
        self._struck: SimulatedWorker | None = None

    @property
    def _process(self) -> SimulatedWorker:
        assert self._struck is not None, "a worker is struck"
        return self._struck

    def each(
        self,
        *,
        worker: Callable[[VirtualWorker], object] | None = None,
        agent: Callable[[VirtualAgent], object] | None = None,
    ) -> bool:
        if self.subject.kind in WORKERS:
            assert worker is not None, self.subject
            self._struck = self._find_worker()
            return self._struck is not None and worker(self._struck) is not False
        assert agent is not None, self.subject
        agents = [one for one in self._sim.agents.values() if one.alive]
        if self.subject.kind is not Subjects.RACK:
            agents = [one for one in agents if one.tray == self.subject.name]
        for one in agents:
            agent(one)
        return bool(agents)

    def _find_worker(self) -> SimulatedWorker | None:
        for place in self._sim.scene().of(self.subject):
            slot = SlotId(place.slot)
            return self._sim.agents[tray_of(slot)].in_slot(slot)
        return None

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._sim.engine.after(seconds, do)

    def on_heal(self, undo: Undo) -> None:
        self._undo.append(undo)

    def chance(self, share: float) -> bool:
        return self._sim.draw["faults"].random() < share

    # -- processes
    def stop_coordinator(self) -> bool:
        sim = self._sim
        if sim.coordinator_asleep:
            return False
        sim.coordinator_asleep = True
        sim.coordinator.loop.stop()
        for agent in sim.agents.values():
            agent.look_at_link()

        def wake() -> None:
            sim.coordinator_asleep = False
            sim.coordinator.loop.go_on()
            for agent in list(sim.agents.values()):
                agent.look_at_link()

        self.on_heal(wake)
        return True

    def crash_at(self, point: str, nth: int, who: VirtualWorker | VirtualAgent) -> None:
        self._injectors.crashes.append(_Crash(point, who, nth))

    def switch_on(self) -> bool:
        tray = TrayId(self.subject.name)
        there = self._sim.agents.get(tray)
        if there is not None and not there.alive:
            self._sim.switch_on(tray)
        return there is not None

    def ask_to_leave(self, agent: VirtualAgent) -> None:
        there = self._sim.agents[agent.tray]
        there.do(there.leave_soon)

    def delay(self, seconds: float) -> None:
        self._process.late_s += seconds
        self._injectors.delayed_s += seconds

    # -- state, samples, storage
    def poison(self, unit: int) -> None:
        self._injectors.poison[unit] = None

    def flip(self, *, in_gradients: bool) -> bool:
        process = self._process
        if process.state != "running" or not process.stateful or process.finished:
            return False
        if in_gradients:  # a flip in an exponent: the loss is not finite
            process.repeats_its_unit()
        else:
            self._injectors.flips += 1
            process.flip(f"flip {self._injectors.flips} of fault {self.number}")
        return True

    def damage_snapshot(self) -> bool:
        tray, owner, memory = self._process.agent.tray, self._process.owner, self._sim.memory
        kept = memory.of(tray, owner)
        if kept:
            memory.rotten.add((tray, owner, max(kept)))
        return bool(kept)

    def damage_checkpoint(self) -> bool:
        return self._sim.disk.rot()

    def fail_calls(self, fault: CallFault) -> None:
        self.on_heal(self._sim.disk.strike(fault, self.number))

    # -- hardware and network
    def judge_gpu(self, slot: SlotId, health: Health, what: str) -> None:
        agent = self._sim.agents.get(tray_of(slot))
        if agent is None or not agent.alive:
            return
        response, scope, repair = response_to(health)
        evidence = Evidence(at_ms=0, source="kernel log", what=what, health=health, fabric=False)
        index = int(slot.rpartition("/")[2])
        verdict = GpuVerdict(
            at_ms=0,
            uuid="",
            index=index,
            health=health,
            response=response,
            scope=scope,
            repair=repair,
            evidence=(evidence,),
        )
        agent.do(agent.say, DeviceJudged(tray=agent.tray, verdict=verdict))
        if self._sim.job.racks and health is not Health.APP:
            unfit = () if health is Health.OK else (what,)
            agent.do(agent.say, DeviceChecked(tray=agent.tray, index=index, unfit=unfit))

    def cut(self, tray: TrayId, *, up: bool, down: bool, peers: bool, loud: bool) -> None:
        sim, cuts = self._sim, self._sim.cuts[tray]

        def change(by: int) -> None:
            cuts.up += by * up
            cuts.down += by * down
            cuts.peers += by * peers
            agent = sim.agents.get(tray)
            if agent is not None:
                agent.look_at_link()
            sim.check_generations()

        change(1)
        agent = sim.agents.get(tray)
        if loud and agent is not None:
            if up and agent.link is not None:  # the coordinator's question whether it lives is refused as well
                sim.engine.after(0.01, sim.coordinator.lose, agent.link, "its agent is gone")
                agent.do(agent.is_cut_off, agent.link)
            if peers:
                for process in agent.processes():
                    process.collective_fails()
        self.on_heal(lambda: change(-1))

    def slow_link(self, tray: TrayId, *, latency_s: float, jitter_s: float) -> None:
        cuts = self._sim.cuts[tray]
        cuts.latency_s += latency_s
        cuts.jitter_s += jitter_s

        def restore() -> None:
            cuts.latency_s -= latency_s
            cuts.jitter_s -= jitter_s

        self.on_heal(restore)

    def break_link(self, tray: TrayId, *, half_open: bool) -> None:
        agent, cuts = self._sim.agents[tray], self._sim.cuts[tray]

        def restore() -> None:
            cuts.resets -= not half_open

        self.on_heal(restore)
        cuts.resets += not half_open
        if agent.link is None:
            return
        if half_open:
            agent.link.broken = agent.link.half_open = True
            agent.look_at_link()
        else:
            agent.do(agent.is_cut_off, agent.link)
