"""rackrun: distributed training that continues, with exact results, when hardware fails."""

from typing import TYPE_CHECKING

from rackrun.errors import (
    CollectiveBroken,
    HardwareError,
    InternalError,
    RackrunError,
    StateLost,
    StepError,
    UsageError,
)
from rackrun.version import __version__ as __version__

if TYPE_CHECKING:
    from rackrun.worker.batch.lr_rule import ScaleLR
    from rackrun.worker.loop.elastic import elastic
    from rackrun.worker.loop.open_run import begin
    from rackrun.worker.loop.run import Run
    from rackrun.worker.steps.step import Step

__all__ = [
    "CollectiveBroken",
    "HardwareError",
    "InternalError",
    "RackrunError",
    "Run",
    "ScaleLR",
    "StateLost",
    "Step",
    "StepError",
    "UsageError",
    "begin",
    "elastic",
]

if not TYPE_CHECKING:  # type checkers see only the names above

    def __getattr__(name: str) -> object:
        # torch is imported on first use of the worker's side: rackctl and the coordinator start without it
        if name == "begin":
            from rackrun.worker.loop.open_run import begin

            return begin
        if name == "elastic":
            from rackrun.worker.loop.elastic import elastic

            return elastic
        if name == "Run":
            from rackrun.worker.loop.run import Run

            return Run
        if name == "ScaleLR":
            from rackrun.worker.batch.lr_rule import ScaleLR

            return ScaleLR
        if name == "Step":
            from rackrun.worker.steps.step import Step

            return Step
        raise AttributeError(f"module 'rackrun' has no attribute {name!r}")
