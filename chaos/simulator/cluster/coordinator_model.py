"""Model of the coordinator's shell around the core: it stamps events, keeps timers and connections, and lets leases
lapse.

Heartbeats are left out: a connection that cannot answer gets a lapse in the future, which is dropped when it can answer
again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from rackrun.chaos.simulator.base.connections import SimulatedChannel
from rackrun.chaos.simulator.base.ground_truth import must
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    BreakGeneration,
    Command,
    CondemnWorker,
    DealShards,
    Decided,
    DismissTray,
    DrainWorkers,
    FenceWorker,
    Notice,
    PauseWorkers,
    ReleaseRack,
    ReleaseWorkers,
    RequestRack,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
    Worker,
)
from rackrun.protocol.events import (
    CostsMeasured,
    DeviceChecked,
    Event,
    PolicyAnswered,
    ReplicasDiffer,
    SlowRank,
    SlowRanksChanged,
    SnapshotMirrored,
    TimerFired,
    TrayJoined,
    TrayLost,
    WorkerExited,
)
from rackrun.protocol.ids import SlotId, Step, TrayId, slot_id, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import QuarantineOver

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.agent_model import Agent
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["Coordinator", "SimulatedLink"]

KEPT = 60
"""The number of last exchanges with the core that are kept for a report."""
LOOK_EVERY = 5
"""The number of units between two looks for slow ranks."""


class SimulatedLink:
    """The link to one agent, over one connection after the other: commands of the core go down, events of the agent go
    up."""

    def __init__(self, sim: Simulation, agent: Agent) -> None:
        self.agent, self.tray = agent, agent.tray
        cuts, draw, costs = sim.cuts[agent.tray], sim.draw["network"], sim.costs
        self.broken = False
        """Whether its connection has ended, and there is no other one yet. What is sent meanwhile waits."""
        self.half_open = False
        """Whether the agent has not learned that its connection has ended."""
        up, down = (lambda: cuts.up > 0 or self.broken), (lambda: cuts.down > 0 or self.broken)
        self.up = SimulatedChannel(sim.engine, draw, sim.buggify, sim.marks, costs.latency_s, cuts, up, self._heard)
        self.down = SimulatedChannel(sim.engine, draw, sim.buggify, sim.marks, costs.latency_s, cuts, down, agent.hear)
        self._coordinator = sim.coordinator
        self.silent = 0
        """A counter that changes whenever the connection becomes silent or can be heard again; odd: it is silent."""

    def _heard(self, message: object) -> None:
        self._coordinator.hear(self, message)

    def heal(self) -> None:
        self.up.heal()
        self.down.heal()

    def lose_what_waits(self) -> None:
        """The agent ends, and with it what waited for another connection."""
        if self.broken:
            self.up.drop()
            self.broken = False

    def close(self) -> None:
        """End the link, which the agent learns of unless it is cut off."""
        if not self.up.closed and not self.up.cuts.down and not self.half_open:
            costs, engine = self._coordinator.sim.costs, self._coordinator.sim.engine
            engine.after(costs.latency_s, self.agent.do, self.agent.is_cut_off, self)
        self.up.closed = self.down.closed = True


class Gone(msgspec.Struct, frozen=True):
    """The end of a connection, as its last message."""

    because: str


class Coordinator:
    """The shell of one job's coordinator."""

    def __init__(self, sim: Simulation, config: JobConfig, core: type[ControlPlane] = ControlPlane) -> None:
        self.sim, self.config = sim, config
        self.core = core(config)
        self.links: dict[TrayId, SimulatedLink] = {}
        self.stopped: StopJob | None = None
        self.events = 0
        self.last: deque[str] = deque(maxlen=KEPT)
        self.notices: deque[str] = deque(maxlen=KEPT)
        self.answers: dict[str, list[Answer]] = {}
        self.withdrawn: dict[SlotId, str] = {}
        self.departing: set[TrayId] = set()
        self.unfit: dict[SlotId, tuple[str, ...]] = {}
        """Slot -> why its GPU is unfit, as last reported."""
        self._left_out: dict[SlotId, None] = {}
        """Slots that were left out at any time, because workers were lost there."""
        self._slow: tuple[SlowRank, ...] = ()
        self.launches = 0
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._at_ms = 0
        self._asleep: deque[tuple[SimulatedLink, object] | Event] | None = None
        self._hash = hashlib.blake2b(digest_size=16)
        self._costs_told = False
        self._checkpoint: Step | None = None
        self._encode = msgspec.msgpack.Encoder().encode

    def trace(self) -> str:
        return self._hash.hexdigest()

    # -- connections
    def accept(self, agent: Agent) -> SimulatedLink:
        return SimulatedLink(self.sim, agent)

    def hear(self, link: SimulatedLink, message: object) -> None:
        """Receive a message of an agent; while the coordinator is stopped, it waits."""
        if self._asleep is not None:
            self._asleep.append((link, message))
        elif isinstance(message, Gone):
            self.lose(link, message.because)
        elif isinstance(message, TrayJoined):
            if message.tray in self.links:
                self._forget(message.tray, "its agent connected anew")
            self.links[message.tray] = link
            self.submit(message)
        elif isinstance(message, msgspec.Struct) and self.links.get(link.tray) is link:
            self.submit(message)  # type: ignore[arg-type]

    def lose(self, link: SimulatedLink, because: str) -> None:
        link.close()
        if self.links.get(link.tray) is link:
            self._forget(link.tray, because)

    def _forget(self, tray: TrayId, because: str) -> None:
        self.links.pop(tray).close()
        self.departing.discard(tray)
        self.unfit = {slot: why for slot, why in self.unfit.items() if tray_of(slot) != tray}
        returns = self.sim.buggify("coordinator: an agent is said to be started again")
        self.submit(TrayLost(tray=tray, because=because, returns=returns))

    def check_connection(self, link: SimulatedLink) -> None:
        """React to a change in whether the connection answers."""
        silent = link.agent.silent or link.up.cuts.silent or link.broken
        if silent == bool(link.silent % 2):
            return
        link.silent += 1
        if silent:
            lease_s = self.sim.costs.lease_s
            wait_s = lease_s / 3 + self.sim.draw["lease"].random() * lease_s * 2 / 3  # a ping is or will be sent
            self.sim.engine.after(wait_s, self._lapse, link, link.silent)

    def _lapse(self, link: SimulatedLink, silent: int) -> None:
        if link.silent != silent or link.up.closed:
            return
        if self._asleep is not None:  # the coordinator looks when it wakes up
            self.sim.engine.after(0.05, self._lapse, link, silent)
            return
        self.sim.marks.sometimes("a lease lapsed")
        self.lose(link, f"no word from its agent for {self.sim.costs.lease_s:.0f} s")

    # -- the coordinator is stopped and woken
    def sleep(self) -> None:
        if self._asleep is None:
            self._asleep = deque()

    def wake(self) -> None:
        """Go on after a stop, with all that has arrived meanwhile."""
        asleep, self._asleep = self._asleep or deque(), None
        for one in asleep:
            if isinstance(one, tuple):
                self.hear(*one)
            else:
                self.submit(one)

    # -- events
    def submit(self, event: Event) -> None:
        """Give an event to the core, after those that are waiting, and carry out the commands that follow."""
        if self._asleep is not None:
            self._asleep.append(event)
            return
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox and self.stopped is None:
                self._handle(self._inbox.popleft())
        finally:
            self._inbox.clear()
            self._handling = False

    def _handle(self, event: Event) -> None:
        timed = event.at_ms if isinstance(event, TimerFired) else 0
        self._at_ms = max(self._at_ms, self.sim.engine.now_ms, timed)
        event = msgspec.structs.replace(event, at_ms=self._at_ms)
        self.events += 1
        self._mark(event)
        if isinstance(event, DeviceChecked):
            self.unfit.pop(slot_id(event.tray, event.index), None)
            self.unfit |= {slot_id(event.tray, event.index): event.unfit} if event.unfit else {}
        if isinstance(event, SnapshotMirrored):
            self.sim.memory.record_copy(event)
        self.sim.rollbacks.on_event(event)
        if isinstance(event, ReplicasDiffer):
            self._distrust(event)
        commands = self.core.handle(event)
        self._hash.update(self._encode(event))
        self._hash.update(self._encode(commands))
        self.last.append(f"{self.sim.engine.now_s:.6f} {event} -> {[*commands] or 'nothing'}")
        self.core.check_invariants()
        decided = [one.decision for one in commands if isinstance(one, Decided)]
        restarts = any(one.rung is Rung.RESTART and one.by != "rule" for one in decided)
        must(
            not (restarts and commands and isinstance(commands[-1], StopJob)),
            "a restart was decided, and the job ended",
        )
        launch = any(isinstance(command, StartWorker) and not command.spare for command in commands)
        for number, command in enumerate(commands):
            must(self.stopped is None, f"after the end: {command}")
            self._carry_out(command, launch=launch)
            must(self.stopped is None or number == len(commands) - 1, "the end is not the last")

    def _distrust(self, event: ReplicasDiffer) -> None:
        """Take in a found difference.

        The first report from a generation that trains is believed; all ranks report the same.
        """
        truth, found = self.sim.truth, self.sim.differences[int(event.generation)]
        phase = self.core.view().phase
        if event.generation == max(truth.plans) and phase in ("training", "resuming", "parking"):
            truth.distrust(int(event.good.step), found.flaws)

    def _mark(self, event: Event) -> None:
        if isinstance(event, TrayLost) or (isinstance(event, WorkerExited) and event.exit_code != 0):
            phase = self.core.view().phase
            if phase in ("parking", "resuming"):
                self.sim.marks.sometimes(f"a loss came while others {'parked' if phase == 'parking' else 'resumed'}")

    def _carry_out(self, command: Command, *, launch: bool) -> None:
        sim = self.sim
        match command:
            case SetTimer():
                self._set(command)
            case BreakGeneration():
                must(command.because, "a break without a reason")
                sim.truth.announces(command.generation)
                self._send(command, command.workers)
            case ResumeGeneration():
                must(command.because, "a plan without a reason")
                self._planned(command, launch=launch)
                members = command.plan.members
                self._send(command, [Worker(m.slot, m.incarnation) for m in members])
            case StartWorker():
                self._may_start(command.slot)
                self._send_to(command, [tray_of(command.slot)])
            case FenceWorker():
                if not command.swept_along:
                    sim.marks.sometimes("a rank was fenced")
                self._send_to(command, [tray_of(command.slot)])
            case PauseWorkers() | DealShards() | DrainWorkers() | ReleaseWorkers():
                self._send(command, command.workers)
            case DismissTray():
                sim.marks.sometimes("a tray was dismissed")
                self._send_to(command, [command.tray])
            case AskPolicy():
                sim.marks.sometimes("the policy was asked")
                trouble = "raised ValueError: no" if sim.draw["policy"].random() < 0.3 else ""
                answer = PolicyAnswered(question=command.question, trouble=trouble)
                sim.engine.after(0.02 + sim.draw["policy"].random(), self.submit, answer)
            case Notice():
                self._notice(command.text)
            case Answer():
                self._hear(command)
            case Decided() | CondemnWorker():
                pass
            case RequestRack() | ReleaseRack():
                sim.provider.provide(command)
            case StopJob():
                must(command.because, "a stop without a reason")
                self.stopped = command

    def _notice(self, text: str) -> None:
        must(text, "a notice without words")
        self.notices.append(text)
        if "is slow" in text:
            self.sim.marks.sometimes("a slow rank was told of")
        if text.startswith("all ranks are held"):
            self.sim.operators.page()

    def _set(self, timer: SetTimer) -> None:
        sim = self.sim
        if isinstance(timer.timer, QuarantineOver):
            self._left_out[timer.timer.slot] = None
            sim.marks.sometimes("a slot was left out for a while")
        late_s = 0.2 * sim.draw["timers"].random() if sim.buggify("coordinator: a late timer") else 0.0
        at_ns = timer.at_ms * 1_000_000 + round(late_s * 1e9)
        sim.engine.at(at_ns, self.submit, TimerFired(timer=timer.timer, at_ms=timer.at_ms))

    def _may_start(self, slot: SlotId) -> None:
        if slot in self._left_out:
            self.sim.marks.sometimes("a slot that was left out was tried again")
        must(slot not in self.withdrawn_slots(), "a worker starts in a place that is drained")

    def _planned(self, command: ResumeGeneration, *, launch: bool) -> None:
        plan, before = command.plan, self.sim.truth.plans
        known = {(m.slot, m.incarnation) for m in before[max(before)].members} if before else set()
        new = [m.slot for m in plan.members if (m.slot, m.incarnation) not in known]
        if self.unfit and new:
            self.sim.marks.sometimes("a GPU was unfit when ranks were placed")
        must(not any(slot in self.unfit for slot in new), "a rank on a GPU that may not be used")
        must(not any(slot in self.withdrawn_slots() for slot in new), "a rank in a place that is drained")
        self.launches += launch
        self.sim.planned(plan, launch=launch)

    def withdrawn_slots(self) -> dict[SlotId, str]:
        leaving = {slot: "departs" for slot in self.sim.all_slots() if tray_of(slot) in self.departing}
        return {**self.withdrawn, **leaving}

    def _hear(self, answer: Answer) -> None:
        self.withdrawn, self.departing = dict(answer.drained), set(answer.departing)
        said = self.answers.setdefault(answer.request, [])
        must(answer.text, "an answer without words")
        must(all(one.outcome == "begun" for one in said), "an answer after the last one")
        must(bool(answer.refusal) == (answer.outcome == "refused"), "a refusal that is none")
        said.append(answer)
        if answer.outcome == "refused":
            self.sim.marks.sometimes("a person was refused")

    # -- commands on their way
    def _send(self, command: Command, workers: Iterable[Worker]) -> None:
        self._send_to(command, dict.fromkeys(tray_of(worker.slot) for worker in workers))

    def _send_to(self, command: Command, trays: Iterable[TrayId]) -> None:
        for tray in trays:
            if (link := self.links.get(tray)) is not None:
                link.down.send(command)

    def measured(self, unit: int) -> None:
        """Report the costs that the real shell derives from telemetry, once they are known."""
        if unit >= 2 and not self._costs_told:
            self._costs_told = True
            self._tell_costs()
        if unit % LOOK_EVERY == LOOK_EVERY - 1:
            self._look_for_slow_ranks()

    def checkpointed(self, agent: Agent, step: int) -> None:
        """Report that a checkpoint is complete on disk; the rank that writes last reports it."""
        if agent.is_heard:
            self._checkpoint = Step(max(self._checkpoint or step, step))
            self._tell_costs()

    def _tell_costs(self) -> None:
        step_s, copied = self.sim.costs.step_s, 1e9 / self.sim.costs.takeover_s
        known = self._checkpoint
        self.submit(CostsMeasured(step_s=step_s, state_bytes=1e9, copy_bytes_per_s=copied, checkpoint=known))

    def _look_for_slow_ranks(self) -> None:
        """Look for slow ranks as the real shell does from steps, and report them when they have changed."""
        newest = self.sim.truth.plans[max(self.sim.truth.plans)]
        found = []
        for member in newest.members:
            process = self.sim.processes.get((member.slot, int(member.incarnation)))
            if process is not None and process.slow > 1.2:
                times = round(process.slow, 2)
                found.append(
                    SlowRank(
                        rank=member.rank, slot=member.slot, times=times, own_ms=1e3, past=times, rows=18, window=20
                    )
                )
        if tuple(found) != self._slow:
            self._slow = tuple(found)
            self.submit(SlowRanksChanged(generation=newest.generation, slow=self._slow))
