"""Tracks how far this rank, or its device where it has one, has come in its collectives, so that hangs can be detected.

A collective is *entered* when what this rank computes before it is complete, and *completed* when its result is there.
On a GPU the host is far ahead of both, because it only enqueues them. So each collective has two marks in the stream:
one before it, and one after the stream's wait for it. The control thread checks now and then which marks the device has
passed, and writes that to the heartbeat page. This distinguishes a kernel that hangs from a rank that waits for others:
the rank of that kernel has not entered the collective that the others wait in.

The device could also write to the page itself. Polling needs no memory that host and device share, works for all
streams, and is at most one tick old, while limits are a second and more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

from rackrun.worker.device.device_queue import DeviceQueue, StreamEvent

if TYPE_CHECKING:
    from rackrun.link.heartbeat_page import HeartbeatPage
    from rackrun.worker.communicators.communicator import Communicator
    from rackrun.worker.membership.blocked_collective import BlockedCall

__all__ = ["Entered", "CollectiveProgress"]


class Entered:
    """A collective that this rank's Python code has called; the device may still be busy before it.

    ``number``: how many collectives of its generation this rank has called up to this one.
    """

    __slots__ = ("call", "communicator", "number", "over", "passed", "reached", "work")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached: StreamEvent | None = None
        """The mark in the stream before the collective; None for a collective of the hosts."""
        self.passed: StreamEvent | None = None
        """The mark after the stream's wait for the collective; None while nobody has waited for it."""
        self.work: dist.Work | None = None
        """The collective's work, until somebody waits for it; not longer, because it holds the memory of the result."""
        self.communicator: Communicator | None = None
        """The communicator of ``work``."""
        self.call: BlockedCall | None = None
        """The place of the collective among those of its group; None before it begins, and for an operation of only
        some members."""
        self.over = False

    def is_reached(self) -> bool:
        """Whether this rank has computed everything that comes before the collective."""
        return self.over or self.reached is None or self.reached.passed()

    def is_passed(self) -> bool:
        """Whether the collective is complete on this rank."""
        if self.over:
            return True
        passed, work, communicator = self.passed, self.work, self.communicator
        if passed is not None:
            return passed.passed()
        return work is not None and communicator is not None and communicator.is_over(work)

    def enqueued(self, communicator: Communicator, work: dist.Work) -> None:
        """Record the collective's work; nobody has waited for it yet."""
        self.communicator, self.work = communicator, work

    def waited(self, passed: StreamEvent) -> None:
        """Record the mark after the stream's wait for the collective."""
        self.passed = passed
        self.work = self.communicator = None


class CollectiveProgress:
    """The open collectives of this rank. The main thread, or autograd on its behalf, enters them; the control thread
    checks them."""

    def __init__(self, page: HeartbeatPage, queue: DeviceQueue) -> None:
        self._page, self._queue = page, queue
        self._lock = threading.Lock()
        self._open: deque[Entered] = deque()
        """Collectives that the device has not passed, oldest first."""
        self.newest = Entered(0)
        if not queue.is_host:
            page.by_device()

    def enter(self) -> Entered:
        """Record that a collective is called, and return its entry."""
        self._page.collective_entered()
        self.newest = entered = Entered(self._page.called)
        if not self._queue.is_host:
            with self._lock:
                self._open.append(entered)
        return entered

    def completed(self, entered: Entered) -> None:
        """Record that the host has seen the collective complete."""
        entered.over = True
        self._page.collective_completed()

    def all_completed(self) -> None:
        """Record that all collectives are complete, also on the device: the host has seen it pass all of them."""
        with self._lock:
            self._open.clear()
            self._page.device_at(0, 0)
            self._page.collectives_over()

    def new_generation(self, generation: int) -> None:
        """Forget the collectives of the former generation."""
        with self._lock:
            self._open.clear()
            self._page.device_at(0, 0)
            self._page.new_generation(generation)

    def update_page(self) -> None:
        """Write to the heartbeat page how far the device is. A device that has failed stays where it was."""
        if self._queue.is_host:
            return
        with self._lock:
            try:
                while self._open and self._open[0].is_passed():
                    self._open.popleft()
                unreached = _first(entered.number for entered in self._open if not entered.is_reached())
                unpassed = _first(entered.number for entered in self._open if not entered.is_passed())
            except RuntimeError:
                return
            self._page.device_at(unreached, unpassed)


def _first(numbers: Iterable[int]) -> int:
    """Return the first of ``numbers``, or 0."""
    return next(iter(numbers), 0)
