"""One ``Trainer.train()`` under rackrun: the run, its loop, its phases, and where the Trainer's loop stands in it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.distributed import utils as dist_utils

from rackrun.frameworks.rank_texts import gather_texts
from rackrun.frameworks.titan.logged_values import LoggedValues
from rackrun.frameworks.titan.loop_record import LoopRecord
from rackrun.frameworks.titan.shard_batches import ShardBatches
from rackrun.frameworks.titan.step_unit import StepUnit
from rackrun.frameworks.titan.torchtitan_checkpoints import LoaderStates
from rackrun.worker.data.loader import BatchPlan
from rackrun.worker.data.rng import undrawn
from rackrun.worker.data.stream_states import decode_state
from rackrun.worker.loop.open_run import open_run
from rackrun.worker.loop.run import Run
from rackrun.worker.membership.decisions.interruptions import LoopDrained
from rackrun.worker.process.runtime import start
from rackrun.worker.steps.step import Step

__all__ = ["StockMethods", "TrainingSession"]

_FIXED = "torchtitan makes its groups, and deals its data, for this number of ranks"


@dataclass(frozen=True)
class StockMethods:
    """The Trainer's own methods, below those of `rackrun.titan.Elastic`."""

    train_step: Callable[..., Any]
    forward_backward_step: Callable[..., Any]


class TrainingSession:
    """The run that one `train` opens."""

    def __init__(self, trainer: Any, stock: StockMethods) -> None:
        self.trainer, self.stock = trainer, stock
        self.record = LoopRecord()
        self.logs = LoggedValues(trainer.metrics_processor)
        self.over = False
        """Whether the run gives no more steps."""
        self._run: Run | None = None
        self._steps: Iterator[int] | None = None
        self._number = -1
        """rackrun's number of the step of this turn."""
        self.loaders = LoaderStates(self)
        self._loaded = self._load()
        training, dims = trainer.config.training, trainer.parallel_dims
        ranks = dims.dp_replicate * dims.dp_shard
        micro_batch = training.local_batch_size * trainer.gradient_accumulation_steps
        with undrawn():
            sizes = BatchPlan(micro_batch * ranks, micro_batch, trainer.config.debug.seed or 0)
            self.run = self._run = open_run(sizes, _mesh(dims))
        self._share_loaded()
        self.run._units.keep_size(_FIXED)
        tracked = {f"optimizer_{number}": one for number, one in enumerate(trainer.optimizers.optimizers)}
        tracked |= {f"scheduler_{number}": one for number, one in enumerate(trainer.lr_schedulers.schedulers)}
        self.run.track(model=trainer.model_parts[0], loop=self.record, **tracked)
        self.data = self.run.stream(self._read_shard, batched=True)
        self.unit = StepUnit(self)

        def train_step(step: Step, *call: Any) -> list[Any]:
            return self.unit(step, *call)

        self._unit = self.run.step(train_step)
        self.run.on_join(self._take_place)

    def install(self) -> None:
        """Put the adapter into the Trainer's parts. It stays there: steps may be done again after the loop."""
        checkpointer, optimizers = self.trainer.checkpointer, self.trainer.optimizers
        checkpointer.load = lambda **_: self._loaded
        checkpointer.save = partial(self._save, checkpointer.save)
        optimizers.step = partial(self._update, inspect.unwrap(type(optimizers).step))
        if hasattr(self.trainer, "validator"):
            self.trainer.validator.validate = partial(self._validate, self.trainer.validator.validate)
        dist_utils.set_pg_timeouts = lambda **_: None  # rackrun has limits of its own for collectives

    @property
    def opened(self) -> bool:
        """Whether the run is open."""
        return self._run is not None

    @property
    def place(self) -> tuple[int, int]:
        """This rank's data shard, and their number."""
        loader = self.trainer.dataloader
        return self._run._data_coordinate() if self._run else (loader.dp_rank, loader.dp_world_size)

    # -- data
    def _read_shard(self, shard: int, shards: int) -> ShardBatches:
        trainer = self.trainer
        config = trainer.config
        loader = config.dataloader.build(
            dp_world_size=shards,
            dp_rank=shard,
            tokenizer=trainer.tokenizer,
            seq_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
            snapshot_every_n_steps=1,
        )
        batches = ShardBatches(loader, trainer.gradient_accumulation_steps)
        if self.record.loaders:
            batches.load_state_dict(decode_state(json.dumps(self.record.loaders[shard]).encode()))
        return batches

    def _update(self, step: Callable[[Any], None]) -> None:
        """Stands in for ``OptimizersContainer.step``, without torch's hooks: those of the optimizers in it follow."""
        self.unit.before_update()
        step(self.trainer.optimizers)

    # -- the loop
    def enter(self) -> bool:
        """Come to the next step, and return whether there is one. A spare waits here. Raises `LoopDrained` when the job
        is to end here, so that nobody takes half a training for a whole one."""
        trainer, record = self.trainer, self.record
        if self.over:
            return False
        if self._steps is None:
            self._steps = self.run.steps(trainer.config.training.steps, phases=True)
        number = next(self._steps, None)
        if number is None and self.run._units.draining:
            raise LoopDrained
        if number is None or record.first + number >= trainer.config.training.steps:
            self.end()
            return False
        self._number = number
        trainer.step, trainer.ntokens_seen = record.first + number, record.ntokens_seen
        return True

    def do_step(self) -> None:
        """Do the step of this turn, however many attempts that takes, and log what it has logged."""
        calls = self._unit(self._number, self._number)
        self.trainer.ntokens_seen = self.record.ntokens_seen
        self.logs.deliver(calls)

    def end(self) -> None:
        """Leave the loop."""
        if not self.over and self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]
        self.over = True

    # -- checkpoints and validation
    def _load(self) -> bool:
        """Load a checkpoint of torchtitan's, before the run is opened: torchtitan steps its optimizers for that.
        Collective. A spare loads none: it gets everything from the ranks when it takes a place."""
        trainer = self.trainer
        if not trainer.checkpointer.enable:
            return False
        trainer.checkpointer.states["dataloader"] = self.loaders
        return not start().spare and bool(trainer.checkpointer.load(step=trainer.config.checkpoint.load_step))

    def _share_loaded(self) -> None:
        """Note the place of the checkpoint that was loaded, for all ranks. Collective."""
        record, trainer = self.record, self.trainer
        if self._loaded and trainer.step:
            record.first, record.ntokens_seen = trainer.step, trainer.ntokens_seen
            rows = gather_texts(self.run, [str(self.place[0]), self.loaders.loaded])
            states = {int(shard): json.loads(state) for shard, state in rows if state}
            record.loaders = [states[shard] for shard in sorted(states)]

    def _save(self, stock: Callable[..., bool], curr_step: int, last_step: bool = False) -> bool:
        checkpointer = self.trainer.checkpointer
        if self.over or not checkpointer.enable:
            return stock(curr_step, last_step)
        if not checkpointer._should_save(curr_step, last_step):
            return False
        self.run.phase(partial(self._at, curr_step, partial(stock, curr_step, last_step)), name="saving a checkpoint")
        return True

    def _validate(self, stock: Callable[..., None], model_parts: Any, step: int) -> None:
        def attempt() -> list[Any]:
            with self.logs.held() as calls:
                stock(model_parts, step)
            self.run.log(**self.logs.losses(calls))
            return calls

        if self.over:
            stock(model_parts, step)
            return
        self.logs.deliver(self.run.phase(partial(self._at, step, attempt), name="validating"))

    def _at(self, step: int, function: Callable[[], Any]) -> Any:
        """Return ``function()``, called with the Trainer's counters as they were after ``step``."""
        trainer = self.trainer
        stood = trainer.step, trainer.ntokens_seen
        trainer.step, trainer.ntokens_seen = step, self.record.ntokens_seen
        try:
            return function()
        finally:
            trainer.step, trainer.ntokens_seen = stood

    # -- the place
    def _take_place(self) -> None:
        """Set what torchtitan has derived from an older rank."""
        trainer = self.trainer
        if hasattr(trainer, "validator"):
            trainer.validator.dp_rank = self.place[0]
        if self.run.is_main:
            config = trainer.config
            self.logs.become_main(config, config.dump_folder, config.parallelism.pipeline_parallel_schedule)


def _mesh(dims: Any) -> dict[str, int] | None:
    """Return the axes of torchtitan's ranks, in its order; None where there is one data-parallel axis alone."""
    axes = {name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "tp") if getattr(dims, name) > 1}
    return axes if len(axes) > 1 or "tp" in axes else None
