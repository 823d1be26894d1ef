"""A Megatron model, its optimizer and its schedule in an elastic run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from rackrun.errors import UsageError
from rackrun.frameworks.megatron.gradient_buffers import forget_collectives, gathers_in_forward
from rackrun.frameworks.megatron.main_parameters import MainParameters
from rackrun.frameworks.megatron.other_state import OtherState
from rackrun.frameworks.megatron.parallel_groups import is_initialized, place_of_shard
from rackrun.frameworks.megatron.refusals import (
    inner_optimizers,
    refuse_model,
    refuse_optimizer,
    refuse_random_numbers,
)
from rackrun.worker.data.loader import Loader
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step

__all__ = ["Training", "track"]


def track(run: Run, model_chunks: Sequence[Any], optimizer: Any, scheduler: Any = None) -> Training:
    """Keep a Megatron training through failures, and return what its step function calls.

    ``model_chunks``: a list with one ``DistributedDataParallel`` of Megatron's. ``optimizer``: from
    ``get_megatron_optimizer``. ``scheduler``: an ``OptimizerParamScheduler``, or None. Call it once, in ``main``, after
    `initialize` and before ``run.steps()``; in place of ``run.track``, which may track other things as well. Raises
    `UsageError` for what the adapter does not support.
    """
    if not is_initialized(run):
        raise UsageError(
            "rackrun.megatron.track was called, and Megatron's process groups were not made by rackrun.megatron.initialize: a spare "
            "that takes a rank over could not make them anew.",
            remedy="call rackrun.megatron.initialize(run, ...) in main, in place of parallel_state.initialize_model_parallel(...).",
        )
    refuse_model(model_chunks)
    refuse_optimizer(optimizer)
    refuse_random_numbers()
    ranks, shards = run._data_coordinate()[1], run._batch.shards
    if shards % ranks:
        raise UsageError(
            f"the global batch has {shards} micro-batches for {ranks} data-parallel ranks: Megatron needs the same number for each.",
            remedy="let global_batch_size be a multiple of micro_batch_size times the data-parallel ranks.",
        )
    return Training(run, model_chunks, optimizer, scheduler)


class Training:
    """What `track` returns."""

    def __init__(self, run: Run, chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        self._run, self._chunks, self._optimizer, self._scheduler = run, list(chunks), optimizer, scheduler
        self._begun: Step | None = None
        """The attempt whose step function has called `begin`."""
        self._is_stale = False
        """Whether state was put in place, and the model's parameters were not computed from it since."""
        self._gathered_in: int | None = None
        """The generation in which the model's parameters were gathered from all shards, since they have last changed;
        None: they were not."""
        self._ordered_in: int | None = None
        """The generation in which the order of gradients was last forgotten."""
        self._gather = [chunk.start_param_sync for chunk in chunks]
        run._bind_to_rank("Megatron's process groups and shards are made for this number of ranks")
        self._track()
        self._step_optimizer = optimizer.step
        optimizer.step = self._checked_step
        for chunk in chunks:
            chunk.start_param_sync = self._gather_later
            chunk.register_forward_pre_hook(lambda *_: self._refresh())

    def begin(self, step: Step) -> None:
        """Begin an attempt at a step: the first call in a step function that does not call `train_step`.

        It computes the model's parameters from the main parameters where a failure makes that necessary, gathers them
        with the distributed optimizer, and clears gradients. Collective.
        """
        generation = self._run.generation
        again = step.attempt > 0 or generation != self._ordered_in
        self._is_stale |= again
        for chunk in self._chunks:
            forget_collectives(chunk, order_too=again)
        self._begun, self._ordered_in = step, generation
        self._gathered_in = None
        self._refresh()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        for one in inner_optimizers(self._optimizer):
            if not one.is_stub_optimizer:
                one.optimizer.zero_grad()  # torch's own, by which it is known that gradients were cleared

    def train_step(
        self, step: Step, forward_step: Callable[..., Any], loader: Loader, *, seq_length: int
    ) -> dict[str, Any]:
        """Do a whole step as Megatron-LM's ``train_step`` does: gradients, ``optimizer.step()``, schedule.

        ``forward_step(data_iterator, model)`` is Megatron's: it takes a micro-batch by ``next(data_iterator)`` and
        returns the output and a function of it that returns the loss. ``loader``: from ``run.loader``. Returns
        ``loss`` (the mean over the global batch), ``grad_norm`` (None where it is not known), and ``skipped`` (whether
        a gradient was not finite, so that nothing was updated).
        """
        self.begin(step)
        get_forward_backward_func()(
            forward_step_func=self.weighted(step, forward_step),
            data_iterator=iter(loader),
            model=self._chunks,
            num_microbatches=len(loader),
            seq_length=seq_length,
            micro_batch_size=self._run._batch.micro_batch,
        )
        updated, norm, _ = self._optimizer.step()
        if updated and self._scheduler is not None:
            self._scheduler.step(increment=step.batch_size)
        norm = norm.item() if isinstance(norm, torch.Tensor) else norm
        return {"loss": step.loss, "grad_norm": norm, "skipped": not updated}

    def weighted(self, step: Step, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward_step`` so that the step knows its losses, for a step function that calls Megatron's schedule
        itself. Megatron divides them by the micro-batches of this rank, and gradients by the data-parallel ranks."""

        def forward(iterator: Any, model: Any, *more: Any) -> tuple[Any, Callable[..., Any]]:
            output, loss_of = forward_step(iterator, model, *more)
            weight = step.weight

            def reported(*args: Any, **kwargs: Any) -> Any:
                found = loss_of(*args, **kwargs)
                loss = found[0].detach() if len(found) == 2 else found[0].detach() / found[1].clamp(min=1)
                step.scale(loss, weight=weight)
                return found

            return output, reported

        return forward

    def gather(self) -> None:
        """Make the model's parameters whole on every rank. Collective: for a phase, or for the code after the loop.

        A forward pass in a phase does so by itself; call it before parameters are read otherwise, as to save them.
        """
        self._refresh()
        for chunk, gather in zip(self._chunks, self._gather, strict=True):
            if gathers_in_forward(chunk):
                gather(force_sync=True)

    def _refresh(self) -> None:
        """Make the model's parameters whole, or let the next forward pass do so where that gathers them. Collective, and
        does nothing where it was done in this generation and no step has changed parameters since."""
        if self._gathered_in == self._run.generation:
            return
        if self._is_stale:
            for one in inner_optimizers(self._optimizer):
                if isinstance(one, MixedPrecisionOptimizer) and not one.is_stub_optimizer:
                    one._copy_main_params_to_model_params()
            self._is_stale = False
        for chunk, gather in zip(self._chunks, self._gather, strict=True):
            if gathers_in_forward(chunk):
                forget_collectives(chunk, order_too=False)
            elif chunk.ddp_config.use_distributed_optimizer:
                gather()
        self._gathered_in = self._run.generation

    def _track(self) -> None:
        ones = inner_optimizers(self._optimizer)
        places = [place_of_shard(one) for one in ones]
        for number, (one, place) in enumerate(zip(ones, places, strict=True)):
            if not one.is_stub_optimizer:
                main = MainParameters(one)
                self._run.track(**{f"main{number}{place}": main, f"optimizer{number}{place}": one.optimizer})
        self._run.track(megatron=OtherState(self._chunks, self._optimizer, self._scheduler, self._is_loaded))

    def _is_loaded(self) -> None:
        self._is_stale, self._gathered_in = True, None

    def _gather_later(self, *_: Any, **__: Any) -> None:
        """Stands in for ``start_param_sync``: at the end of ``optimizer.step()`` a step that counts could not do it again
        if a rank is lost in it. `begin` gathers, or the first forward pass after the step."""
        self._gathered_in = None

    def _checked_step(self) -> Any:
        """Stands in for ``optimizer.step``. Raises `UsageError` in a step function that has not called `begin`."""
        if self._begun is None or self._run._units.step_in_hand is not self._begun:
            raise UsageError(
                "optimizer.step() was called in a step that has not begun with Training.begin(step): if it is done again, its gradients "
                "would be added to those of the attempt before.",
                remedy="call begin(step) of what rackrun.megatron.track has returned at the top of the @run.step function.",
            )
        updated = self._step_optimizer()
        self._gathered_in = None
        return updated
