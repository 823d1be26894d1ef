"""The worker's part in a planned swap: to stand still after a step, as all ranks do, with what a newcomer would need.

The gate of the step has told everybody of it, so nobody has begun anything later. The pause lasts until its generation is
broken, whatever for; from there on it is a recovery like any other, in which nobody is behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.link.heartbeat_page import Activity
from rackrun.protocol.ids import Generation, Position
from rackrun.worker.process.reports import Reports, say
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints
from rackrun.worker.snapshots.shard_snapshots import Snapshots

__all__ = ["Pause"]


class Pause:
    def __init__(
        self, runtime: Runtime, snapshots: Snapshots, durable: DurableCheckpoints | None, reports: Reports
    ) -> None:
        self._world, self._page = runtime.world, runtime.page
        self._snapshots, self._durable, self._reports = snapshots, durable, reports

    def stand(self, at: Position, *, last: bool) -> None:
        """After ``at`` was committed and its copies were begun. ``last``: no later step would make good for a checkpoint whose
        writer goes, so it is written first."""
        self._snapshots.settle(self._page.progress)
        if self._durable is not None:
            self._durable.settle(self._page.progress)
            if last:
                self._durable.wait_written(lambda: self._world.broken)
        if self._world.device.type == "cuda":  # whoever is ended now has nothing under way that others wait for
            torch.cuda.synchronize(self._world.device)
        self._page.enter(Activity.WAITING, at)
        generation = Generation(self._world.generation)
        if self._world.unless_broken(lambda: self._reports.paused(generation)):
            self._world.wait_broken()

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """The snapshot for a pause may fail: without it this rank pauses as well, and the coordinator sees that there is none."""
        try:
            yield
        except MemoryPlanError as error:
            say(f"rank {self._world.rank}: no snapshot for a planned swap, there is no memory for it: {error}")
