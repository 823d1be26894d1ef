"""Joins a new generation: builds its groups, takes over a lost rank's place, and brings state to where it is missing.

Everything that a plan asks of this process happens here, between two attempts at a unit. When a newer generation is
announced meanwhile, this starts over with the newer plan.

Where the ranks have to hold other shards, the script must build everything anew. This module leaves ``main`` then
(`Reenter`), with the state sealed in a snapshot, and `Rejoin.arrive` fills the new state when the script is back at
``run.steps()``. The old ranks' snapshots stay available meanwhile: if that breaks, a newer plan names them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.errors import StateLost
from rackrun.link.heartbeat_page import Activity
from rackrun.protocol.commands import GenerationPlan, Member, Restore
from rackrun.protocol.ids import Generation, Position, Step, after_step, snapshot_id
from rackrun.worker.communicators.communicator import OWN_FAULTS, Communicator
from rackrun.worker.communicators.gate_tree import on_hosts
from rackrun.worker.device.numerics import unlike
from rackrun.worker.device.rank_exit import leave
from rackrun.worker.integrity.replicas import ReplicaCheck
from rackrun.worker.loop.resize_support import fixed_because
from rackrun.worker.membership.decisions.interruptions import Reenter, Superseded
from rackrun.worker.process.reports import Reports, say
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.restore.live_restore import RestoreCallbacks, run_restores, settle_restores
from rackrun.worker.restore.loop_end import LoopEndState
from rackrun.worker.restore.reshard_from_snapshots import reshard
from rackrun.worker.restore.snapshot_fetch import CorruptSnapshot
from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints
from rackrun.worker.snapshots.shard_snapshots import Snapshots
from rackrun.worker.state.state_manifest import Lineage, StateManifest
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.hang_deadlines import HangDeadlines
from rackrun.worker.torch_compat import promote_groups, promote_sharded

__all__ = ["Rejoin"]


class Rejoin:
    """Carries out plans for this process. ``settle``: waits until no copy of the state is in progress."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        snapshots: Snapshots,
        replicas: ReplicaCheck,
        pace: HangDeadlines,
        durable: DurableCheckpoints | None,
        settle: Callable[[], None],
        reports: Reports,
    ) -> None:
        self._runtime, self._world, self._page = runtime, runtime.world, runtime.page
        self._state, self._snapshots, self._replicas = state, snapshots, replicas
        self._pace, self._durable, self._settle = pace, durable, settle
        self._reports = reports
        self.loop_end = LoopEndState(state)
        self.known_digests: Callable[[], Mapping[str, int]] = dict
        """Returns digests that are already known, by path (see `rackrun.worker.restore.live_restore.RestoreCallbacks`)."""
        self._unlike = ""
        """The last notice printed about numerics: how the state that this process took over was computed differently.
        """
        self._sources_differed = False
        """Whether this process has reported that the ranks that it was to be restored from differ."""
        self.entered_once = ""
        """Why ``main`` cannot be entered again in this process, for a message; "" where it can."""
        self.bound_to_rank = False
        """Whether what ``main`` has built fits no other rank than the one that it was built for."""
        self.leaving = False
        """Whether ``main`` is being left to be entered again: what it returns or raises does not count any more."""
        self.left_after: int | None = None
        """The step after which the ranks had left their loops early, as learned at this process's last join; None if
        they had not."""

    def run(self, came_in: Position, left_after: int | None, stays: Callable[[], bool] = lambda: False) -> bool:
        """Carry out the newest plan in this process: join the groups of its generation, and restore state where the
        plan says so.

        ``came_in``: the position that was committed when this process began its loop. It has not run the steps before
        that, so a plan that goes back further ends it. ``left_after``: the step after which this process left its loop
        early; None: it has not. ``stays``: returns True while the script still has to run the code that follows the
        last committed step in the body of its loop.

        Returns True when this process has resumed. Returns False, with nothing changed, when the plan makes this
        process leave ``main`` and enter it again while ``stays()`` is True: run that code, then call again. Raises
        `Reenter` when ``main`` is to be left now. Ends the process when it cannot take part.
        """
        world = self._world
        size = world.size
        world.stages.reached("parked")
        while True:
            if world.generation:
                # The time measurement of the broken unit ends here, and this rank is not to blame for how long a plan
                # takes.
                self._page.enter(Activity.RECOVERING, world.passed)
            plan = world.wait_plan()
            world.let_device_return()
            mine = self._runtime.member_of(plan)
            self._check_loop_end(plan)
            back = plan.rollback is not None and self._end_of(plan.rollback) < world.passed
            if self._must_reenter(plan, mine) and not back and stays():
                return False
            self._page.enter(Activity.RECOVERING, world.passed, self._pace.recovery_deadline_ms())
            try:
                if plan.reshard is not None:
                    self._hand_over(plan, mine)
                if mine.fresh and self._is_built_otherwise(plan, mine):
                    self._leave_main()
                if plan.layout < world.layout:
                    leave(world.rank, f"has the shards of generation {world.layout}, not of {plan.layout}.")
                if plan.world_size != world.size or not (mine.fresh or world.counts_as(plan, mine)):
                    self._resize(plan, mine.rank)
                elif mine.fresh:  # a promoted spare, or a rank whose own state is of no use
                    self._take_place(plan, mine.rank)
                world.join(plan)
                world.layout = plan.layout
                world.broadcasts.republish_at(plan.store)
                self._runtime.set_rank_environment(mine.rank, plan.world_size)
                if plan.rollback is not None and self._end_of(plan.rollback) < came_in:
                    leave(
                        world.rank,
                        f"took over {after_step(came_in.step)}, and cannot do the steps after {plan.rollback} again; another takes its place.",
                    )
                self._restore(plan, fresh=mine.fresh)
                if not self._agree_after_loop(plan, left_after, size):
                    continue
            except Superseded:
                continue
            except OWN_FAULTS:
                raise
            except RuntimeError as error:
                world.collective_failed(world.generation, error)
                continue
            break
        same = not plan.restores and plan.rollback is None and plan.world_size == size
        self._pace.new_generation(nobody_lost=same)
        if self._durable is not None:
            self._durable.mark_rank_lost()
        self._reports.resumed(Generation(plan.generation))
        world.stages.reached("resumed")
        return True

    def _check_loop_end(self, plan: GenerationPlan) -> None:
        """End this process if what it has done in the code after the loop keeps it from taking part: no other rank
        could repeat that."""
        if plan.reshard is not None:
            return  # main will be left and entered again
        if plan.rollback is not None and (self._world.called_after_loop or self.loop_end.changed()):
            back = f"all go back to step {plan.rollback}"
            self._leave_if_unfit(f"is in the code after the loop, and {back}")
        if any(member.fresh for member in plan.members):
            self.loop_end.check()

    def _leave_if_unfit(self, because: str) -> None:
        leave(self._world.rank, f"{because}; another takes its place.")

    def _agree_after_loop(self, plan: GenerationPlan, left_after: int | None, size: int) -> bool:
        """Return False when this generation must end because ranks have called collectives after the loop; else True.

        By now each surviving rank has left its loop or goes on with it, and a newcomer learns which (`left_after`). A
        rank that has called collectives after the loop, which others have yet to call, or that stands at another one
        than they do, cannot take part. A newcomer replaces it once others have its state, and this generation ends with
        that. Where all ranks have called some, all but rank 0 are replaced, and rank 0 stays until the generation is
        broken. ``size``: of the world before this plan. A world that has only shrunk goes on without its lost ranks.
        """
        world = self._world
        communicator = world.groups[0].communicator
        if communicator is None:
            return True
        left = max(_left_by_now(self.left_after, world.passed), _left_by_now(left_after, world.passed))
        met = world.called_after_loop and (size == plan.world_size or any(member.fresh for member in plan.members))

        def ask() -> tuple[int, int]:
            most_left, some_have_met, not_all_have = _most(communicator, [left, met, not met])
            self.left_after = most_left - 1 if most_left else None
            world.resumed = Generation(plan.generation)
            if some_have_met:
                _most(communicator, [0])  # a barrier: all ranks have the result
            return some_have_met, not_all_have

        some_have_met, not_all_have = world.attempt(plan, ask)
        if not some_have_met:
            return True
        # so that nobody is blamed for the time that others take to write
        self._reports.resumed(Generation(plan.generation))
        self._page.enter(Activity.WAITING, world.passed)
        if met and (not_all_have or world.rank):
            self._wait_written(plan)
            self._leave_if_unfit("has called collectives after the loop, where another was lost")
        world.wait_broken()
        return False

    def _wait_written(self, plan: GenerationPlan) -> None:
        """Wait until this rank's part of the last checkpoint is on disk. Raises `Superseded` when another rank is lost
        meanwhile, because the next plan may need this process's state."""
        if self._durable is not None:
            self._durable.wait_written(lambda: self._world.superseded(plan.generation))
        if self._world.superseded(plan.generation):
            raise Superseded

    def _must_reenter(self, plan: GenerationPlan, mine: Member) -> bool:
        """Whether the plan requires this process to leave ``main`` and enter it again."""
        return plan.reshard is not None or (mine.fresh and self._is_built_otherwise(plan, mine))

    def _is_built_otherwise(self, plan: GenerationPlan, mine: Member) -> bool:
        """Whether the script was built for another world size, or for a rank in other groups, and may have branched by
        those values."""
        world = self._world
        if plan.world_size != world.size:
            return bool(fixed_because(self._state, world))
        return (self.bound_to_rank and mine.rank != world.rank) or not world.fits(mine.rank)

    def _take_place(self, plan: GenerationPlan, rank: int) -> None:
        """Take over ``rank`` in place: renumber groups and sharded modules, and start to build the groups."""
        moved = self._world.promote(rank)
        promote_groups(moved)
        promote_sharded(self._state.modules.values(), rank)
        self._world.start_build(plan)

    def _resize(self, plan: GenerationPlan, rank: int) -> None:
        """Adapt in place to a world that has shrunk or grown. A newcomer adopts everything else from its restore
        source."""
        before = self._world.size
        moved, origins = self._world.resize(plan, rank)
        promote_groups(moved)
        self._replicas.resized(origins, plan.restores)
        self._pace.resized(before, plan.world_size)
        self._world.start_build(plan)

    def _restore(self, plan: GenerationPlan, *, fresh: bool) -> None:
        """Bring the state to what the plan asks for: load a snapshot after a rollback, or copy state from live ranks.
        ``fresh``: this process's own state is of no use."""
        world = self._world
        communicator = world.groups[0].communicator
        settle_restores()
        self._settle()
        restore = next((r for r in plan.restores if r.rank == world.rank), None) if fresh else None
        if restore is not None and restore.sources:
            self._snapshots.drop_all()
        if plan.rollback is not None or (restore is not None and not restore.sources):
            self._load(plan, plan.committed.step if plan.rollback is None else plan.rollback, restore)
        if communicator is not None:
            manifest = self._run_restores(plan, communicator)
            if manifest is not None:
                self._adopt(plan, manifest)
                self._replicas.unique.take_place(world.rank)
                if plan.rollback is not None:
                    self._seal(plan.rollback)
        if plan.rollback is not None:
            if communicator is not None:
                # A barrier. A newcomer that has begun its loop can go back no further; until all have arrived, all may
                # have to.
                world.attempt(plan, lambda: _most(communicator, [0]))
            world.set_position(
                self._end_of(plan.rollback), ()
            )  # the plan's gate belongs to a step that is to be done again
        elif fresh:
            world.set_position(plan.committed, plan.gate)
        elif any(not restore.sources for restore in plan.restores):
            self._snapshots.hold(plan.committed.step)  # a newcomer holds the same one, and can go back no further

    def _run_restores(self, plan: GenerationPlan, communicator: Communicator) -> StateManifest | None:
        """Take part in the restores from live ranks (see `run_restores`).

        Raises `Superseded` when this rank's sources differ, after a report to the coordinator, which makes a new plan;
        `StateLost` when that happens again.
        """
        world = self._world
        callbacks = RestoreCallbacks(
            lambda: world.superseded(plan.generation),
            world.stages.reached,
            self.known_digests,
            self.loop_end.source,
        )
        try:
            return world.attempt(
                plan,
                lambda: run_restores(
                    plan, world.rank, communicator, self._state, world.replica_class, self._runtime.device, callbacks
                ),
            )
        except StateLost as lost:
            if self._sources_differed:
                raise
            self._sources_differed = True
            because = f"the ranks that rank {world.rank} was to be restored from differ"
            print(f"rackrun: {because}: {lost}", file=sys.stderr, flush=True)
            self._reports.sources_differ(Generation(plan.generation), because)
            raise Superseded from lost

    def _adopt(self, plan: GenerationPlan, manifest: StateManifest) -> None:
        """Record that the state in place is the one ``manifest`` describes."""
        self._replicas.adopt(manifest)
        self._say_unlike(plan, manifest)

    def _say_unlike(self, plan: GenerationPlan, manifest: StateManifest) -> None:
        """Print once when the adopted state was computed with other hardware, libraries or settings than here."""
        different = unlike(manifest.numerics, self._runtime.device)
        if different and different != self._unlike:
            self._unlike = different
            say(
                f"rank {self._world.rank}, in generation {plan.generation}, goes on from a state that was computed with {different}: "
                "the same bits as without a loss are not promised"
            )

    def _seal(self, step: int) -> None:
        """Take a snapshot of a state copied from another rank.

        This rank has no snapshot of ``step`` of its own, and all may have to return there once more without that other
        rank. Ends the process when there is no memory.
        """
        try:
            self._snapshots.take(step)
            self._snapshots.settle()
        except MemoryPlanError as error:
            leave(self._world.rank, f"has no memory for a snapshot of its state, and another takes its place: {error}")

    def _load(self, plan: GenerationPlan, step: int, restore: Restore | None) -> None:
        """Load a snapshot of ``step``: this rank's own, or the one that ``restore`` names.

        Does nothing when ``restore`` has live sources. Raises `Superseded` when the snapshot is damaged, after a report
        to the coordinator, which makes a new plan. Ends the process when there is no memory.
        """
        world = self._world
        if restore is not None and restore.sources:
            return  # a replica that goes back itself is the source
        where, fetched = "", None
        try:
            if restore is not None:
                self._snapshots.expect()  # the loaded snapshot becomes this rank's own
                lost, where = restore, restore.snapshot or restore.rebuild[0].row
                fetched = world.attempt(
                    plan, lambda: self._snapshots.fetch(step, lost, lambda: world.superseded(plan.generation))
                )
            manifest = self._snapshots.load(step, fetched, all_go_back=plan.rollback is not None)
            self._adopt(plan, manifest)
            if fetched is not None:
                # This rank needs a snapshot of its own for the next failure; the copy holds what was adopted.
                self._snapshots.take(step)
                self._snapshots.settle()
        except MemoryPlanError as error:
            leave(world.rank, f"has no memory for its own snapshot, and another takes its place: {error}")
        except CorruptSnapshot as damaged:
            print(
                f"rackrun: rank {world.rank}: the snapshot of step {step} cannot be used: {damaged} Remedy: look at "
                f"{_hosts(restore) or 'the memory of this host'}.",
                file=sys.stderr,
                flush=True,
            )
            self._reports.damaged(plan.generation, self._snapshots.named(step), where, str(damaged))
            raise Superseded from damaged

    def _end_of(self, step: int) -> Position:
        """Return the position that a snapshot of ``step`` holds. For the step after which ``main`` was entered again
        that includes some of its phases."""
        began = self._world.began
        return began if began.step == step else Position(step)

    # -- main is entered again
    def _hand_over(self, plan: GenerationPlan, mine: Member) -> None:
        """Seal this process's state of the old world in a snapshot and leave ``main`` by raising `Reenter`.

        Raises `Superseded` instead when a newer plan arrives while this process can still stay.
        """
        world, of = self._world, plan.reshard
        assert of is not None
        settle_restores()
        self._settle()
        changed = False
        asked = plan.rollback is None and any(where.endswith(self._address(mine)) for where in of.images)
        if asked and not mine.fresh and (world.passed, world.layout) == (plan.committed, of.layout):
            changed = bool(self.loop_end.changed())
            if not self.loop_end.put_back():
                self._leave_if_unfit("has changed tracked state after the loop, of which there is no copy")
            try:
                self._snapshots.hand_over(plan.committed, world.unless_overtaken(plan))
            except MemoryPlanError as error:
                leave(world.rank, f"has no memory for a snapshot of its state, and another takes its place: {error}")
        if not world.unless_overtaken(plan)(world.give_up_state):
            if changed:  # the script relies on the changes that were undone
                self._leave_if_unfit("had to undo what its script had changed after the loop")
            raise Superseded
        self._leave_main()

    def _leave_main(self) -> NoReturn:
        """Leave ``main`` by raising `Reenter`, or end this process where ``main`` cannot be entered again."""
        if self.entered_once:
            leave(
                self._world.rank,
                f"would have to begin its script again, but {self.entered_once}; another takes its place.",
            )
        self.leaving = True
        raise Reenter

    def arrive(self, left_after: int | None) -> int | None:
        """Fill the new state, at ``run.steps()`` of a ``main`` that was entered again.

        ``left_after``: the step after which this process had left the loop early in the former entry, or None. Returns
        the step after which the ranks left it, which a newcomer cannot know; None where they go on with the loop.
        Raises `Reenter` when meanwhile the world, this process's rank, or the shards to fill have changed once more, or
        the script has used collectives.
        """
        world, left = self._world, None
        plan = world.joined
        assert plan is not None, "main is entered again for a plan"
        joined = True
        while True:
            self._page.enter(Activity.RECOVERING, world.passed, self._pace.recovery_deadline_ms())
            try:
                if not joined or world.broken:
                    joined = False
                    former, plan = plan, world.wait_plan()
                    same = (plan.reshard, plan.committed, plan.rollback) == (
                        former.reshard,
                        former.committed,
                        former.rollback,
                    )
                    if not same or world.met or not world.counts_as(plan, self._runtime.member_of(plan)):
                        self.leaving = True
                        raise Reenter
                    world.start_build(plan)
                    world.join(plan)
                    joined = True
                left = self._reshard(plan, left_after)
            except Superseded:
                joined = False
                continue
            except OWN_FAULTS:
                raise
            except RuntimeError as error:
                world.collective_failed(world.generation, error)
                continue
            break
        self._pace.new_generation(nobody_lost=False)
        if self._durable is not None:
            self._durable.mark_rank_lost()
        self._reports.ready(world.replica_class)
        self._reports.resumed(Generation(plan.generation))
        return left

    def _reshard(self, plan: GenerationPlan, left_after: int | None) -> int | None:
        """Fill the state from the old ranks' snapshots and seal it as the first snapshot of the new layout.

        Returns the same as `arrive`. Raises `Superseded` when a newer plan exists or a snapshot is damaged.
        """
        world, of, boot = self._world, plan.reshard, self._runtime.boot
        assert of is not None
        assert boot is not None
        old = snapshot_id(of.layout, Step(plan.committed.step))

        def heard() -> bool:
            self._page.progress()
            return not world.superseded(plan.generation)

        me, own, token = self._address(self._runtime.member_of(plan)), self._snapshots.own_image, boot.token
        try:
            manifest = world.attempt(plan, lambda: reshard(self._state, world.rank, of, old, me, own, token, heard))
        except CorruptSnapshot as damaged:
            print(
                f"rackrun: rank {world.rank}: an old rank's snapshot of step {plan.committed.step} cannot be used: {damaged} "
                "Remedy: look at the memory of that host.",
                file=sys.stderr,
                flush=True,
            )
            self._reports.damaged(plan.generation, old, damaged.where, str(damaged))
            raise Superseded from damaged
        communicator = world.groups[0].communicator
        left = _left_by_now(left_after, plan.committed)
        if communicator is not None:
            # A barrier. Until all ranks have their state, all may have to go back further, and the snapshot of the new
            # world replaces one of the old.
            left = world.attempt(plan, lambda: _most(communicator, [left])[0])
        self._say_unlike(plan, manifest)
        since = manifest.lineage
        self._state.lineage = Lineage(
            began=since.began,
            life=since.life,
            facts=since.facts,
            entered=plan.committed,
            changes=since.changes.union(self._state.lineage.changes),
            results=since.results,
        )
        world.began, world.layout = plan.committed, plan.layout
        world.set_position(plan.committed, plan.gate)
        self._replicas.begin_again()
        try:
            self._snapshots.keep(plan.committed.step, world.unless_overtaken(plan), besides=old)
        except MemoryPlanError as error:
            leave(world.rank, f"has no memory for a snapshot of its new state: {error}")
        if not world.unless_overtaken(plan)(world.has_state_again):
            raise Superseded
        return left - 1 if left else None

    def _address(self, mine: Member) -> str:
        """Return the end of the address of this process's snapshots, the same for every agent that keeps them."""
        return f"/{mine.slot}/{mine.incarnation}"


def _left_by_now(left_after: int | None, passed: Position) -> int:
    """Return the step after which a loop was left early, plus 1; 0 if it was not left early, or if earlier steps are to
    be done again."""
    return 0 if left_after is None or passed.step < left_after else left_after + 1


def _most(communicator: Communicator, says: Sequence[int]) -> list[int]:
    """Return the maximum over all ranks of each element of ``says``. Also a barrier."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    found = torch.tensor(says, dtype=torch.int64)
    communicator.call(on_hosts(communicator, largest=True), [found], options, on_host=True).wait()
    return [int(one) for one in found.tolist()]


def _hosts(restore: Restore | None) -> str:
    """Return the hosts that gave a snapshot or a part of one for ``restore``, joined by commas; "" for none."""
    given = [restore.snapshot, *(one.snapshot for one in restore.rebuild)] if restore is not None else []
    return ", ".join(dict.fromkeys(where.rpartition(":")[0] for where in given if where))
