"""Carry out the faults of `rackrun.chaos.faults.fault_types` in virtual time.

A fault without a model is refused by name before the job starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.faults.fault_types import (
    CrashAt,
    DelayCollective,
    DiskFails,
    DiskFull,
    ExhaustMemory,
    Fault,
    FlipBit,
    HoldGil,
    Kill,
    Link,
    Partition,
    Pause,
    PoisonBatch,
    Preempt,
    Raise,
    Return,
    Slow,
    StepClock,
    Subjects,
    Xid,
    name_of,
)
from rackrun.chaos.faults.targets import Subject
from rackrun.chaos.plan.conductor import Strike
from rackrun.chaos.plan.definition import FlipFlop, Inject, Plan, Swizzle, kind_of, parts_of
from rackrun.chaos.simulator.cluster.agent_model import Agent
from rackrun.chaos.simulator.cluster.worker_model import POINTS, Process
from rackrun.protocol.events import DeviceChecked, DeviceJudged
from rackrun.protocol.gpu_health import Evidence, Health, Verdict, response_to
from rackrun.protocol.ids import SlotId, TrayId, tray_of

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["Injectors"]

_SIGNALS = {"KILL": 9, "SEGV": 11, "ABRT": 6, "BUS": 7, "TERM": 15}
_XIDS = {13: Health.APP, 31: Health.APP, 48: Health.RESET, 63: Health.DEGRADED, 79: Health.LOST, 94: Health.DEGRADED}
"""Xid code -> the health that the model makes of it; any other code is `Health.DEGRADED`."""
_LEFT_OPEN_S = 0.2
"""Seconds that a lost packet costs: it is sent again."""

_RESET = "it was reset"

Undo = Callable[[], object]


def _why_not(fault: Fault, kind: Subjects, *, disk: bool) -> str:
    """Return why the model cannot have this fault, or "" if it can."""
    if kind is Subjects.STORAGE:
        return "" if disk else "nothing is written to disk"
    match fault:
        case Kill() | CrashAt() if kind is Subjects.COORDINATOR:
            return "its coordinator does not end before the job"
        case CrashAt(point=point) if point not in POINTS:
            return f"the model has no point {point!r}, but: {', '.join(POINTS)}"
        case Link(replies_lost=True):
            return "its links have no bytes to lose"
        case PoisonBatch(how=how) if how != "raises":
            return "it has no losses"
        case (
            Kill()
            | CrashAt()
            | FlipBit()
            | PoisonBatch()
            | Raise()
            | ExhaustMemory()
            | Return()
            | Pause()
            | HoldGil()
            | DelayCollective()
            | Slow()
            | Xid()
            | Preempt()
            | Partition()
            | Link()
            | StepClock()
        ):
            return ""
        case _:
            return "it has no model of that"


class Injectors:
    """The faults of one simulated job. Raises `Unsupported` for a plan with a fault that has no model."""

    def __init__(self, sim: Simulation, plan: Plan) -> None:
        self._sim = sim
        self._in_force: dict[int, list[Undo]] = {}
        self._crashes: list[tuple[CrashAt, Process | Agent, list[int]]] = []
        self.poison: dict[int, None] = {}
        """Units in which one sample raises."""
        self._flips = 0
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
    def strike(self, order: Strike) -> tuple[bool, str]:
        """Carry out a strike. Returns whether it took effect, and why not."""
        undo: list[Undo] = []
        took = [self._one(order.fault, subject, undo, order.number) for subject in order.subjects]
        if order.fault.lasts:
            self._in_force[order.number] = undo
        self._sim.look_at_eras()
        self._sim.stir()
        return any(took), "" if any(took) else "nobody was there any more"

    def take_back(self, number: int) -> None:
        for undo in self._in_force.pop(number, []):
            undo()
        self._sim.look_at_eras()

    def end(self, heals: Callable[[], bool]) -> None:
        """End all faults. ``heals`` says whether one that is in force is taken back; the others stay for good."""
        for number in list(self._in_force):
            if heals() or self._sim.coordinator_asleep:
                self.take_back(number)
        self._crashes.clear()

    def crash(self, point: str, who: Process | Agent) -> bool:
        """End ``who`` at a named point if a fault says so. Returns whether it has ended."""
        for at, (fault, victim, seen) in enumerate(self._crashes):
            if fault.point == point and victim is who:
                seen.append(1)
                if len(seen) >= fault.nth:
                    del self._crashes[at]
                    self._sim.marks.sometimes("a worker crashed at a point")
                    who.die() if isinstance(who, Agent) else who.end(signal=9)
                    return True
        return False

    # -- who
    def _agents(self, subject: Subject) -> list[Agent]:
        live = [agent for agent in self._sim.agents.values() if agent.alive]
        if subject.kind is Subjects.RACK:
            return live
        return [agent for agent in live if agent.tray == subject.name]

    def _process(self, subject: Subject) -> Process | None:
        for place in self._sim.scene().of(subject):
            slot = SlotId(place.slot)
            return self._sim.agents[tray_of(slot)].in_slot(slot)
        return None

    # -- faults
    def _one(self, fault: Fault, subject: Subject, undo: list[Undo], number: int) -> bool:
        sim = self._sim
        if isinstance(fault, Return):
            there = sim.agents.get(TrayId(subject.name))
            sim.switch_on(TrayId(subject.name)) if there is not None and not there.alive else None
            return there is not None
        if isinstance(fault, StepClock):
            return True  # neither the model nor the core reads wall clocks
        if subject.kind is Subjects.COORDINATOR:
            return self._coordinator(undo)
        if subject.kind is Subjects.STORAGE:
            return self._storage(fault, undo, number)
        if subject.kind in (Subjects.RANK, Subjects.SPARE):
            process = self._process(subject)
            return process is not None and self._worker(fault, process, undo, number)
        agents = self._agents(subject)
        for agent in agents:
            self._agent(fault, agent, subject.kind, undo)
        return bool(agents)

    def _storage(self, fault: Fault, undo: list[Undo], number: int) -> bool:
        if isinstance(fault, FlipBit):
            return self._sim.disk.rot()
        assert isinstance(fault, DiskFull | DiskFails)
        undo.append(self._sim.disk.strike(fault, number))
        return True

    def _coordinator(self, undo: list[Undo]) -> bool:
        sim = self._sim
        if sim.coordinator_asleep:
            return False
        sim.coordinator_asleep = True
        sim.coordinator.sleep()
        for agent in sim.agents.values():
            agent.look_at_link()

        def wake() -> None:
            sim.coordinator_asleep = False
            sim.coordinator.wake()
            for agent in list(sim.agents.values()):
                agent.look_at_link()

        undo.append(wake)
        return True

    def _worker(self, fault: Fault, process: Process, undo: list[Undo], number: int) -> bool:
        match fault:
            case Kill(signal=signal):
                process.end(signal=_SIGNALS[signal])
            case ExhaustMemory():
                process.end(signal=9)
            case Raise(error=error):
                process.end(code=1, bug=f"train.py:{number} ({error})")
            case CrashAt():
                self._crashes.append((fault, process, []))
            case Pause():
                process.pause()
                undo.append(process.go_on)
            case HoldGil(for_s=for_s):
                process.pause()
                self._sim.engine.after(for_s, process.go_on)
            case DelayCollective(for_s=for_s):
                process.late_s += for_s
                self.delayed_s += for_s
            case Slow(share=share):
                self._slow(process, share, undo)
            case FlipBit(of="snapshot"):
                return self._rot(process)
            case FlipBit(of=of):
                return self._flip(of, process, number)
            case PoisonBatch():
                self.poison[process.passed + 2] = None
            case Xid(code=code):
                self._judged(process.slot, _XIDS.get(code, Health.DEGRADED), f"Xid {code}")
                undo.append(lambda: self._judged(process.slot, Health.OK, _RESET))
            case _:
                raise AssertionError(fault)
        return True

    def _slow(self, process: Process, share: float, undo: list[Undo]) -> None:
        process.slow /= share

        def fast() -> None:
            process.slow *= share

        undo.append(fast)

    def _rot(self, process: Process) -> bool:
        kept = self._sim.memory.of(process.agent.tray, process.owner)
        if kept:
            self._sim.memory.rotten.add((process.agent.tray, process.owner, max(kept)))
        return bool(kept)

    def _flip(self, of: str, process: Process, number: int) -> bool:
        if process.state != "running" or not process.stateful or process.finished:
            return False
        if of == "gradients":  # a flip in an exponent: the loss is not finite
            process.repeats_its_unit()
        else:
            self._flips += 1
            process.flip(f"flip {self._flips} of fault {number}")
        return True

    def _judged(self, slot: SlotId, health: Health, what: str) -> None:
        agent = self._sim.agents.get(tray_of(slot))
        if agent is None or not agent.alive:
            return
        response, scope, repair = response_to(health)
        evidence = Evidence(at_ms=0, source="kernel log", what=what, health=health, fabric=False)
        index = int(slot.rpartition("/")[2])
        verdict = Verdict(
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
        if self._sim.job.racks and (health not in (Health.OK, Health.APP) or what == _RESET):
            unfit = () if health is Health.OK else (what,)
            agent.do(agent.say, DeviceChecked(tray=agent.tray, index=index, unfit=unfit))

    def _agent(self, fault: Fault, agent: Agent, kind: Subjects, undo: list[Undo]) -> None:
        match fault:
            case Kill():
                agent.die(told=kind is Subjects.AGENT or self._sim.draw["faults"].random() < 0.5)
            case CrashAt():
                self._crashes.append((fault, agent, []))
            case Pause():
                self._pause(agent, kind, undo)
            case Slow(share=share):
                for process in agent.processes():
                    self._slow(process, share, undo)
            case Preempt(notice_s=notice_s):
                agent.do(agent.leave_soon)
                self._sim.engine.after(notice_s, agent.die)
            case Partition():
                self._cut(fault, agent.tray, undo)
            case Link():
                self._link(fault, agent, undo)
            case _:
                raise AssertionError(fault)

    def _pause(self, agent: Agent, kind: Subjects, undo: list[Undo]) -> None:
        agent.pause()
        if kind is not Subjects.AGENT:
            for process in agent.processes():
                process.pause()
                undo.append(process.go_on)
        undo.append(agent.go_on)

    def _cut(self, fault: Partition, tray: TrayId, undo: list[Undo]) -> None:
        cuts = self._sim.cuts[tray]
        up = fault.shape in ("isolated", "one_way", "from_coordinator")
        down = fault.shape in ("isolated", "from_coordinator")
        peers = fault.shape in ("isolated", "one_way", "from_peers")

        def change(by: int) -> None:
            cuts.up += by * up
            cuts.down += by * down
            cuts.peers += by * peers
            agent = self._sim.agents.get(tray)
            if agent is not None:
                agent.look_at_link()
            self._sim.look_at_eras()

        change(1)
        agent = self._sim.agents.get(tray)
        if fault.loud and agent is not None:
            if up and agent.link is not None:  # the coordinator's question whether it lives is refused as well
                self._sim.engine.after(0.01, self._sim.coordinator.lose, agent.link, "its agent is gone")
                agent.do(agent.is_cut_off, agent.link)
            if peers:
                for process in agent.processes():
                    process.feels_broken()
        undo.append(lambda: change(-1))

    def _link(self, fault: Link, agent: Agent, undo: list[Undo]) -> None:
        cuts = self._sim.cuts[agent.tray]
        slow_s = 1000 / fault.bytes_per_s if fault.bytes_per_s else 0.0
        latency_s, jitter_s = fault.latency_s + slow_s, fault.jitter_s + fault.lost * _LEFT_OPEN_S * 10
        cuts.latency_s += latency_s
        cuts.jitter_s += jitter_s

        def restore() -> None:
            cuts.latency_s -= latency_s
            cuts.jitter_s -= jitter_s
            cuts.resets -= fault.reset

        undo.append(restore)
        cuts.resets += fault.reset
        if agent.link is None:
            return
        if fault.reset:
            agent.do(agent.is_cut_off, agent.link)
        elif fault.half_open:
            agent.link.broken = agent.link.half_open = True
            agent.look_at_link()
