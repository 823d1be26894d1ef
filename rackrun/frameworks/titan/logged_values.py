"""Holds back what the Trainer logs in a step or in a validation until that is committed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchtitan.components.metrics import BaseLogger

__all__ = ["LoggedValues"]

_NAMES = {
    "log": {"global_avg_loss": "loss", "grad_norm": "grad_norm"},
    "log_validation": {"loss": "validation_loss"},
}
"""Method of the metrics processor -> its argument -> the name for ``run.log``."""


class LoggedValues:
    """The calls of ``log`` and ``log_validation`` of ``metrics``, a MetricsProcessor."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self._stock = {"log": metrics.log, "log_validation": metrics.log_validation}

    @contextmanager
    def held(self) -> Iterator[list[Any]]:
        """Keep the calls in the list that this yields, as [name, arguments, keywords], and begin each attempt with the
        same counts of tokens and times."""
        metrics = self._metrics
        calls: list[Any] = []

        def keep(name: str) -> Any:
            return lambda *args, **kwargs: calls.append([name, list(args), kwargs])

        tokens, times = metrics.ntokens_since_last_log, list(metrics.data_loading_times)
        metrics.log, metrics.log_validation = keep("log"), keep("log_validation")
        try:
            yield calls
        except BaseException:
            metrics.ntokens_since_last_log, metrics.data_loading_times[:] = tokens, times
            raise
        finally:
            metrics.log, metrics.log_validation = self._stock["log"], self._stock["log_validation"]

    def losses(self, calls: Sequence[Any]) -> dict[str, float]:
        """Return the loss and the gradient norm, or the loss of a validation, in the calls that were kept."""
        found: dict[str, float] = {}
        for name, args, kwargs in calls:
            given = inspect.signature(self._stock[name]).bind(*args, **kwargs).arguments
            names = _NAMES[name]
            found |= {names[key]: value for key, value in given.items() if key in names}
        return found

    def deliver(self, calls: Sequence[Any] | None) -> None:
        """Make the calls that were kept in what is committed now. A process that has taken a rank over has no times of
        its own yet, and reports 0."""
        for name, args, kwargs in calls or ():
            if not self._metrics.data_loading_times:
                self._metrics.data_loading_times.append(0.0)
            self._stock[name](*args, **kwargs)

    def become_main(self, config: Any, dump_folder: str, pp_schedule: str) -> None:
        """Make the loggers that rank 0 has, in a process that is rank 0 now and has none."""
        metrics = self._metrics
        if type(metrics.logger) is BaseLogger:
            metrics.logger = metrics._build_metric_logger(
                config=metrics.config,
                parallel_dims=metrics.parallel_dims,
                dump_folder=dump_folder,
                pp_schedule=pp_schedule,
                config_dict=config.to_dict(),
            )
