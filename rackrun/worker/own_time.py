"""How much of a unit this rank spent on its own, and how much waiting for others.

In step, all ranks take the same time: the fast wait for the slow, in collectives. What tells a slow rank is the time that it
did not wait. So every wait is taken off: those in a work's ``wait``, and the one at the end of a backward pass, where torch waits
for the futures of its buckets without asking us. That one is bounded by two stamps: the engine calls back when the last gradient
is computed, and the futures' own completion. A wait that nobody sees counts as the rank's own: it makes the fast look as slow as
the slowest, and never one slower than the others.

On a GPU the host does not wait; there nothing is told yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.autograd import Variable

__all__ = ["OwnTime"]


class OwnTime:
    """Of the unit in hand. Times are seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.passes = 0
        """Micro-batches so far, ghosts included."""
        self.in_passes = 0.0
        """Of this rank's own time, what these took; known when they are over."""
        self._first = (0.0, 0.0)
        """When the first began, and what was waited before."""
        self._waited = 0.0
        self._computed: float | None = None
        """When a backward pass had computed all; until somebody sees that its end is over."""
        self._landed = 0.0
        self._graph = -1
        self._disturbed = False

    def begin(self) -> None:
        self.passes = 0
        self.in_passes = 0.0
        self._waited = 0.0
        self._computed = None
        self._disturbed = False

    def next_pass(self) -> None:
        """A micro-batch begins."""
        self.goes_on()
        if not self.passes:
            self._first = self._clock(), self._waited
        self.passes += 1

    def passes_over(self) -> None:
        """What follows is the same however many they were."""
        self.goes_on()
        if self.passes and not self.in_passes:
            began, waited = self._first
            self.in_passes = max(0.0, self._clock() - began - (self._waited - waited))

    def disturbed(self) -> None:
        """The world broke: how long this unit took says nothing."""
        self._disturbed = True

    def waited(self, seconds: float) -> None:
        """In a collective, for its result."""
        self._waited += seconds

    def future_given(self) -> None:
        """Somebody will wait for a collective's future: in a backward pass, its engine, once all is computed."""
        graph = torch._C._current_graph_task_id()
        if graph not in (-1, self._graph):
            self._graph = graph
            Variable._execution_engine.queue_callback(self._backward_computed)

    def landed(self) -> None:
        """A future is complete. Any thread."""
        self._landed = self._clock()

    def goes_on(self) -> None:
        """The main thread is at work: what it waited for is over."""
        if self._computed is not None:
            self._waited += max(0.0, self._landed - self._computed)
            self._computed = None

    def of(self, seconds: float) -> float:
        """This rank's part of a unit that took ``seconds``; 0 when it is not known."""
        self.goes_on()
        return 0.0 if self._disturbed else max(0.0, seconds - self._waited)

    def _backward_computed(self) -> None:
        self._computed = self._clock()
