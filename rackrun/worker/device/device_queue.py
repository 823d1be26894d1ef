"""Tracks the work that the host has enqueued on a device and that is not done yet.

A call of an NCCL collective only enqueues it, and its ``wait()`` makes the stream wait, not the host. An abort raises
nothing either: the kernel exits with garbage, and later work in the stream uses that. So code that draws a conclusion
from a result lets the device get there first, and then checks whether the generation is broken.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from rackrun.checkpoint.host_memory.device_threads import use_device

__all__ = ["DeviceQueue", "StreamEvent", "Waits", "queue_of", "wait_until"]

_EAGER_S = 0.002
_NAP_S = 0.0002
_REMEMBERED = 8
_LOOKS = 20
"""The number of polls in a row (about 30 us) after which other Python threads certainly get a turn."""


class StreamEvent(Protocol):
    """A place in a stream, with the time at which the device passed it."""

    def passed(self) -> bool:
        """Whether the device has passed it. Any thread that has called `DeviceQueue.use`."""

    def since(self, earlier: StreamEvent) -> float:
        """Return the device time from ``earlier`` to this place, in seconds, once both are passed."""


class DeviceQueue(Protocol):
    """The work of one device, or of the host."""

    is_host: bool
    """Whether the host computes: a call has done its work when it returns, and a wait is the host's."""

    @property
    def name(self) -> str:
        """The device's name, for messages."""

    def mark(self) -> Callable[[], bool]:
        """Return a function that tells whether everything is done that this thread has enqueued in its current stream
        so far."""

    def record_event(self) -> StreamEvent:
        """Return the place after everything that this thread has enqueued in its current stream so far."""

    def place(self) -> AbstractContextManager[None]:
        """Return a context manager for another thread: what that enqueues within comes after the current end of this
        thread's stream."""

    def stream(self) -> int:
        """Return the id of this thread's current stream."""

    def is_capturing(self) -> bool:
        """Whether this thread's work is being recorded in a graph instead of run."""

    def use(self) -> None:
        """Select the device in this thread (see `rackrun.checkpoint.host_memory.device_threads.use_device`)."""

    def synchronise(self) -> None:
        """Wait until everything is done that any thread has enqueued in any stream. Raises `RuntimeError` if the device
        has failed.

        The wait cannot be interrupted, so call this in a thread that may be abandoned.
        """


def queue_of(device: torch.device) -> DeviceQueue:
    """Return the queue of ``device``."""
    return _CudaQueue(device) if device.type == "cuda" else _HostQueue()


class Waits:
    """The recent waits at one place in a step, which predict when the next one ends.

    The host sleeps until shortly before the shortest of them would end, and then polls without sleeping until the
    second longest would. Sleeping past the end would leave the device idle.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_REMEMBERED)
        self._usual = 0.0, 0.0

    def nap_s(self, waited_s: float) -> float:
        """Return how long, in seconds, the host may sleep after it has waited ``waited_s``; 0: it only gives other
        threads a turn."""
        if waited_s < _EAGER_S:
            return 0.0
        shortest, longest = self._usual
        return 0.0 if shortest - _EAGER_S <= waited_s <= longest + _EAGER_S else _NAP_S

    def record(self, waited_s: float) -> None:
        """Record the length of a wait."""
        self._last.append(waited_s)
        known = sorted(self._last)
        self._usual = known[0], known[max(len(known) - 2, 0)]


def wait_until(passed: Callable[[], bool], gives_up: Callable[[], bool], waits: Waits | None = None) -> bool:
    """Poll until ``passed()`` or ``gives_up()`` is true, and return whether it was ``passed()``. Blocking calls of the
    device are avoided, because they cannot be interrupted. ``waits``: earlier waits at the same place."""
    began, waits, looks = time.monotonic(), waits or Waits(), 0
    nothing = select.poll()
    while not passed():
        if gives_up():
            return False
        nap_s = waits.nap_s(time.monotonic() - began)
        looks += 1
        if nap_s or not looks % _LOOKS:
            time.sleep(nap_s)  # takes 50 us at least
        else:
            nothing.poll(0)  # releases Python's lock, and takes it again at once unless another thread is quicker
    waits.record(time.monotonic() - began)
    return True


class _HostQueue:
    is_host = True

    @property
    def name(self) -> str:
        return "the host's processors"

    def mark(self) -> Callable[[], bool]:
        return _over

    def record_event(self) -> StreamEvent:
        return _HostStreamEvent()

    def place(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def use(self) -> None:
        """Do nothing: there is no device to select."""

    def synchronise(self) -> None:
        """Do nothing: all work is done."""


class _HostStreamEvent:
    def __init__(self) -> None:
        self._at_s = time.monotonic()

    def passed(self) -> bool:
        return True

    def since(self, earlier: StreamEvent) -> float:
        assert isinstance(earlier, _HostStreamEvent), "a moment of this queue"
        return self._at_s - earlier._at_s


class _CudaQueue:
    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        properties = torch.cuda.get_device_properties(self._device)
        uuid = getattr(properties, "uuid", "")
        return f"GPU {self._device.index} ({properties.name}{f', GPU-{uuid}' if uuid else ''})"

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.query

    def record_event(self) -> StreamEvent:
        return _CudaStreamEvent(self._device)

    def place(self) -> AbstractContextManager[None]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return self._behind(event)

    @contextlib.contextmanager
    def _behind(self, event: torch.cuda.Event) -> Iterator[None]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).stream_id)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def use(self) -> None:
        use_device(self._device)

    def synchronise(self) -> None:
        torch.cuda.synchronize(self._device)


class _CudaStreamEvent:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())

    def since(self, earlier: StreamEvent) -> float:
        assert isinstance(earlier, _CudaStreamEvent), "a moment of this queue"
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def _over() -> bool:
    return True
