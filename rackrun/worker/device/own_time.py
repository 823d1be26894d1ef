"""Measures how much of a unit this rank spent on its own, and how much waiting for others.

Ranks move in step, so all take the same time: fast ranks wait for slow ones in collectives. The time that a rank did
not wait shows which is slow. So every wait is subtracted: those in a work's ``wait``, and the one at the end of a
backward pass, where torch waits for the futures of its buckets itself. That one is bounded by two time stamps: a
callback of the engine when the last gradient is computed, and the completion of the futures. A wait that is not noticed
counts as the rank's own time; it makes a fast rank look as slow as the slowest, and never one slower than the others.

On a GPU the stream waits, not the host. There the stamps are events in the stream, on both sides of each of its waits
(including those that FSDP2 does itself), and the engine calls back before and after those of a backward pass. They are
read when a unit is committed: the device has passed everything before the gate by then, so nothing waits for them.
Those after the gate, in an optimizer's update, have not been passed yet; they count for the next unit, in which the
host waits for the device. Waits in other streams than the unit's own do not delay its computation, and are not counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd import Variable

from rackrun.worker.device.device_queue import DeviceQueue, StreamEvent

__all__ = ["OwnTimeMeter"]


@dataclass(frozen=True, slots=True)
class _Wait:
    """One wait of a stream, between two places of it."""

    before: StreamEvent
    after: StreamEvent
    in_passes: bool


class OwnTimeMeter:
    """The times of the current unit, in seconds. ``queue``: of the device that computes; None: the host does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, queue: DeviceQueue | None = None) -> None:
        self._clock = clock
        self._queue = None if queue is None or queue.is_host else queue
        self.passes = 0
        """Number of micro-batches so far, ghosts included."""
        self.in_passes = 0.0
        """The part of this rank's own time that the micro-batches took; known when they are over, and on a device after
        `of` was called."""
        self._first = (0.0, 0.0)
        """When the first micro-batch began, and how long was waited before it."""
        self._waited = 0.0
        self._computed: float | None = None
        """When a backward pass had computed everything, until its end was noticed; None otherwise."""
        self._landed = 0.0
        self._graph = -1
        self._disturbed = False

        self._stream = 0
        """Id of the stream that computes the unit."""
        self._waits: list[_Wait] = []
        """Waits of that stream that are not read yet, including those of earlier units."""
        self._passes_from: StreamEvent | None = None
        self._passes_until: StreamEvent | None = None
        self._waited_in_passes = 0.0
        """How long the host has waited during the micro-batches."""
        self._ends_backward = False
        """Whether waits now belong to the end of a backward pass."""

    def begin(self) -> None:
        """Begin a unit."""
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

    def begin_microbatch(self) -> None:
        """Begin a micro-batch."""
        self.main_thread_resumed()
        if not self.passes:
            self._first = self._clock(), self._waited
            if self._queue is not None:
                self._passes_from = self._queue.record_event()
        self.passes += 1

    def end_microbatches(self) -> None:
        """End the micro-batches: what follows is the same for any number of them."""
        self.main_thread_resumed()
        if self._queue is not None:
            if self.passes and self._passes_until is None:
                self._passes_until = self._queue.record_event()
                self._waited_in_passes = self._waited - self._first[1]
        elif self.passes and not self.in_passes:
            began, waited = self._first
            self.in_passes = max(0.0, self._clock() - began - (self._waited - waited))

    def invalidate(self) -> None:
        """Note that the world broke, so that this unit's time says nothing."""
        self._disturbed = True

    def add_host_wait(self, seconds: float) -> None:
        """Add a wait of the host for a collective's result."""
        self._waited += seconds

    def add_stream_wait(self, before: StreamEvent, after: StreamEvent) -> None:
        """Add a wait of this thread's current stream, between two places of it."""
        assert self._queue is not None, "the host has no stream"
        if self._queue.stream() == self._stream and not self._ends_backward:
            self._waits.append(_Wait(before, after, self.passes > 0 and self._passes_until is None))

    @contextlib.contextmanager
    def stream_wait(self) -> Iterator[None]:
        """Context manager: what this thread's current stream waits for within counts as a wait."""
        assert self._queue is not None, "the host has no stream"
        before = self._queue.record_event()
        yield
        self.add_stream_wait(before, self._queue.record_event())

    def future_given(self) -> None:
        """Note that somebody will wait for a collective's future; in a backward pass that is the engine, once
        everything is computed."""
        graph = torch._C._current_graph_task_id()
        if graph not in (-1, self._graph):
            self._graph = graph
            Variable._execution_engine.queue_callback(self._backward_computed)

    def future_completed(self) -> None:
        """Note that a future is complete. Any thread."""
        self._landed = self._clock()

    def main_thread_resumed(self) -> None:
        """Note that the main thread works again, so that its wait is over."""
        if self._computed is not None:
            self._waited += max(0.0, self._landed - self._computed)
            self._computed = None

    def of(self, seconds: float) -> float:
        """Return this rank's own part, in seconds, of a unit that took ``seconds``; 0 if it is unknown."""
        self.main_thread_resumed()
        waited = self._waited + self._read_stream()
        return 0.0 if self._disturbed else max(0.0, seconds - waited)

    def _read_stream(self) -> float:
        """Return how long, in seconds, the unit's stream has waited since the last call, as far as the device has
        come."""
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
        before, self._ends_backward = self._queue.record_event(), True
        # Runs after the callbacks that exist now, such as DDP's, which waits for all buckets.
        Variable._execution_engine.queue_callback(lambda: self._backward_over(before))

    def _backward_over(self, before: StreamEvent) -> None:
        assert self._queue is not None, "the host has no stream"
        self._ends_backward = False
        self.add_stream_wait(before, self._queue.record_event())
