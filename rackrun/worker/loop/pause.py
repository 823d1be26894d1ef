"""Pauses this worker after a step, as all ranks do, so that a planned swap can replace a rank.

The gate of the step has announced the pause to all ranks, so no rank has begun a later unit. The pause lasts until its
generation is broken, for whatever reason. A normal recovery follows, in which no rank is behind.
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

__all__ = ["WorkerPause"]


class WorkerPause:
    """Holds a worker at a step boundary during a planned swap, with the snapshot that a newcomer would need."""

    def __init__(
        self, runtime: Runtime, snapshots: Snapshots, durable: DurableCheckpoints | None, reports: Reports
    ) -> None:
        self._world, self._page = runtime.world, runtime.page
        self._snapshots, self._durable, self._reports = snapshots, durable, reports

    def hold(self, at: Position, *, last: bool) -> None:
        """Pause after ``at``, which is committed and whose copies (snapshot, checkpoint) have begun.

        Waits for those copies, reports the pause, and returns when the generation is broken. ``last``: ``at`` is the
        last step of the run. Then the checkpoint is written to disk first, as no later step would replace one whose
        writer is ended.
        """
        self._snapshots.settle(self._page.progress)
        if self._durable is not None:
            self._durable.settle(self._page.progress)
            if last:
                self._durable.wait_written(lambda: self._world.broken)
        # A rank that is ended from here on has no device work pending that others wait for.
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        self._page.enter(Activity.WAITING, at)
        generation = Generation(self._world.generation)
        if self._world.unless_broken(lambda: self._reports.paused(generation)):
            self._world.wait_broken()

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """Context manager for taking the snapshot before a pause: prints a `MemoryPlanError` instead of raising it.

        The rank pauses without a snapshot then, and the coordinator sees that there is none.
        """
        try:
            yield
        except MemoryPlanError as error:
            say(f"rank {self._world.rank}: no snapshot for a planned swap, there is no memory for it: {error}")
