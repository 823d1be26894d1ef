"""Builds a generation's communicators in a helper thread, because building cannot be broken: it can only be left.

A peer that stops in the middle of gloo's handshake holds everyone for as long as the handshake's timeout. So the main
thread never waits for gloo itself, it waits for this thread *or* for a newer generation, whichever comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from rackrun.checkpoint.device import use_device
from rackrun.core.commands import Plan
from rackrun.worker.communicator import Communicator, build_communicator
from rackrun.worker.store import ExchangeStore

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
        token: str,
        *,
        patient: bool = False,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=f"rackrun-build-{plan.generation}", daemon=True)
        self.communicators: dict[ElasticGroup, Communicator] = {}
        self.over = False
        self.error: Exception | None = None
        self._plan, self._device, self._token, self._patient, self._done = plan, device, token, patient, done
        self._groups = [(group, group.key, group.rank(), group.size(), group.ranks) for group in groups]
        self._abandoned = False
        self._store: ExchangeStore | None = None

    def abandon(self) -> None:
        """A newer generation overtakes this one: nobody will use what is being built."""
        self._abandoned = True
        if self._store is not None:
            self._store.close()
        for communicator in list(self.communicators.values()):
            communicator.break_()

    def run(self) -> None:
        try:
            use_device(self._device)
            self._build()
        except Exception as error:  # noqa: BLE001 - kept: the main thread waits for the next generation with it
            self.error = error
        self.over = True
        self._done()

    def _build(self) -> None:
        for group, key, rank, size, ranks in self._groups:
            if size == 1:
                continue  # a loopback is exact
            room = f"{self._plan.generation}/{key}/{ranks[0]}"
            self._store = store = ExchangeStore(self._plan.store, self._token, room)
            try:
                if self._abandoned:
                    return
                if self._patient:
                    store.set(f"here/{rank}", b"")
                    store.wait([f"here/{peer}" for peer in range(size)], _PATIENCE)
                self.communicators[group] = build_communicator(self._device, store, room, rank, size, _HANDSHAKE)
            finally:
                store.close()
