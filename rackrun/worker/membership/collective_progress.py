"""How far this rank has come in its collectives, for who looks whether it hangs: as the *device* has, where there is one.

A collective is *entered* when what this rank computes before it is done, and it is *completed* when its result is there. On a GPU the host is far
ahead of both: it has only enqueued them. So two places in the stream go with each collective: one in front of it, and one behind the
stream's wait for it. The control thread asks now and then which of them the device has passed, and writes that to the heartbeat page. A kernel that hangs
is then told from a rank that waits for others: the rank of that kernel has not entered what the others wait in.

The device itself could write to the page as well. Asking needs no memory that both share, works for all streams, and what is told is at
most one tick old, where limits are a second and more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

from rackrun.worker.device.device_queue import DeviceQueue, Moment

if TYPE_CHECKING:
    from rackrun.link.heartbeat_page import HeartbeatPage
    from rackrun.worker.communicators.communicator import Communicator
    from rackrun.worker.membership.blocked_collective import Call

__all__ = ["Entered", "Progress"]


class Entered:
    """A collective that the host has called for, the ``number``-th of its generation."""

    __slots__ = ("call", "communicator", "number", "over", "passed", "reached", "work")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reached: Moment | None = None
        """In front of it; None: it is the host's."""
        self.passed: Moment | None = None
        """Behind the stream's wait for it; None: nobody has waited yet."""
        self.work: dist.Work | None = None
        """Until then. Not for longer: it holds the memory of its result."""
        self.communicator: Communicator | None = None
        """Of ``work``."""
        self.call: Call | None = None
        """None: it has not begun, or is no collective of a whole group."""
        self.over = False

    def is_reached(self) -> bool:
        return self.over or self.reached is None or self.reached.passed()

    def is_passed(self) -> bool:
        if self.over:
            return True
        passed, work, communicator = self.passed, self.work, self.communicator
        if passed is not None:
            return passed.passed()
        return work is not None and communicator is not None and communicator.is_over(work)

    def enqueued(self, communicator: Communicator, work: dist.Work) -> None:
        """Nobody has waited yet."""
        self.communicator, self.work = communicator, work

    def waited(self, passed: Moment) -> None:
        self.passed = passed
        self.work = self.communicator = None


class Progress:
    """Entered by the main thread, or autograd's for it; looked at by the control thread."""

    def __init__(self, page: HeartbeatPage, queue: DeviceQueue) -> None:
        self._page, self._queue = page, queue
        self._lock = threading.Lock()
        self._open: deque[Entered] = deque()
        """Oldest first."""
        self.newest = Entered(0)
        if not queue.is_host:
            page.by_device()

    def enter(self) -> Entered:
        """A collective is called for."""
        self._page.collective_entered()
        self.newest = entered = Entered(self._page.called)
        if not self._queue.is_host:
            with self._lock:
                self._open.append(entered)
        return entered

    def completed(self, entered: Entered) -> None:
        """The host has seen it."""
        entered.over = True
        self._page.collective_completed()

    def all_completed(self) -> None:
        """Also on the device: the host has seen that it came past all of them."""
        with self._lock:
            self._open.clear()
            self._page.device_at(0, 0)
            self._page.collectives_over()

    def new_generation(self, generation: int) -> None:
        with self._lock:
            self._open.clear()
            self._page.device_at(0, 0)
            self._page.new_generation(generation)

    def look(self) -> None:
        """Tell how far the device is. A device that has failed is no further than it was."""
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
    return next(iter(numbers), 0)
