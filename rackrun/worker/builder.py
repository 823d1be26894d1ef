"""Builds a generation's communicators in a helper thread, because building cannot be broken: it can only be left.

A peer that stops in the middle of gloo's handshake holds everyone for as long as the handshake's timeout. So the main
thread never waits for gloo itself, it waits for this thread *or* for a newer generation, whichever comes first. Each build
has its own connection to the store: torch's client holds a lock while it waits, and would block the next build.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rackrun.core.commands import Plan
from rackrun.worker.communicator import Communicator, build_communicator

if TYPE_CHECKING:
    from rackrun.worker.group import ElasticGroup

__all__ = ["Builder"]

_HANDSHAKE = timedelta(seconds=20)
_PATIENCE = timedelta(minutes=30)
"""At the start workers come as their scripts get here, not all at once."""


class Builder(threading.Thread):
    def __init__(
        self,
        plan: Plan,
        groups: Sequence[ElasticGroup],
        device: torch.device,
        *,
        patient: bool = False,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=f"rackrun-build-{plan.generation}", daemon=True)
        self.communicators: dict[ElasticGroup, Communicator] = {}
        self.over = False
        self.error: Exception | None = None
        self._plan, self._device, self._patient, self._done = plan, device, patient, done
        self._groups = [(group, group.key, group.rank(), group.size(), group.ranks) for group in groups]
        self._abandoned = False

    def abandon(self) -> None:
        """A newer generation overtakes this one: nobody will use what is being built."""
        self._abandoned = True
        for communicator in list(self.communicators.values()):
            communicator.break_()

    def run(self) -> None:
        try:
            self._build()
        except Exception as error:  # noqa: BLE001 - kept: the main thread waits for the next generation with it
            self.error = error
        self.over = True
        self._done()

    def _build(self) -> None:
        host, _, port = self._plan.store.rpartition(":")
        if all(size == 1 for _, _, _, size, _ in self._groups):
            return
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_HANDSHAKE)
        for group, key, rank, size, ranks in self._groups:
            if size == 1:
                continue  # a loopback is exact
            if self._abandoned:
                return
            prefix = dist.PrefixStore(f"rackrun/{self._plan.generation}/{key}/{ranks[0]}", store)
            if self._patient:
                prefix.set(f"here/{rank}", "")
                prefix.wait([f"here/{peer}" for peer in range(size)], _PATIENCE)
            communicator = build_communicator(self._device, prefix, rank, size, _HANDSHAKE)
            self.communicators[group] = communicator
