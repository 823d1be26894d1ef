"""Model of a tray's agent: the agent's own machine, with models of its processes, its clock and its connection.

What is started, killed, reported and passed on `rackrun.agent.tray.tray_machine` decides, as in a real agent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from rackrun.agent.tray import tray_facts as t
from rackrun.agent.tray.coordinator_lease import (
    AttemptFailed,
    CoordinatorLease,
    GiveUp,
    HangUp,
    JoinAnew,
    LinkBroke,
    LinkFact,
    LinkSilent,
    LinkState,
    LinkWelcomed,
    Ping,
    Proceed,
    Retry,
)
from rackrun.agent.tray.process_states import ProcessState
from rackrun.agent.tray.tray_machine import TrayMachine
from rackrun.agent.workers.standstill import BOUND_NS
from rackrun.chaos.simulator.base.ground_truth import must
from rackrun.chaos.simulator.cluster.coordinator_model import Gone, SimulatedLink
from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker
from rackrun.protocol.commands import GenerationPlan, Worker, WorkerCommand
from rackrun.protocol.events import Event, TrayJoined, WorkerEvent
from rackrun.protocol.ids import SlotId, TrayId

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["Agent"]

CONNECT_S = 1.0
"""An attempt to connect through a partition fails after this long, in which its packet was sent again."""
REFUSED = 409
"""Status of the coordinator's answer to an agent that it has given up."""


class Agent:
    """The agent of one tray."""

    def __init__(self, sim: Simulation, tray: TrayId, slots: int) -> None:
        self.sim, self.tray, self.slots = sim, tray, slots
        self.alive, self.own_pause = True, 0
        self._stopped_ns = 0
        """When it was stopped last."""
        self.began_ns = sim.engine.now_ns
        self._machine = TrayMachine(tray, sim.costs.grace_s)
        self._processes: dict[Worker, SimulatedWorker] = {}
        """All that were started and not forgotten, dead ones too."""
        self.drift = 1 + sim.draw["clocks"].uniform(-1, 1) * sim.drift
        self.link: SimulatedLink | None = None
        """The link to the coordinator, over whichever connection."""
        self._lease = CoordinatorLease(sim.costs.lease_s, sim.costs.orphan_s, self.clock_s)
        self._silent_since_s: float | None = None
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def join(self) -> None:
        """Connect to the coordinator, and report the tray."""
        if self.sim.crashes("agent: joining", self):
            return
        self.link = self.sim.coordinator.accept(self)
        described = self.sim.describe(self.tray, self.slots)
        self.say(
            TrayJoined(
                tray=self.tray,
                host=self.tray,
                slots=self.slots,
                store=f"{self.tray}:1",
                snapshots=f"{self.tray}:2",
                codec=True,
                topology=described,
            )
        )
        self._decide(LinkWelcomed())
        self.look_at_link()

    # -- time
    @property
    def clock_s(self) -> float:
        """The agent's own clock."""
        return self.sim.engine.now_s / self.drift

    def later(self, seconds: float, do: Callable[..., None], *args: object) -> None:
        """Call ``do`` after ``seconds`` of the agent's own clock."""
        self.sim.engine.after(seconds * self.drift, self.do, do, *args)

    def do(self, do: Callable[..., None], *args: object) -> None:
        """Call ``do`` now, or when the agent goes on if it is stopped; never if it has ended."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((do, args))
        else:
            do(*args)

    @property
    def paused(self) -> bool:
        return self.own_pause > 0

    def pause(self) -> None:
        if not self.paused:
            self._stopped_ns = self.sim.engine.now_ns
        self.own_pause += 1
        self.look_at_link()

    def go_on(self) -> None:
        """Go on after a stop, and do what has piled up meanwhile."""
        self.own_pause -= 1
        if self.paused or not self.alive:
            return
        self.look_at_link()
        stood_ns = self.sim.engine.now_ns - self._stopped_ns
        ran = [not process.paused and process.silent_ns < self._stopped_ns for process in self.processes()]
        for process in self.processes():
            process.progress_ns = min(process.progress_ns + stood_ns, self.sim.engine.now_ns)  # its time does not count
        if stood_ns >= BOUND_NS:
            self._tell(t.StoodStill(stood_ns // 1_000_000, workers_ran=any(ran) if ran else None))
        backlog, self._backlog = self._backlog, deque()
        for do, args in backlog:
            self.do(do, *args)

    @property
    def silent(self) -> bool:
        return self.paused or not self.alive

    # -- the connection
    @property
    def is_heard(self) -> bool:
        """Whether the coordinator counts on this agent's connection."""
        return self.sim.coordinator.counts_on(self.tray, self.link)

    def say(self, event: Event) -> None:
        if self.link is not None:
            self.link.up.send(event)

    def hear(self, command: WorkerCommand) -> None:
        self.do(self._tell, t.CommandArrived(command))

    def look_at_link(self) -> None:
        """React to a change in whether the two sides hear each other."""
        link = self.link
        if link is None:
            return
        self.sim.coordinator.check_connection(link)
        if self._hears_nothing(link):
            if self._silent_since_s is None:
                self._silent_since_s = self.clock_s
                self.later(self.sim.costs.lease_s, self._look_at_silence, self._silent_since_s)
        else:
            self._silent_since_s = None
        if not link.up.cuts.silent and not self.sim.coordinator_asleep:
            link.heal()
            if link.up.closed:  # the other side says that this connection is no more
                self.later(2 * self.sim.costs.latency_s, self.is_cut_off, link)

    def _hears_nothing(self, link: SimulatedLink) -> bool:
        return link.up.cuts.down > 0 or link.half_open or self.sim.coordinator_asleep

    def _look_at_silence(self, since_s: float) -> None:
        if self._silent_since_s == since_s and self._lease.state is LinkState.CONNECTED:
            self._decide(LinkSilent(self.clock_s - since_s))

    def is_cut_off(self, link: SimulatedLink) -> None:
        """Learn that the connection of this link has ended."""
        if self.link is link and self._lease.state is LinkState.CONNECTED:
            link.broken = True
            self.sim.coordinator.check_connection(link)
            self._decide(LinkBroke())

    def _connect(self) -> None:
        """Try to resume the link over another connection."""
        link = self.link
        assert link is not None
        if link.up.cuts.silent or self.sim.coordinator_asleep:
            self.later(CONNECT_S, self._decide, AttemptFailed("timed out"))
        elif link.up.cuts.resets:
            self._decide(AttemptFailed("connection reset"))
        elif link.up.closed:
            self.sim.marks.sometimes("a zombie was refused")
            self._decide(AttemptFailed("it has been given up", status=REFUSED))
        else:
            self.sim.marks.sometimes("a link was resumed")
            self._decide(LinkWelcomed())
            link.broken = link.half_open = False
            self.look_at_link()

    def _decide(self, fact: LinkFact) -> None:
        """Ask the link's machine, and carry out what it answers."""
        match effect := self._lease.handle(fact, self.clock_s):
            case Ping():
                self.later(self.sim.costs.lease_s, self._look_at_silence, self._silent_since_s)
            case HangUp():
                assert self.link is not None
                self.is_cut_off(self.link)
            case Retry():
                self.later(effect.after_s, self._connect)
            case GiveUp():
                self.die()
            case Proceed():
                pass
            case JoinAnew():
                raise AssertionError("the model's coordinator hears of an agent as soon as it connects")
            case _:
                assert_never(effect)

    # -- its end
    def die(self, *, told: bool = True) -> None:
        """End the agent with all its workers. ``told``: the connection ends visibly, and does not just fall silent."""
        if not self.alive:
            return
        link = self.link
        if link is not None and told:
            link.lose_what_waits()
            link.up.send(Gone("its agent is gone"))
        self.alive, self.own_pause = False, 0
        for process in self.processes():
            process.dies()
        self.sim.memory.forget_tray(self.tray)
        if link is not None and not told:
            self.sim.coordinator.check_connection(link)
        self.sim.wake_conductor()

    # -- workers
    @property
    def plan(self) -> GenerationPlan | None:
        """The latest plan."""
        return self._machine.resume.plan if self._machine.resume is not None else None

    def processes(self) -> list[SimulatedWorker]:
        """Return those that are alive, by slot."""
        alive = [process for process in self._processes.values() if process.alive]
        return sorted(alive, key=lambda process: process.slot)

    def in_slot(self, slot: SlotId) -> SimulatedWorker | None:
        return next((one for one in self._processes.values() if one.slot == slot and one.alive), None)

    def hear_worker(self, process: SimulatedWorker, event: WorkerEvent) -> None:
        self._tell(t.WorkerSaid(process.worker, event))

    def see_exit(self, process: SimulatedWorker) -> None:
        """See, a little later, that a process has ended."""
        costs = self.sim.costs
        late_s = self.sim.draw["exits"].random() if self.sim.buggify("agent: an exit is seen late") else 0.0
        self.later(costs.of(costs.see_exit_s, self.sim.draw["exits"]) + late_s, self._tell_exit, process)

    def _tell_exit(self, process: SimulatedWorker) -> None:
        """Tell of an exit, and that the process is gone: in rare cases later, when exit handlers run, or its memory is
        torn down."""
        last = process.last_words
        reaped_s = self.sim.draw["exits"].random() if self.sim.buggify("agent: a process is reaped late") else 0.0
        if last.signal is None:  # it has said so itself, when its script was over
            self.hear_worker(process, last)
            reaped_s *= 2 * self.sim.costs.grace_s
        elif reaped_s:
            self._tell(t.EndSeen(process.worker, last.exit_code, last.signal))
        if reaped_s:
            self.later(reaped_s, self._reap, process)
        else:
            self._reap(process)

    def _reap(self, process: SimulatedWorker) -> None:
        last = process.last_words
        keeps = bool(self.sim.memory.of(self.tray, process.owner))
        self._tell(t.ProcessReaped(process.worker, last.exit_code, last.signal, keeps))

    def leave_soon(self) -> None:
        self._tell(t.LeaveAsked(f"SIGTERM to the agent of {self.tray}", exit_code=143))

    # -- facts and effects
    def _tell(self, fact: t.TrayFact) -> None:
        """Tell the machine a fact, and carry out what it answers."""
        for effect in self._machine.handle(fact, self.clock_s):
            self._carry_out(effect, fact)

    def _carry_out(self, effect: t.TrayEffect, fact: t.TrayFact) -> None:
        match effect:
            case t.PassOn(command=command, workers=workers):
                for worker in workers:
                    self._processes[worker].receive(command)
            case t.Forward():
                assert isinstance(fact, t.WorkerSaid)
                self.say(fact.message)  # type: ignore[arg-type]
            case t.SendEvent(event=event):
                self.say(event)
            case t.SetDeadline(deadline=deadline, at_s=at_s):
                self.later(at_s - self.clock_s, self._tell, t.DeadlinePassed(deadline))
            case t.Leave():
                self.die()
            case t.SpareWaits() | t.SpareLeaves() | t.PrintLine():
                pass  # it has no fillers and no output
            case t.Emptied():
                raise AssertionError("the model's agents end at once")
            case _:
                self._carry_out_on_process(effect)

    def _carry_out_on_process(self, effect: t.ProcessEffect) -> None:
        match effect:
            case t.AdmitWorker(command=command, plan=plan):
                must(self.in_slot(command.slot) is None, f"two processes in {command.slot}")
                process = SimulatedWorker(self, command)
                self._processes[process.worker] = process
                self.sim.born(process)
                if plan is not None:
                    process.receive(plan)
            case t.FindStore(command=command):
                self._tell(t.StoreFound(Worker(command.slot, command.incarnation)))
            case t.ForkWorker(command=command):
                process = self._processes[Worker(command.slot, command.incarnation)]
                self._tell(t.WorkerBorn(process.worker))
                process.start()
            case t.KillWorker(worker=worker):
                process = self._processes[worker]
                if self._machine.state_of(worker) is ProcessState.ENDING:
                    self.sim.marks.sometimes("a process outlived its exit and was killed")
                    self.later(self.sim.costs.see_exit_s, self._reap, process)
                process.end(signal=9)
            case t.ForgetWorker(worker=worker):
                self.sim.memory.forget_owner(self.tray, self._processes.pop(worker).owner)
            case t.ReportExit(worker=worker, exit_code=code, signal=signal, failure=failure):
                last = self._processes[worker].last_words
                self.say(msgspec.structs.replace(last, exit_code=code, signal=signal, failure=failure))
            case t.BuryWorker(worker=worker):
                self._processes[worker].dies()  # if it was fenced before it started
            case t.TerminateWorker():
                raise AssertionError("the model's agents end at once")
            case _:
                assert_never(effect)
