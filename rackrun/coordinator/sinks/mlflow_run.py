"""``mlflow:URI[#EXPERIMENT]``: a run of an MLflow tracking server, or of a database or folder that MLflow takes."""

from __future__ import annotations

import os
import re
from typing import Any

from rackrun.coordinator.sinks.sink import Key, Opening, Record

__all__ = ["MlflowRun", "metric_name", "uri_and_experiment"]

_EXPERIMENT = "rackrun"
_BATCH = 1000
"""The most metrics that MLflow takes in one request."""


class MlflowRun:
    """An MLflow run: numbers are metrics, texts are tags, which keep the last."""

    def __init__(self, opening: Opening) -> None:
        self.run = ""
        self._uri, self._experiment = uri_and_experiment(opening.target)
        self._title = opening.run_id
        self._client: Any = None
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}

    def begin(self, newest: Key | None, run: str) -> Key | None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # it is tried again from here
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        if run:
            self._client.update_run(run, status="RUNNING")
            self.run = run
            return newest
        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        made = self._client.create_run(number, run_name=self._title, tags={"rackrun.run_id": self._title})
        self.run = made.info.run_id
        return newest

    def write(self, record: Record) -> None:
        from mlflow.entities import Metric

        for name, value in record.values.items():
            if isinstance(value, str):
                self._tags[metric_name(name)] = value
            else:
                key, at_ms = metric_name(name), int(record.time_s * 1e3)
                self._metrics.append(Metric(key, float(value), at_ms, max(record.key.step, 0)))

    def flush(self) -> None:
        from mlflow.entities import RunTag

        while self._metrics:
            self._client.log_batch(self.run, metrics=self._metrics[:_BATCH])
            del self._metrics[:_BATCH]
        if self._tags:
            self._client.log_batch(self.run, tags=[RunTag(name, text) for name, text in self._tags.items()])
            self._tags.clear()

    def rewind(self, step: int) -> str:
        return f"MLflow keeps the values of the steps after {step}, beside the right ones"

    def close(self) -> str:
        self._client.set_terminated(self.run, "FINISHED")
        return ""


def uri_and_experiment(target: str) -> tuple[str, str]:
    """Split ``URI#EXPERIMENT``."""
    uri, _, experiment = target.partition("#")
    return uri, experiment or _EXPERIMENT


def metric_name(name: str) -> str:
    """Return a name in the characters that MLflow takes."""
    return re.sub(r"[^\w./: -]", "_", name)[:250]
