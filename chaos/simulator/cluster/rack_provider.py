"""Model of a provider of racks: it delivers what was asked for, late, wrongly or not at all, and takes racks back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.protocol.commands import ReleaseRack, RequestRack
from rackrun.protocol.events import RackDelivered, RackPreempted, RackRefused
from rackrun.protocol.ids import TrayId

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["SimulatedProvider"]

_WAYS = (
    *("brings",) * 4,
    "brings late",
    "brings fewer",
    "brings broken ones",
    "brings what was there",
    "brings nothing",
    "says it twice",
    "never brings it up",
    "refuses",
    "fails",
    "hangs",
    *("takes it back",) * 5,
    "takes a part of it back",
)


class SimulatedProvider:
    """The provider of one job."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._draw = sim, sim.draw["provider"]
        self._trays: dict[int, list[TrayId]] = {}
        """Request -> the trays of each rack that was delivered and not released."""
        self._released: set[int] = set()
        self.broken: set[TrayId] = set()
        """Trays on which no worker comes up."""

    def trays(self) -> list[TrayId]:
        """Return the trays that were delivered and not given back."""
        return [tray for trays in self._trays.values() for tray in trays]

    def provide(self, command: RequestRack | ReleaseRack) -> None:
        """Answer a command of the core."""
        if isinstance(command, RequestRack):
            self._request(command)
        else:  # the provider takes all of it, even if workers are still there
            self._released.add(command.request)
            self._sim.engine.after(self._draw.choice([0.1, 3.0]), self._take, command.request)

    def _request(self, command: RequestRack) -> None:
        way, draw = self._draw.choice(_WAYS), self._draw
        seconds = draw.choice([0.1, 5.0, 40.0])
        names = [TrayId(f"rack{command.request}-{number}") for number in range(command.trays)]
        if way == "brings fewer":
            names = names[: len(names) // 2] or names
        after = self._sim.engine.after
        match way:
            case "hangs":
                pass
            case "refuses" | "fails":
                after(seconds, self._refuse, command.request, way == "fails")
            case "brings what was there":
                after(seconds, self._say, command.request, [TrayId("tray-0"), *names[1:]])
            case "brings nothing":
                after(seconds, self._say, command.request, [])
            case _:
                seconds += 300.0 if way == "brings late" else 0.0
                after(seconds, self._bring, command, names, way)

    def _refuse(self, request: int, failed: bool) -> None:
        because = "no capacity" if not failed else "raised ValueError: no"
        self._sim.coordinator.submit(RackRefused(request=request, because=because, failed=failed))

    def _say(self, request: int, names: list[TrayId]) -> None:
        self._sim.coordinator.submit(RackDelivered(request=request, trays=tuple(names)))

    def _bring(self, command: RequestRack, names: list[TrayId], way: str) -> None:
        sim, draw, request = self._sim, self._draw, command.request
        if request in self._released and draw.random() < 0.5:
            return  # the release came in time; otherwise the rack comes all the same
        self._trays[request] = names
        if way == "brings broken ones":
            self.broken.update(names)
        if way != "never brings it up":
            for name in names:
                sim.engine.after(2.0 * draw.random(), self._switch_on, request, name)
        sim.engine.after(2.0 * draw.random(), self._say, request, names)
        if way == "says it twice":
            sim.engine.after(2.0 + draw.random(), self._say, request, names)
        if way.startswith("takes"):
            part = tuple(names[:1]) if "part" in way else ()
            sim.engine.after(60.0 * draw.random(), self._preempt, request, part)

    def _switch_on(self, request: int, tray: TrayId) -> None:
        if tray in self._trays.get(request, ()):
            self._sim.marks.sometimes("a tray of another rack joined")
            self._sim.switch_on(tray)

    def _preempt(self, request: int, part: tuple[TrayId, ...]) -> None:
        if request not in self._trays:
            return
        self._sim.coordinator.submit(RackPreempted(request=request, because="somebody pays more", trays=part))
        if not part or part == tuple(self._trays[request]):
            self._sim.engine.after(self._draw.choice([5.0, 60.0]), self._take, request)

    def _take(self, request: int) -> None:
        for tray in self._trays.pop(request, ()):
            agent = self._sim.agents.get(tray)
            if agent is not None and agent.alive:
                if agent.processes():
                    self._sim.marks.sometimes("a rack was taken from under its workers")
                agent.die()
