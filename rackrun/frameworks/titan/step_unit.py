"""One step of the Trainer as a unit of rackrun: the whole of ``Trainer.train_step``, which may run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.loss import IGNORE_INDEX

from rackrun.frameworks.titan.known_losses import KnownLosses, local_part
from rackrun.worker.steps.step import Step

if TYPE_CHECKING:
    from rackrun.frameworks.titan.training_session import TrainingSession

__all__ = ["StepUnit"]


@dataclass
class _Attempt:
    step: Step
    local_tokens: torch.Tensor
    """Labels of this rank that count."""
    global_tokens: torch.Tensor | None = None
    """The same of all ranks."""
    loss: torch.Tensor | None = None
    """The sum of the losses of this rank's micro-batches so far, each divided by ``global_tokens``."""


class StepUnit:
    """Does steps of the session's Trainer. It needs nothing from the loop, as a rollback calls it again later."""

    def __init__(self, session: TrainingSession) -> None:
        self._session, self._trainer = session, session.trainer
        self._losses = KnownLosses()
        self._attempt: _Attempt | None = None

    def __call__(self, step: Step, number: int | None = None) -> list[Any]:
        """Do one step, and return what it has logged (`LoggedValues.held`). ``number``: rackrun's number of it; None
        where a waiting spare tries the step."""
        session, trainer = self._session, self._trainer
        stood = trainer.step, trainer.ntokens_seen
        trainer.ntokens_seen = session.record.ntokens_seen
        if number is not None:
            trainer.step = session.record.first + number + 1
        try:
            with session.logs.held() as calls, self._losses.answering():
                batches = self._take(step)
                session.stock.train_step(trainer.batch_generator(batches))
            if number is not None:
                session.record.step_done(number, trainer.ntokens_seen)
                session.run.log(**session.logs.losses(calls))
            return calls
        finally:
            self._attempt = None
            trainer.step, trainer.ntokens_seen = stood

    def _take(self, step: Step) -> list[Any]:
        """Return the micro-batches of this rank, and begin the attempt."""
        (given,) = self._session.data
        batches = list(given.values())
        tokens = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum()
        self._attempt = _Attempt(step, tokens)
        step.weight  # noqa: B018 - the read says that the losses are weighted here: by torchtitan, by tokens
        return batches

    def forward_backward(self, **given: Any) -> torch.Tensor:
        """Do a micro-batch as the stock Trainer does, and add its loss."""
        loss: torch.Tensor = self._session.stock.forward_backward_step(**given)
        attempt = self._attempt
        if attempt is not None:
            attempt.global_tokens = given["global_valid_tokens"]
            if attempt.loss is None:
                attempt.loss = loss.detach().clone()
            else:
                attempt.loss.add_(loss.detach())
        return loss

    def before_update(self) -> None:
        """Reduce what will be logged, before the gate. Collective."""
        attempt, session, trainer = self._attempt, self._session, self._trainer
        if attempt is None or attempt.loss is None or attempt.global_tokens is None:
            return
        ranks = session.run._data_coordinate()[1]
        attempt.step.scale(local_part(attempt.loss) * ranks, weight=1 / ranks)
        if trainer.parallel_dims.dp_cp_enabled and trainer.metrics_processor.should_log(trainer.step):
            seen = torch.tensor(trainer.ntokens_seen, dtype=torch.int64, device=trainer.device)
            local = attempt.loss * attempt.global_tokens / attempt.local_tokens
            self._losses.reduce(attempt.loss, local, seen, trainer.parallel_dims.get_optional_mesh("loss"))
