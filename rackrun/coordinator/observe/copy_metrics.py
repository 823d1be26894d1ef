"""Metrics of the copies of a job's state: snapshots, copies on other trays, checkpoints, and restores from each."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import Event, SnapshotDamaged, SnapshotMirrored, SnapshotStriped
from rackrun.protocol.ids import Rank, Step, step_in
from rackrun.protocol.wire import StateCopied

__all__ = ["CopyMetrics"]

_STALL_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WRITE_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class CopyMetrics:
    """Metrics of copies. ``plan`` returns the latest plan; a gauge shows a step when every rank of its world has
    reached it."""

    def __init__(self, registry: CollectorRegistry, plan: Callable[[], GenerationPlan | None]) -> None:
        self._plan = plan
        self._sealed: dict[Rank, int] = {}
        self._mirrored: dict[Rank, int] = {}
        self._sizes: dict[Rank, int] = {}
        self._on_disk = -1
        self.snapshot_step = _step(registry, "snapshot_step", "The newest step of which every rank has a snapshot")
        self.mirrored_step = _step(
            registry, "snapshot_mirrored_step", "The newest step of which every rank's snapshot is on another tray too"
        )
        self.checkpoint_step = _step(registry, "checkpoint_step", "The newest step with a whole checkpoint on disk")
        self.snapshot_bytes = Gauge("rackrun_snapshot_bytes", "Of the largest rank's snapshot.", registry=registry)
        self.snapshot_s = Histogram(
            "rackrun_snapshot_stall_seconds",
            "What a snapshot took from training on one rank.",
            buckets=_STALL_S,
            registry=registry,
        )
        self.copies = Counter(
            "rackrun_snapshot_copies", "Copies of snapshots to other trays, by outcome.", ["outcome"], registry=registry
        )
        self._made = self.copies.labels("made")
        self.damaged = Counter(
            "rackrun_snapshots_damaged", "Snapshots that did not match their checksums.", registry=registry
        )
        self.checkpoints = Counter(
            "rackrun_checkpoints", "Checkpoints on disk, by outcome.", ["outcome"], registry=registry
        )
        self.checkpoint_s = Histogram(
            "rackrun_checkpoint_write_seconds",
            "From the step after which it is until a checkpoint is whole on disk.",
            buckets=_WRITE_S,
            registry=registry,
        )
        self.restores = Counter("rackrun_restores", "Ranks restored, by source.", ["source"], registry=registry)

    def record_event(self, event: Event) -> None:
        if isinstance(event, SnapshotDamaged):
            self.damaged.inc()
        elif isinstance(event, SnapshotMirrored) and event.steps:
            self._elsewhere(event, max(event.steps))
        elif isinstance(event, SnapshotStriped):
            self._elsewhere(event, event.step)

    def _elsewhere(self, event: SnapshotMirrored | SnapshotStriped, step: Step) -> None:
        self._made.inc()
        plan = self._plan()
        for member in plan.members if plan else ():
            if (member.slot, member.incarnation) == (event.slot, event.incarnation):
                found = step_in(plan.layout, step) if plan else None
                self._mirrored[member.rank] = -1 if found is None else found
        self.mirrored_step.set(self._of_all(self._mirrored))

    def record_copy(self, told: StateCopied) -> None:
        match told.kind, told.outcome:
            case "snapshot", _:
                self._sealed[told.rank], self._sizes[told.rank] = told.at.step, told.bytes
                self.snapshot_s.observe(told.seconds)
                self.snapshot_step.set(self._of_all(self._sealed))
                self.snapshot_bytes.set(max(self._sizes.values()))
            case "copy", outcome:
                self.copies.labels(outcome).inc()
            case "resume", _:
                self.restores.labels("disk").inc()
                self._whole(told.at.step)
            case "checkpoint", "done":
                if told.at.step > self._on_disk:  # more than one rank may have finished it
                    self.checkpoints.labels("done").inc()
                    self.checkpoint_s.observe(told.seconds)
                    self._whole(told.at.step)
            case "checkpoint", outcome:
                self.checkpoints.labels(outcome).inc()
            case _:
                pass  # from a newer worker

    def record_recovery(self, recovery: RecoveryRecord) -> None:
        if not recovery.overtaken:
            for source in recovery.sources:
                self.restores.labels(source).inc()

    def _whole(self, step: int) -> None:
        self._on_disk = step
        self.checkpoint_step.set(step)

    def _of_all(self, steps: dict[Rank, int]) -> int:
        plan = self._plan()
        return min((steps.get(member.rank, -1) for member in plan.members), default=-1) if plan else -1


def _step(registry: CollectorRegistry, name: str, what: str) -> Gauge:
    gauge = Gauge(f"rackrun_{name}", f"{what}; -1: none yet.", registry=registry)
    gauge.set(-1)
    return gauge
