"""Evaluation of the parked members' reports: what is committed, where state comes from, and what a decision needs to
know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rackrun.core.generation import restore_plan
from rackrun.core.generation.restore_plan import StatePlan, StoredSnapshots
from rackrun.core.generation.restore_sources import RestoreSources
from rackrun.core.generation.world import World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import Loss, WorkerRecord
from rackrun.core.recovery.view_builder import DecisionInputs, ViewBuilder
from rackrun.core.resize.resizing import Resizing
from rackrun.protocol.ids import Generation, Position, Rank, steps_in, tray_of
from rackrun.protocol.job_config import JobConfig

__all__ = ["FEW_STEPS", "ParkedMembers"]

FEW_STEPS = 10
"""Number of steps that may be computed again without asking the user. At the beginning, copies are not everywhere
yet."""


@dataclass(slots=True)
class ParkedMembers:
    """Evaluates the reports of parked members, and keeps the result until a member changes."""

    config: JobConfig
    world: World
    rack: RackMachine
    sources: RestoreSources
    classes: Mapping[Rank, str]
    resizing: Resizing
    view_builder: ViewBuilder
    losses: Mapping[Rank, Loss]
    """Losses since the last plan."""
    found: DecisionInputs | None = None
    """Cached result of `evaluate`, valid as long as only spares send events."""
    missing: int = 0
    """How many more spares have to become ready before a decided wait can end. 0: every ready spare leads to a new
    decision. Valid as long as ``found``."""

    def forget(self) -> None:
        """Drop the cached result, because a member may have changed."""
        self.found = None
        self.missing = 0

    def evaluate(self) -> DecisionInputs:
        """Return what the parked members' reports allow. Call it when all members have parked. It does not look at
        spares."""
        if self.found is None:
            self.found = self._look()
        return self.found

    def state(self, committed: Position) -> StatePlan | None:
        """Return where state comes from, for the world as it is now; None: no copy of some state is left in memory."""
        return self._state(self._reports(), committed, self.world.members)

    def loses_state_without(self, rank: Rank) -> bool:
        """Return whether state would be lost, or steps computed again, if this parked member were ended. The snapshots
        that its agent keeps stay."""
        now, record = self.evaluate(), self.world.members[rank]
        others = {one: report for one, report in self._reports().items() if one != rank}
        members = {one: member for one, member in self.world.members.items() if one != rank}
        if now.state is None or not record.stateful:
            return False
        then = self._state(others, now.committed, members, left_by=record)
        return then is None or (then.rollback is not None and then.rollback != now.state.rollback)

    def _look(self) -> DecisionInputs:
        world = self.world
        world.doubt()
        reports = self._reports()
        committed, gate = restore_plan.committed(reports, *world.floor())
        if world.old is not None and world.plan is not None and committed > world.plan.committed:
            world.old = None  # a gate has passed in the new world: all ranks had its state and a snapshot of it
        state, lost = self._state(reports, committed, world.members), world.lost()
        why_no_shrink = self.resizing.why_not_shrink(committed, gate) if lost else "nobody is lost"
        return DecisionInputs(
            committed=committed,
            gate=gate,
            state=state,
            lost=lost,
            ranks=self.view_builder.ranks(),
            exact=self.view_builder.exact(),
            may_begin_again=self.config.start_over or (state is None and self._has_just_begun(committed)),
            would_stay=0 if why_no_shrink else len(self.resizing.staying()),
            why_no_shrink=why_no_shrink,
        )

    def _reports(self) -> dict[Rank, restore_plan.ParkReport]:
        return {rank: _report(record, self.world.layout) for rank, record in self.world.stateful().items()}

    def _state(
        self,
        reports: Mapping[Rank, restore_plan.ParkReport],
        committed: Position,
        members: Mapping[Rank, WorkerRecord],
        *,
        left_by: WorkerRecord | None = None,
    ) -> StatePlan | None:
        """``left_by``: a worker whose snapshots count as those of one that has ended."""
        world, snapshots = self.world, self.sources.snapshots
        if world.old is not None:
            return world.old.state(members, self.rack, trusted=world.trusted)
        kept = snapshots.by_rank()
        if left_by is not None and left_by.rank is not None:
            kept = {**kept, left_by.rank: [_stored(left_by, world.layout), *kept.get(left_by.rank, ())]}
        return restore_plan.state_plan(
            reports=reports,
            kept=kept,
            classes=self.classes,
            world_size=world.size,
            upto=committed,
            rollback_incomplete=world.rollback_incomplete() or world.unsure,
            trusted=world.trusted,
            rebuild=snapshots.rebuilding(members, self.rack.trays, world.layout),
        )

    def _has_just_begun(self, committed: Position) -> bool:
        """Return whether no more than `FEW_STEPS` steps were computed, according to living members and to those seen to
        exit."""
        if committed.step >= FEW_STEPS:
            return False
        ends = [loss.exit for loss in self.losses.values()]
        return bool(self.world.stateful()) or all(end is not None and end.step < FEW_STEPS for end in ends)


def _report(record: WorkerRecord, layout: Generation) -> restore_plan.ParkReport:
    parked = record.parked
    assert parked is not None
    snapshots = steps_in(layout, parked.snapshots) if parked.snapshots else ()
    return restore_plan.ParkReport(passed=parked.passed, entered=parked.entered, gate=parked.gate, snapshots=snapshots)


def _stored(record: WorkerRecord, layout: Generation) -> StoredSnapshots:
    """Return the snapshots that a parked worker would leave on its tray, as stored ones."""
    slot = record.worker.slot
    steps = _report(record, layout).snapshots
    return StoredSnapshots(
        tray=tray_of(slot), slot=slot, incarnation=record.worker.incarnation, where=slot, steps=steps
    )
