"""One ``Trainer.train()`` under rackrun: the run, its loop, and where the Trainer's loop stands in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rackrun.frameworks.accelerate.accelerate_ranks import set_ranks
from rackrun.frameworks.hf.data_order import TrainerOrder
from rackrun.frameworks.hf.loop_state import LoopRecord, captured, fresh_logs, restore
from rackrun.frameworks.hf.step_unit import StepUnit, StockMethods
from rackrun.frameworks.hf.tokens import TokenLoader
from rackrun.frameworks.hf.unit_optimizer import UnitOptimizer
from rackrun.frameworks.rank_texts import from_rank_0, gather_marks, of_rank, texts_of_ranks
from rackrun.frameworks.script_attributes import ScriptAttributes
from rackrun.worker.data.loader import BatchPlan
from rackrun.worker.data.rng import undrawn
from rackrun.worker.loop.open_run import open_run
from rackrun.worker.membership.decisions.interruptions import LoopDrained
from rackrun.worker.process.reports import say
from rackrun.worker.snapshots.durable_checkpoints import checkpoint_directory
from rackrun.worker.steps.step import Step

__all__ = ["TrainingSession"]

_BOTH = (
    "resume_from_checkpoint and --checkpoint-dir are both given: where that directory has a checkpoint, training goes on from it, "
    "and resume_from_checkpoint says only where the first start begins."
)


class TrainingSession:
    """The run that one `train` opens. ``loader``: the stock Trainer's. ``model``: as accelerate has wrapped it."""

    def __init__(self, trainer: Any, stock: StockMethods, loader: Any, model: Any, max_steps: int) -> None:
        self._trainer, args = trainer, trainer.args
        self.record = LoopRecord()
        self.record.first = trainer.state.global_step
        ranks = args.world_size
        self._order = TrainerOrder(
            loader, ranks, args.gradient_accumulation_steps, self.record.first, args.data_seed or args.seed
        )
        micro = self._order.micro_batch
        with undrawn():
            sizes = BatchPlan(micro * args.gradient_accumulation_steps * ranks, micro, args.data_seed or args.seed)
            self.run = open_run(sizes, order=self._order)
        self._max_steps = max_steps
        optimizer = UnitOptimizer.adopt(trainer.optimizer)
        self.run.track(model=model, optimizer=optimizer, scheduler=trainer.lr_scheduler, loop=self.record)
        if trainer.accelerator.scaler is not None:
            self.run.track(scaler=trainer.accelerator.scaler)
        workers, prefetch = args.dataloader_num_workers, args.dataloader_prefetch_factor or 2
        data = self.run.loader(loader.dataset, collate=loader.collate_fn, num_workers=workers, prefetch=prefetch)
        self._own = ScriptAttributes([trainer, *trainer.callback_handler.callbacks])
        unit = StepUnit(trainer, stock, self.run, data, model, optimizer, self.record, self._own)

        def train_step(step: Step, *call: Any) -> None:
            unit(step, *call)

        self._unit = self.run.step(train_step)
        self.tokens = TokenLoader(self._order.steps_per_epoch, self._order.micro_batches, self._enter)
        self._given: int | None = None
        """The Trainer's number of the step that the run gave last; None when it gave none."""
        self._known: int | None = None
        """The Trainer's number of the step whose turn this process enters after it was committed; None after that."""
        self._phases = 0
        """Number of phases of this turn, since its step where that was done."""
        self._turn = -1
        """The Trainer's number of the step that was done in this turn; -1 before it."""
        self.in_phase = False
        self.over = False
        """Whether the run gives no more steps."""
        self.results: dict[str, Any] = {}
        """The results of the last step."""
        self.run.on_join(self._take_place)

    # -- the loop
    def begin(self) -> int:
        """Come to the loop, where a spare waits, and return the Trainer's number of the step to begin with."""
        total = self._max_steps - self.record.first
        if self.record.first and checkpoint_directory():
            total = self._max_steps  # a checkpoint of rackrun's may have begun elsewhere; the Trainer ends the loop
            if self.run.is_main:
                say(_BOTH)
        self._steps = self.run.steps(total, phases=True)
        number, record = next(self._steps, None), self.record
        self._order.first = record.first
        self._known = record.step if record.step >= 0 else None
        if self._known is not None:  # for the hooks before that step
            restore(self._trainer, record.entered, record.history[: record.logs])
            if self._own.may_change:
                self._own.restore(of_rank(json.loads(record.results)["own"], self.run.rank))
        else:
            self._trainer.state.global_step = record.first
        self._given = None if number is None else record.first + number
        self.over = number is None
        first = next((one for one in (self._known, self._given) if one is not None), record.first)
        self.tokens.begin(first)
        return first

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return self._order.steps_per_epoch

    def micro_batches_before(self, step: int) -> int:
        """Return the number of micro-batches of a rank before ``step`` in its epoch."""
        return step % self.steps_per_epoch * int(self._trainer.args.gradient_accumulation_steps)

    def _enter(self, step: int) -> bool:
        """Return whether there is a ``step``, to which the loop comes now: the others may have ended theirs. Raises
        `LoopDrained` when the job is to end here, so that nobody takes half a training for a whole one."""
        self._phases, self._turn = 0, -1
        if step in (self._given, self._known):
            return True
        number = next(self._steps, None)
        if number is None:
            if self.run._units.draining:
                raise LoopDrained
            self.over = True
            self._trainer.control.should_training_stop = True
            return False
        self._given = self.record.first + number
        assert self._given == step, f"the run is at step {self._given}, and the Trainer at step {step}"
        return True

    def do_step(self, step: int) -> None:
        """Do the step, however many attempts that takes, and add its losses to the Trainer's sums."""
        trainer, record = self._trainer, self.record
        if self.over and step != self._known:
            return
        if not self.over:
            entered, fresh = captured(trainer), fresh_logs(trainer, len(record.history))
            self._unit(step - record.first, step, entered, fresh, self._own.changed())
        if step == self._known:
            restore(trainer, record.entered, record.history[: record.logs])
        else:
            self._known = None
        self._phases, self._turn = 0, step
        self.results = json.loads(record.results)
        self._add_results()

    def _add_results(self) -> None:
        trainer, results = self._trainer, self.results
        losses = torch.tensor(results["losses"], dtype=torch.float32, device=trainer.args.device)
        sums = trainer._tr_loss.reshape(-1)
        if len(sums) != len(losses):  # the first step, or the first of a world of another size
            sums = sums.mean().repeat(len(losses))
            trainer._rackrun_flos = [sum(trainer._rackrun_flos), *[0.0] * (len(losses) - 1)]
        since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        for loss in losses.T:
            added = sums + loss
            if trainer.args.logging_nan_inf_filter:
                added = torch.where(torch.isnan(loss) | torch.isinf(loss), sums + sums / since, added)
            sums = added
        trainer._tr_loss = sums
        trainer._rackrun_flos = [a + b for a, b in zip(trainer._rackrun_flos, results["flos"], strict=True)]
        trainer.state.num_input_tokens_seen += results["tokens"]
        if self._own.may_change:
            self._own.restore(of_rank(results["own"], self.run.rank))

    def end(self) -> None:
        """Leave the loop, at its end or after the step at which the Trainer has stopped."""
        if not self.over and next(self._steps, None) is not None:
            self._steps.close()
        self.over = True

    # -- phases
    def phase(self, function: Callable[[], Any], name: str) -> Any:
        """Run ``function`` on all ranks, again as a whole if a rank is lost in it, and return its result. All ranks go
        on with the loop's state that rank 0 has then."""
        trainer, record = self._trainer, self.record
        entered, fresh = captured(trainer), fresh_logs(trainer, len(record.history))
        entered_own = self._own.changed()
        result: list[Any] = []

        def attempt() -> None:
            found, logs = captured(trainer), trainer.state.log_history
            restore(trainer, entered, [*record.history, *filter(None, fresh.split("\n"))])
            self._own.restore(entered_own)
            self.in_phase = True
            try:
                result[:] = [function()]
                left = from_rank_0(self.run, captured(trainer))
                logs_left = from_rank_0(self.run, fresh_logs(trainer, len(record.history)))
                own = self._own.changed()
                record.phase_done(left, logs_left, texts_of_ranks(self.run, own, gather_marks(self.run, own)))
            finally:
                self.in_phase = False
                restore(trainer, found, None)
                trainer.state.log_history = logs

        if not self.over:
            self.run.phase(attempt, name=name)
        number, self._phases = self._phases, self._phases + 1
        if number < len(record.phases) and (self._known is None or self._known == self._turn):
            left, known, own = record.phases[number]
            restore(trainer, left, record.history[:known])
            self._own.restore(of_rank(own, self.run.rank))
        return result[0] if result else None

    # -- the place
    def _take_place(self) -> None:
        """Set what accelerate and the Trainer have derived from an older rank."""
        set_ranks(self.run)
        state = self._trainer.state
        state.is_world_process_zero = self._trainer.is_world_process_zero()
        state.is_local_process_zero = self._trainer.is_local_process_zero()
