"""The kinds of sinks: the value of ``--log-to``, checked before anything is started, and the sink that is made of it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from rackrun.coordinator.sinks.otlp_metrics import endpoint
from rackrun.coordinator.sinks.sink import Opening, Sink
from rackrun.errors import UsageError

__all__ = ["KINDS", "SinkTarget", "make_sink", "parse_target"]

_REMEDY = "give jsonl:PATH, tensorboard:DIR, wandb:PROJECT, mlflow:URI[#EXPERIMENT] or otlp:URL; see docs/loggers.md."


class _Kind(NamedTuple):
    makes: str
    """``module:class``, in this room."""
    imports: str = ""
    """The package that it needs."""
    install: str = ""
    is_path: bool = False


KINDS = {
    "jsonl": _Kind("json_lines:JsonLines", is_path=True),
    "tensorboard": _Kind("tensorboard_events:TensorBoardEvents", "tensorboard", "tensorboard", is_path=True),
    "wandb": _Kind("wandb_run:WandbRun", "wandb", "wandb"),
    "mlflow": _Kind("mlflow_run:MlflowRun", "mlflow", "mlflow"),
    "otlp": _Kind("otlp_metrics:OtlpMetrics"),
}


class SinkTarget(msgspec.Struct, frozen=True):
    """One ``--log-to``."""

    kind: str
    target: str
    """What comes after the kind; paths are absolute."""

    @property
    def path(self) -> Path | None:
        """The file or directory that is written; None: the target is no path."""
        return Path(self.target) if KINDS[self.kind].is_path else None

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}"


def parse_target(text: str) -> SinkTarget:
    """Parse ``KIND:TARGET``. Raises UsageError, also if the package that the kind needs is not installed."""
    name, _, target = text.partition(":")
    kind = KINDS.get(name)
    if kind is None or not target:
        what = f"there is no kind {name!r}" if kind is None else "it names no target"
        raise UsageError(f"--log-to {text!r}: {what}.", remedy=_REMEDY)
    if kind.imports and importlib.util.find_spec(kind.imports) is None:
        raise UsageError(
            f"--log-to {text!r}: the package {kind.imports} is not installed.",
            remedy=f"pip install {kind.install}, on the host of the coordinator.",
        )
    if name == "otlp":
        try:
            endpoint(target)
        except ValueError as error:
            raise UsageError(
                f"--log-to {text!r}: {error}.", remedy="for example otlp:http://localhost:4318."
            ) from error
    return SinkTarget(name, str(Path(target).expanduser().absolute()) if kind.is_path else target)


def make_sink(opening: Opening) -> Sink:
    """Make the sink, which is not open yet."""
    module, _, name = KINDS[opening.kind].makes.partition(":")
    made: Callable[[Opening], Sink] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return made(opening)
