"""`Trainer` with rackrun's steps in it, and `Elastic`, the same for subclasses of transformers' own.

The loop stays transformers'. It iterates over step tokens (`rackrun.frameworks.hf.tokens`) instead of batches; at a
step's last token the whole step is done (`rackrun.frameworks.hf.step_unit`), and what the loop calls after it (clipping,
``optimizer.step()``, the scheduler) returns what the step has done. Evaluation and saving are phases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import trainer as trainer_module

from rackrun.errors import UsageError
from rackrun.frameworks.hf.refusals import refuse_arguments, refuse_class, refuse_loader, refuse_version
from rackrun.frameworks.hf.step_unit import StockMethods
from rackrun.frameworks.hf.tokens import Token
from rackrun.frameworks.hf.training_session import TrainingSession
from rackrun.frameworks.own_attributes import own_attributes
from rackrun.worker.process.runtime import start

__all__ = ["Elastic", "Trainer"]

start()

_CONTINUED = "rackrun"
"""Stands for the checkpoint that a process which takes a rank over resumes from: rackrun has restored everything."""

_Base: Any = transformers.Trainer if TYPE_CHECKING else object


class Elastic(_Base):  # type: ignore[misc]
    """Put this before a subclass of transformers' ``Trainer``: ``class T(rackrun.hf.Elastic, SFTTrainer): ...``.

    Any rank may be lost at any moment; its replacement goes on inside of the same loop, with the same weights, the same
    samples and the same history.
    """

    _rackrun: TrainingSession | None = None
    _rackrun_flos: list[float] = [0.0]  # noqa: RUF012 - replaced, never changed
    _rackrun_loader: Any = None
    _tr_loss: torch.Tensor
    _rackrun_prepared: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_class(cls)

    # -- the beginning
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Keep the stock loader, from which the order of samples is taken."""
        if self._rackrun is not None:
            raise UsageError(
                "train() was called again: a process that takes a rank over goes on inside of one loop.",
                remedy="train one Trainer, once, in a script.",
            )
        refuse_version()
        refuse_arguments(self)
        refuse_loader(self, dataloader)
        self._rackrun_loader = dataloader
        values = super().set_initial_training_values(args, dataloader)
        if values[-1] < 1:
            raise UsageError("the Trainer has no step to do: num_train_epochs is 0.", remedy="do not call train().")
        return values

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Open the run, come to its loop, and return where to go on: a process that takes a rank over goes on like one
        that resumes from a checkpoint."""
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        # Accelerate would not wrap a model in DistributedDataParallel that `evaluate` has prepared for itself, and each
        # rank would train a model of its own.
        self.model.__dict__.pop("_is_accelerate_prepared", None)
        model, _ = super()._prepare_for_training(max_steps, self._rackrun_loader, resume_from_checkpoint)
        stock = StockMethods(
            training_step=super().training_step,
            get_num_items_in_batch=super()._get_num_items_in_batch,
            clip_grad_norm=super()._clip_grad_norm,
            get_grad_norm=super()._get_grad_norm,
            get_learning_rate=super()._get_learning_rate,
            floating_point_ops=super().floating_point_ops,
            track_num_input_tokens=super()._track_num_input_tokens,
        )
        session = TrainingSession(self, stock, self._rackrun_loader, model, max_steps)
        self._rackrun_prepared = model, session.tokens
        first = session.begin()
        self._rackrun = session
        return first // session.steps_per_epoch, session.micro_batches_before(first)

    def _prepare_for_training(self, *_: Any) -> Any:
        """Return what was prepared already: the model, and the tokens in place of the loader."""
        return self._rackrun_prepared

    def _run_epoch(self, **kwargs: Any) -> None:
        """Iterate over the tokens of one epoch."""
        assert self._rackrun is not None, "the run is open"
        self._rackrun.tokens.set_epoch(kwargs["epoch"])
        super()._run_epoch(**{**kwargs, "resume_from_checkpoint": _CONTINUED})

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Load nothing for a process that rackrun has restored: it seeds every step."""
        if checkpoint != _CONTINUED:
            super()._load_rng_state(checkpoint)

    # -- a step
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Do the step at its last token. Its losses are in ``_tr_loss`` then, so what the loop adds is 0."""
        if not isinstance(inputs, Token):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        if inputs.last:
            assert self._rackrun is not None, "the run is open"
            self._rackrun.do_step(inputs.step)
        return torch.zeros((), device=self._tr_loss.device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if batch_samples and isinstance(batch_samples[0], Token):
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._rackrun.results["norm"] if self._rackrun else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._rackrun.results["norm"] if self._rackrun else super()._get_grad_norm(model, grad_norm)

    def _get_learning_rate(self) -> float:
        """Return the rate that the step has used, until the loop has counted the step."""
        session = self._rackrun
        if session is not None and session.results and self.state.global_step == session.record.step:
            return float(session.results["rate"])
        return float(super()._get_learning_rate())

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0 for a token: the step has counted its micro-batches."""
        return 0 if isinstance(inputs, Token) else int(super().floating_point_ops(inputs))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not isinstance(inputs, Token):
            super()._track_num_input_tokens(inputs)

    def store_flos(self) -> None:
        """Add what all ranks have counted, which every rank knows."""
        if self._rackrun is None or not self.is_in_train:
            super().store_flos()
            return
        counted = self._rackrun_flos
        if len(counted) > 1:
            self.state.total_flos += torch.tensor(counted, device=self.args.device).sum().item()
        else:
            self.state.total_flos += counted[0]
        self._rackrun_flos = [0.0] * len(counted)

    # -- logging, evaluation, saving
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log at once, without a collective; evaluate and save in a phase."""
        session, control = self._rackrun, self.control
        assert session is not None, "the run is open"
        evaluate, save = control.should_evaluate, control.should_save
        control.should_evaluate = control.should_save = False
        with self._known_losses():
            super()._maybe_log_save_evaluate(*args, **kwargs)
        self.control.should_evaluate |= evaluate
        self.control.should_save |= save
        if self.control.should_evaluate or self.control.should_save:
            stock = super()._maybe_log_save_evaluate
            session.phase(lambda: stock(self._tr_loss, *args[1:], **kwargs), "evaluating and saving")

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        session, stock = self._rackrun, super()._evaluate
        if session is None or session.in_phase:
            return stock(*args, **kwargs)
        return session.phase(lambda: stock(*args, **kwargs), "evaluating")

    @contextlib.contextmanager
    def _known_losses(self) -> Iterator[None]:
        """Let the Trainer gather its sum of losses without a collective: every rank has those of all ranks."""
        stock = trainer_module.nested_gather

        def gathered(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return tensors if tensors is self._tr_loss else stock(tensors, *args, **kwargs)

        trainer_module.nested_gather = gathered
        try:
            yield
        finally:
            trainer_module.nested_gather = stock

    # -- what belongs to the script
    def rackrun_scripts_own(self) -> dict[str, Any]:
        """Return name -> what the script has given to the Trainer and may keep state in, and the attributes of its
        subclass, for the chaos harness."""
        callbacks = {type(one).__name__: one for one in self.callback_handler.callbacks}
        given = ("data_collator", "compute_loss_func", "compute_metrics", "train_dataset", "eval_dataset")
        return {**callbacks, **{name: getattr(self, name, None) for name in given}, **own_attributes(self)}

    # -- the end
    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the run's loop. What follows is the script's code after the loop."""
        session = self._rackrun
        assert session is not None, "the run is open"
        session.end()
        self._initial_global_step = session.record.first  # the mean loss is that of all steps, also on a successor
        sums = self._tr_loss.reshape(-1)
        self._tr_loss = sums[min(session.run.rank, len(sums) - 1)]
        return super()._finalize_training(*args, **kwargs)


class Trainer(Elastic, transformers.Trainer):  # type: ignore[misc]
    """transformers' ``Trainer``; see `Elastic`."""
