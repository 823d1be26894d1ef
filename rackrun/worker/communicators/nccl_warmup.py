"""Creates a spare's first NCCL communicator while the spare waits, so that a recovery does not pay for it.

The first communicator in a process loads kernels, opens network devices and starts threads, which takes seconds. The
warm-up communicator has one rank, so no other process takes part, and it is dropped after one all-reduce.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rackrun.checkpoint.base.messages import say
from rackrun.checkpoint.host_memory.device_threads import use_device

__all__ = ["OneRankCommunicator", "warm_nccl"]


class OneRankCommunicator(Protocol):
    """A communicator of one rank. An exception from a method means that the communicator could not be made or used."""

    def connect(self, device: torch.device) -> None:
        """Create the communicator for ``device``. All three methods are called in the same thread."""

    def use(self) -> None:
        """Run one collective and return when the device has completed it."""

    def drop(self) -> None:
        """Destroy the communicator, if there is one. Called last, also after an error in the other methods."""


def warm_nccl(device: torch.device, alone: OneRankCommunicator | None = None) -> threading.Thread | None:
    """Start the warm-up in a daemon thread and return that thread, which need not be joined.

    Returns None when ``device`` is not a CUDA device. ``alone`` replaces the real communicator in tests. A failure is
    printed, not raised.
    """
    if device.type != "cuda":
        return None
    thread = threading.Thread(
        target=_warm, args=[device, _OneRankNccl() if alone is None else alone], name="rackrun-warm-nccl", daemon=True
    )
    thread.start()
    return thread


def _warm(device: torch.device, alone: OneRankCommunicator) -> None:
    use_device(device)
    try:
        try:
            alone.connect(device)
            alone.use()
        finally:
            alone.drop()
    except Exception as error:  # noqa: BLE001 - the real communicator decides
        say(f"warming NCCL up failed, a spare's first communicator will be cold: {type(error).__name__}: {error}")


class _OneRankNccl:
    def __init__(self) -> None:
        self._group: Any = None
        self._device = torch.device("cpu")

    def connect(self, device: torch.device) -> None:
        """Build a communicator of this rank alone on ``device``."""
        self._device = device
        options = dist.ProcessGroupNCCL.Options()
        # Blocking, as in the job's own communicators: torch would choose non-blocking mode for an eager connection.
        options.config.blocking = 1
        self._group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
        self._group.eager_connect_single_device(device)

    def use(self) -> None:
        """Run one small all-reduce in a separate CUDA stream, and wait until the device has completed it."""
        stream = torch.cuda.Stream(self._device)  # the spare's trial step may still be running in the default stream
        with torch.cuda.stream(stream):
            work = self._group.allreduce([torch.zeros(1, device=self._device)])
            if work is not None:
                work.wait()
        stream.synchronize()

    def drop(self) -> None:
        """Abort the communicator. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # as with every other communicator here; after an abort it is never destroyed
