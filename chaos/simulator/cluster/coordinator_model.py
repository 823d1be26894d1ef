"""The coordinator of a simulated job: the real driver, over virtual time, with models of what leaves its process.

The links to agents, the user's policy and the provider are models. So are leases and what the real shell derives from
telemetry. Heartbeats are left out: a connection that cannot answer gets a lapse in the future, which is dropped when it
can answer again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from rackrun.chaos.simulator.base.connections import SimulatedChannel
from rackrun.chaos.simulator.base.coordinator_checks import KEPT, CheckedCore, CheckedJournal, CommandChecks
from rackrun.chaos.simulator.base.virtual_loop import VirtualLoop
from rackrun.coordinator.shell.driver import Driver
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.link.channel import split_frames
from rackrun.protocol.commands import AskPolicy, StopJob, WorkerCommand
from rackrun.protocol.events import (
    CostsMeasured,
    Event,
    PolicyAnswered,
    SlowRank,
    SlowRanksChanged,
    TrayJoined,
)
from rackrun.protocol.ids import Step, TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.wire import decode_command

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.agent_model import Agent
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["Coordinator", "Gone", "SimulatedLink"]

LOOK_EVERY = 5
"""The number of units between two looks for slow ranks."""


class SimulatedLink:
    """The link to one agent, over one connection after the other: commands of the core go down, events of the agent go
    up. The driver sends by it as by a real one (`rackrun.coordinator.shell.ports.AgentConnection`)."""

    def __init__(self, sim: Simulation, agent: Agent) -> None:
        self.agent, self.tray = agent, agent.tray
        self.host, self.pid = str(agent.tray), 0
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

    def send(self, data: bytes) -> None:
        """Send a frame down. It arrives as the command that it holds."""
        self.down.send(self._coordinator.command_in(data))

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
    """The coordinator of one job: a driver, and all that it needs."""

    def __init__(self, sim: Simulation, config: JobConfig, core: type[ControlPlane] = ControlPlane) -> None:
        self.sim = sim
        self.core = core(config)
        self.checks = CommandChecks(sim)
        self.notices: deque[str] = deque(maxlen=KEPT)
        self.loop = VirtualLoop(sim.engine, self._late_s)
        journal = CheckedJournal(self.checks)
        self.checked = CheckedCore(self.core, journal, self.checks, self.loop.time)
        self.driver = Driver(self.checked, journal, run_id="simulated", observer=_SimulatedScreen(self), loop=self.loop)
        self.driver.returns = lambda _tray: sim.buggify("coordinator: an agent is said to be started again")
        self.driver.ask = self._ask
        self.driver.provide = sim.provider.provide
        self._journal = journal
        self._sent: tuple[bytes, WorkerCommand | None] = b"", None
        """The frame that was sent last, and the command in it."""
        self._slow: tuple[SlowRank, ...] = ()
        self._costs_told = False
        self._checkpoint: Step | None = None

    @property
    def stopped(self) -> StopJob | None:
        """How the job ended; None: it goes on."""
        return self.driver.over

    def submit(self, event: Event) -> None:
        """Give an event to the driver, now or when the coordinator goes on."""
        self.loop.call(self.driver.submit, event)

    # -- what leaves the process
    def command_in(self, data: bytes) -> WorkerCommand:
        """Return the command in a frame that is sent to an agent."""
        known, command = self._sent
        if command is None or known is not data:
            (body,) = split_frames(bytearray(data))
            command = decode_command(body)
            self._journal.sent(command)
            self._sent = data, command
        return command

    def _ask(self, command: AskPolicy) -> None:
        draw = self.sim.draw["policy"]
        trouble = "raised ValueError: no" if draw.random() < 0.3 else ""
        answer = PolicyAnswered(question=command.question, trouble=trouble)
        self.sim.engine.after(0.02 + draw.random(), self.submit, answer)

    def _late_s(self) -> float:
        return 0.2 * self.sim.draw["timers"].random() if self.sim.buggify("coordinator: a late timer") else 0.0

    # -- connections
    def accept(self, agent: Agent) -> SimulatedLink:
        return SimulatedLink(self.sim, agent)

    def counts_on(self, tray: TrayId, link: SimulatedLink | None) -> bool:
        """Return whether ``link`` is the tray's current one."""
        return link is not None and self.driver.link_of(tray) is link

    def hear(self, link: SimulatedLink, message: object) -> None:
        """Receive a message of an agent."""
        self.loop.call(self._take_in, link, message)

    def _take_in(self, link: SimulatedLink, message: object) -> None:
        if isinstance(message, Gone):
            self.lose(link, message.because)
        elif isinstance(message, TrayJoined):
            before = self.driver.link_of(message.tray)
            if isinstance(before, SimulatedLink):
                self.lose(before, "its agent connected anew")
            self.driver.joined(message, link)
        elif isinstance(message, msgspec.Struct) and self.counts_on(link.tray, link):
            self.driver.submit(message)  # type: ignore[arg-type]

    def lose(self, link: SimulatedLink, because: str) -> None:
        """Give an agent up, now or when the coordinator goes on."""
        if self.loop.stopped:
            self.loop.call(self.lose, link, because)
            return
        link.close()
        self.driver.lost(link.tray, link, because)

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
        if self.loop.stopped:  # the coordinator looks when it wakes up
            self.sim.engine.after(0.05, self._lapse, link, silent)
            return
        self.sim.marks.sometimes("a lease lapsed")
        self.lose(link, f"no word from its agent for {self.sim.costs.lease_s:.0f} s")

    # -- what the real shell derives from telemetry
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


class _SimulatedScreen:
    """What operators see of the job, as `rackrun.coordinator.shell.ports.Observer`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def line(self, text: str, logged: object) -> None: ...

    def recovered(self, recovery: object) -> None: ...

    def protected(self, text: str) -> None: ...

    def notice(self, text: str) -> None:
        sim = self._coordinator.sim
        self._coordinator.notices.append(text)
        if "is slow" in text:
            sim.marks.sometimes("a slow rank was told of")
        if text.startswith("all ranks wait in a hold"):
            sim.operators.page()
