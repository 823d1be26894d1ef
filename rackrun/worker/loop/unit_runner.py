"""Runs units of work that may have to run again: attempt, gate, then commit, or discard and recover.

A *unit* is one step or one phase. `UnitRunner.run` returns when the unit is committed, however many attempts that took.
After a rollback (a shard without a live copy was lost) the units since the snapshot are attempted again from their
recorded calls, inside whatever call the loop is in. The user's loop itself never goes back.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rackrun.errors import CollectiveBroken, StepError
from rackrun.link.heartbeat_page import Activity
from rackrun.protocol.ids import BEGIN, Position
from rackrun.worker.batch.mesh_axes import Axes
from rackrun.worker.communicators.nccl_warmup import warm_nccl
from rackrun.worker.data.data_run import DataState
from rackrun.worker.data.global_batch import Batches, StepBatch, check_rule
from rackrun.worker.data.loader import Shard
from rackrun.worker.data.rng import undrawn
from rackrun.worker.exact.exact_reduction import ExactReduction
from rackrun.worker.loop.entry_parts import EntryParts, MainHandover
from rackrun.worker.loop.join_generation import Rejoin
from rackrun.worker.loop.pause import WorkerPause
from rackrun.worker.loop.resize_support import fixed_because, held_because
from rackrun.worker.loop.unit_attempt import UnitAttempt
from rackrun.worker.loop.unusable_state import (
    judge_post_gate_failures,
    leave_changed_between,
    leave_torn,
    leave_unrestorable,
)
from rackrun.worker.membership.decisions.gate_sums import GateSums
from rackrun.worker.membership.decisions.interruptions import Abandoned
from rackrun.worker.membership.decisions.script_scope import Scope
from rackrun.worker.process.reports import say
from rackrun.worker.process.runtime import Runtime
from rackrun.worker.script.second_loop import ONE_LOOP
from rackrun.worker.snapshots.durable_checkpoints import DurableCheckpoints
from rackrun.worker.state.state_manifest import TurnResults
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps import closures
from rackrun.worker.steps.audits import is_looked_at
from rackrun.worker.steps.recorded_units import RecordedUnit
from rackrun.worker.steps.step import Step
from rackrun.worker.steps.turns import encoded, with_phase, with_step
from rackrun.worker.steps.unit_times import EXITS, UNKNOWN
from rackrun.worker.torch_compat.not_compiled import not_compiled

__all__ = ["UnitRunner"]

T = TypeVar("T")

_BETWEEN = "between"


class UnitRunner:
    """Runs the units of one entry of ``main`` on this rank, and connects all parts of the worker for that."""

    _result: Any = None
    """The value that the step function returned in the last attempt."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        batches: Batches,
        snapshot_every: int | None,
        durable: DurableCheckpoints | None,
        mesh: Axes = (),
        exact: ExactReduction | None = None,
        carried: MainHandover | None = None,
    ) -> None:
        """``carried``: what the former entry of ``main`` handed over; None at the first entry."""
        self._parts = parts = EntryParts.of_entry(
            runtime, mesh, state, batches, exact, durable, snapshot_every, carried
        )
        self._runtime, self._world, self._page = runtime, runtime.world, runtime.page
        self._state, self._batches, self._exact, self._durable = state, batches, exact, durable
        self._snapshots, self._pace, self._undo = parts.snapshots, parts.pace, parts.undo
        self._replicas, self._post_gate, self._reports = parts.replicas, parts.post_gate, parts.reports
        self._recorded = parts.recorded
        self._carried = carried
        self._world.on_post_gate_failure, self._world.rejoin = self._post_gate.record, self._rejoin_after_loop
        self._pause = WorkerPause(runtime, self._snapshots, durable, self._reports)
        self.waiting_spare = not self._world.generation if carried else runtime.spare
        self._in_hand: UnitAttempt | None = None
        """The attempt at the current unit; None between two units."""
        self._attempts: dict[Position, int] = {}
        """Number of attempts begun at the unit that was attempted last."""
        self._rejoin = Rejoin(
            runtime, state, self._snapshots, self._replicas, self._pace, durable, parts.settle, self._reports
        )
        self._rejoin.known_digests = self._undo.digests_ahead
        self._begun = False
        self._between: float | None = None
        """When the user's code between two units began to run (`time.monotonic`); None while it does not run."""
        self._owed: Position | None = None
        """The step that the script called last, until the loop's body has ended: the code after the call must run once
        the step is committed."""
        self._left_after: int | None = None
        self._pause_due: tuple[Position, int] | None = None
        """The step and generation after which all ranks pause, when the loop's body has ended; None when no pause is
        due."""
        self.keeps_results = False
        """Whether the script's loop may enter a turn again whose step is committed, for which results are kept."""
        self._kept_size = ""
        """Why the number of ranks cannot change, beside what groups and tracked objects show; "" if it may."""
        self._not_given: set[str] = set()
        """Names of steps and phases whose results cannot be kept, as far as that was said."""
        self._came_in = BEGIN
        """The position that was committed when this process entered its loop: this process has never called its step
        function for an earlier one."""
        self._copying_bytes = 0
        """Bytes that this rank copies of its state after the last step, while all ranks copy theirs and some may not
        have finished; 0 when none copy."""
        self._undo.accesses.settle = parts.settle
        self._world.may_be_left = self._may_be_left
        self._world.may_leave_phase = self._undo.may_be_left
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)
        self._hook_after: RemovableHandle | None = None
        if batches.scale is not None:  # otherwise no rate is ever scaled
            restore = not_compiled(lambda optimizer, *_: parts.rates.restore(optimizer))
            self._hook_after = register_optimizer_step_post_hook(restore)

    def entered_once(self, because: str) -> None:
        """Let this process end where ``main`` would have to be entered again, as it cannot be; "" if it can."""
        self._rejoin.entered_once = because

    @property
    def is_exact(self) -> bool:
        """Whether gradients are reduced exactly."""
        return self._exact is not None

    def keeps(self, name: str, data: DataState) -> None:
        """Keep where the script's ``data`` stand, as tracked state under ``name``."""
        self._parts.data_states.append(data)
        self._state.track(name, data)

    def keep_size(self, because: str) -> None:
        """Keep the number of ranks. ``because``: why it cannot change, for a message."""
        self._kept_size = because

    def bind_to_rank(self, because: str) -> None:
        """Let a spare that takes another rank over enter ``main`` again, and keep the number of ranks (see
        `Run._bind_to_rank`)."""
        self.keep_size(because)
        self._rejoin.bound_to_rank = True

    # -- the run
    @property
    def passed(self) -> Position:
        """The position of the last unit whose gate this rank saw pass."""
        return self._world.passed

    @property
    def draining(self) -> bool:
        """Whether the world agreed in its last gate to end at this step boundary: some rank was asked to leave, and no
        rank has begun a later step, as it may have after a rollback."""
        gate = self._world.gate
        return gate is not None and gate.draining > 0 and not gate.ahead

    @property
    def step_in_hand(self) -> Step | None:
        """The attempt at a step or phase that is running; None between two units."""
        return None if self._in_hand is None else self._in_hand.step

    def begin(
        self,
        warm_up: Callable[[], Callable[[Step], Any] | None],
        total: int,
        held: str = "",
        sizes: Sequence[int] = (),
    ) -> None:
        """Enter the step loop, at ``run.steps()``.

        A rank goes on at once, from a checkpoint if there is one. A spare warms up and waits until a plan names it.
        ``warm_up`` returns the function for a spare to try once, or None. ``total``: number of steps of the run.
        ``held``: why ``main`` cannot be entered again with another number of ranks, or "". ``sizes``: numbers of ranks
        that the world may come to have. Raises `StepError` at a second call, `CollectiveBroken` when a peer was lost before the
        first step, and `Reenter`.
        """
        if self._begun:
            raise StepError(
                "run.steps() was called twice.",
                remedy=ONE_LOOP,
            )
        self._begun = True
        self._world.returns.unit_s = lambda: self._pace.slowest_s
        self._runtime.main_reached_steps()
        self._reports.setup_ms = self._runtime.setup_ms
        self._parts.last_step = total - 1
        if self._exact is not None:
            self._exact.attach()
        else:
            self._state.divide_alike()
        if self._batches.scale is not None:
            self._state.track("rackrun.batches", self._batches)
            for name, optimizer in self._state.optimizers.items():
                self._parts.rates.check(name, optimizer)
        if self._durable is not None and not self.waiting_spare and self._carried is None:
            self._resume(self._durable)
        if self._batches.scale is not None and not self.waiting_spare and self._carried is None:
            check_rule(self._batches.check(sizes), self._world)
        self._world.scope = Scope.OUTSIDE
        self._say_how_it_changes(held)
        if self._carried is not None and not self.waiting_spare:
            self._left_after = self._rejoin.arrive(self._carried.left_after)
            self._came_in = self.passed
            self._make_last_whole()
            self._to_script()
            return
        if not self.waiting_spare:
            if self._world.broken:
                raise CollectiveBroken(
                    "a peer was lost before the first step.", remedy="none needed: the world starts again."
                )
            self._expect_snapshots()
            self._reports.ready(self._replicas.at_start())
            self._to_script()
            return
        if self._carried is None:
            self._try_once(warm_up())
        self._page.enter(Activity.WAITING)
        self._reports.ready("")
        if self._carried is None:
            warm_nccl(self._runtime.device)
        self._recover()
        self._came_in = self.passed
        self.waiting_spare = False
        self._left_after = self._rejoin.left_after
        self._make_last_whole()
        self._to_script()

    def _make_last_whole(self) -> None:
        """Complete the checkpoint of the last step when this process takes a place after that step.

        Does nothing once phases have run that change the state, which is not the state of that step any more.
        """
        changes = self._state.lineage.changes
        if self._durable is None or self.left_early or self.passed.step < self._parts.last_step:
            return
        if self.passed == Position(self._parts.last_step) or not any(changes.phases.values()):
            self._durable.make_whole(self._parts.last_step)
            self._parts.settle()

    def _to_script(self) -> None:
        """Mark on the heartbeat page that the user's own code runs again, between two units."""
        self._page.enter(Activity.BETWEEN, self.passed, *self._pace.allowance(_BETWEEN, between=True))

    def _say_how_it_changes(self, held: str) -> None:
        """Report whether the number of ranks can change: in place, by entering ``main`` again, or not at all and
        why."""
        reports = self._reports
        if self._batches.dealt_by_framework:
            reports.fixed = "a framework deals the samples to this number of ranks"
        elif self._kept_size:
            reports.fixed = self._kept_size
        elif because := fixed_because(self._state, self._world):
            reports.fixed = held or held_because(self._state, self._world, self._parts.axes)
            reports.reenters = not reports.fixed and self._runtime.boot is not None
            reports.fixed = reports.fixed and f"{because}, and {reports.fixed}"

    @property
    def left_early(self) -> bool:
        """Whether the script has left its loop before the end, in this entry of ``main`` or in a former one."""
        return self._left_after is not None

    @property
    def lost_before_steps(self) -> bool:
        """Whether ``main`` was entered again, is not at ``run.steps()`` yet, and the world that it was entered for is
        broken."""
        return self._carried is not None and not self._begun and self._world.broken

    @property
    def leaving(self) -> bool:
        """Whether ``main`` is being left to be entered again (see `Rejoin.leaving`)."""
        return self._rejoin.leaving

    def let_go(self) -> MainHandover:
        """Release everything that belongs to this entry of ``main``, and return what the next entry takes over."""
        self._parts.settle()
        self._undo.let_go()
        self._hook.remove()
        if self._hook_after is not None:
            self._hook_after.remove()
        if self._exact is not None:
            self._exact.detach()
        self._world.let_go()
        nothing = TrackedState()
        nothing.lineage = self._state.lineage
        self._snapshots.become(nothing)
        if self._durable is not None:
            self._durable.become(nothing)
        return MainHandover(
            self._parts.axes, self._snapshots, self._durable, self._pace, self._world.size, self._left_after
        )

    def _resume(self, durable: DurableCheckpoints) -> None:
        """Load the newest checkpoint, if there is one, and set this rank's position to it."""
        position = durable.resume()
        if position is not None:
            self._world.began = self._came_in = position
            self._world.set_position(position, ())

    def run(self, at: Position, body: Callable[[Step], T], name: str = "", *, in_body: bool = False) -> T:
        """Run ``body`` as the unit at ``at``, and return its result once the unit is committed.

        ``name``: a phase's name, for limits and messages. ``in_body``: the loop's body has called this phase, and goes
        on after it. Raises `StepError` when tracked state has changed since the unit before.
        """
        if self._between is not None:
            self._pace.unit_took(_BETWEEN, time.monotonic() - self._between)
            self._between = None
        self._undo.check_stands(glance=not (at.phase or is_looked_at(self._parts.number(at))))
        self._recorded.append(RecordedUnit(at, body, name, in_body=in_body))
        self._result = None  # a recovery at the end of the loop's body may have left the result of an older unit
        self._owed = at if in_body or not at.phase else None
        self._catch_up()
        result: T = self._result  # the last attempt was at this unit
        self._result = None  # it may be large
        # a recovery was the last thing to happen, or is due
        if self._page.activity is not Activity.BETWEEN or self._world.broken:
            self._to_script()
        self._between = time.monotonic()
        return result

    def body_over(self) -> None:
        """Pause or recover at the end of the loop's body after a committed step, if either is due.

        Raises `Reenter` when ``main`` is to be left. It is left here, not in the call of the step function, so that the
        rest of the body has run.
        """
        self._owed = None
        if self._pause_due is None and not self._world.broken:
            return
        self._undo.check_stands(accessed=True)
        self._undo.let_go()
        if self._between is not None:
            self._pace.unit_took(_BETWEEN, time.monotonic() - self._between)
        self._pause_if_due()
        self._catch_up()
        self._to_script()
        self._between = time.monotonic()

    def finish(self) -> None:
        """Wait until all ranks have finished, after ``main`` has returned; this rank stays available as a restore
        source meanwhile."""
        self._owed = None
        channel, boot = self._runtime.channel, self._runtime.boot
        took_ms = self._page.own_ms_now
        with contextlib.suppress(Abandoned):
            self._world.synchronise_device()  # before release: a peer's kernels may still use this rank's communicators
        self._page.enter(Activity.WAITING)
        while channel is not None and boot is not None:
            self._parts.settle()
            if self._durable is not None:
                self._durable.finish(lambda: self._world.broken)
            if not self._world.broken:
                self._reports.finished(took_ms)
                if self._world.wait_released():
                    self._page.enter(Activity.EXITING, self.passed, *self._pace.unobserved(EXITS))
                    break
            self._recover()
            self._catch_up()
            self._pause_if_due()
            self._page.enter(Activity.WAITING)
        if self._durable is not None:
            self._durable.finish(lambda: False)
            self._durable.is_over()
        self._undo.let_go()
        self._snapshots.finish()
        self._world.close()

    def expect(self, seconds: float) -> None:
        """Let the current operation and the next unit take ``seconds`` before they count as a hang."""
        self._pace.expect(seconds)
        self._page.allow(int(1e3 * seconds))

    def leaves_loop(self) -> None:
        """Record that the script leaves the loop before its end, after the step committed last."""
        if self._left_after is None:
            self._left_after = self.passed.step

    def loop_left(self) -> None:
        """Accept what the script has done to tracked state since it left the loop, such as loading the best weights:
        its last phases begin with that.

        A pause that was agreed on in the last step is dropped.
        """
        self._owed = self._pause_due = None
        self.refuse_freed()
        self.leaves_loop()
        self._undo.accept()
        self._rejoin.loop_end.left()

    def loop_over(self, *, late: bool = False) -> None:
        """Hand over to the script's code after the loop, which is not recorded and cannot be repeated. ``late``: that
        code has already begun."""
        self._between = self._owed = None
        self._undo.let_go()
        self._page.enter(Activity.BETWEEN, self.passed, *self._pace.unobserved(UNKNOWN))
        self._parts.settle()  # the script may change the state from here on, while a copy of it may be in progress
        if self._runtime.boot is not None:
            self._rejoin.loop_end.reached(self._undo.changed_since() if late else "")

    def refuse_freed(self) -> None:
        """Raise `StepError` when a tracked tensor's memory was freed (see `LoopEndState.refuse_freed`)."""
        self._rejoin.loop_end.refuse_freed()

    def report_log(self, values: dict[str, float | int | str]) -> None:
        """Report values logged by the script: with the current unit, once it is committed, or at once between two
        units."""
        if self._in_hand is not None and not self._world.unit_passed:
            self._in_hand.logs.append(values)  # dropped if the unit is not committed
        else:
            self._reports.logged(values, self.passed)

    def begin_shard(self, step: Step, shard: Shard, *, last: bool, ids: np.ndarray[Any, Any], dp_size: int) -> None:
        """Prepare for the micro-batch ``shard`` that the loader is about to yield: its weight in ``step``, its random
        numbers, gradient synchronisation.

        ``last``: it is this rank's last of the step. ``ids``: its sample ids. ``dp_size``: number of data-parallel
        ranks. Raises `Abandoned` when the world is broken.
        """
        attempt = self._in_hand
        if attempt is None or attempt.step is not step:
            raise StepError(
                "an iterator of the loader was kept from another step, or from another attempt at this one.",
                remedy="begin a new `for batch in loader` in every call of the @run.step function.",
            )
        attempt.begin_shard(shard, last=last, ids=ids, dp_size=dp_size)

    def _may_be_left(self) -> None:
        """Note a point in the current step at which an attempt that will not count may be left."""
        if self._in_hand is not None:
            self._in_hand.may_be_left()

    # -- one attempt
    def _catch_up(self) -> None:
        """Attempt the recorded units, oldest first, until the newest is committed.

        The world may still be broken afterwards: the code that follows the step in the loop's body runs first, because
        it may leave the loop, which a newcomer has to learn.
        """
        machine = self._world.machine
        while True:
            due = self._recorded.first_after(machine.passed)
            if due is None and self._owed is not None:
                break
            if machine.broken:
                if not self._recover():
                    return
                continue
            if due is None:
                break
            self._attempt(due)
        # Where replicas are compared, all ranks may go back to the last good step, even a rank that has joined since
        # and has no snapshot of it.
        back = [one for one in (self._snapshots.oldest_kept(), self._world.good) if one is not None]
        self._recorded.keep_after(min(back, default=None))

    def _attempt(self, unit: RecordedUnit) -> None:
        """Run ``unit`` once. Commits it if its gate passes, and discards its changes otherwise. Ends the process when
        they cannot be undone."""
        at = unit.at
        number = self._attempts.pop(at, 0)
        self._attempts = {at: number + 1}
        began = time.monotonic()
        attempt = self._in_hand = self._begin(Step(at, number, self._world), unit.name, in_body=unit.in_body)
        try:
            if self._replicas.begins():
                self._replicas.keep_all_buffers()
            if self._replicas.due() and self._replicas.compare():
                self._expect_snapshots()
                self._reports.ready(self._world.replica_class)
            self._result = unit.body(attempt.step)
            attempt.body_over()
        except Abandoned:
            pass
        except Exception as error:
            if self._world.unit_passed or not self._world.may_follow_from_break(error):
                raise
            # Loopback values or a broken peer's data caused this error in the script; the attempt does not count.
        finally:
            self._in_hand = None
            attempt.ended()
            self._parts.rates.restore_all()
        self._world.let_device_return()
        rank = self._world.rank
        if self._post_gate.any:
            judge_post_gate_failures(rank, at, corrupted_state=self._post_gate.corrupted_state())
        attempt.step._discarded = not self._world.machine.unit_passed
        if self._world.machine.unit_passed:
            self._world.scope = Scope.OUTSIDE
            if self.keeps_results:
                self._keep_result(unit)
            self._committed(at, attempt, time.monotonic() - began - self._world.waited_s, unit.name)
            if self._to_pause(at):
                self._pause_due = at, self._world.generation
                if self._world.gate is not None and self._world.gate.ahead:
                    # some ranks are in a call for a later unit, and do not return to their script before it
                    self._pause_if_due()
        elif attempt.rollback_incomplete:
            leave_unrestorable(rank, at, attempt.not_put_back)
        elif attempt.changed_between_units and self._undo.changed_between:
            leave_changed_between(rank, at, self._undo.changed_between)
        elif changed := self._discard(reached_gate=attempt.reached_gate):
            leave_torn(rank, at, changed)

    def _begin(self, step: Step, name: str = "", *, in_body: bool = False) -> UnitAttempt:
        return UnitAttempt(self._parts, step, name=name, in_body=in_body, copying_bytes=self._copying_bytes)

    def _keep_result(self, unit: RecordedUnit) -> None:
        """Keep what the committed ``unit`` has returned for processes that enter its turn without having called it."""
        if unit.at.phase and not unit.in_body:
            return
        if self._result is not None and not encoded(self._result):
            self._say_not_given(unit.name or "the step function")
        lineage, phase = self._state.lineage, unit.at.phase
        results = with_phase(lineage.results, phase, self._result) if phase else with_step(self._result)
        self._state.lineage = msgspec.structs.replace(lineage, results=results)

    def _say_not_given(self, name: str) -> None:
        """Print once that a process which goes through committed calls gets None in place of a result."""
        if name in self._not_given or self._world.rank != 0:
            return
        self._not_given.add(name)
        say(
            f"{name} returns a {type(self._result).__name__}: a process that takes a rank over may get None in its place. "
            "Remedy: return numbers, texts, lists and dictionaries (tensor.item()), or do not use the result."
        )

    @property
    def results(self) -> TurnResults:
        """What the last calls of the loop returned."""
        return self._state.lineage.results

    @property
    def last_in_body(self) -> Position:
        """The position of the last committed unit among those that the loop's body calls."""
        step = self._left_after if self._left_after is not None else self.passed.step
        return Position(step, self.results.last_phase)

    @property
    def left_after(self) -> int | None:
        """The step after which the script has left its loop early; None if it has not."""
        return self._left_after

    def ends_after(self, step: int) -> None:
        """Note that ``step`` was the last one of a loop that had no number of steps."""
        self._parts.last_step = step

    def batch_of(self, step: int) -> StepBatch:
        """Return the global batch of ``step``. The current step keeps the batch with which its attempt began."""
        held = self._in_hand
        return held.batch if held is not None and held.step._at.step == step else self._batches.of(step)

    @not_compiled
    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hook before each ``optimizer.step()``: pass the gate at the first one of a step, and scale the learning
        rates.

        Raises `StepError` outside a step and for an optimizer that is not tracked.
        """
        attempt = self._in_hand
        if attempt is None:
            raise StepError(
                f"{type(optimizer).__name__}.step() was called outside a step, where it could not be undone or repeated.",
                remedy="call it inside the @run.step function.",
            )
        if not any(optimizer is tracked for tracked in self._state.optimizers.values()):
            raise StepError(
                f"{type(optimizer).__name__}.step() trains state that is not tracked.",
                remedy="pass the optimizer to run.track(...).",
            )
        return attempt.before_optimizer(optimizer, args, kwargs)

    def _committed(self, at: Position, attempt: UnitAttempt, seconds: float, name: str) -> None:
        """Record and report the committed unit, learn from its gate, and begin the copies that are due."""
        self._page.enter(Activity.BETWEEN, at, *self._pace.allowance(_BETWEEN, between=True))
        self._snapshots.drop_former()
        if self._exact is not None and not at.phase:
            self._exact.committed()
        if not at.phase and self._batches.committed(at.step, attempt.batch):
            self._reports.batch_changed(at.step, attempt.batch, self._batches)
        for one in self._parts.data_states:
            one.committed(attempt.step)
        self._pace.committed()
        self._parts.nan.committed(at)
        gate = self._world.gate
        assert gate is not None, "a unit is committed by its gate"
        self._undo.ended()
        late = self._state.lineage.changes.parts
        if gate.parts and not late:
            self._has_parts(
                f"a step goes on after its first optimizer.step() with {self._parts.multi_part.found or 'collectives on another rank'}"
            )
        if self._replicas.committed(gate.changed_late, late=late):
            self._reports.ready(self._world.replica_class)
        if self._replicas.gates_move and not self._state.lineage.changes.parts:
            self._has_parts(
                "each rank has buffers of its own (statistics of batch norm, say) that change after optimizer.step()"
            )
        if not self._replicas.need_snapshots and self._replicas.known(at):
            self._snapshots.drop_upto(self._world.began.step)
        first = attempt.step.attempt == 0
        if first and not at.phase:
            self._pace.took(seconds)
        elif first:
            self._pace.unit_took(self._parts.phase_key(at, name, in_body=attempt.in_body), seconds)
        own = self._world.own_time.of(seconds) if first else 0.0
        rescaled = self._exact.rescaled if self._exact is not None and not at.phase else 0
        self._reports.committed(at, attempt.step.attempt, rescaled, seconds, own, attempt.delivered_ids())
        self._reports.snapshots(self._page, size=self._snapshots.bytes, seconds=self._snapshots.cost_s)
        for values in attempt.logs:
            self._reports.logged(values, at)
        if not at.phase:
            self._copying_bytes = self._undo.trained_bytes if self._begin_copies(at, gate) else 0
            self._pace.step_done()
        self._undo.committed()

    def _begin_copies(self, at: Position, gate: GateSums) -> bool:
        """Begin the snapshot and the checkpoint that are due after ``at``, and return whether any copy has begun: the
        same on all ranks."""
        begun = False
        if self._replicas.need_snapshots and not self._world.broken:
            now, to_pause = self._pace.first_step_of_generation, self._to_pause(at)
            with self._pause.without_memory() if to_pause else contextlib.nullcontext():
                begun = self._snapshots.take_if_due(at, gate, now=now or to_pause)
        elif not self._world.broken:
            first, last = self._pace.first_step_of_generation, at.step + 1 == self._parts.last_step
            begun = self._parts.corruption.committed(at, first_of_generation=first, last=last)
        if self._durable is not None:
            begun |= self._durable.save_if_due(at, gate, last=at.step == self._parts.last_step)
        return begun

    def _to_pause(self, at: Position) -> bool:
        """Whether all ranks pause after ``at``: the same on all ranks, except where the generation is broken already.

        A pause follows a step, not a phase, because its snapshot is one of a step. A run that ends here needs no swap.
        """
        gate = self._world.gate
        asked = gate is not None and gate.pausing > 0 and not at.phase
        return asked and not self.draining and not self._world.broken

    def _pause_if_due(self) -> None:
        """Pause if a pause of this generation is due. All live ranks come to this after the same step."""
        due, self._pause_due = self._pause_due, None
        if due is not None and due[1] == self._world.generation:
            self._pause.hold(due[0], last=due[0].step == self._parts.last_step)

    def _discard(self, *, reached_gate: bool) -> list[str]:
        """Undo the changes of an attempt that does not count. Returns the paths of what has no copy to put back."""
        changed = self._undo.discard(backward_open=not reached_gate or self._world.inflight.some_abandoned)
        self._replicas.unique.discarded()
        self._world.scope = Scope.OUTSIDE
        return changed

    def _has_parts(self, why: str) -> None:
        """Record that the script's steps have several parts, so that their gates move to the end. All ranks call this
        after the same unit."""
        changes = msgspec.structs.replace(self._state.lineage.changes, parts=True)
        self._state.lineage = msgspec.structs.replace(self._state.lineage, changes=changes)
        if self._world.rank == 0:
            size = self._undo.trained_bytes
            say(
                f"{why}. So that a step can be done again as a whole, it is committed at its end, and {size / 2**20:.1f} MiB (parameters and what optimizers hold for them) "
                "are copied when it begins. Where all that can come before the first optimizer.step(), that is not needed."
            )

    # -- recovery
    def _recover(self) -> bool:
        """Join the next generation. Returns False when that is to be done later (see `Rejoin.run`)."""
        self._undo.let_go()
        recovered = self._rejoin.run(
            self._came_in, self._left_after, lambda: self._owed is not None and self._owed <= self.passed
        )
        if recovered:
            self._expect_snapshots()
        return recovered

    def _expect_snapshots(self) -> None:
        """Have the memory for snapshots allocated while the next steps run."""
        if self._replicas.need_snapshots:
            self._snapshots.expect()

    def _rejoin_after_loop(self) -> None:
        """Recover from a break while the script's code after the loop runs; that code continues as if nothing had
        happened."""
        scope = self._world.scope
        with undrawn():
            while self._world.broken:
                self._recover()
                self._catch_up()
        self._world.scope = scope
        self._page.enter(Activity.BETWEEN, self.passed, *self._pace.unobserved(UNKNOWN))

    def _try_once(self, function: Callable[[Step], Any] | None) -> None:
        """Run the step function once on loopback groups up to the gate, on a spare, and then the optimizers, to warm up
        allocations, kernels and compilation.

        The results are overwritten when the spare takes a place. Errors are printed, not raised.
        """
        if function is None:
            return
        try:
            attempt = self._in_hand = self._begin(Step(Position(0), 0, self._world))
            with contextlib.suppress(Abandoned):
                function(attempt.step)
            self._warm_optimizers()
            if self._state.sharded() or (self._runtime.boot is not None and self._runtime.boot.world_size == 1):
                self._snapshots.warm()
        except Exception as error:  # noqa: BLE001 - a warm-up may fail on loopback values; the real step decides
            print(
                f"rackrun: warming up a spare failed, it will be cold: {type(error).__name__}: {error}", file=sys.stderr
            )
        finally:
            tried, self._in_hand = self._in_hand, None
            if tried is not None:
                tried.ended()
                tried.step._discarded = True
            self._discard(reached_gate=tried is not None and tried.reached_gate)
            for one in self._parts.data_states:
                one.trial_over()

    def _warm_optimizers(self) -> None:
        """Run each optimizer once, so that its state is allocated: as large as the model or twice that, it would
        otherwise be allocated page by page during a recovery."""
        self._hook.remove()
        try:
            for optimizer in self._state.optimizers.values():
                if not closures.needs_closure(optimizer):
                    optimizer.step()
        finally:
            self._hook = register_optimizer_step_pre_hook(self._before_optimizer)
