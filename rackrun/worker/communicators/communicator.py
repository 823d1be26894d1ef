"""What moves bytes inside an elastic group, for one generation: gloo on CPUs, gloo and NCCL on GPUs, behind one seam.

A communicator is built, used, broken and dropped; it is never repaired. Breaking means that every collective in flight on it ends, on this rank, at
once: with an error on the host (`rackrun.worker.communicators.gloo`), with garbage on a device (`rackrun.worker.communicators.nccl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

__all__ = ["COLLECTIVE_TIMEOUT", "OWN_FAULTS", "Communicator", "PointToPoint"]

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Hangs are found by the agent, from observed step times; a collective itself need not give up."""

OWN_FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""What a rank's own device says. They are RuntimeErrors, as a lost peer's are, but the next generation would meet them here again: this rank ends, and
another takes its place."""

PointToPoint = tuple[str, torch.Tensor, int, int]
"""``send`` or ``recv``, the tensor, the peer's rank in the group, the tag."""


class Communicator(Protocol):
    """One generation's transport of one group."""

    @property
    def batches(self) -> bool:
        """Sends and receives that belong together have to be called as one `batch`."""

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        """A collective, by the device's half; or by the hosts', for tensors of the host, and for what hosts alone have to agree on. Returns its work;
        None: a synchronous one stands in the current stream. RuntimeError where it is broken."""

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        """All of them at once, whatever their order, by the device's half. Returns one work."""

    def is_over(self, work: Any) -> bool:
        """``work`` of this communicator's has ended, as far as can be told without waiting. Any thread, also beside a break."""

    def lost_a_peer(self) -> bool:
        """Of the host's half, on a device: some peer has closed its end, as it does first of all when it is broken, and the system where it ends.
        What a device has received after that may be garbage."""

    def break_(self) -> None:
        """End what is in flight. Any thread, any number of times; never blocks for long."""

    def drop(self) -> None:
        """Before the last reference goes: break it, and wait until that is over. May block."""
