"""What a device has yet to do when the host has asked for it: its stream, of which a wait is not the host's.

A collective of NCCL is only enqueued by its call, and its ``wait()`` makes the stream wait. An abort does not raise either: the kernel leaves
with garbage, and what stands behind it in the stream goes on with that. So whoever draws a conclusion from what was computed lets the
device come there first, and looks whether the generation is broken afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["DeviceQueue", "queue_of", "wait_until"]

_EAGER_S = 0.002
_NAP_S = 0.0002


class DeviceQueue(Protocol):
    is_host: bool
    """A call has done what it does when it returns, and a wait is the host's."""

    def mark(self) -> Callable[[], bool]:
        """Asks whether all is over that this thread has enqueued until now."""


def queue_of(device: torch.device) -> DeviceQueue:
    return _CudaQueue(device) if device.type == "cuda" else _HostQueue()


def wait_until(passed: Callable[[], bool], gives_up: Callable[[], bool]) -> bool:
    """Whether it has, before the caller gives up. Nothing is awaited on the device: that could not be left."""
    began = time.monotonic()
    while not passed():
        if gives_up():
            return False
        time.sleep(0 if time.monotonic() - began < _EAGER_S else _NAP_S)
    return True


class _HostQueue:
    is_host = True

    def mark(self) -> Callable[[], bool]:
        return _over


class _CudaQueue:
    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.query


def _over() -> bool:
    return True
