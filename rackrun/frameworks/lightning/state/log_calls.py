"""Calls of loggers: once for each committed step or phase, in order, by whoever is rank 0 then."""

from __future__ import annotations

from typing import Any

from rackrun.frameworks.lightning.base.package import LightningPackage
from rackrun.frameworks.lightning.base.plain_text import decoded, encoded
from rackrun.frameworks.lightning.state.csv_rows import continue_rows, delete_backup, replace_atomically, rows_of

__all__ = ["LogCalls"]


class LogCalls:
    """Stands between ``trainer.loggers`` and whoever calls their ``log_metrics``.

    What is logged in a step or a phase is held until that is committed: it may run again.
    """

    def __init__(self, trainer: Any, package: LightningPackage) -> None:
        self._trainer, self._package = trainer, package
        self._loggers: list[Any] = list(trainer.loggers)
        self._stock = [logger.log_metrics for logger in self._loggers]
        self.counts = [0] * len(self._loggers)
        """Number of calls that have reached each logger: rows of its file."""
        self._held: list[tuple[int, dict[str, Any], int | None]] | None = None
        self._since: list[tuple[int, dict[str, Any], int | None]] = []
        """The calls that were made since the turn began."""
        for index, logger in enumerate(self._loggers):
            logger.log_metrics = self._call_of(index)
            if self._is_csv(logger):
                self.counts[index] = rows_of(logger)
                replace_atomically(logger)

    def hold(self) -> None:
        """Hold all calls from now on."""
        self._held = []

    def held(self) -> str:
        """Return the calls that are held, as text."""
        return encoded(self._held or [], "a logger")

    def turn_begins(self) -> None:
        """Count from here what `of_turn` returns."""
        self._since = []

    def of_turn(self) -> str:
        """Return the calls since the turn began, as text."""
        return encoded(self._since, "a logger")

    def drop(self) -> None:
        """Forget the calls that are held, and hold no more."""
        self._held = None

    def deliver(self, text: str) -> None:
        """Make the calls that `held` has returned."""
        for index, metrics, step in decoded(text, self._trainer.strategy.root_device) if text else ():
            self._log(index, metrics, step)

    def versions(self) -> list[Any]:
        """Return the version of each logger: the name of its folder."""
        return [getattr(logger, "version", None) for logger in self._loggers]

    def set_versions(self, versions: list[Any]) -> None:
        """Give each logger the version that rank 0 has found, or that the training had before it was resumed."""
        for logger, version in zip(self._loggers, versions, strict=True):
            if hasattr(logger, "_version") and logger._version != version:
                logger._version = version
                if hasattr(logger, "_experiment"):
                    logger._experiment = None

    def begin_anew(self) -> None:
        """Begin a new training, whatever files there are."""
        for logger in self._loggers:
            if self._is_csv(logger) and self._trainer.strategy.is_global_zero:
                delete_backup(logger)

    def become_main(self) -> None:
        """Go on where the rank 0 before this process has stopped."""
        for logger, rows in zip(self._loggers, self.counts, strict=True):
            if self._is_csv(logger):
                continue_rows(logger, rows)
        if self._trainer.enable_autolog_hparams:
            self._package.part("trainer.trainer")._log_hyperparams(self._trainer)

    def _call_of(self, index: int) -> Any:
        def log_metrics(metrics: Any, step: int | None = None) -> None:
            values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
            if self._held is None:
                self._since.append((index, values, step))
                self._log(index, values, step)
            else:
                self._held.append((index, values, step))

        return log_metrics

    def _log(self, index: int, metrics: dict[str, Any], step: int | None) -> None:
        self._stock[index](metrics, step=step)
        self.counts[index] += 1
        if self._is_csv(self._loggers[index]):
            self._loggers[index].save()

    def _is_csv(self, logger: Any) -> bool:
        return isinstance(logger, self._package.part("loggers").CSVLogger)
