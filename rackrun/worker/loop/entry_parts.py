"""The parts of the worker that the units of one entry of ``main`` share, and what an entry hands over to the next."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from rackrun.protocol.ids import Position
from rackrun.worker.batch.learning_rates import LearningRates
from rackrun.worker.batch.mesh_axes import Axes
from rackrun.worker.data.data_run import DataState
from rackrun.worker.data.global_batch import Batches
from rackrun.worker.exact.exact_reduction import ExactReduction
from rackrun.worker.integrity.not_finite import NanProbation
from rackrun.worker.integrity.replicas import ReplicaCheck
from rackrun.worker.integrity.silent_corruption import CorruptionCheck
from rackrun.worker.process.reports import Reports, say
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints
from rackrun.worker.snapshots.shard_snapshots import Snapshots
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.hang_deadlines import HangDeadlines
from rackrun.worker.steps.multi_part_steps import MultiPartWatch
from rackrun.worker.steps.post_gate import PostGateFailures
from rackrun.worker.steps.recorded_units import RecordedUnits
from rackrun.worker.steps.undo.unit_undo import UnitUndo

__all__ = ["EntryParts", "MainHandover"]


@dataclass(frozen=True)
class MainHandover:
    """What one entry of ``main`` hands over to the next."""

    axes: Axes
    snapshots: Snapshots
    durable: DurableCheckpoints | None
    pace: HangDeadlines
    world_size: int
    """Number of ranks of the former world."""
    left_after: int | None
    """The step after which the script left its loop early; None if it did not."""


@dataclass(slots=True)
class EntryParts:
    """The parts of the worker that the units of one entry of ``main`` share."""

    runtime: Runtime
    axes: Axes
    state: TrackedState
    batches: Batches
    exact: ExactReduction | None
    durable: DurableCheckpoints | None
    snapshots: Snapshots
    pace: HangDeadlines
    undo: UnitUndo
    multi_part: MultiPartWatch
    replicas: ReplicaCheck
    post_gate: PostGateFailures
    corruption: CorruptionCheck
    nan: NanProbation
    rates: LearningRates
    recorded: RecordedUnits
    reports: Reports
    last_step: int = -1
    """The last step of the run; -1 before ``run.steps()``."""
    data_states: list[DataState] = field(default_factory=list)
    """Where the script's data stand, which ranks exchange before a gate."""

    @classmethod
    def of_entry(
        cls,
        runtime: Runtime,
        axes: Axes,
        state: TrackedState,
        batches: Batches,
        exact: ExactReduction | None,
        durable: DurableCheckpoints | None,
        snapshot_every: int | None,
        carried: MainHandover | None,
    ) -> EntryParts:
        """Make the parts for an entry of ``main``. ``carried``: what the former entry handed over; None at the first.
        ``snapshot_every``: steps from one snapshot to the next; None: as often as costs little."""
        world = runtime.world
        # Where the batch follows the world size a shrunk world trains differently: report no shards.
        shards = 0 if batches.scale else batches.plan.shards
        reports = Reports(runtime, axes, exact=exact is not None and not batches.scale, shards=shards)
        replicas = ReplicaCheck(state, world)
        snapshots = carried.snapshots if carried else Snapshots(runtime, state, snapshot_every)
        snapshots.become(state)
        pace = HangDeadlines(constant=batches.scale is None)
        if carried is not None:
            pace = carried.pace
            pace.entered_again(carried.world_size, world.size)
        return cls(
            runtime=runtime,
            axes=axes,
            state=state,
            batches=batches,
            exact=exact,
            durable=durable,
            snapshots=snapshots,
            pace=pace,
            undo=UnitUndo(state, lambda what: say(what) if world.rank == 0 else None),
            multi_part=MultiPartWatch(state),
            replicas=replicas,
            post_gate=PostGateFailures(state),
            corruption=CorruptionCheck(
                int(os.environ.get("RACKRUN_CHECK_REPLICAS", "0")) if runtime.boot is not None else 0,
                state,
                world,
                replicas,
                snapshots,
                reports,
                lambda step: durable.distrust(step) if durable is not None else None,
            ),
            nan=NanProbation(os.environ.get("RACKRUN_NAN_PROBATION") == "1", world, reports),
            rates=LearningRates(),
            recorded=RecordedUnits(),
            reports=reports,
        )

    def number(self, at: Position) -> int:
        """Return the number of steps from where the run began or was resumed to ``at``; 1 for the first step."""
        return at.step - self.runtime.world.began.step

    def phase_key(self, at: Position, name: str, *, in_body: bool) -> str:
        """Return the key under which is kept how long a phase takes and what it changes. It holds the place of a
        registered phase, as a function may be registered twice; of one that the loop's body calls, only its name."""
        if in_body:
            return f"in the body {name}"
        return f"{'at_end' if at.step > self.last_step else 'every'} {at.phase} {name}"

    @property
    def copying(self) -> bool:
        """Whether a snapshot or a checkpoint may still be read from the state."""
        return self.snapshots.copying or (self.durable is not None and self.durable.copying)

    def settle(self) -> None:
        """Wait until copies of the state (snapshot, checkpoint) no longer read it, so that it may be changed."""
        if not self.copying:
            return
        began = time.monotonic()
        self.snapshots.settle(self.runtime.page.progress)
        if self.durable is not None:
            self.durable.settle(self.runtime.page.progress)
        self.pace.copied(time.monotonic() - began)
