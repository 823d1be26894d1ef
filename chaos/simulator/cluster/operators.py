"""Model of operators who drain, return, swap, shrink, grow and change the policy, at random moments.

They also ask for what does not exist. Notices of a hold page them, and they end it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.protocol.events import (
    DrainRequested,
    Event,
    GrowRequested,
    PolicyRequested,
    ReturnRequested,
    ShrinkRequested,
    StopRequested,
    SwapRequested,
)
from rackrun.protocol.ids import Rank, TrayId, slot_id, tray_of

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation

__all__ = ["OperatorModel"]

ASKED = ("drain", "drain and wait", "return", "return", "swap", "swap", "shrink", "grow", "policy")
PAGES_MAX = 6
"""The number of notices of holds after which the job is stopped in the next one."""


class OperatorModel:
    """The operators of one job."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._draw = sim, sim.draw["people"]
        self._pages = 0

    def begin(self) -> None:
        for number in range(self._sim.job.requests):
            self._sim.engine.after(self._draw.random() * self._sim.job.faults_s, self._ask, number)

    def page(self) -> None:
        """Take notice of a hold. Something is done about it within five minutes."""
        self._pages += 1
        self._sim.marks.sometimes("all ranks waited in a hold")
        self._sim.engine.after(300 * self._sim.draw["pager"].random(), self._end_hold, self._pages)

    def _end_hold(self, page: int) -> None:
        """Switch on a tray that is off, change the policy, or stop the job: at the sixth page at the latest."""
        sim, draw = self._sim, self._sim.draw["pager"]
        if sim.coordinator.core.view().phase != "parking":
            return
        off = [tray for tray, agent in sim.agents.items() if not agent.alive]
        ways = ["swap,shrink,hold", "swap,restart,hold", "stop", "rackctl stop", *["a tray"] * 4 * bool(off)]
        way = draw.choice(ways) if page < PAGES_MAX else "stop"
        if way == "a tray":
            sim.switch_on(draw.choice(off))
        elif way == "rackctl stop":
            sim.coordinator.submit(StopRequested(because=way, exit_code=143))
        else:
            sim.coordinator.submit(PolicyRequested(request=f"end of hold {page}", policy=way))

    def _ask(self, number: int) -> None:
        self._sim.coordinator.submit(self._request(number, self._draw.choice(ASKED)))

    def _request(self, number: int, kind: str) -> Event:
        sim, draw = self._sim, self._draw
        tray = TrayId(f"tray-{draw.randrange(sim.job.trays + 1)}")
        slot = slot_id(tray, draw.randrange(sim.job.slots))
        target = tray if draw.random() < 0.5 else slot
        steps = sim.truth.committed + 1
        match kind:
            case "drain" | "drain and wait":
                name = f"drain {number} {target}"
                return DrainRequested(request=name, target=target, wait=kind != "drain", steps=steps)
            case "return":
                drained = sorted(sim.coordinator.checks.withdrawn)
                target = draw.choice(drained) if drained else target
                return ReturnRequested(
                    request=f"return {number}", target=draw.choice([target, tray_of(slot) or target])
                )
            case "shrink":
                size = sim.coordinator.core.view().world_size
                rank, size_then = Rank(draw.randrange(size + 1)), draw.randrange(size + 1)
                ranks = (rank,) if draw.random() < 0.5 else ()
                return ShrinkRequested(
                    request=f"shrink {number}", ranks=ranks, to=0 if ranks else size_then, steps=steps
                )
            case "grow":
                return GrowRequested(request=f"grow {number}", to=draw.choice([0, 0, 1, 3]))
            case "policy":
                policy = draw.choice(["swap,shrink,wait", "swap,acquire,restart", "no-swap", "nonsense", None])
                return PolicyRequested(request=f"policy {number}", policy=policy)
            case _:
                view = sim.coordinator.core.view()
                spares = [spare.slot for spare in view.spares]
                to = draw.choice([draw.choice(spares) if spares else slot, slot, ""])
                rank = Rank(draw.randrange(view.world_size + 1))
                return SwapRequested(request=f"swap {number}", rank=rank, to=to, steps=steps)
