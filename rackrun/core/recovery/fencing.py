"""Break before fence: a living culprit that shares GPU memory with its peers is killed only when they have left the generation.

NCCL's kernels read and write buffers that their peers have mapped. A SIGKILL frees a process's own, and a peer whose kernel still runs on
them may die with an illegal memory access, so that one lost rank becomes two. So the culprit is condemned at once (`CondemnWorker`: it is no
member any more, and its rank is lost), the others are broken, and `FenceWorker` follows when each of them has parked: its kernels have left
by then. Who does not park does not hold that up for longer than `FENCE_WAIT_MS`.

Where no memory is shared the two go out together, the fence first: to wait would only delay the recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rackrun.core.generation.world import IN_PLACE, Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.protocol.commands import Command, CondemnWorker, FenceWorker, SetTimer, Worker
from rackrun.protocol.ids import TrayId, tray_of
from rackrun.topology.sources.partial_topology import PartialTopology

__all__ = ["FENCE_WAIT_MS", "Fencing"]

FENCE_WAIT_MS = 500
"""A condemned worker is killed after this time at the latest. A break takes milliseconds; parking waits for what a script computes."""
_partials = msgspec.json.Decoder(list[PartialTopology])


@dataclass(slots=True)
class Fencing:
    """Kills living members for whom others are to take over."""

    world: World
    rack: RackMachine
    emit: Callable[[Command], None]
    _held: dict[Worker, FenceWorker] = field(default_factory=dict)
    """Condemned, and not killed yet."""
    _timed: dict[Worker, None] = field(default_factory=dict)
    """Those of them whose timer is set."""

    def fence(self, record: WorkerRecord, because: str, *, fault: bool = False) -> None:
        """From now on it is no living worker. It is killed at once, or by `look` or `overdue`."""
        waits = self._shares_memory(record)
        command = self.rack.fence(record, because, fault=fault)
        if not waits:
            self.emit(command)
            return
        worker = record.worker
        self._held[worker] = command
        self.emit(CondemnWorker(slot=worker.slot, incarnation=worker.incarnation, because=because, fault=fault))

    def look(self, at_ms: int) -> None:
        """After whatever may have ended the wait: who parked, who was lost, what became of the world."""
        if not self._held:
            return
        if self.world.phase is not Phase.PARKING or not self.world.awaited:
            for worker in tuple(self._held):
                self._kill(worker)
            return
        for worker in self._held:
            if worker not in self._timed:
                self._timed[worker] = None
                self.emit(SetTimer(name=f"fence:{worker.slot}:{worker.incarnation}", at_ms=at_ms + FENCE_WAIT_MS))

    def overdue(self, name: str) -> None:
        """``slot:incarnation`` has been waited for long enough."""
        for worker in tuple(self._held):
            if f"{worker.slot}:{worker.incarnation}" == name:
                self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        """Unless it has ended by itself, or its tray is lost."""
        command = self._held.pop(worker)
        self._timed.pop(worker, None)
        record = self.rack.occupants.get(worker.slot)
        if record is not None and record.worker == worker and record.state is WorkerState.FENCED:
            self.emit(command)

    def _shares_memory(self, record: WorkerRecord) -> bool:
        """It is a rank among others, in a generation whose collectives may run, and its tray's driver lists GPUs."""
        world = self.world
        if world.phase not in IN_PLACE or record.rank is None or world.size < 2:
            return False
        return world.members.get(record.rank) is record and self._has_gpus(tray_of(record.worker.slot))

    def _has_gpus(self, tray: TrayId) -> bool:
        joined = self.rack.trays[tray]
        partials = _partials.decode(joined.topology) if joined.topology else []
        return any(found.gpus for partial in partials if partial.kind == "nvml" for found in partial.trays)

    def check_invariants(self) -> None:
        for worker in self._held:
            record = self.rack.occupants.get(worker.slot)
            alive = record is not None and record.worker == worker and record.alive
            assert not alive, f"{worker.slot} is to be killed, and counts as alive"
        assert not self._held or (self.world.phase is Phase.PARKING and self.world.awaited), "nobody is waited for"
        assert self._held.keys() == self._timed.keys(), "a wait without an end"
