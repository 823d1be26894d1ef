"""How much of a unit this rank spent on its own, and how much waiting for others.

In step, all ranks take the same time: the fast wait for the slow, in collectives. What tells a slow rank is the time that it
did not wait. So every wait is taken off: those in a work's ``wait``, and the one at the end of a backward pass, where torch waits
for the futures of its buckets without asking us. That one is bounded by two stamps: the engine calls back when the last gradient
is computed, and the futures' own completion. A wait that nobody sees counts as the rank's own: it makes the fast look as slow as
the slowest, and never one slower than the others.

On a GPU the host does not wait, its stream does. There the stamps are events in the stream, on both sides of each of its waits (FSDP2's too, which it does itself), and the engine
calls back before and after those of a backward pass. They are read when a unit is committed, by when the device has come past all that
stands before the gate, so nothing waits for them. Those behind the gate, in an optimizer's update, have not been passed then: they count for the next
unit, in which the host waits for the device. Waits in other streams than the unit's own are no waits of what it computes, and are not counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import Variable

from rackrun.worker.device.device_queue import DeviceQueue, Moment

__all__ = ["OwnTime"]


@dataclass(frozen=True, slots=True)
class _Wait:
    """Of a stream."""

    before: Moment
    after: Moment
    in_passes: bool


class OwnTime:
    """Of the unit in hand. Times are seconds. ``queue``: of the device that computes; None: the host does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, queue: DeviceQueue | None = None) -> None:
        self._clock = clock
        self._queue = None if queue is None or queue.is_host else queue
        self.passes = 0
        """Micro-batches so far, ghosts included."""
        self.in_passes = 0.0
        """Of this rank's own time, what these took; known when they are over, and on a device when `of` has been asked."""
        self._first = (0.0, 0.0)
        """When the first began, and what was waited before."""
        self._waited = 0.0
        self._computed: float | None = None
        """When a backward pass had computed all; until somebody sees that its end is over."""
        self._landed = 0.0
        self._graph = -1
        self._disturbed = False

        self._stream = 0
        """The one that computes the unit."""
        self._waits: list[_Wait] = []
        """Of that stream, also of units before; those that are not read yet."""
        self._passes_from: Moment | None = None
        self._passes_until: Moment | None = None
        self._waited_in_passes = 0.0
        """By the host."""
        self._ends_backward = False
        """What is waited now counts as the end of a backward pass."""

    def begin(self) -> None:
        self.passes = 0
        self.in_passes = 0.0
        self._waited = 0.0
        self._computed = None
        if self._disturbed:
            self._waits.clear()
        self._disturbed = False
        self._passes_from = self._passes_until = None
        self._ends_backward = False
        if self._queue is not None:
            self._stream = self._queue.stream()

    def next_pass(self) -> None:
        """A micro-batch begins."""
        self.goes_on()
        if not self.passes:
            self._first = self._clock(), self._waited
            if self._queue is not None:
                self._passes_from = self._queue.moment()
        self.passes += 1

    def passes_over(self) -> None:
        """What follows is the same however many they were."""
        self.goes_on()
        if self._queue is not None:
            if self.passes and self._passes_until is None:
                self._passes_until = self._queue.moment()
                self._waited_in_passes = self._waited - self._first[1]
        elif self.passes and not self.in_passes:
            began, waited = self._first
            self.in_passes = max(0.0, self._clock() - began - (self._waited - waited))

    def disturbed(self) -> None:
        """The world broke: how long this unit took says nothing."""
        self._disturbed = True

    def waited(self, seconds: float) -> None:
        """By the host, in a collective, for its result."""
        self._waited += seconds

    def stream_waited(self, before: Moment, after: Moment) -> None:
        """By this thread's current stream, between those places of it."""
        assert self._queue is not None, "the host has no stream"
        if self._queue.stream() == self._stream and not self._ends_backward:
            self._waits.append(_Wait(before, after, self.passes > 0 and self._passes_until is None))

    @contextlib.contextmanager
    def stream_wait(self) -> Iterator[None]:
        """What this thread's current stream is told to wait for within."""
        assert self._queue is not None, "the host has no stream"
        before = self._queue.moment()
        yield
        self.stream_waited(before, self._queue.moment())

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
        waited = self._waited + self._read_stream()
        return 0.0 if self._disturbed else max(0.0, seconds - waited)

    def _read_stream(self) -> float:
        """Seconds that the unit's stream has waited since it was asked last, as far as the device has come."""
        total = in_passes = 0.0
        ahead = []
        for wait in self._waits:
            if not wait.after.passed():
                ahead.append(wait)
                continue
            seconds = max(0.0, wait.after.since(wait.before))
            total += seconds
            in_passes += seconds if wait.in_passes else 0.0
        self._waits = ahead
        first, last = self._passes_from, self._passes_until
        if first is not None and last is not None and last.passed():
            self.in_passes = max(0.0, last.since(first) - in_passes - self._waited_in_passes)
        return total

    def _backward_computed(self) -> None:
        if self._queue is None:
            self._computed = self._clock()
            return
        before, self._ends_backward = self._queue.moment(), True
        # Behind the callbacks that are there by now, such as DDP's, which waits for all buckets.
        Variable._execution_engine.queue_callback(lambda: self._backward_over(before))

    def _backward_over(self, before: Moment) -> None:
        assert self._queue is not None, "the host has no stream"
        self._ends_backward = False
        self.stream_waited(before, self._queue.moment())
