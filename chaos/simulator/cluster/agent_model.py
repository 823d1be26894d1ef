"""Model of a tray's agent: it starts and ends workers, reports their exits, and notices when it has lost the
coordinator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rackrun.chaos.simulator.base.ground_truth import must
from rackrun.chaos.simulator.cluster.coordinator_model import Gone, Link
from rackrun.chaos.simulator.cluster.worker_model import Process
from rackrun.protocol.commands import (
    BreakGeneration,
    DealShards,
    DismissTray,
    DrainWorkers,
    FenceWorker,
    PauseWorkers,
    Plan,
    ReleaseWorkers,
    ResumeGeneration,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import Event, TrayJoined
from rackrun.protocol.ids import SlotId, TrayId

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["Agent"]

LEFT_IN_SLOT_MAX = 2
"""The most workers that have ended whose snapshots are kept in one slot."""
RETRY_S = 1.0


class Agent:
    """The agent of one tray."""

    def __init__(self, sim: Simulation, tray: TrayId, slots: int) -> None:
        self.sim, self.tray, self.slots = sim, tray, slots
        self.alive, self.own_pause = True, 0
        self.began_ns = sim.engine.now_ns
        self.plan: Plan | None = None
        self.drift = 1 + sim.draw["clocks"].uniform(-1, 1) * sim.drift
        self.link: Link | None = None
        self._slots: dict[SlotId, list[Process]] = {}
        self._backlog: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._broken = 0

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
        self.look_at_link()

    # -- time
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
        self.own_pause += 1
        self.look_at_link()

    def go_on(self) -> None:
        """Go on after a stop, and do what has piled up meanwhile."""
        self.own_pause -= 1
        if self.paused or not self.alive:
            return
        self.look_at_link()
        backlog, self._backlog = self._backlog, deque()
        for do, args in backlog:
            self.do(do, *args)
        if self.link is not None and self.link.up.closed:
            self._lost_connection()

    @property
    def silent(self) -> bool:
        return self.paused or not self.alive

    # -- the connection
    @property
    def is_heard(self) -> bool:
        """Whether the coordinator counts on this agent's connection."""
        return self.link is not None and self.sim.coordinator.links.get(self.tray) is self.link

    def say(self, event: Event) -> None:
        if self.link is not None:
            self.link.up.send(event)

    def hear(self, message: object) -> None:
        self.do(self._obey, message)

    def look_at_link(self) -> None:
        """React to a change in whether pings are answered."""
        link = self.link
        if link is None:
            return
        self.sim.coordinator.look_at(link)
        if link.up.cuts.silent or self.sim.coordinator_asleep:
            self._broken += 1
            wait_s = self.sim.costs.lease_s * (0.25 + 0.5 * self.sim.draw["lease"].random())
            self.later(wait_s, self._unanswered, self._broken)
        else:
            self._broken += 1
            link.up.heal()
            link.down.heal()
            if link.up.closed:  # the other side says that this connection is no more
                self.later(2 * self.sim.costs.latency_s, self._lost_connection)

    def _unanswered(self, since: int) -> None:
        if since == self._broken and self.link is not None and self.link.up.cuts.silent:
            self._lost_connection()

    def _lost_connection(self) -> None:
        """The connection is lost. The workers go on; the agent tries again, and is refused, or gives up."""
        if self.link is None:
            return
        link, self.link = self.link, None
        link.down.closed = True
        if not link.up.closed:
            link.up.send(Gone("its agent is gone"))  # sent when it gets through
        self.later(RETRY_S, self._try_again, link, self.sim.engine.now_s + self.sim.costs.orphan_s)

    def _try_again(self, link: Link, until_s: float) -> None:
        cuts = self.sim.cuts[self.tray]
        if self.sim.engine.now_s >= until_s:
            self.die()
        elif cuts.silent or self.sim.coordinator_asleep:
            self.later(RETRY_S, self._try_again, link, until_s)
        else:
            self.sim.marks.sometimes("a zombie was refused")
            self.sim.coordinator.lose(link, "its agent is gone")
            self.die()

    # -- its end
    def die(self, *, told: bool = True) -> None:
        """End the agent with all its workers. ``told``: the connection ends visibly, and does not just fall silent."""
        if not self.alive:
            return
        link = self.link
        if link is not None and told:
            link.up.send(Gone("its agent is gone"))
        self.alive, self.own_pause = False, 0
        for process in self.processes():
            process.dies()
        self.sim.memory.forget_tray(self.tray)
        if link is not None and not told:
            self.sim.coordinator.look_at(link)
        self.sim.stir()

    def processes(self) -> list[Process]:
        return [process for slot in self._slots.values() for process in slot if process.alive]

    # -- commands
    def _obey(self, command: object) -> None:
        match command:
            case StartWorker():
                self._start(command)
            case FenceWorker():
                for process in self._slots.get(command.slot, ()):
                    if process.incarnation == command.incarnation and process.alive:
                        process.end(signal=9)
            case ResumeGeneration():
                self.plan = command.plan
                for member in command.plan.members:
                    self._pass_on(member.slot, member.incarnation, command)
            case BreakGeneration() | PauseWorkers() | DealShards() | DrainWorkers() | ReleaseWorkers():
                for worker in command.workers:
                    self._pass_on(worker.slot, worker.incarnation, command)
            case DismissTray():
                self.die()
            case StopJob():
                pass
            case _:
                raise AssertionError(command)

    def _pass_on(self, slot: SlotId, incarnation: int, command: object) -> None:
        for process in self._slots.get(slot, ()):
            if process.incarnation == incarnation and process.alive:
                process.told(command)

    def _start(self, command: StartWorker) -> None:
        slot = self._slots.setdefault(command.slot, [])
        must(not any(process.alive for process in slot), f"two processes in {command.slot}")
        left = [process for process in slot if self.sim.memory.of(self.tray, process.owner)]
        for process in left[:-LEFT_IN_SLOT_MAX]:
            self.sim.memory.forget_owner(self.tray, process.owner)
        slot[:] = left[-LEFT_IN_SLOT_MAX:]
        process = Process(self, command)
        slot.append(process)
        self.sim.born(process)
        process.start()

    def tell_exit(self, event: Event) -> None:
        costs = self.sim.costs
        late_s = self.sim.draw["exits"].random() if self.sim.buggify("agent: an exit is seen late") else 0.0
        self.later(costs.of(costs.see_exit_s, self.sim.draw["exits"]) + late_s, self.say, event)

    def in_slot(self, slot: SlotId) -> Process | None:
        return next((process for process in self._slots.get(slot, ()) if process.alive), None)

    def is_cut_off(self, link: Link) -> None:
        """Learn that the coordinator has given up this connection."""
        if self.link is link:
            self._lost_connection()
