"""A spare's first communicator of NCCL is made before it is needed, while it waits: the first in a process loads kernels, opens network devices
and starts threads, which would take seconds of a recovery.

It is of one rank, so nobody else takes part, and it goes as soon as something has been summed on it.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.worker.process.reports import say

__all__ = ["Alone", "warm_nccl"]


class Alone(Protocol):
    """A communicator of one rank. What it raises means that it could not be made, or not be used."""

    def connect(self, device: torch.device) -> None:
        """In the thread that calls the rest, too."""

    def use(self) -> None:
        """One collective; returns when the device has done it."""

    def drop(self) -> None:
        """Whatever came before."""


def warm_nccl(device: torch.device, alone: Alone | None = None) -> threading.Thread | None:
    """Begin, in a thread that nobody has to wait for. None where ``device`` has no NCCL."""
    if device.type != "cuda":
        return None
    thread = threading.Thread(
        target=_warm, args=[device, _OneRank() if alone is None else alone], name="rackrun-warm-nccl", daemon=True
    )
    thread.start()
    return thread


def _warm(device: torch.device, alone: Alone) -> None:
    use_device(device)
    try:
        try:
            alone.connect(device)
            alone.use()
        finally:
            alone.drop()
    except Exception as error:  # noqa: BLE001 - the real communicator decides
        say(f"warming NCCL up failed, a spare's first communicator will be cold: {type(error).__name__}: {error}")


class _OneRank:
    def __init__(self) -> None:
        self._group: Any = None
        self._device = torch.device("cpu")

    def connect(self, device: torch.device) -> None:
        self._device = device
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 1  # as the real one: torch would choose the other mode for who connects at once
        self._group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
        self._group.eager_connect_single_device(device)

    def use(self) -> None:
        stream = torch.cuda.Stream(self._device)  # the step that the spare has tried may still be running in the other
        with torch.cuda.stream(stream):
            work = self._group.allreduce([torch.zeros(1, device=self._device)])
            if work is not None:
                work.wait()
        stream.synchronize()

    def drop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # as of every other: it is never destroyed after that
