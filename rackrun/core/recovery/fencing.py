"""Break before fence: a living culprit that shares GPU memory with its peers is killed only after they have left the
generation.

NCCL's kernels read and write buffers that their peers have mapped. SIGKILL frees a process's own memory, and a peer
whose kernel still runs on it may die of an illegal memory access, so that one lost rank becomes two. So the culprit is
condemned at once (`CondemnWorker`: it is no member any more, and its rank is lost), and the others are broken.
`FenceWorker` follows when each of them has parked, because its kernels have left by then. A worker that does not park
delays this by at most `FENCE_WAIT_MS`.

Where no memory is shared, both commands go out together, the fence first: waiting would only delay the recovery.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import IN_PLACE, Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.protocol.commands import CondemnWorker, FenceWorker, SetTimer, Worker
from rackrun.protocol.ids import TrayId, tray_of
from rackrun.protocol.timers import FenceOver
from rackrun.topology.sources.partial_topology import PartialTopology

__all__ = ["FENCE_WAIT_MS", "Fencing"]

FENCE_WAIT_MS = 500
"""Milliseconds after which a condemned worker is killed at the latest. A break takes milliseconds; parking waits for
the script's own computation."""
_partials = msgspec.json.Decoder(list[PartialTopology])


@dataclass(slots=True)
class Fencing:
    """Kills living members whose ranks others are to take over."""

    world: World
    rack: RackMachine
    out: Outbox
    held: dict[Worker, FenceWorker] = field(default_factory=dict)
    """Workers that are condemned and not killed yet, with the command that kills each."""
    _timed: dict[Worker, None] = field(default_factory=dict)
    """Workers of ``held`` whose timer is set."""

    def fence(self, record: WorkerRecord, because: str, *, fault: bool = False) -> None:
        """Condemn a worker. It is killed at once, or later by `kill_if_parked` or `overdue`."""
        waits = self._shares_memory(record)
        command = self.rack.fence(record, because, fault=fault)
        if not waits:
            self.out.emit(command)
            return
        worker = record.worker
        self.held[worker] = command
        self.out.emit(CondemnWorker(slot=worker.slot, incarnation=worker.incarnation, because=because, fault=fault))

    def kill_if_parked(self, at_ms: int) -> None:
        """Kill condemned workers if the wait for the others is over, else set their timers. Called whenever a worker
        parked or was lost, or the phase changed."""
        if not self.held:
            return
        if self.world.phase is not Phase.PARKING or not self.world.awaited:
            for worker in tuple(self.held):
                self._kill(worker)
            return
        for worker in self.held:
            if worker not in self._timed:
                self._timed[worker] = None
                self.out.emit(SetTimer(timer=FenceOver(worker.slot, worker.incarnation), at_ms=at_ms + FENCE_WAIT_MS))

    def overdue(self, worker: Worker) -> None:
        """Kill a worker whose wait is over."""
        if worker in self.held:
            self._kill(worker)

    def _kill(self, worker: Worker) -> None:
        """Emit the held `FenceWorker`, unless the worker has exited by itself or its tray is lost."""
        command = self.held.pop(worker)
        self._timed.pop(worker, None)
        record = self.rack.occupants.get(worker.slot)
        if record is not None and record.worker == worker and record.state is WorkerState.FENCED:
            self.out.emit(command)

    def _shares_memory(self, record: WorkerRecord) -> bool:
        """Return whether the worker is one of several ranks in a generation whose collectives may run, on a tray with
        GPUs."""
        world = self.world
        if world.phase not in IN_PLACE or record.rank is None or world.size < 2:
            return False
        return world.members.get(record.rank) is record and self._has_gpus(tray_of(record.worker.slot))

    def _has_gpus(self, tray: TrayId) -> bool:
        """Return whether the driver of a tray lists GPUs."""
        joined = self.rack.trays[tray]
        partials = _partials.decode(joined.topology) if joined.topology else []
        return any(found.gpus for partial in partials if partial.kind == "nvml" for found in partial.trays)

    def check_invariants(self) -> None:
        """Raise AssertionError if a held worker counts as alive or nothing would end its wait."""
        for worker in self.held:
            record = self.rack.occupants.get(worker.slot)
            alive = record is not None and record.worker == worker and record.alive
            assert not alive, f"{worker.slot} is to be killed, and counts as alive"
        assert not self.held or (self.world.phase is Phase.PARKING and self.world.awaited), "nobody is waited for"
        assert self.held.keys() == self._timed.keys(), "a wait without an end"
