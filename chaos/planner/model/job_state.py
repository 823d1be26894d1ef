"""The progress of the job, and where its state lies: live, in snapshots, on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.inputs.fleet import Fleet, FleetJob
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.model.fleet_state import FleetState
from rackrun.chaos.planner.model.outcome import TimeBreakdown
from rackrun.chaos.planner.model.undisturbed_training import TrainingTimes, progress

__all__ = ["Intervals", "State"]


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals in steps; 0: never. Snapshots are taken only where state has no live replica (``mirror``)."""

    snapshot: int
    checkpoint: int

    def __post_init__(self) -> None:
        if min(self.snapshot, self.checkpoint) < 0:
            raise PlannerError(
                f"snapshots every {self.snapshot} and checkpoints every {self.checkpoint} steps are impossible.",
                remedy="give steps from 1; 0 is never.",
            )


@dataclass(slots=True)
class State:
    """The progress and the state of one job."""

    fleet: Fleet
    job: FleetJob
    costs: PlanCosts
    intervals: Intervals
    where: TimeBreakdown
    steps: int = 0
    """The number of committed steps."""
    snapshot: int = 0
    """The number of steps after which the newest snapshot was taken; 0 is the beginning."""
    checkpoint: int = 0
    _gone: dict[int, None] = field(default_factory=dict)
    """Trays whose memory was lost since the newest snapshot."""

    def slow(self, replicas: int, full: int) -> float:
        """Return how many times as long a step takes with ``replicas`` of ``full`` replicas.

        Some replicas have one micro-batch more, and all wait for those.
        """
        share = self.job.micro_batches
        return full / replicas if not share else math.ceil(share * full / replicas) / share

    def train(self, seconds: float, slow: float) -> None:
        """Train without disturbance for ``seconds``. ``slow``: how many times as long a step takes."""
        costs, where = self.costs, self.where
        pace = TrainingTimes(
            step_s=costs.step_s * slow + costs.between_steps_s,
            snapshot_every=self.intervals.snapshot if self.job.state == "mirror" else 0,
            snapshot_s=costs.snapshot_s,
            copy_s=costs.copy_s,
            checkpoint_every=self.intervals.checkpoint,
            checkpoint_s=costs.checkpoint_s,
            write_s=costs.write_s,
        )
        done = progress(pace, self.steps, seconds, self.snapshot, self.checkpoint)
        self.steps += done.steps
        if done.snapshot > self.snapshot:
            self._gone.clear()
        self.snapshot, self.checkpoint = done.snapshot, done.checkpoint
        where.productive += done.steps * costs.step_s
        where.slowed += done.steps * costs.step_s * (slow - 1)
        where.between += done.steps * costs.between_steps_s
        where.saving += done.saving_s
        where.broken += done.rest_s

    def tray_gone(self, tray: int) -> None:
        self._gone[tray] = None

    def rollback(self, hall: FleetState) -> int | None:
        """Return how many steps back the state in memory is for the ranks that are lost; None if some of it is lost,
        too."""
        if not hall.lost:
            return 0
        if self.job.state == "disk" or len(hall.lost) == hall.ranks:
            return None
        if self.job.state == "replicas":
            return 0
        trays = {hall.tray_of(int(hall.seats[rank])) for rank in hall.lost}
        copies = all(tray not in self._gone or self._holder(tray, hall) not in self._gone for tray in trays)
        return self.steps - self.snapshot if copies else None

    def go_back(self, steps: int) -> None:
        """Take back this many steps, which have to be done again."""
        self.steps -= steps
        self.where.productive -= steps * self.costs.step_s
        self.where.between -= steps * self.costs.between_steps_s
        self.where.redone += steps * (self.costs.step_s + self.costs.between_steps_s)

    def from_disk(self) -> None:
        """Go back to the newest checkpoint on disk."""
        self.go_back(self.steps - self.checkpoint)
        self.snapshot = self.checkpoint
        self._gone.clear()

    def _holder(self, tray: int, hall: FleetState) -> int:
        """Return the tray that keeps a tray's copies.

        It is the next tray in order that was there (`rackrun.core.members.rack.RackMachine.mirrors`).
        """
        for after in range(1, self.fleet.total_trays):
            other = (tray + after) % self.fleet.total_trays
            if other in self._gone or not hall.is_down(other):
                return other
        return tray
