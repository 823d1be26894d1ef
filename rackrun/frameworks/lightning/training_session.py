"""One ``fit`` under rackrun: the run, its loop, and where Lightning's loops stand in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from rackrun.errors import UsageError
from rackrun.frameworks.lightning.base.data_order import LightningOrder
from rackrun.frameworks.lightning.base.package import LightningPackage
from rackrun.frameworks.lightning.base.plain_text import decoded
from rackrun.frameworks.lightning.epoch_loops import adopt_loops
from rackrun.frameworks.lightning.refusals import refuse_loader, refuse_trainer, refuse_validation, refuse_version
from rackrun.frameworks.lightning.state.checkpoint_files import CheckpointFiles
from rackrun.frameworks.lightning.state.log_calls import LogCalls
from rackrun.frameworks.lightning.state.loop_state import LoopRecord, captured, restore
from rackrun.frameworks.lightning.step_unit import LastBatch, StepUnit, transferred
from rackrun.frameworks.rank_texts import gather_texts, of_rank
from rackrun.frameworks.script_attributes import ScriptAttributes
from rackrun.worker.data.loader import BatchPlan, Loader
from rackrun.worker.data.rng import undrawn
from rackrun.worker.loop.open_run import open_run
from rackrun.worker.loop.run import Run
from rackrun.worker.membership.decisions.interruptions import LoopDrained
from rackrun.worker.process.reports import say
from rackrun.worker.steps.step import Step

__all__ = ["TrainingSession"]

_WITHOUT_END = 2**38
"""Number of steps where neither epochs nor steps are limited."""
_READS_NO_BATCH = {
    "BackboneFinetuning",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "EMAWeightAveraging",
    "GradientAccumulationScheduler",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "RichModelSummary",
    "RichProgressBar",
    "TQDMProgressBar",
    "Timer",
    "WeightAveraging",
}
"""Lightning's callbacks whose hooks around a batch do not look at the batch, nor at the output."""


class TrainingSession:
    """The run that one `fit` opens."""

    run: Run
    order: LightningOrder
    data: Loader

    def __init__(self, trainer: Any, package: LightningPackage) -> None:
        refuse_version(package)
        refuse_trainer(trainer, package)
        self.trainer, self.package = trainer, package
        self.record = LoopRecord()
        self.entered: str | None = None
        """The loops' state right before a step that was not tried yet; None elsewhere."""
        self.takes_loader = False
        """Whether the Trainer is asking for its training loader."""
        self.in_step = self.in_phase = self.over = False
        """Whether a step runs, a phase runs, or no more steps follow."""
        self.last: LastBatch | None = None
        """The last micro-batch of the step that this process has done last."""
        self._loader: Any = None
        self._given: int | None = None
        """The step that the run gave last; None when it gave none."""
        self._known: int | None = None
        """The step whose turn this process enters after it was committed; None after that."""
        self._next = 0
        self._phases = 0
        """Number of phases of this turn, since its step where that was done."""
        self._done = -1
        """The step that was done in this turn; -1 before it."""
        self._turn_text = self.fixed = ""
        trainer._rackrun = self

    # -- the beginning
    def refuse_second_fit(self) -> None:
        """Raise `UsageError`."""
        raise UsageError(
            "fit() was called again: a process that takes a rank over goes on inside of one loop.",
            remedy="train with one Trainer.fit(), once, in a script.",
        )

    def install(self) -> None:
        """Put the adapter into the Trainer, whose model and optimizer are set up."""
        trainer = self.trainer
        refuse_trainer(trainer, self.package, ready=True)
        self.logs = LogCalls(trainer, self.package)
        self.logs.set_versions(trainer.strategy.broadcast(self.logs.versions()))
        self.files = CheckpointFiles(trainer, self.package.part("callbacks").ModelCheckpoint)
        adopt_loops(trainer, self)
        objects = [trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks]
        self.own = ScriptAttributes(one for one in objects if one is not None)
        self._stock_run_stage, trainer._run_stage = trainer._run_stage, self._run_stage
        self._stock_save, trainer.save_checkpoint = trainer.save_checkpoint, self._save_checkpoint
        trainer._signal_connector.register_signal_handlers = lambda: None

    def take_loader(self, loader: Any) -> Any:
        """Keep the stock training loader, and return what the loop is given in its place."""
        refuse_loader(self.trainer, loader)
        self._loader = loader
        return _Unread(loader)

    def _run_stage(self) -> Any:
        trainer = self.trainer
        if not trainer.training or self.over:
            return self._stock_run_stage()
        trainer.strategy.barrier("run-stage")
        trainer.lightning_module.zero_grad()
        self._open()
        fresh = self._begin()
        if fresh:
            self.logs.begin_anew()
            self.phase(self._sanity_check, "the sanity check")
        with torch.autograd.set_detect_anomaly(trainer._detect_anomaly):
            trainer.fit_loop.run()
        return None

    def _sanity_check(self) -> None:
        with self.package.part("utilities.seed").isolate_rng():
            self.trainer._run_sanity_check()

    def _open(self) -> None:
        """Ask for the data, and open the run."""
        trainer = self.trainer
        fit, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
        if trainer.enable_validation:
            trainer.validating = True
            validation.setup_data()
            trainer.training = True
        self.takes_loader = True
        fit.setup_data()
        self.takes_loader = False
        if self._loader is None or fit.max_batches in (0, float("inf")):
            raise UsageError("fit() has no training batches of a known number.", remedy="give it a sized DataLoader.")
        accumulation, ranks = trainer.accumulate_grad_batches, trainer.world_size
        refuse_validation(trainer, accumulation)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.order = LightningOrder(self._loader, ranks, fit.max_batches, accumulation, seed)
        micro = self.order.micro_batch
        with undrawn():
            sizes = BatchPlan(micro * accumulation * ranks, micro, seed)
            self.run = trainer.strategy._rackrun_run = open_run(sizes, order=self.order)
        tracked = {"model": trainer.strategy.model, "optimizer": trainer.optimizers[0], "loop": self.record}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            tracked[f"scheduler_{index}"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            tracked["scaler"] = scaler
        for index, callback in enumerate(trainer.callbacks):
            for name, value in vars(callback).items():
                if isinstance(value, torch.nn.Module) and value is not trainer.lightning_module:
                    tracked[f"callback_{index}_{name}"] = value
        self.run.track(**tracked)
        loader = self._loader
        self.data = self.run.loader(
            loader.dataset,
            collate=loader.collate_fn,
            num_workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 2,
        )
        self._step_unit = unit = StepUnit(self, lambda: self._wants("on_train_batch_end"))

        def train_step(step: Step, *call: Any) -> None:
            unit(step, *call)

        self._unit = self.run.step(train_step)
        self.run.on_join(self._take_place)
        self.files.before = set(trainer.strategy.broadcast(self.files.look()))

    def _begin(self) -> bool:
        """Come to the loop over steps, where a spare waits. Return whether no step is committed yet."""
        record = self.record
        fixed = json.dumps({"versions": self.logs.versions(), "before": sorted(self.files.before)})
        self._steps = self.run.steps(self._total(), phases=True)
        number = next(self._steps, None)
        joined = self.run._joined_others or record.step >= 0
        self._known = record.step if record.step >= 0 else None
        self._given, self.over = number, number is None
        self._next = next((one for one in (self._known, number) if one is not None), 0)
        if record.fixed:
            kept = json.loads(record.fixed)
            self.logs.set_versions(kept["versions"])
            self.files.before = set(kept["before"])
        self.fixed = record.fixed or fixed
        if self._known is not None:
            restore(self.trainer, of_rank(record.turn, self.run.rank))
        if joined and self.run.is_main:
            self.logs.become_main()
        return self._known is None

    def _total(self) -> int:
        fit = self.trainer.fit_loop
        limits = [fit.max_steps] if fit.max_steps >= 0 else []
        if fit.max_epochs is not None and fit.max_epochs >= 0:
            limits.append(fit.max_epochs * self.order.steps_per_epoch)
        total = min(limits, default=_WITHOUT_END)
        if total < 1:
            raise UsageError("fit() has no step to do: max_epochs or max_steps is 0.", remedy="do not call fit().")
        return int(total)

    # -- a turn
    def enter(self) -> int:
        """Come to the next step, and return its number. Raises `StopIteration` where the other ranks have ended their
        loop, and `LoopDrained` when the job is to end here, so that nobody takes half a training for a whole one."""
        number, self._next = self._next, self._next + 1
        self._phases, self._done = 0, -1
        if number not in (self._given, self._known):
            self._given = next(self._steps, None)
            if self._given is None:
                if self.run._units.draining:
                    raise LoopDrained
                self.over = True
                self.trainer.should_stop = True
                raise StopIteration
            assert self._given == number, f"the run is at step {self._given}, and the Trainer at step {number}"
        if number == self._known:
            restore(self.trainer, of_rank(self.record.turn, self.run.rank))
            self.logs.hold()  # hooks before the step would log what the step has changed since, such as the rate
        self._turn_text = captured(self.trainer)
        self.logs.turn_begins()
        return number

    def do_step(self, number: int) -> LastBatch:
        """Do the step, however many attempts that takes, and give the loops what it has left."""
        record, trainer = self.record, self.trainer
        if not self.over:
            self.entered = captured(trainer)
            self._unit(number, number, self._turn_text, self.logs.of_turn(), self.entered)
        if number == self._known:
            self.logs.drop()
        else:
            self._known = None
        self._phases, self._done = 0, number
        left = json.loads(of_rank(record.outcome, self.run.rank))
        if number == self._known:
            self.logs.deliver(record.calls)
        if self._step_unit.left != number:
            self._set_left(left["state"])
        self.logs.deliver(left["calls"])
        last, self.last = self.last, None
        if last is None or last.step != number:
            index = self.order.micro_batches(number) - 1
            output = decoded(left["output"], trainer.strategy.root_device)
            last = LastBatch(number, output, self._batch(number, index, "on_train_batch_end"))
        trainer.fit_loop.epoch_loop._results.batch = last.batch
        return last

    def _set_left(self, state: str) -> None:
        """Bring the loops to where the last step has left them. ``state``: theirs when the ranks sent each other texts."""
        restore(self.trainer, state)
        loop, after = self.trainer.fit_loop.epoch_loop, json.loads(self.record.after)
        loop.automatic_optimization.optim_progress.load_state_dict(after["optimizer"])
        loop.scheduler_progress.load_state_dict(after["scheduler"])
        for callback, averages in zip(self.averaging(), after["averaging"], strict=True):
            callback.load_state_dict(averages)

    def first_batch(self, number: int) -> Any:
        """Return the first micro-batch of a step, for the hooks before it."""
        return self._batch(number, 0, "on_train_batch_start")

    def batch_starts(self, batch: Any, index: int) -> Any:
        """Call the hooks before a micro-batch, and return what the module's returns."""
        call, trainer = self.package.part("trainer.call"), self.trainer
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, index)
        response = call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, index)
        call._call_strategy_hook(trainer, "on_train_batch_start", batch, index)
        return response

    def batch_ends(self, output: Any, batch: Any, index: int) -> None:
        """Call the hooks after a micro-batch."""
        call, trainer = self.package.part("trainer.call"), self.trainer
        call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, index)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, index)
        trainer._logger_connector.on_batch_end()

    def end(self) -> None:
        """Leave the loop over steps, at its end or after the step at which the Trainer has stopped."""
        if not self.over and next(self._steps, None) is not None:
            self._steps.close()
        self.over = True

    # -- phases
    def phase(self, function: Callable[[], Any], name: str) -> None:
        """Run ``function`` on all ranks, again as a whole if a rank is lost in it. Each rank goes on with the loops'
        state that its own function has left."""
        trainer, record = self.trainer, self.record
        entered = captured(trainer)

        def attempt() -> None:
            found = captured(trainer)
            restore(trainer, entered)
            self.logs.hold()
            self.in_phase = True
            try:
                function()
                rows = gather_texts(self.run, [captured(trainer), self.logs.held()])
                record.phase_done([row[0] for row in rows], rows[0][1])
            finally:
                self.in_phase = False
                self.logs.drop()
                restore(trainer, found)

        if not self.over:
            self.run.phase(attempt, name=name)
        number, self._phases = self._phases, self._phases + 1
        if number < len(record.phases) and (self._known is None or self._known == self._done):
            left, calls = record.phases[number]
            restore(trainer, of_rank(left, self.run.rank))
            self.logs.deliver(calls)

    def saves_after_batch(self) -> bool:
        """Whether a callback may save, or ask the other ranks, in its hook after the step that was just done."""
        trainer, callbacks = self.trainer, self.package.part("callbacks")
        for one in trainer.callbacks:
            if isinstance(one, callbacks.Timer):
                return True
            if not isinstance(one, callbacks.Checkpoint):
                continue
            if type(one).on_train_batch_end is not callbacks.ModelCheckpoint.on_train_batch_end:
                return True
            every = one._every_n_train_steps
            if one._train_time_interval is not None or (every >= 1 and trainer.global_step % every == 0):
                return True
        return False

    def averaging(self) -> list[Any]:
        """Return the callbacks that average weights after each step, which belongs to the step."""
        return [
            one for one in self.trainer.callbacks if isinstance(one, self.package.part("callbacks").WeightAveraging)
        ]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save in a phase where code of the script's own asks for it in the loop's body. Where an exception leaves the
        training on this rank, do nothing: the others do not come to save, and another process takes the rank over."""
        if self.trainer.interrupted:
            say(
                "nothing is saved after an exception: the training goes on without this process, or from --checkpoint-dir."
            )
        elif self.in_phase or self.in_step or self.over:
            self._stock_save(*args, **kwargs)
        else:
            self.phase(lambda: self._stock_save(*args, **kwargs), "saving a checkpoint")

    # -- batches for hooks
    def _wants(self, hook: str) -> bool:
        """Whether a hook around a batch may look at it."""
        module, base = type(self.trainer.lightning_module), self.package.part("core.module").LightningModule
        callback = self.package.part("callbacks.callback").Callback
        return getattr(module, hook) is not getattr(base, hook) or any(
            getattr(type(one), hook, None) is not getattr(callback, hook) and not self._reads_no_batch(one)
            for one in self.trainer.callbacks
        )

    def _reads_no_batch(self, callback: Any) -> bool:
        kind = type(callback)
        return kind.__name__ in _READS_NO_BATCH and kind is getattr(self.package.part("callbacks"), kind.__name__, None)

    def _batch(self, number: int, index: int, hook: str) -> Any:
        """Return a micro-batch of this rank for ``hook``; None where no hook looks at it."""
        if not self._wants(hook):
            return None
        with undrawn():
            shard = self.run.rank * self.order.micro_batches(number) + index
            batch = self.data._fetch(number, self.order.ids(number, shard))
            return transferred(self.trainer, batch, self.package.part("trainer.call"))

    # -- the place
    def _take_place(self) -> None:
        """Set what Lightning has derived from an older rank."""
        self.trainer.strategy.set_world_ranks()
        validation = self.trainer.fit_loop.epoch_loop.val_loop._combined_loader
        for loader in validation.flattened if validation is not None else ():
            sampler = getattr(loader, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                sampler.rank = self.run.rank
        if self.run.is_main:
            for callback in self.trainer.callbacks:
                if isinstance(callback, self.package.part("callbacks").ProgressBar):
                    callback.enable()


class _Unread:
    """Stands for the training loader in Lightning's loop: it has its length and attributes, and yields nothing."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
