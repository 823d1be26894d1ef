"""What loaders of data use of the run that they belong to, and what the run keeps of where they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from rackrun.worker.data.global_batch import StepBatch
    from rackrun.worker.data.loader import BatchPlan, Shard
    from rackrun.worker.steps.step import Step

__all__ = ["DataChecks", "DataRun", "DataState"]


class DataChecks(Protocol):
    """The part of `rackrun.worker.script.script_checks.ScriptChecks` that loaders use."""

    def begin_iteration(self, attempt: Step, micro_batches: int) -> Any: ...
    def record_generator_use(self, reading: Any, name: str, generator: Any) -> None: ...
    def record_delivery(self, reading: Any) -> None: ...
    def end_iteration(self, reading: Any) -> None: ...
    def check_left_generators(self) -> None: ...


class DataRun(Protocol):
    """The part of `rackrun.worker.loop.run.Run` that loaders use."""

    @property
    def _batch(self) -> BatchPlan: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def _checks(self) -> DataChecks: ...
    def _current_step(self) -> Step: ...
    def _batch_of(self, step: int) -> StepBatch: ...
    def _my_shards(self) -> list[Shard]: ...
    def _begin_shard(self, step: Step, shard: Shard, *, last: bool, ids: Any) -> None: ...


class DataState(Protocol):
    """Where some of the script's data stand; a tracked object, the same on all ranks."""

    def exchange(self, step: Any, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Exchange with all ranks what the attempt ``step`` has read, before its gate. Collective."""
        ...

    def committed(self, step: Any) -> None:
        """Keep what was exchanged, because ``step`` is committed."""
        ...

    def trial_over(self) -> None:
        """Forget what a spare has read in its trial."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
