"""One step of Lightning's training loop as a unit of rackrun: everything from the first forward to the schedulers.

It does what the stock loop does for the micro-batches of one step, with the stock methods and hooks, and may run again
from its beginning. The hooks before the first micro-batch and after the last are the loop's body's.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rackrun.errors import UsageError
from rackrun.frameworks.lightning.base.plain_text import decoded, encoded
from rackrun.frameworks.lightning.state.loop_state import captured, restore
from rackrun.frameworks.rank_texts import gather_texts
from rackrun.worker.data.rng import reseed
from rackrun.worker.steps.step import Step

if TYPE_CHECKING:
    from rackrun.frameworks.lightning.training_session import TrainingSession

__all__ = ["LastBatch", "StepUnit", "transferred"]


@dataclass(frozen=True)
class LastBatch:
    """The last micro-batch of a step on this rank, and what ``training_step`` has returned for it."""

    step: int
    output: Any
    batch: Any


@dataclass(frozen=True)
class _MicroBatch:
    content: Any
    shard: int
    """Its index in the global batch."""


class StepUnit:
    """Does the steps of a session, and keeps their results in its record."""

    def __init__(self, session: TrainingSession, sends_output: Callable[[], bool]) -> None:
        """``sends_output``: returns whether a hook after the step needs all that ``training_step`` returns."""
        self._session, self._trainer, self._sends_output = session, session.trainer, sends_output
        self.left = -1
        """The step after which the loops of this process stand; -1 where they were put back to the step's beginning."""
        self._result: Any = None
        """What ``training_step`` has returned last, as Lightning keeps it."""
        self._rows: list[list[str]] | None = None
        """The texts of all ranks; None before they are gathered."""
        self._before = "", ""
        """What this rank was called with: the state at the turn's beginning, and what was logged since."""
        optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization
        self._stock_training_step = optimization._training_step
        optimization._training_step = self._training_step
        precision = self._trainer.precision_plugin
        self._stock_after_closure = precision._after_closure
        precision._after_closure = self._after_closure

    def __call__(self, step: Step, *call: Any) -> None:
        """Do one step. ``call``: its number, the loops' state at the turn's beginning, what was logged since, and the
        state right before the step; none where a waiting spare tries it."""
        session, trainer = self._session, self._trainer
        is_first = bool(call) and session.entered is call[-1]  # nothing has changed since the loops' state was taken
        session.entered = None
        found = call[-1] if is_first else captured(trainer)
        number, turn, calls, entered = call or (0, "", "", found)
        if not is_first:
            restore(trainer, entered)
        self._before, self._rows, self._result, self.left = (turn, calls), None, None, -1
        session.logs.hold()
        session.in_step = True
        callbacks, is_left = trainer.callbacks, False
        try:
            if not call:
                trainer.callbacks = []  # a trial is no step: they must not count it
            output, batch = self._micro_batches(step, number)
            if self._rows is None or self._may_change_late():
                self._gather()
            rows: Any = self._rows
            session.record.fixed = session.fixed
            turns, before, outcome, _ = zip(*rows, strict=True)
            session.record.step_done(number, turns, before[0], outcome, self._changed_after())
            session.last = LastBatch(number, output, batch)
            is_left = is_first  # the loops go on with what the step has left
            self.left = number if is_left else -1
        finally:
            session.in_step = False
            session.logs.drop()
            trainer.callbacks = callbacks
            if not is_left:
                restore(trainer, found)

    # -- micro-batches
    def _micro_batches(self, step: Step, number: int) -> tuple[Any, Any]:
        """Do all micro-batches of this rank, the update at the last, and return the output and content of the last."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        call = self._session.package.part("trainer.call")
        taken = self._take(step)
        first, ranks = self._session.order.place(number)[1], self._session.run.world_size
        output: Any = {}
        batch: Any = None
        for index, one in enumerate(taken, start=first):
            last = index - first == len(taken) - 1
            reseed(self._session.run._batch.seed, "shard", int(step), one.shard)
            if index > first:
                loop.batch_progress.is_last_batch = index == trainer.num_training_batches - 1
                loop.batch_progress.increment_ready()
            batch = transferred(trainer, one.content, call)
            if index > first:
                trainer._logger_connector.on_batch_start(batch)
                self._session.batch_starts(batch, index)
                loop.batch_progress.increment_started()
            trainer.fit_loop.epoch_loop._results.batch = batch
            step.weight  # noqa: B018 - the read says that the losses are weighted here: by Lightning
            kwargs = loop._build_kwargs(OrderedDict(), batch, index)
            with trainer.profiler.profile("run_training_batch"):
                output = loop.automatic_optimization.run(trainer.optimizers[0], index, kwargs)
            if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
                step.scale(output["loss"].detach(), weight=1 / ranks)
            if not last:
                loop.batch_progress.increment_processed()
                self._session.batch_ends(output, batch, index)
                loop.batch_progress.increment_completed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        for callback in self._session.averaging():
            callback.on_train_batch_end(trainer, trainer.lightning_module, output, batch, index)
        return output, batch

    def _take(self, step: Step) -> list[_MicroBatch]:
        taken = []
        for content in self._session.data:
            step.weight  # noqa: B018
            taken.append(_MicroBatch(content, step.shards[-1]))
        return taken

    # -- what is kept
    def _training_step(self, kwargs: Any) -> Any:
        self._result = self._stock_training_step(kwargs)
        return self._result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Call the hooks between backward and update, and then, before the update, send all ranks what this rank has
        logged."""
        self._stock_after_closure(model, optimizer)
        if not self._session.in_step:
            return
        if self._rows is not None:
            raise UsageError(
                "the optimizer, or optimizer_step of the LightningModule, calls its closure twice in a step.",
                remedy="call it once in each step, as an optimizer such as AdamW does.",
            )
        self._gather()

    def _may_change_late(self) -> bool:
        """Whether code of the script's runs after the optimizer's update, such as the rest of an ``optimizer_step``."""
        module, base = type(self._trainer.lightning_module), self._session.package.part("core.module").LightningModule
        return any(getattr(module, hook) is not getattr(base, hook) for hook in ("optimizer_step", "lr_scheduler_step"))

    def _gather(self) -> None:
        output: Any = {}
        if self._result is not None and self._result.loss is not None:
            output = self._result.asdict() if self._sends_output() else {"loss": self._result.loss}
        left = {
            "state": captured(self._trainer),
            "output": encoded(output, "what training_step returns"),
            "calls": self._session.logs.held(),
        }
        rates = [group["lr"] for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        texts = [*self._before, json.dumps(left), encoded(rates, "the optimizer")]
        self._rows = gather_texts(self._session.run, texts)
        self._refuse_other_rates([row[-1] for row in self._rows])

    def _refuse_other_rates(self, rates: list[str]) -> None:
        """Raise `UsageError` if the learning rates of the ranks differ."""
        for rank, found in enumerate(rates):
            if found != rates[0]:
                shown = ", ".join(str(decoded(one, torch.device("cpu"))) for one in (rates[0], found))
                raise UsageError(
                    f"ranks 0 and {rank} have different learning rates, {shown}: a scheduler follows a metric of each rank's own.",
                    remedy="log the metric that the scheduler monitors with sync_dist=True.",
                )

    def _changed_after(self) -> str:
        """Return what has changed since all ranks were sent their results; it is the same on all ranks."""
        loop = self._trainer.fit_loop.epoch_loop
        return json.dumps(
            {
                "optimizer": loop.automatic_optimization.optim_progress.state_dict(),
                "scheduler": loop.scheduler_progress.state_dict(),
                "averaging": [callback.state_dict() for callback in self._session.averaging()],
            }
        )


def transferred(trainer: Any, batch: Any, call: Any) -> Any:
    """Return a batch as ``training_step`` is given it: converted, on the device, after the module's hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
