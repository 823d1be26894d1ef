"""The interface of an elastic group's transport for one generation: gloo on CPUs, gloo and NCCL on GPUs.

A communicator is built, used, broken and dropped; it is never repaired. Breaking it ends every collective in flight on
this rank at once: with an error on the host (`rackrun.worker.communicators.gloo`), with garbage on a device
(`rackrun.worker.communicators.nccl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

__all__ = ["COLLECTIVE_TIMEOUT", "OWN_FAULTS", "Communicator", "PointToPoint"]

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""The timeout of a collective. The agent detects hangs from observed step times, so a collective itself need not time
out early."""

OWN_FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of a rank's own device. They are `RuntimeError`s, like those of a lost peer, but would occur here in the next
generation again. So this rank ends, and another takes its place."""

PointToPoint = tuple[str, torch.Tensor, int, int]
"""``send`` or ``recv``, the tensor, the peer's rank in the group, the tag."""


class Communicator(Protocol):
    """The transport of one group for one generation."""

    @property
    def batches(self) -> bool:
        """Whether sends and receives that belong together must be called as one `batch`."""

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        """Start a collective and return its work; None: a synchronous one is in the current stream. Raises
        `RuntimeError` if the communicator is broken.

        The device's backend runs it. With ``on_host`` the hosts' backend does: for host tensors, and for what only
        hosts must agree on.
        """

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        """Start all sends and receives at once, in any order, on the device's backend. Returns one work."""

    def is_over(self, work: Any) -> bool:
        """Whether this communicator's ``work`` has ended, as far as can be told without waiting. Any thread, also
        during a break."""

    def lost_a_peer(self) -> bool:
        """On a device: whether a peer has closed its connection to the hosts' backend.

        A peer that breaks closes it first, and the system closes it when the peer's process ends. What a device has
        received after that may be garbage.
        """

    def break_(self) -> None:
        """End all collectives in flight. Any thread, any number of times; never blocks for long."""

    def drop(self) -> None:
        """Break the communicator and wait until that is done. To be called before the last reference goes; may
        block."""
