"""Reports to the coordinator: that the worker is ready, what it has committed and logged, that it has resumed, that it
has finished.

Without an agent nothing is sent, but rank 0 prints its log.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rackrun.checkpoint.base.messages import say
from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.events import (
    BatchChanged,
    LossNotRepeated,
    ReplicasDiffer,
    SnapshotDamaged,
    SourcesDiffer,
    WorkerFinished,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
)
from rackrun.protocol.ids import Generation, Position, Rank, Step, step_in
from rackrun.protocol.wire import Logged, StateCopied, UnitCommitted
from rackrun.worker.batch.mesh_axes import Axes
from rackrun.worker.data.global_batch import Batches, StepBatch
from rackrun.worker.device.numerics import numerics_of
from rackrun.worker.process.runtime import Runtime

__all__ = ["Reports", "say"]


class Reports:
    """Sends this worker's reports through the agent; without an agent does nothing, except that rank 0 prints what is
    logged."""

    def __init__(self, runtime: Runtime, mesh: Axes = (), *, exact: bool = False, shards: int = 0) -> None:
        self._channel, self._boot, self._world = runtime.channel, runtime.boot, runtime.world
        self._mesh, self._exact, self._shards = mesh, exact, shards
        self._device = runtime.device
        self.fixed, self.reenters = "", False
        """See `WorkerReady.fixed` and `WorkerReady.reenters`."""
        self.setup_ms = -1
        """See `WorkerReady.setup_ms`."""
        self._snapshot = self._not_mirrored = -1

    @property
    def _axes(self) -> Axes:
        """The current axes of the mesh: a single axis over all ranks changes with the world."""
        return ((self._mesh[0][0], self._world.size),) if len(self._mesh) == 1 else self._mesh

    def ready(self, replica_class: str) -> None:
        """Report that this worker is ready, with its ``replica_class``; "" on a spare."""
        self._world.replica_class = replica_class
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                WorkerReady(
                    slot=self._boot.slot,
                    incarnation=self._boot.incarnation,
                    replica_class=replica_class,
                    mesh=self._axes,
                    fixed=self.fixed,
                    reenters=self.reenters,
                    exact=self._exact,
                    shards=self._shards,
                    setup_ms=self.setup_ms,
                    numerics=tuple(numerics_of(self._device).items()),
                )
            )

    def resumed(self, generation: Generation) -> None:
        """Report that this worker has resumed in ``generation``."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                WorkerResumed(slot=self._boot.slot, incarnation=self._boot.incarnation, generation=generation)
            )

    def paused(self, generation: Generation) -> None:
        """Report that this worker pauses in ``generation``."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                WorkerPaused(slot=self._boot.slot, incarnation=self._boot.incarnation, generation=generation)
            )

    def damaged(self, generation: Generation, named: int, where: str, because: str) -> None:
        """Report that the snapshot ``named`` at ``where`` is damaged, so that the coordinator plans again."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                SnapshotDamaged(
                    slot=self._boot.slot,
                    incarnation=self._boot.incarnation,
                    generation=generation,
                    step=Step(named),
                    where=where,
                    because=because,
                )
            )

    def sources_differ(self, generation: Generation, because: str) -> None:
        """Report that the live sources of this rank differ, so that the coordinator plans again."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                SourcesDiffer(
                    slot=self._boot.slot, incarnation=self._boot.incarnation, generation=generation, because=because
                )
            )

    def differ(self, at: Position, culprits: tuple[Rank, ...], good: Position, differing: tuple[Rank, ...]) -> None:
        """Report that replicas differ (see `ReplicasDiffer`)."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                ReplicasDiffer(
                    slot=self._boot.slot,
                    incarnation=self._boot.incarnation,
                    generation=Generation(self._world.generation),
                    at=at,
                    culprits=culprits,
                    good=good,
                    again=bool(differing),
                    differing=differing,
                )
            )

    def not_repeated(self, at: Position) -> None:
        """Report a loss that was not finite and did not repeat (see `LossNotRepeated`)."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(LossNotRepeated(slot=self._boot.slot, incarnation=self._boot.incarnation, at=at))

    def finished(self, took_ms: int) -> None:
        """Report that ``main`` has ended. ``took_ms``: see `WorkerFinished`."""
        if self._channel is not None and self._boot is not None:
            boot = self._boot
            self._channel.send(WorkerFinished(slot=boot.slot, incarnation=boot.incarnation, took_ms=took_ms))

    def committed(
        self, at: Position, attempt: int, rescaled: int, seconds: float, own: float, ids: np.ndarray[Any, Any]
    ) -> None:
        """Report a committed unit. ``rescaled``: see `UnitCommitted`; ``seconds``: its time; ``own``: the part that this
        rank did not wait for others; ``ids``: the samples that it delivered."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                UnitCommitted(
                    slot=self._boot.slot,
                    incarnation=self._boot.incarnation,
                    generation=Generation(self._world.generation),
                    rank=self._world.rank,  # type: ignore[arg-type]
                    at=at,
                    attempt=attempt,
                    rescaled=rescaled,
                    seconds=seconds,
                    own=own,
                    passes=self._world.own_time.passes,
                    in_passes=self._world.own_time.in_passes,
                    meets=self._world.microbatch_collectives.detected,
                    gate=self._world.gate.scalars if self._world.gate else (),
                    ids=ids.astype("<i8").tobytes(),
                    stages=self._world.stages.collect(),
                )
            )

    def batch_changed(self, step: int, batch: StepBatch, batches: Batches) -> None:
        """Report that the global batch has changed with the committed ``step``."""
        if self._channel is not None and self._boot is not None:
            samples, target, rule = batches.summary(batch)
            self._channel.send(
                BatchChanged(
                    slot=self._boot.slot,
                    incarnation=self._boot.incarnation,
                    step=Step(step),
                    batch=samples,
                    full_batch=batches.plan.global_batch,
                    factor=batch.lr_factor,
                    target=target,
                    rule=rule,
                )
            )

    def copied(self, kind: str, step: int, outcome: str = "done", *, size: int = 0, seconds: float = 0.0) -> None:
        """Report a copy of the state (see `StateCopied`). Any thread."""
        if self._channel is not None and self._boot is not None:
            with contextlib.suppress(OSError):  # when the agent is gone this process ends anyway
                self._channel.send(
                    StateCopied(
                        slot=self._boot.slot,
                        incarnation=self._boot.incarnation,
                        generation=Generation(self._world.generation),
                        rank=self._world.rank,  # type: ignore[arg-type]
                        at=Position(step),
                        kind=kind,
                        outcome=outcome,
                        bytes=size,
                        seconds=seconds,
                    )
                )

    def snapshots(self, page: HeartbeatPage, *, size: int, seconds: float) -> None:
        """Report snapshots, and failed copies to other trays, that are new since the last call. ``size`` and
        ``seconds``: of the newest snapshot."""
        newest, failed = max(page.snapshots(), default=-1), page.mirror_failed
        if newest != self._snapshot and (step := self._step_of(newest)) is not None:
            self.copied("snapshot", step, size=size, seconds=seconds)
        if failed != self._not_mirrored and (step := self._step_of(failed)) is not None:
            self.copied("copy", step, "failed")
        self._snapshot, self._not_mirrored = newest, failed

    def _step_of(self, named: int) -> int | None:
        return None if named < 0 else step_in(self._world.layout, Step(named))

    def logged(self, values: dict[str, float | int | str], at: Position) -> None:
        """Report values that the script has logged at ``at``."""
        if self._channel is not None and self._boot is not None:
            self._channel.send(
                Logged(
                    slot=self._boot.slot,
                    incarnation=self._boot.incarnation,
                    generation=Generation(self._world.generation),
                    rank=self._world.rank,  # type: ignore[arg-type]
                    at=at,
                    values=values,
                )
            )
        elif self._world.rank == 0:
            shown = (
                f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
            )
            print(f"step {at.step}  {'  '.join(shown)}", flush=True)
