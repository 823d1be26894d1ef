"""Lightning's loops with rackrun's steps in them: mix-ins, put before the classes of the loops of a Trainer.

One turn of the epoch loop does one step, with all its micro-batches. Validation, the end of an epoch, and the saving of
checkpoints are phases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rackrun.errors import UsageError

if TYPE_CHECKING:
    from rackrun.frameworks.lightning.training_session import TrainingSession

__all__ = ["ElasticEpochLoop", "ElasticFitLoop", "adopt_loops"]


def adopt_loops(trainer: Any, session: TrainingSession) -> None:
    """Make the training loops of ``trainer`` those of ``session``, in place."""
    for loop, mixin in ((trainer.fit_loop, ElasticFitLoop), (trainer.fit_loop.epoch_loop, ElasticEpochLoop)):
        loop.__class__ = type(f"Elastic{type(loop).__name__}", (mixin, type(loop)), {})
        loop._rackrun = session


class ElasticFitLoop:
    """Goes over epochs."""

    _rackrun: TrainingSession

    def on_advance_end(self) -> None:
        """End an epoch: its metrics are reduced over the ranks, and checkpoints saved."""
        self._rackrun.phase(super().on_advance_end, "ending an epoch")  # type: ignore[misc]

    def on_run_end(self) -> None:
        """Leave the loop over steps, and call the hooks at the end of training."""
        self._rackrun.end()
        super().on_run_end()  # type: ignore[misc]


class ElasticEpochLoop:
    """Goes over the steps of an epoch."""

    _rackrun: TrainingSession
    trainer: Any
    batch_progress: Any
    scheduler_progress: Any
    automatic_optimization: Any

    def on_run_start(self, data_fetcher: Any) -> None:
        """Begin an epoch. The stock loader is not iterated over."""

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: when a job is to end, rackrun ends it between two steps."""

    def advance(self, data_fetcher: Any) -> None:  # noqa: ARG002 - as Lightning calls it
        """Do one step, with the hooks around it."""
        session, connector = self._rackrun, self.trainer._logger_connector
        number = session.enter()
        first = session.order.place(number)[1]
        assert self.batch_progress.current.ready == first, f"step {number} begins at micro-batch {first} of its epoch"
        self.batch_progress.is_last_batch = first == self.trainer.num_training_batches - 1
        self.batch_progress.increment_ready()
        batch = session.first_batch(number)
        connector.on_batch_start(batch)
        if session.batch_starts(batch, first) == -1:
            raise UsageError(
                "on_train_batch_start has returned -1: an epoch that ends early has no order of samples.",
                remedy="set trainer.should_stop to end the training, or limit_train_batches for shorter epochs.",
            )
        self.batch_progress.increment_started()
        last = session.do_step(number)
        self.batch_progress.increment_processed()
        index = self.batch_progress.current.ready - 1
        if session.saves_after_batch():
            session.phase(lambda: session.batch_ends(last.output, last.batch, index), "saving a checkpoint")
        else:
            session.batch_ends(last.output, last.batch, index)
        self.batch_progress.increment_completed()
        connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate where that is due, in a phase."""
        stock, due = super().on_advance_end, super()._should_check_val_fx  # type: ignore[misc]
        if due(data_fetcher) or self._plateau_is_due():
            self._rackrun.phase(lambda: stock(data_fetcher), "validating")
        else:
            stock(data_fetcher)

    def _plateau_is_due(self) -> bool:
        """Whether a scheduler that waits for a metric moves after this step."""
        batches = self.batch_progress.current.ready
        return any(
            config.reduce_on_plateau and config.interval == "step" and batches % config.frequency == 0
            for config in self.trainer.lr_scheduler_configs
        )
