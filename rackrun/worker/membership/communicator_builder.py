"""Builds a generation's communicators in helper threads, because a build cannot be interrupted, only abandoned.

A peer that stops during a handshake blocks everyone for the handshake's timeout. So the main thread never waits for a
handshake itself. It waits for the helper thread *or* for a newer generation, whichever comes first. Each group is built
in a thread of its own: together they take as long as the slowest, and ranks need not build them in the same order.

A group of more ranks than `rackrun.worker.communicators.on_demand.eager_ranks` is not built here: its communicator
builds each part at its first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.protocol.commands import GenerationPlan
from rackrun.worker.communicators.communicator import COLLECTIVE_TIMEOUT, Communicator
from rackrun.worker.communicators.exchange_rooms import ExchangeRooms
from rackrun.worker.communicators.exchange_store import ExchangeStore
from rackrun.worker.communicators.gate_tree import with_gate_tree
from rackrun.worker.communicators.gloo import GlooCommunicator
from rackrun.worker.communicators.handshakes import Handshakes
from rackrun.worker.communicators.on_demand import OnDemand, eager_ranks
from rackrun.worker.device.device_queue import DeviceQueue, queue_of

if TYPE_CHECKING:
    from rackrun.worker.membership.elastic_group import ElasticGroup

__all__ = ["Builder", "build_communicator"]

_HANDSHAKE, _HANDSHAKE_OF_A_RANK = timedelta(seconds=20), timedelta(milliseconds=10)
"""Timeout of a handshake, and the addition for each rank of a group that is built on demand. 10,000 handshakes take 10
to 30 s (docs/scale.md)."""
_PATIENCE = timedelta(minutes=30)
"""How long to wait at the start, when workers arrive as their scripts reach this point, not all at once."""
_FREE_BYTES = 3 * 2**30
"""Free memory of a device, in bytes, below which the old communicators are dropped before the build. NCCL's buffers for
a group of eight take 0.3 to 1.5 GB."""


def build_communicator(
    device: torch.device, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> Communicator:
    """Build a group's communicator, and return it when all ``size`` ranks have joined.

    ``store`` must belong to this group alone. Raises `RuntimeError` after ``timeout``. Call it in a thread that may be
    abandoned.
    """
    host = GlooCommunicator(store, rank, size, timeout)
    if device.type != "cuda":
        return host
    from rackrun.worker.communicators.nccl import nccl_communicator  # needs a GPU build of torch

    return nccl_communicator(device, store, rank, size, timeout, host)


class Builder(threading.Thread):
    """A thread that builds the communicators of all ``groups`` for ``plan``."""

    def __init__(
        self,
        plan: GenerationPlan,
        groups: Sequence[ElasticGroup],
        device: torch.device,
        token: str,
        *,
        patient: bool = False,
        done: Callable[[], None] = lambda: None,
        queue: DeviceQueue | None = None,
        handshakes: Handshakes | None = None,
    ) -> None:
        """``patient``: wait long for the other ranks, as at the start. ``done`` is called when `over` has become
        true, perhaps several times. ``queue``: of ``device``. ``handshakes`` counts the handshakes of later builds
        on demand."""
        super().__init__(name=f"rackrun-build-{plan.generation}", daemon=True)
        self.communicators: dict[ElasticGroup, Communicator] = {}
        self.over = False
        """Whether all communicators are built, or one cannot be (see ``error``)."""
        self.error: Exception | None = None
        self._plan, self._device, self._token, self._patient, self._done = plan, device, token, patient, done
        # a group of one rank needs no communicator: a loopback is exact
        self._groups = [(group, group.key, group.rank(), group.ranks) for group in groups if group.size() > 1]
        self._old = [group.communicator for group in groups if group.communicator is not None]
        self._queue, self._handshakes = queue or queue_of(device), handshakes or Handshakes()
        self._lock = threading.Lock()
        self._abandoned = False
        self._rooms = self._new_rooms()

    def abandon(self) -> None:
        """Stop: a newer generation replaces this one, and nobody will use what is being built."""
        with self._lock:
            self._abandoned = True
            communicators = list(self.communicators.values())
        self._rooms.close()
        for communicator in communicators:
            communicator.break_()

    def run(self) -> None:
        try:
            use_device(self._device)
            self._free_device_memory()
        except RuntimeError as error:
            self._fail(error)
            return
        threads = [
            threading.Thread(target=self._try, args=group, name=self.name, daemon=True) for group in self._groups[1:]
        ]
        for thread in threads:
            thread.start()
        if self._groups:
            self._try(*self._groups[0])
        for thread in threads:
            thread.join()
        self.over = True
        self._done()

    def _free_device_memory(self) -> None:
        """Drop the old communicators first if the device has little free memory."""
        if self._device.type == "cuda" and torch.cuda.mem_get_info(self._device)[0] < _FREE_BYTES:
            for communicator in self._old:
                communicator.drop()
        self._old.clear()

    def _try(self, group: ElasticGroup, key: str, rank: int, ranks: tuple[int, ...]) -> None:
        try:
            use_device(self._device)
            self._build(group, key, rank, ranks)
        except Exception as error:  # noqa: BLE001 - kept: the main thread reports it, and waits for the next plan
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.over = True
        self._done()

    def _build(self, group: ElasticGroup, key: str, rank: int, ranks: tuple[int, ...]) -> None:
        rooms: list[ExchangeStore] = []

        def room(name: str) -> ExchangeStore:
            rooms.append(self._rooms.enter(name))
            return rooms[-1]

        name, size = f"{key}/{ranks[0]}", len(ranks)
        on_demand = size > eager_ranks()
        try:
            store = room(name) if self._patient or not on_demand else None
            if self._patient and store is not None:
                _meet(store, rank, size, _PATIENCE)
            communicator: Communicator
            if on_demand or store is None:
                communicator = self._on_demand(name, rank, size)
            else:
                communicator = build_communicator(self._device, store, rank, size, _HANDSHAKE)
            self._keep(group, communicator)
            if key == "world":
                self._keep(
                    group, with_gate_tree(communicator, lambda block: room(f"gate/{block}"), rank, size, _HANDSHAKE)
                )
        finally:
            for each in rooms:
                self._rooms.leave(each)

    def _on_demand(self, name: str, rank: int, size: int) -> OnDemand:
        rooms = self._new_rooms()
        build = partial(_build_when_all_have_come, self._device, rooms, self._handshakes, name)
        return OnDemand(build, rooms.close, rank, size, self._queue)

    def _new_rooms(self) -> ExchangeRooms:
        address, token, generation = self._plan.store, self._token, self._plan.generation
        return ExchangeRooms(lambda name: ExchangeStore(address, token, f"{generation}/{name}"))

    def _keep(self, group: ElasticGroup, communicator: Communicator) -> Communicator:
        """Store the communicator for its group; break it at once if the build was abandoned."""
        with self._lock:
            self.communicators[group] = communicator
            abandoned = self._abandoned
        if abandoned:
            communicator.break_()
        return communicator


def _meet(store: ExchangeStore, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ``size`` ranks have called this with the same store. Raises `RuntimeError` after ``timeout``."""
    store.set(f"here/{rank}", b"")
    store.wait([f"here/{peer}" for peer in range(size)], timeout)


def _build_when_all_have_come(
    device: torch.device, rooms: ExchangeRooms, handshakes: Handshakes, group: str, part: str, rank: int, size: int
) -> Communicator:
    """Build a communicator at its first use.

    A rank that reaches a collective first waits for the others as in the collective itself, and the agents judge that
    wait. The handshake after it is short.
    """
    store = rooms.enter(f"{group}/{part}")
    try:
        _meet(store, rank, size, COLLECTIVE_TIMEOUT)
        with handshakes.one():
            return build_communicator(device, store, rank, size, _HANDSHAKE + size * _HANDSHAKE_OF_A_RANK)
    finally:
        rooms.leave(store)
