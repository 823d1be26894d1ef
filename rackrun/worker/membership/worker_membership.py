"""This worker's membership of the world: its groups, its generation, and its part in deciding whether a unit counts.

Two threads use it. The *main thread* runs the user's script: collectives, gates, recoveries. The *control thread*
(`rackrun.worker.process.control_thread`) brings messages of the coordinator: a generation is broken, a plan has come.
What is decided here, `rackrun.worker.membership.decisions.membership_machine` decides: whether the generation is whole, and
whether a unit counts. This module calls it under one lock, and has the threads, communicators and messages. So the
report that the control thread sends is final the moment it is sent, even while the main thread still computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.errors import CollectiveBroken, StepError
from rackrun.protocol.commands import BreakGeneration, DealShards, GenerationPlan, Member
from rackrun.protocol.events import WorkerParked, WorkerSevered, WorkerUnbuilt
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, SlotId, Step
from rackrun.worker.batch.microbatch_collectives import MicrobatchCollectives
from rackrun.worker.batch.share_changes import ShareChanges
from rackrun.worker.communicators.setup_broadcasts import Broadcasts
from rackrun.worker.device.device_queue import StreamEvent, Waits, queue_of, wait_until
from rackrun.worker.device.device_return import DeviceReturn
from rackrun.worker.device.own_time import OwnTimeMeter
from rackrun.worker.membership.blocked_collective import BlockedCollective
from rackrun.worker.membership.collective_progress import CollectiveProgress, Entered
from rackrun.worker.membership.decisions.gate import CollectiveOrder, Offer, agreed, elements
from rackrun.worker.membership.decisions.gate_sums import GateSums
from rackrun.worker.membership.decisions.interruptions import Abandoned, Superseded
from rackrun.worker.membership.decisions.membership_machine import MembershipMachine
from rackrun.worker.membership.decisions.script_scope import (
    Scope,
    called_in_capture,
    called_outside,
    lost_after_loop,
    refuse_thread,
    script_threads,
)
from rackrun.worker.membership.elastic_group import ElasticGroup
from rackrun.worker.membership.generation_build import GenerationBuild
from rackrun.worker.membership.group_registry import GroupRegistry
from rackrun.worker.membership.inflight import InflightCollectives
from rackrun.worker.membership.recovery_stages import RecoveryStages
from rackrun.worker.torch_compat import c10d

if TYPE_CHECKING:
    from rackrun.link.heartbeat_page import HeartbeatPage
    from rackrun.worker.communicators.communicator import Communicator

__all__ = ["WorkerMembership"]


T = TypeVar("T")


class WorkerMembership:
    """The world as this worker sees it: its process groups, generation, gate, and the state of a recovery. One per
    process."""

    def __init__(  # noqa: PLR0915 - what there is at the start, one line each
        self, page: HeartbeatPage, device: torch.device, slot: SlotId, incarnation: Incarnation, token: str
    ) -> None:
        self.page = page
        self.device, self.queue = device, queue_of(device)
        self._gate_waits = Waits()
        self.scope = Scope.SETUP
        self.groups: list[ElasticGroup] = []
        self.group_registry = GroupRegistry()
        self.machine = MembershipMachine()
        """Decides whether the generation is whole, and whether a unit counts. It changes under the lock only."""
        self.began = BEGIN
        """The position that was committed when the run began or was resumed, or when its ``main`` was entered again."""
        self.layout = Generation(0)
        """The generation in which the ranks were given the shards that they hold; snapshots belong to it."""
        self.met = 0
        """Number of collectives and groups that the script has called for before ``run.steps()``, as the other ranks
        have."""
        self.replica_class = ""
        self.updated = False
        """Whether an optimizer has stepped in the current unit."""
        self.after_update: Callable[[str, Any], None] | None = None
        """Called with the name and result of every collective of the script after the first ``optimizer.step()`` of a
        step; None before it."""
        self.on_post_gate_failure: Callable[[Any], None] = lambda result: None  # noqa: ARG005
        """Called with the result of every collective that breaks after the gate of its unit has passed."""
        self.rejoin: Callable[[], None] = lambda: None
        """Called in the script's own code after the loop, to take part in the newest generation."""
        self.begun = BEGIN
        """The unit that was begun last, whatever became of it."""
        self.good: Position | None = None
        """The last unit after which all replicas are known to have been equal; None when they are not compared, or this
        process has just joined."""
        self.drain = False
        self.traffic = 0
        """Number of elements that collectives of the current unit have written on this rank."""
        self.inflight = InflightCollectives()
        self.order = CollectiveOrder()
        self.own_time = OwnTimeMeter(queue=self.queue)
        self.progress = CollectiveProgress(page, self.queue)
        self.blocked = BlockedCollective(page)
        self.stages = RecoveryStages()
        self.microbatch_collectives = MicrobatchCollectives()
        self.share_changes = ShareChanges()
        self.broadcasts = Broadcasts(None)

        self._slot, self._incarnation = slot, incarnation
        self._lock = threading.RLock()
        """The lock under which the machine changes."""
        self._changed = threading.Condition(self._lock)
        """Notified when the machine has changed in a way that somebody may wait for."""
        self._build = GenerationBuild(slot, incarnation, token, device, self.queue, self.machine, self._changed)
        self.joined: GenerationPlan | None = None
        """The plan of this generation."""
        self._has_state = True
        """Whether this process holds state: not between leaving ``main`` and the new state being filled."""
        self.resumed = Generation(0)
        """The newest generation in which this worker had its state in place, and all ranks had shared what they knew; 0
        if none (see `rackrun.protocol.events.WorkerParked.resumed`)."""
        self._seated: tuple[Member, ...] = ()
        """The members of the world by rank, as this worker and its groups count ranks now."""
        self._in_gate = False
        self._after_in: int | None = None
        """The generation in which the script has called its first collective after the loop; None if it has called
        none."""
        self.in_phase = False
        self.waited_s = 0.0
        """Seconds that the current unit waited for a plan, which count as recovery and not as time of the unit."""
        self.device_wait_since_ns = 0
        """When the main thread began to wait for the device and nothing else, in ns of the monotonic clock; 0 when it
        does not."""
        self.returns = DeviceReturn(self.queue, lambda: self.rank)
        self.may_leave_phase: Callable[[], bool] = lambda: True
        self.may_be_left: Callable[[], None] = lambda: None
        """Called at every place at which a step that will not count may be left."""
        self._released = False
        self._fixed: Callable[[str, int, int], Communicator] | None = None

    # -- groups
    def create_default(self, rank: int, size: int) -> ElasticGroup:
        group = ElasticGroup(self, range(size), rank, "default", "default_pg", "world")
        self.groups.append(group)
        return group

    def new_group(self, ranks: Sequence[int], name: str, desc: str) -> ElasticGroup | None:
        """Make a group. torch's rule applies: every rank calls this for every group, in the same order. Returns None on
        a rank that is not a member. Raises `StepError` after ``run.steps()`` has begun."""
        if self.scope is not Scope.SETUP:
            raise StepError(
                "a process group was made after run.steps() began.", remedy="make all groups and meshes before."
            )
        entered = self.progress.enter()  # making a group waits for its other ranks
        try:
            return self._new_group(ranks, name, desc)
        finally:
            self.progress.completed(entered)

    def _new_group(self, ranks: Sequence[int], name: str, desc: str) -> ElasticGroup | None:
        with self._lock:
            self._check_whole()
            plan = self.machine.plan
        self.met += self.size > 1
        key = self.group_registry.add(ranks, desc)
        if self.rank not in ranks:
            return None
        group = ElasticGroup(self, ranks, list(ranks).index(self.rank), name, desc, key)
        self.groups.append(group)
        if self._fixed is not None and len(ranks) > 1:
            group.communicator = self._fixed(group.key, group.rank(), group.size())
        elif self.generation and plan is not None:
            group.communicator = self._build.build_group(plan, group, self.rank)
            self.stages.reached("built")
        return group

    @property
    def in_setup(self) -> bool:
        """Whether the script is before ``run.steps()``."""
        return self.scope is Scope.SETUP

    @property
    def rank(self) -> int:
        return self.groups[0].group_rank

    @property
    def size(self) -> int:
        return len(self.groups[0].ranks)

    @property
    def has_mirrors(self) -> bool:
        """Whether the plan has other trays keep copies of snapshots, or parity of them."""
        plan = self.machine.plan
        return plan is not None and bool(plan.mirrors or plan.sets)

    # -- collectives
    def enter_collective(self, group: ElasticGroup, name: str, result: Any) -> int | None:
        """Record that the script calls the collective ``name``, and return the generation to run it in; None for a
        loopback into ``result``.

        Raises `StepError` where collectives are not allowed.
        """
        machine, scope = self.machine, self.scope
        if threading.get_ident() != threading.main_thread().ident:
            in_or_between_units = scope in {Scope.UNIT, Scope.OUTSIDE} and not self.in_phase
            if in_or_between_units and self.size > 1:
                refuse_thread(name)
        if scope is Scope.OUTSIDE and self.size > 1:
            raise called_outside()
        if scope is Scope.AFTER and self.size > 1:
            self._check_after()
        self._refuse_capture(group, name)
        self.progress.enter()
        self.own_time.main_thread_resumed()
        size = len(group.ranks)
        if size == len(self.groups[0].ranks):
            self.order.add_collective(name, result)
        if self.after_update is not None:
            self.after_update(name, result)
        if size > 1:
            self.traffic += elements(result)
        if self.microbatch_collectives.checks:
            self.microbatch_collectives.check_collective(name, group.ranks, uneven=bool(self.share_changes.shares))
        if scope is Scope.SETUP:
            self._check_whole()
            self.met += size > 1
        if not machine.broken:
            return machine.generation or None
        if machine.unit_passed:
            self.on_post_gate_failure(result)
        self.leave_phase()
        return None

    def _check_whole(self) -> None:
        """Raise `CollectiveBroken` if the world broke before ``run.steps()``, where a loopback's values would be
        kept."""
        if self.machine.broken and self.machine.generation:
            raise CollectiveBroken(
                "a peer was lost before the first step.", remedy="none needed: the world starts again."
            )

    def _check_after(self) -> None:
        """Handle a break in the code after the loop, whose end is committed, at a collective there.

        A rank that has called no collective there yet rejoins, and goes on as the rank that it was. A rank that has
        called one cannot, because a newcomer stands at another place: raises the error of `lost_after_loop`, and a
        newcomer replaces it. Autograd cannot be left, so it gets a loopback's values there, and this rank counts as one
        that has called a collective.
        """
        gone = self.machine.broken or self._after_in not in (None, self.generation)
        if gone and torch._C._current_graph_task_id() == -1:
            before = self.size, self.rank
            self.rejoin()
            if self.called_after_loop or (self.size, self.rank) != before:
                raise lost_after_loop()
        self._after_in = self.generation

    @property
    def called_after_loop(self) -> bool:
        """Whether this rank has called a collective in the code after the loop."""
        return self.scope is not Scope.SETUP and self._after_in is not None

    def _refuse_capture(self, group: ElasticGroup, name: str) -> None:
        """Raise `StepError` if a CUDA graph is being captured, unless nobody will ever change the world of one rank."""
        if self.queue.is_capturing() and (group.size() > 1 or self.machine.plan is not None):
            raise called_in_capture(name)

    def enqueued(self, entered: Entered, communicator: Communicator, work: dist.Work | None) -> None:
        """Record a collective that the device runs. ``work`` None: it is on this thread's current stream, which waits
        for the other ranks in it."""
        assert entered.reached is not None, "a collective of the device"
        if work is None:
            after = self.queue.record_event()
            entered.waited(after)
            self.own_time.add_stream_wait(entered.reached, after)
        else:
            entered.enqueued(communicator, work)

    def report_blocked(self, entered: Entered, generation: int) -> None:
        """Report that this thread has waited on the host for a while in a collective of ``generation``, if that may be
        part of a deadlock."""
        in_unit = self.scope is Scope.UNIT and self.machine.is_whole(generation)
        nobody_else = threading.get_ident() == threading.main_thread().ident and not (
            self.in_phase and script_threads()
        )
        if in_unit and self.queue.is_host and nobody_else:
            self.blocked.report(entered.call, generation, self.groups)

    @property
    def result_is_final(self) -> bool:
        """Whether the script uses what a collective returns for good, because no gate of a step follows first."""
        return self.in_phase or self.scope is not Scope.UNIT

    def wait_for_event(self, event: StreamEvent, generation: int) -> bool:
        """Wait until the device has passed ``event``. Returns whether it did before ``generation`` was broken, here or
        at a peer, so that its results are good."""
        came = self._wait_for_device(event.passed, lambda: self._is_gone(generation))
        return came and not self._is_gone(generation) and not self.lost_a_peer()

    def lost_a_peer(self) -> bool:
        """Whether a rank of this generation is gone, or has left it, even if this rank was not informed yet; False
        without a device.

        If so, what this rank has received may be garbage.
        """
        if self.queue.is_host:
            return False
        # the communicator of all ranks sees all of them; where it is built on demand, the others do
        return any(group.communicator.lost_a_peer() for group in self.groups if group.communicator is not None)

    def may_follow_from_break(self, error: Exception) -> bool:
        """Whether ``error``, raised by the script, may come from a break: from a loopback's values, or from a lost
        peer's garbage."""
        if self.lost_a_peer():
            self.collective_failed(self.generation, error)
        return self.machine.broken

    def _is_gone(self, generation: int) -> bool:
        return not self.machine.is_whole(generation)

    def _wait_for_device(
        self, passed: Callable[[], bool], gives_up: Callable[[], bool], waits: Waits | None = None
    ) -> bool:
        self.device_wait_since_ns = time.monotonic_ns()
        try:
            return wait_until(passed, gives_up, waits)
        finally:
            self.device_wait_since_ns = 0

    def leave_setup(self) -> None:
        """Raise `CollectiveBroken` if the world broke before ``run.steps()`` (compare `leave_phase`)."""
        if self.scope is Scope.SETUP:
            self._check_whole()

    def leave_phase(self) -> None:
        """Raise `Abandoned` in a phase whose generation is broken, instead of giving it a loopback's values, which it
        would use for good.

        Not inside autograd, and not while the phase has other weights in the model (averaged ones, say) that it will
        put back itself.
        """
        if self.scope is Scope.AFTER and self._after_in is not None:
            self._check_after()
        if not self.in_phase or not self.machine.broken or self._in_gate or torch._C._current_graph_task_id() != -1:
            return
        if self.may_leave_phase():
            raise Abandoned

    def may_abandon(self, generation: int) -> bool:
        """Whether to go on without a collective of ``generation`` that has not ended yet."""
        leave = generation != self.machine.generation or self.inflight.overdue()
        self.inflight.some_abandoned |= leave
        return leave

    def collective_failed(self, generation: int, error: Exception, result: Any = ()) -> None:
        """Record that a collective of ``generation`` has failed: nothing of that generation counts any more."""
        because = str(error).partition("\n")[0]
        with self._lock:
            ours = self.machine.fail_collective(generation, because, time.monotonic())
            if ours:
                self._changed.notify_all()
            late = ours and self.machine.unit_passed
        if late:
            self.on_post_gate_failure(result)

    def unreported_failure(self) -> WorkerSevered | WorkerUnbuilt | None:
        """Return the report to send when nobody else knows that this generation is broken or cannot be built; else
        None. The control thread calls this at intervals."""
        with self._lock:
            if (unbuilt := self._build.take_failure()) is not None:
                return unbuilt
            because = self.machine.take_unreported_failure(time.monotonic())
            generation = Generation(self.generation)
        if because is None:
            return None
        return WorkerSevered(slot=self._slot, incarnation=self._incarnation, generation=generation, because=because)

    @property
    def generation(self) -> int:
        """The generation that this worker's communicators belong to; 0 before the first."""
        return self.machine.generation

    @property
    def broken(self) -> bool:
        return self.machine.broken

    @property
    def pausing(self) -> bool:
        """Whether this worker was told to pause in this generation."""
        return self.machine.pausing

    def wait_broken(self) -> None:
        """Wait until the generation is broken, as a pause does."""
        with self._changed:
            self._changed.wait_for(lambda: self.machine.broken)

    # -- gates
    @property
    def passed(self) -> Position:
        """The last unit that is known on this rank to be committed."""
        return self.machine.passed

    @property
    def unit_passed(self) -> bool:
        """Whether the current unit's gate has passed, so that what it does from here on cannot be undone."""
        return self.machine.unit_passed

    @property
    def gate(self) -> GateSums | None:
        """The sums of the gate of ``passed``; None before the first gate, and after a rollback."""
        return self.machine.gate

    def pass_gate(self, at: Position, mine: Offer, refuses: Callable[[Position, GateSums], bool]) -> None:
        """Enter the gate of ``at`` and wait for its result, once the device has come (`synchronise_device`).

        The gate is one small all-reduce over the whole world. If any rank saw it pass, every rank had entered it, so
        all gradients of the unit are complete everywhere: the unit is committed, also for ranks whose gate broke. If no
        live rank saw it pass, all ranks do the unit again.

        ``mine``: this rank's offer, which is overwritten by the sums. ``refuses``: decides from the sums whether the
        unit is to be done again; it answers alike on all ranks. Raises `Abandoned` if the unit will not count.
        """
        machine = self.machine
        with self._lock:
            if not machine.enter_gate(at):
                raise Abandoned
        values = self._sum(mine)
        with self._lock:
            size = self.size
            sums = None if machine.broken else agreed(values, size, at)
            if sums is not None and refuses(at, sums):
                machine.refuse_gate()
                raise Abandoned
            if sums is not None:
                machine.pass_gate(sums)
                self.updated = True
                self.stages.reached("passed")
                if sums.shares_received == size:
                    self.share_changes.agree()
                return
        self.own_time.invalidate()
        began = time.monotonic()
        with self.page.no_deadline():
            self.wait_plan()  # the plan says whether the unit counts
        self.waited_s = time.monotonic() - began
        if not machine.count_by_plan(at):
            raise Abandoned
        self.updated = True

    def sum_before_gate(self, at: Position, mine: Offer) -> GateSums:
        """Return what the gate of ``at`` would sum up now that the device has come, without committing anything. Raises
        `Abandoned` when the unit will not count."""
        if self.machine.broken or not self.machine.generation:
            raise Abandoned
        values = self._sum(mine)
        sums = None if self.machine.broken else agreed(values, self.size, at)
        if sums is None:
            raise Abandoned
        return sums

    def _sum(self, mine: Offer) -> list[float]:
        """Sum ``mine`` over all ranks, in place, and return the values as a list."""
        if self.size > 1:
            self._in_gate = True
            try:
                self.groups[0].sum_on_host(torch.from_numpy(mine))
            finally:
                self._in_gate = False
            self.progress.all_completed()
        values: list[float] = mine.tolist()
        return values

    def synchronise_device(self) -> None:
        """Wait until the device has passed everything that is enqueued; the unit's gradients are complete then, if
        nothing was broken before.

        Raises `Abandoned` when something was, because a broken collective leaves garbage that looks complete.
        """
        if not self._wait_for_device(self.queue.mark(), lambda: self.machine.broken, self._gate_waits):
            raise Abandoned

    def abandon(self) -> None:
        """Leave the current unit by raising `Abandoned`."""
        raise Abandoned

    def begin_unit(self, *, phase: bool) -> None:
        """Prepare for one attempt at a unit: reset what is kept per unit."""
        self.in_phase, self.waited_s = phase, 0.0
        self.order.begin_unit()
        self.own_time.begin()
        self.microbatch_collectives.begin_unit()
        self.share_changes.take_effect()
        self.inflight.some_abandoned = False
        self.scope = Scope.UNIT
        self.machine.begin_unit()
        self.updated = False
        self.after_update = None
        c10d.leave_coalescing()
        for group in self.groups:
            group.leave_coalescing()

    def end_passes(self) -> None:
        """Record that the current unit's forward and backward passes are over. What follows happens once on all
        ranks."""
        self.own_time.end_microbatches()
        self.microbatch_collectives.stop()

    def set_position(self, position: Position, gate: tuple[float, ...]) -> None:
        """Set the committed position and its gate as a plan says them: for a newcomer, and for all ranks after a
        rollback."""
        with self._lock:
            self.machine.place(position, gate)

    def begin_alone(self) -> None:
        """Begin as a world of one rank without a coordinator, where loopbacks are exact."""
        self.machine.start_alone(Generation(1))

    # -- called by the control thread
    def unless_broken(self, act: Callable[[], None]) -> bool:
        """Call ``act`` under the lock unless the generation is broken, and return whether it was called. After a break
        this worker has already reported, for the next plan, what it holds."""
        with self._lock:
            if self.machine.broken:
                return False
            act()
            return True

    def unless_overtaken(self, plan: GenerationPlan) -> Callable[[Callable[[], None]], bool]:
        """Return a function like `unless_broken` for use between two generations: it calls its argument only while
        ``plan`` is the newest that was announced."""

        def unless(act: Callable[[], None]) -> bool:
            with self._lock:
                if self.machine.is_superseded(plan.generation):
                    return False
                act()
                return True

        return unless

    def on_break(self, command: BreakGeneration, snapshots: Callable[[], tuple[Step, ...]]) -> WorkerParked | None:
        """Break the generation, and return the report of what this worker holds; None if a newer one was announced
        already. ``snapshots``: returns the steps of its snapshots."""
        machine = self.machine
        with self._lock:
            if not machine.announce_break(command.generation):
                return None
            self.returns.break_begins()
            self.stages.begin()
            self.inflight.mark_broken()
            report = WorkerParked(
                slot=self._slot,
                incarnation=self._incarnation,
                generation=command.generation,
                passed=machine.passed,
                entered=machine.entered,
                begun=self.begun,
                gate=machine.gate.values if machine.gate else (),
                snapshots=snapshots(),
                layout=Generation(self.layout) if self._has_state else None,
                replica_class=self._class_to_report(),
                resumed=self.resumed,
                good=self.good,
            )
            communicators = [group.communicator for group in self.groups if group.communicator]
            builder = self._build.builder
            self._changed.notify_all()
        for communicator in communicators:
            communicator.break_()
        self.returns.watch_device()
        self.stages.reached("broken")
        if builder is not None:
            builder.abandon()
        return report

    def look_at_device(self) -> None:
        """Update the device's progress, and end the process if the device has not come back after a break in time. The
        control thread calls this at intervals.

        Handshakes on demand count as progress, because the others wait for them.
        """
        self.progress.update_page()
        self.returns.check()
        if self._build.handshakes.are_under_way:
            self.page.progress()  # handshakes have a limit of their own

    def let_device_return(self) -> None:
        """Wait, after a break and before anything is done again, until all that was in flight on the device is over.
        The process ends if that takes too long."""
        machine = self.machine
        if self.queue.is_host or not machine.broken or not machine.generation:
            return
        with self.page.no_deadline():
            # a collective that failed on its own is broken on the device only once the break is announced
            with self._changed:
                self._changed.wait_for(lambda: machine.announced > machine.generation or self._released)
            self.returns.wait()
            self.returns.break_begins()  # this thread may have enqueued something after the others were broken
            self.returns.watch_device()
            self.returns.wait()

    def _class_to_report(self) -> str:
        """Return this rank's replica class for the report. Ranks that were equal at the start may differ after the
        first step; until that is checked, none counts as a replica."""
        if self.replica_class.startswith("start") and self.machine.entered > self.began:
            return f"unchecked rank {self.rank}"
        return self.replica_class

    def on_plan(self, plan: GenerationPlan, mine: Member) -> None:
        """Accept a newer plan. Its groups are built at once, unless this worker must take another place first.
        ``mine``: this process's entry in the plan."""
        with self._lock:
            if not self.machine.take_plan(plan):
                return
            if not self.machine.generation:  # a spare receives no BreakGeneration
                self.stages.begin()
            self.stages.reached("planned")
            if not mine.fresh and plan.reshard is None and self.counts_as(plan, mine):
                self._build.start(plan, self.groups)
            self._changed.notify_all()

    def on_pause(self, generation: Generation) -> None:
        """Note that ``generation`` is to pause. Ignored between two generations and on a spare."""
        with self._lock:
            self.machine.ask_pause(generation)

    def on_share_change(self, command: DealShards) -> None:
        """Note the next deal of micro-batches. Ignored between two generations and on a spare."""
        with self._lock:
            if self.machine.is_whole(command.generation):
                self.share_changes.receive(command.number, command.shares)

    def on_release(self) -> None:
        """Note that the job is over, and wake the main thread."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    # -- joining a generation
    def wait_plan(self) -> GenerationPlan:
        """Wait for the plan of the newest announced generation, and return it. Ends the process when the job ends
        first, as for a spare that was never needed."""
        with self._changed:
            self._changed.wait_for(lambda: self.machine.has_next_plan or self._released)
            if not self.machine.has_next_plan:
                raise SystemExit(0)
            assert self.machine.plan is not None
            return self.machine.plan

    def wait_released(self) -> bool:
        """Wait, on a finished rank, until the job is over (returns True) or there is something to recover first
        (returns False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._released or self.machine.has_next_plan)
            return self._released

    def start_build(self, plan: GenerationPlan) -> None:
        """Start to build the groups of ``plan``. Raises `Superseded` when a newer generation was announced
        meanwhile."""
        with self._lock:
            if self.machine.is_superseded(plan.generation):
                raise Superseded
            self._build.start(plan, self.groups)

    def join(self, plan: GenerationPlan) -> None:
        """Wait for the communicators of ``plan`` and adopt them; raises `Superseded` when a newer generation was
        announced meanwhile."""
        builder = self._build.builder
        assert builder is not None, "a plan without a build"
        self.returns.wait()
        self._build.wait(plan, builder, self.rank)
        self.stages.reached("built")
        with self._lock:
            if self.machine.is_superseded(plan.generation):
                raise Superseded
            dropped: list[Communicator | None] = []
            for group in self.groups:
                dropped.append(group.communicator)
                group.communicator = builder.communicators.get(group)
                assert group.communicator is not None or group.size() == 1, f"group {group.key} has no communicator"
            self.joined = plan
            self.share_changes.begin(plan.shares)
            self._seated = plan.members
            self.machine.join(plan)
            self.own_time.invalidate()
            self.inflight.new_generation()
            self.progress.new_generation(plan.generation)
            self.blocked.new_generation()
        threading.Thread(
            target=_drop, args=[dropped, self.device], name="rackrun-drop", daemon=True
        ).start()  # in a thread, because each drop takes 3 to 30 ms
        del dropped

    def give_up_state(self) -> None:
        """Note that this process's state is being discarded. To be called under the lock (`unless_overtaken`), like
        `has_state_again`."""
        self._has_state = False

    def has_state_again(self) -> None:
        """Note that the new state is filled."""
        self._has_state = True

    def let_go(self) -> None:
        """Drop all callbacks into the entry of ``main`` that was left."""
        self.on_post_gate_failure = lambda result: None  # noqa: ARG005
        self.rejoin = lambda: None
        self.may_leave_phase = lambda: True
        self.may_be_left = lambda: None
        self.inflight.new_generation()
        slowest_s = self.returns.unit_s()
        self.returns.unit_s = lambda: slowest_s

    def begin_again(self, plan: GenerationPlan, rank: int) -> None:
        """Prepare to enter ``main`` again as ``rank`` of another world: drop all groups of the former one.

        The committed position stays if the plan cuts all shards anew. If it does not, this process is a newcomer, and
        begins as a spare does. Raises `Superseded`.
        """
        with self._lock:
            if self.machine.is_superseded(plan.generation):
                raise Superseded
            dropped = [group.communicator for group in self.groups]
            self._build.drop()
            for group in self.groups:
                group.communicator = None
            self.groups.clear()
            self.group_registry = GroupRegistry()
            self.machine.leave_main(plan)
            self.began = self.machine.passed
            if plan.reshard is None:
                self.good = None
                self._has_state = True  # as on any spare: the core knows that it has restored nothing yet
            self._seated = plan.members
            self.replica_class = f"none yet, as rank {rank} in generation {plan.generation}"
            self.scope, self.met, self._after_in = Scope.SETUP, 0, None
            self.updated = self.in_phase = False
            self.order = CollectiveOrder()
        threading.Thread(target=_drop, args=[dropped, self.device], name="rackrun-drop", daemon=True).start()
        del dropped

    def join_fixed(self, build: Callable[[str, int, int], Communicator]) -> None:
        """Join the world without rackrun's launcher (plain torchrun). No other generation follows, so each group keeps
        the one communicator that ``build(key, rank, size)`` makes for it."""
        self.groups[0].communicator = build(self.groups[0].key, self.rank, self.size)
        self._fixed = build
        self.machine.start_alone(Generation(1))

    def close(self) -> None:
        """Drop the communicators before the interpreter ends, because gloo's threads must not outlive it.

        NCCL's are aborted: torch's own destructor would wait for the other ranks. What this rank has enqueued is over
        by then.
        """
        self.queue.synchronise()
        if self._fixed is not None:
            self.groups[0].communicator.call("barrier", dist.BarrierOptions(), on_host=True).wait()  # type: ignore[union-attr]
        for group in self.groups:
            communicator, group.communicator = group.communicator, None
            if communicator is not None and not self.queue.is_host:
                communicator.drop()

    def promote(self, rank: int) -> list[tuple[ElasticGroup, tuple[int, ...]]]:
        """Take the place of ``rank`` in every group, as a spare. Returns all groups except the world's, with their new
        ranks."""
        return self.group_registry.promote(self.groups, rank)

    def fits(self, rank: int) -> bool:
        """Whether `promote` can give this process the place of ``rank``."""
        return self.group_registry.fits(self.groups, rank)

    def counts_as(self, plan: GenerationPlan, mine: Member) -> bool:
        """Whether this process's rank and world size are already those that ``plan`` gives it."""
        return (self.rank, self.size) == (mine.rank, plan.world_size)

    def resize(
        self, plan: GenerationPlan, rank: int
    ) -> tuple[list[tuple[ElasticGroup, tuple[int, ...]]], list[int | None]]:
        """Change all groups to the plan's world, whose size or numbering differs, with this process as ``rank``.

        Returns the groups with their new ranks, and for each new rank which rank it was before; None for one that joins
        now. Raises `Superseded`.
        """
        with self._lock:  # the control thread builds for a newer plan from the groups as they are then
            if self.machine.is_superseded(plan.generation):
                raise Superseded
            before = {(member.slot, member.incarnation): int(member.rank) for member in self._seated}
            moved = self.group_registry.resize(self.groups, rank, plan.world_size)
            self._seated = plan.members
        return moved, [before.get((member.slot, member.incarnation)) for member in plan.members]

    def attempt(self, plan: GenerationPlan, transfer: Callable[[], T]) -> T:
        """Run ``transfer`` in a helper thread and return its result. Raises its error, or `Superseded` when a newer
        generation is announced; the thread is abandoned then."""
        ended: list[T | BaseException] = []

        def run() -> None:
            try:
                use_device(self.device)
                ended.append(transfer())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                ended.append(error)
            self._wake()

        threading.Thread(target=run, name=f"rackrun-restore-{plan.generation}", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: ended or self.machine.is_superseded(plan.generation))
            if self.machine.is_superseded(plan.generation):
                raise Superseded
        if isinstance(ended[0], BaseException):
            raise ended[0]
        return ended[0]

    def superseded(self, generation: Generation | int) -> bool:
        """Whether a generation other than ``generation`` was announced last."""
        return self.machine.is_superseded(generation)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _drop(communicators: list[Communicator | None], device: torch.device) -> None:
    """Drop all communicators in the list, on ``device``, and empty it."""
    use_device(device)
    for communicator in communicators:
        if communicator is not None:
            communicator.drop()
    communicators.clear()
