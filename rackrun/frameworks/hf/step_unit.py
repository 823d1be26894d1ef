"""One step of the Trainer as a unit of rackrun: everything from the first forward to ``optimizer.step()``.

It computes what the stock loop computes for one step, with the stock methods, and may run again from its beginning. It
needs nothing from the loop but what it is called with, as a rollback calls it again later.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rackrun.frameworks.hf.loop_state import LoopRecord
from rackrun.frameworks.hf.rank_results import RankResults
from rackrun.frameworks.hf.unit_optimizer import UnitOptimizer
from rackrun.frameworks.rank_texts import from_rank_0
from rackrun.frameworks.script_attributes import ScriptAttributes
from rackrun.worker.data.loader import Loader
from rackrun.worker.data.rng import reseed
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step

__all__ = ["StepUnit", "StockMethods"]


@dataclass(frozen=True)
class StockMethods:
    """The Trainer's own methods, below those of `rackrun.hf.Elastic`."""

    training_step: Callable[..., torch.Tensor]
    get_num_items_in_batch: Callable[..., Any]
    clip_grad_norm: Callable[..., Any]
    get_grad_norm: Callable[..., Any]
    get_learning_rate: Callable[[], float]
    floating_point_ops: Callable[[Any], int]
    track_num_input_tokens: Callable[[Any], None]


@dataclass(frozen=True)
class _MicroBatch:
    inputs: Any
    shard: int
    """Its index in the global batch."""
    counts: bool
    """Whether it counts: a rank with fewer micro-batches than others repeats one with weight 0."""


class StepUnit:
    """Does steps of ``trainer`` in ``run``, and keeps their results in ``record``."""

    def __init__(
        self,
        trainer: Any,
        stock: StockMethods,
        run: Run,
        loader: Loader,
        model: Any,
        optimizer: UnitOptimizer,
        record: LoopRecord,
        own: ScriptAttributes,
    ) -> None:
        self._trainer, self._stock, self._run, self._loader = trainer, stock, run, loader
        self._model, self._optimizer, self._record, self._own = model, optimizer, record, own
        self._results = RankResults(run, own)

    def __call__(self, step: Step, at: int = 0, entered: str = "", fresh: str = "", own: str | None = None) -> None:
        """Do one step. ``at``: the Trainer's number of it. ``entered``: the loop's state when it began, and ``fresh``:
        the logs since the last step (`rackrun.frameworks.hf.loop_state`). ``own``: the attributes of the script's own
        that the Trainer had then; None where a waiting spare tries the step."""
        is_trial = own is None
        own = self._own.changed() if own is None else own
        self._own.restore(own)
        try:
            self._do(step, at, entered, fresh, own)
        finally:
            if is_trial:
                self._own.restore(own)

    def _do(self, step: Step, at: int, entered: str, fresh: str, own: str) -> None:
        trainer, stock = self._trainer, self._stock
        taken = self._take(step)
        ranks = self._run._data_coordinate()[1]
        shards = self._run._batch_of(int(step)).shards
        counted = [one for one in taken if one.counts]
        wanted = self._results.room_wanted(own)
        items, told = self._count_items([one.inputs for one in counted or _emptied(taken)], fresh, wanted)
        trainer.current_gradient_accumulation_steps = shards // ranks if shards % ranks == 0 else shards / ranks
        seen = trainer.state.num_input_tokens_seen
        flos = 0.0
        self._optimizer.within(True)
        try:
            values = []
            for number, one in enumerate(taken):
                step.weight  # noqa: B018 - the read says that the losses are weighted here: by the Trainer
                reseed(self._run._batch.seed, "shard", int(step), one.shard)
                loss = self._backward(one, items, last=number == len(taken) - 1)
                step.scale(loss, weight=1 / ranks if one.counts else 0.0)
                values.append(loss if one.counts else torch.zeros_like(loss))
                flos += float(stock.floating_point_ops(one.inputs)) if one.counts else 0.0
                stock.track_num_input_tokens(one.inputs)
            tokens = trainer.state.num_input_tokens_seen - seen
            losses = torch.stack([value.reshape(()) for value in values]).double().tolist()
            losses += [0.0] * (self._most_micro_batches(shards, ranks) - len(losses))
            has_fresh, wanted = told()
            self._results.offer(step, [*losses, flos], wanted)
            if has_fresh:
                fresh = from_rank_0(self._run, fresh)
            norm = stock.clip_grad_norm(self._model) if trainer.args.max_grad_norm > 0 else None
            norm = stock.get_grad_norm(self._model, grad_norm=norm)
            norm = norm.item() if isinstance(norm, torch.Tensor) else norm
            self._optimizer.step()
            rows, kept = self._results.take(step)
            rate, skipped = stock.get_learning_rate(), self._optimizer.skipped
            if not skipped and not _waits_for_metrics(trainer.lr_scheduler):
                trainer.lr_scheduler.step()
            self._model.zero_grad()
        finally:
            trainer.state.num_input_tokens_seen = seen  # the loop adds the step's tokens once it is committed
            self._optimizer.within(False)
        results = {
            "losses": [list(row[:-1]) for row in rows],
            "flos": [row[-1] for row in rows],
            "tokens": tokens,
            "norm": norm,
            "rate": rate,
            "skipped": skipped,
            "own": kept,
        }
        self._record.step_done(at, entered, fresh, json.dumps(results))

    def _most_micro_batches(self, shards: int, ranks: int) -> int:
        """Return the largest number of micro-batches that a rank has in a step of ``shards``."""
        shares = self._run._world.share_changes.shares
        return max(shares) if shares and sum(shares) == shards else -(-shards // ranks)

    def _count_items(
        self, batches: list[Any], fresh: str, wanted: float
    ) -> tuple[Any, Callable[[], tuple[bool, float]]]:
        """Return the number of items in the step's batches as the Trainer counts it, and a function that returns whether
        rank 0 has ``fresh`` logs, and the most that a rank has ``wanted``. Collective: one, which the stock Trainer takes
        too, except for models whose loss needs no count."""
        trainer, size = self._trainer, self._run.world_size
        accelerator, device, logs = trainer.accelerator, trainer.args.device, float(len(fresh.encode()))
        rows: list[torch.Tensor] = []

        def gather(mine: torch.Tensor) -> torch.Tensor:
            """Return the ``mine`` of all ranks, one number each, as ``accelerator.gather`` does."""
            row = torch.zeros(3, dtype=torch.float64, device=device)
            row[0], row[1], row[2] = mine, logs, wanted
            rows[:] = [torch.empty_like(row) for _ in range(size)]
            dist.all_gather(rows, row)
            return torch.stack(rows)[:, 0].to(mine.dtype)

        def told() -> tuple[bool, float]:
            of_ranks = torch.stack(rows)[:, 1:].tolist()
            return of_ranks[0][0] > 0, max(bytes_wanted for _, bytes_wanted in of_ranks)

        if size == 1:
            return self._stock.get_num_items_in_batch(batches, device), lambda: (logs > 0, wanted)
        accelerator.gather = gather
        try:
            items = self._stock.get_num_items_in_batch(batches, device)
        finally:
            del accelerator.gather
        if not rows:  # this model's loss needs no count
            gather(torch.zeros((), device=device))
        return items, told

    def _take(self, step: Step) -> list[_MicroBatch]:
        """Return the step's micro-batches of this rank: the Trainer counts their tokens before the first forward."""
        taken: list[_MicroBatch] = []
        for inputs in self._loader:
            counts = step.weight > 0
            taken.append(_MicroBatch(inputs, step.shards[-1] if counts else 0, counts))
        return taken

    def _backward(self, one: _MicroBatch, items: Any, *, last: bool) -> torch.Tensor:
        """Do the forward and backward pass of a micro-batch, and return its loss as the Trainer scales it."""
        accelerator = self._trainer.accelerator
        accelerator.gradient_state._set_sync_gradients(last)
        inputs = dict(one.inputs) if isinstance(one.inputs, dict) else one.inputs  # `compute_loss` may take from it
        with contextlib.nullcontext() if last else accelerator.no_sync(model=self._model):
            if one.counts:
                return self._stock.training_step(self._model, inputs, items)
            stock = accelerator.backward
            accelerator.backward = lambda loss, **kwargs: stock(loss * 0.0, **kwargs)
            try:
                return self._stock.training_step(self._model, inputs, items)
            finally:
                del accelerator.backward


def _waits_for_metrics(scheduler: Any) -> bool:
    """Whether the Trainer moves this scheduler after an evaluation, by its metrics."""
    from transformers.optimization import GreedyLR

    return isinstance(scheduler, ReduceLROnPlateau | GreedyLR)


def _emptied(taken: list[_MicroBatch]) -> list[_MicroBatch]:
    """Return the first of ``taken`` with no label that counts, for a rank whose micro-batches all do not count."""
    one = taken[0]
    labels = {key: torch.full_like(one.inputs[key], -100) for key in ("labels", "shift_labels") if key in one.inputs}
    return [_MicroBatch({**one.inputs, **labels}, one.shard, counts=False)]
