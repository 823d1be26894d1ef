"""What a device has yet to do when the host has asked for it: its streams, of which a wait is not the host's.

A collective of NCCL is only enqueued by its call, and its ``wait()`` makes the stream wait. An abort does not raise either: the kernel leaves
with garbage, and what stands behind it in the stream goes on with that. So whoever draws a conclusion from what was computed lets the
device come there first, and looks whether the generation is broken afterwards.
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

__all__ = ["DeviceQueue", "Moment", "Waits", "queue_of", "wait_until"]

_EAGER_S = 0.002
_NAP_S = 0.0002
_REMEMBERED = 8
_LOOKS = 20
"""In a row, some 30 us, before other threads of Python get their turn for sure."""


class Moment(Protocol):
    """A place in a stream, and the time at which the device came past it."""

    def passed(self) -> bool:
        """Any thread that has called `DeviceQueue.use`."""

    def since(self, earlier: Moment) -> float:
        """Seconds of the device, once both are passed."""


class DeviceQueue(Protocol):
    is_host: bool
    """A call has done what it does when it returns, and a wait is the host's."""

    @property
    def name(self) -> str:
        """Of the device, for people."""

    def mark(self) -> Callable[[], bool]:
        """Asks whether all is over that this thread has enqueued in its current stream until now."""

    def moment(self) -> Moment:
        """Behind all that this thread has enqueued in its current stream until now."""

    def place(self) -> AbstractContextManager[None]:
        """Where this thread's current stream is now. Another thread, within it, enqueues behind that."""

    def stream(self) -> int:
        """Which stream is this thread's current one."""

    def is_capturing(self) -> bool:
        """What this thread enqueues is recorded for later, in a graph."""

    def use(self) -> None:
        """As `rackrun.checkpoint.host_memory.device_threads.use_device`."""

    def synchronise(self) -> None:
        """Wait until all is over that anybody has enqueued, in any stream. It cannot be left: for a thread that may be. RuntimeError where the
        device has failed."""


def queue_of(device: torch.device) -> DeviceQueue:
    return _CudaQueue(device) if device.type == "cuda" else _HostQueue()


class Waits:
    """Of one place in a step. The last few tell when the end of the next one may come: naps until shortly before the shortest of them would be over,
    then looks without a nap until the longest but one would be. A nap at the end is a time in which the device has nothing to do."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_REMEMBERED)
        self._usual = 0.0, 0.0

    def nap_s(self, waited_s: float) -> float:
        """So long may the host sleep that has waited ``waited_s``. 0: it only lets other threads work."""
        if waited_s < _EAGER_S:
            return 0.0
        shortest, longest = self._usual
        return 0.0 if shortest - _EAGER_S <= waited_s <= longest + _EAGER_S else _NAP_S

    def took(self, waited_s: float) -> None:
        self._last.append(waited_s)
        known = sorted(self._last)
        self._usual = known[0], known[max(len(known) - 2, 0)]


def wait_until(passed: Callable[[], bool], gives_up: Callable[[], bool], waits: Waits | None = None) -> bool:
    """Whether it has, before the caller gives up. Nothing is awaited on the device: that could not be left. ``waits``: those before this one, at the
    same place."""
    began, waits, looks = time.monotonic(), waits or Waits(), 0
    nothing = select.poll()
    while not passed():
        if gives_up():
            return False
        nap_s = waits.nap_s(time.monotonic() - began)
        looks += 1
        if nap_s or not looks % _LOOKS:
            time.sleep(nap_s)  # 50 us at least
        else:
            nothing.poll(0)  # gives Python's lock away, and takes it back at once if nobody is quicker
    waits.took(time.monotonic() - began)
    return True


class _HostQueue:
    is_host = True

    @property
    def name(self) -> str:
        return "the host's processors"

    def mark(self) -> Callable[[], bool]:
        return _over

    def moment(self) -> Moment:
        return _HostMoment()

    def place(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def use(self) -> None:
        """Nothing to set."""

    def synchronise(self) -> None:
        """All is over."""


class _HostMoment:
    def __init__(self) -> None:
        self._at_s = time.monotonic()

    def passed(self) -> bool:
        return True

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _HostMoment), "a moment of this queue"
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

    def moment(self) -> Moment:
        return _CudaMoment(self._device)

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


class _CudaMoment:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, _CudaMoment), "a moment of this queue"
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def _over() -> bool:
    return True
