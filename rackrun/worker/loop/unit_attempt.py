"""One attempt at a unit on this rank: from its begin, through the gradients, to its gate.

What an attempt learns (the samples delivered, the loss, whether a closure runs again) ends with it. Whether its unit is
committed, and what follows, is decided in `rackrun.worker.loop.unit_runner`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rackrun.errors import StepError
from rackrun.link.heartbeat_page import Activity
from rackrun.protocol.ids import Position
from rackrun.worker.batch.mesh_axes import ranks_of_one_loss
from rackrun.worker.data.global_batch import StepBatch
from rackrun.worker.data.loader import Shard
from rackrun.worker.data.rng import reseed
from rackrun.worker.loop.entry_parts import EntryParts
from rackrun.worker.membership.decisions.gate import Offer, complete, offered
from rackrun.worker.membership.decisions.gate_sums import ZERO_SUMS, GateSums
from rackrun.worker.membership.decisions.interruptions import Abandoned
from rackrun.worker.script.user_line import in_generator
from rackrun.worker.steps import closures
from rackrun.worker.steps.audits import is_audited
from rackrun.worker.steps.step import Step
from rackrun.worker.steps.undo.between_units import changed_between
from rackrun.worker.tensors.readback import Readback

__all__ = ["UnitAttempt"]

_FACTOR, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


class UnitAttempt:
    """One attempt at one unit. It is made when the attempt begins, and dropped when it has ended."""

    def __init__(
        self, parts: EntryParts, step: Step, *, name: str = "", in_body: bool = False, copying_bytes: int = 0
    ) -> None:
        """Begin the attempt: record what an undo needs, and set batch, deadline and random numbers.

        ``name``: that of a phase. ``in_body``: the loop's body calls the phase. ``copying_bytes``: bytes that a copy
        reads from the state beside this unit.
        """
        self.step, self._parts, self.in_body = step, parts, in_body
        self._world = parts.runtime.world
        self.delivered: list[np.ndarray[Any, Any]] = []
        """The ids of the samples that this rank was given, one array for each micro-batch."""
        self.logs: list[dict[str, float | int | str]] = []
        """What the script has logged: reported if the unit is committed."""
        self.reached_gate = False
        self.not_put_back: list[str] = []
        """The tracked state that this rank has changed in an earlier attempt and cannot put back."""
        self.rollback_incomplete = False
        """Whether some rank has changed state that it cannot put back, as the gate told."""
        self.changed_between_units = False
        """Whether some rank had other state when the unit began than at the end of the unit before, as the gate told."""
        self._loss: float | Readback = 0.0
        """This rank's part of the step's loss at the first ``optimizer.step()``."""
        self._late_gate = False
        """Whether the gate stands at the unit's end instead of before its first ``optimizer.step()``."""
        self._gradients_checked = True
        """Whether gradients left from an older step were looked for. False where the loss was read before any
        ``optimizer.step()``."""
        self._counts_again = False
        """Whether a closure is being called again, with the samples that its first call was given."""
        self.batch = self._begin(name, copying_bytes)
        """The global batch of the step."""

    def _begin(self, name: str, copying_bytes: int) -> StepBatch:
        step, parts, page = self.step, self._parts, self._parts.runtime.page
        if step._at.phase:
            parts.settle()  # a phase may change parameters
        else:
            step._ask_loss = self._ask_loss
        self._begin_undo(step._at, parts.phase_key(step._at, name, in_body=self.in_body))
        if parts.exact is not None and not step._at.phase:
            parts.exact.begin(step)
        parts.post_gate.begin_unit()
        parts.multi_part.begin_unit()
        self._world.begin_unit(phase=bool(step._at.phase))
        self._world.begun = step._at
        batch = parts.batches.of(step._at.step)
        work = self._begin_batch(batch)
        self._world.stages.reached("noted")
        if step._at.phase:
            page.name_unit(name)
            page.enter(
                Activity.PHASE,
                step._at,
                *parts.pace.allowance(parts.phase_key(step._at, name, in_body=self.in_body)),
            )
        else:
            page.enter(Activity.STEP, step._at, *parts.pace.step_allowance(copying_bytes=copying_bytes, work=work))
        reseed(parts.batches.plan.seed, "unit", step._at.step, step._at.phase, self._world.rank)
        return batch

    def _begin_undo(self, at: Position, phase: str) -> None:
        """Record the state for an undo, and decide how much is copied. ``phase``: the key of a phase.

        The first step since the run began or was resumed shows how the script behaves, so everything is copied in it.
        """
        undo = self._parts.undo
        if at.phase:
            self._late_gate = True
            undo.begin(phase=phase)
            return
        number = self._parts.number(at)
        tries = not self._world.generation  # a spare's trial run
        self._late_gate = self._parts.state.lineage.changes.parts or number == 1
        undo.begin(
            whole=self._late_gate and not tries,
            audit=is_audited(number) and not tries,
            everywhere=number == 1 and not tries,
            share=(self._world.size, *self._world.share_changes.shares),
        )

    def _begin_batch(self, batch: StepBatch) -> float:
        """Tell the step of its ``batch``, and return this rank's possible work in it relative to the usual, 1.0 for a
        constant batch."""
        step, batches = self.step, self._parts.batches
        step.samples, step.lr_factor = batch.samples_before, batch.lr_factor
        step.batch_size = batch.shards * batches.plan.micro_batch
        if batches.scale is None or step._at.phase:
            return 1.0
        self._world.order.add(f"{batch}")  # the gate detects a rank with a different batch
        return batches.work(batch, self._world.size)

    # -- what the script does
    def begin_shard(self, shard: Shard, *, last: bool, ids: np.ndarray[Any, Any], dp_size: int) -> None:
        """Prepare for the micro-batch ``shard``, as `UnitRunner.begin_shard` says."""
        step, parts, machine = self.step, self._parts, self._world.machine
        self.may_be_left()
        if machine.broken and not machine.unit_passed and not in_generator():
            raise Abandoned  # a generator would be over by it, and the script may have kept it: `Step.scale` raises instead
        shards = self.batch.shards
        parts.runtime.page.progress()
        self._world.own_time.begin_microbatch()
        self._world.microbatch_collectives.begin_microbatch(last=last)
        step._weigh(shards, 1 if parts.exact is not None else dp_size, ghost=shard.ghost)
        step._last_given = last
        if not shard.ghost:
            step.shards = (*step.shards, shard.index)
            if not self._counts_again:
                self.delivered.append(ids)
        if parts.exact is not None:
            parts.exact.next_shard(shard, dp_size)
        parts.state.synchronise_gradients(last)
        reseed(parts.batches.plan.seed, "shard", step._at.step, shard.index)

    def may_be_left(self, *, updates_next: bool = False) -> None:
        """Note a point in the step at which an attempt that will not count may be left."""
        if not self.step._at.phase and not self._world.updated:
            self._parts.undo.at_place(updates_next=updates_next)

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Pass the gate before the first ``optimizer.step()``, and scale the learning rates. Return what ``args`` and
        ``kwargs`` are replaced by; None leaves them."""
        rates, factor, closure = self._parts.rates, self.step.lr_factor, closures.of_step(args, kwargs)
        if closure is not None and not self._world.updated:
            rates.scale(optimizer, factor)
            return closures.with_closure(args, kwargs, self._before_closure, self._after_closure)
        self._before_update()
        rates.scale(optimizer, factor)
        return None

    def body_over(self) -> None:
        """Pass the gate at the end of the unit's body, unless it has passed. Raises `Abandoned`."""
        if self._late_gate and not self.step._at.phase and not self._world.updated:
            self._before_first_update(trains=False)  # as ranks do that have read the loss
        self._world.after_update = None
        self._parts.multi_part.ends()
        if not self._world.machine.unit_passed:
            self._pass_gate()

    def ended(self) -> None:
        """Note that the attempt is over, however it ended."""
        self.step._ask_loss = None
        self._world.in_phase = False
        self._world.after_update = None

    def _before_closure(self, call: int) -> None:
        self._counts_again = self.step._loss_is_old = call > 0

    def _after_closure(self, call: int) -> None:
        self._counts_again = self.step._loss_is_old = False
        if call == 0:
            self._before_update()

    def _ask_loss(self) -> None:
        """Make the loss known when it is read before any ``optimizer.step()``, which a scaler or a guard may have
        skipped. Raises `StepError` during a backward pass."""
        if torch._C._current_graph_task_id() != -1:
            raise StepError("step.loss was read in a backward pass.", remedy="read it after step.backward().")
        self._before_first_update(trains=False)

    # -- the gate
    def _before_update(self) -> None:
        """Handle the moment when all gradients of the step are complete, before an optimizer changes parameters."""
        if not self._world.updated:
            self._before_first_update()
        if not self._gradients_checked:
            self._gradients_checked = True
            self._parts.undo.check_gradients()

    def _before_first_update(self, *, trains: bool = True) -> None:
        """Pass the gate, or, where the gate stands at the end, sum the loss; all gradients of the step or of its first
        part are complete.

        ``trains``: False when perhaps no ``optimizer.step()`` follows. Raises `Abandoned` when the world is broken.
        """
        step, parts, machine = self.step, self._parts, self._world.machine
        self._world.stages.reached("computed")
        left = machine.broken or not machine.generation
        self.may_be_left(updates_next=not left)
        if left:
            raise Abandoned
        self._gradients_checked = trains
        if trains:
            parts.undo.check_gradients()
        if step._at.phase:
            self._world.updated = True
            return
        if self._late_gate:
            self._complete()
            mine = self._offered(ZERO_SUMS)
            complete(mine, loss=self._let_device_come())
            step._early = self._world.sum_before_gate(step._at, mine)
            self._world.updated = True
        else:
            self._pass_gate()
        if not parts.state.lineage.changes.parts:
            self._world.after_update = parts.multi_part.called

    def _complete(self) -> None:
        """Complete what is computed from gradients and loss, before an optimizer changes anything."""
        step, parts = self.step, self._parts
        self._world.end_passes()
        parts.settle()
        if step._at.phase:
            self._loss = 0.0
            return
        parts.undo.before_update()
        self.not_put_back = parts.undo.not_put_back()
        parts.corruption.before_gate(step._at, last=step._at.step == parts.last_step)
        self._loss = parts.exact.settle(step) if parts.exact is not None else Readback(step._local_loss)

    def _let_device_come(self) -> float:
        """Wait for the device, the only such wait in a step, and return the loss that this rank offers to the gate.
        Raises `Abandoned`."""
        self._world.synchronise_device()
        loss = self._loss.value() if isinstance(self._loss, Readback) else self._loss
        return loss / ranks_of_one_loss(self._parts.axes)

    def _pass_gate(self) -> None:
        """Offer this rank's sums to the gate of the unit, and pass it. Raises `Abandoned` when the world breaks."""
        step, parts, page = self.step, self._parts, self._parts.runtime.page
        self.reached_gate = True
        if not self._world.updated or step._at.phase:
            self._complete()
        parts.replicas.unique.exchange()
        for one in parts.data_states:
            one.exchange(step, self._world.groups[0].gather_bytes)
        part = Readback(step._local_loss if parts.nan.on else None)
        ids = self.delivered_ids()
        page.seal_ledger(step._at, ids)
        sums = GateSums(
            loss=0.0,
            samples=float(len(ids)),
            ids_digest=_ids_digest(ids),
            # A checkpoint holds a step: when the request to leave comes in a phase, the world runs one more step.
            draining=float(self._world.drain and not (step._at.phase and parts.durable is not None)),
            snapshot_cost_s=parts.snapshots.usual_cost_s,
            step_s=parts.pace.median_s,
            changed_late=float(parts.replicas.changed_late),
            mirroring=float(page.mirroring),
            mirrored=float(page.mirrored >= 0),
            writing=float(parts.durable is not None and parts.durable.writing),
            cut_short=float(parts.durable is not None and parts.durable.cut_short(step._at.step)),
            ahead=float(parts.recorded.any_after(step._at)),
            pausing=float(self._world.pausing and parts.replicas.known(step._at)),
            shares_received=float(self._world.share_changes.has_next),
            not_finite=0.0,
            tried=0.0,
            parts=float(bool(parts.multi_part.found)),
            rollback_incomplete=float(bool(self.not_put_back)),
            changed_between=0.0,
        )
        mine = self._offered(sums)
        complete(mine, loss=self._let_device_come())  # from here until the optimizer's first kernel the device is idle
        if parts.undo.changed_between:
            complete(mine, changed_between=1.0)
        if parts.nan.on:
            not_finite, tried = parts.nan.gate_values(step, part.value())
            complete(mine, not_finite=not_finite, tried=tried)
        self._world.stages.reached("entered")
        self._world.pass_gate(step._at, mine, self._refuses)

    def _offered(self, sums: GateSums) -> Offer:
        shared = sums._replace(shared=self.step._to_gather)
        return offered(self.step._at, self._world.order, shared, self._world.rank, self._world.size)

    def _refuses(self, at: Position, sums: GateSums) -> bool:
        """Whether the unit is refused although its gate has passed: the same answer on all ranks. Raises `StepError`
        when the script has changed tracked state between two units on all of them."""
        parts = self._parts
        if sums.changed_between == self._world.size:
            raise changed_between(parts.undo.changed_between)
        self.rollback_incomplete = sums.rollback_incomplete > 0
        self.changed_between_units = sums.changed_between > 0 and not parts.corruption.on
        if self.rollback_incomplete or self.changed_between_units or self.step._refuses(sums):
            return True
        return parts.nan.refuses(at, sums)

    def delivered_ids(self) -> np.ndarray[Any, Any]:
        """Return the ids of all samples delivered so far, int64."""
        if len(self.delivered) == 1:
            return self.delivered[0]
        return np.concatenate(self.delivered) if self.delivered else np.empty(0, np.int64)


def _ids_digest(ids: np.ndarray[Any, Any]) -> float:
    """Return a checksum of sample ids that does not depend on order or rank: the sum of 32 mixed bits of each id, exact
    in a float for up to 2**20 ids a rank."""
    mixed = (ids.view(np.uint64) * _FACTOR) >> _HALF
    return float(int(np.add.reduce(mixed)) % 2**52)
