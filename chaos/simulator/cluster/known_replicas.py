"""Model of what a worker knows of its replicas, as in `rackrun.worker.integrity.replicas`.

A world that begins knows at once which ranks hold the same state. One that has entered ``main`` again compares anew: its
ranks begin with equal state, and whether they stay equal is known when they begin the second unit after that. Until then
none counts as a replica of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.protocol.commands import GenerationPlan

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker

__all__ = ["KnownReplicas"]

_START = "start "


class KnownReplicas:
    """The replica class of one worker, as the worker knows it."""

    def __init__(self, of: SimulatedWorker) -> None:
        self._of = of
        self.name = ""

    def begins(self) -> None:
        """Begin a world."""
        self.name = self._real

    def leaves_main(self, plan: GenerationPlan) -> None:
        """Leave ``main`` to enter it again, with other shards."""
        self.name = f"none yet, as rank {self._of.rank} in generation {plan.generation}" if self._real else ""

    def fills(self) -> None:
        """Record that the state has been filled anew from those of all old ranks, in ``main``."""
        self.name = f"{_START}{self._real}" if self._real else ""

    def takes_over(self, plan: GenerationPlan, unit: int) -> None:
        """Take over what the source of the state of ``unit`` knew: a rank of the same generation, or a snapshot."""
        of = self._of
        sources = [source for restore in plan.restores if restore.rank == of.rank for source in restore.sources]
        peers = [plan.members[source] for source in sources]
        known = [of.sim.processes[peer.slot, int(peer.incarnation)].replicas.name for peer in peers]
        if known:
            self.name = known[0]
        elif unit > self._entered + 1:
            self.name = self._real
        else:
            self.fills()

    def compares(self) -> bool:
        """Compare with the other ranks before the next unit, if that is due. Return whether it was."""
        due = self._entered >= 0 and self._of.passed == self._entered + 1
        if due:
            self.name = self._real
        return due

    def to_report(self, entered: int) -> str:
        """Return the class that a worker that parks reports. ``entered``: the last unit whose gate it has entered."""
        if self.name.startswith(_START) and entered > self._entered:
            return f"unchecked rank {self._of.rank}"
        return self.name

    @property
    def _real(self) -> str:
        return self._of.sim.class_of(self._of.rank)

    @property
    def _entered(self) -> int:
        """The unit that was committed when all ranks last entered ``main`` again; -1: they never did."""
        return self._of.sim.eras[self._of.generation].entered
