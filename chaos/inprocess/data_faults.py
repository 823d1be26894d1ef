"""Samples that are poison, wherever they are computed. Installed by `rackrun.chaos.inprocess.inprocess_faults`.

``poison/SAMPLE`` says what a sample does (``raises``, ``nan``), to all processes alike: it is the data that is bad, not a rank.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackrun.chaos.faults.fault_types import PoisonBatch

if TYPE_CHECKING:
    import torch

    from rackrun.chaos.inprocess.inprocess_faults import _Hooks

__all__ = ["Poison", "install_data"]


class Poison:
    def __init__(self, hooks: _Hooks, folder: Path) -> None:
        self._hooks, self._folder = hooks, folder / "poison"
        self._folder.mkdir(exist_ok=True)

    def choose(self, step: int, ids: list[int]) -> None:
        """One of these is poison from now on, if there is an order for this process."""
        if order := self._hooks.take(lambda fault: isinstance(fault, PoisonBatch)):
            assert isinstance(order.fault, PoisonBatch)
            sample = random.Random(order.seed).choice(ids)
            partial = self._folder / f".{sample}"
            partial.write_text(order.fault.how)
            partial.rename(self._folder / str(sample))
            what = "raises" if order.fault.how == "raises" else "makes the loss NaN"
            self._hooks.tell(order, f"sample {sample} {what}, from step {step} on")

    def among(self, ids: list[int]) -> tuple[int, str] | None:
        """Sample, and what it does."""
        for sample in ids:
            with contextlib.suppress(FileNotFoundError):
                return sample, (self._folder / str(sample)).read_text()
        return None


def install_data(hooks: _Hooks, folder: Path) -> None:
    from rackrun.worker.loop.run import Run
    from rackrun.worker.steps.step import Step

    poison, begin, scale = Poison(hooks, folder), Run._begin_shard, Step.scale
    spoilt: set[Step] = set()
    """Whose micro-batch in hand has a sample that makes it NaN."""

    def hooked_begin(self: Run, step: Step, shard: Any, *, last: bool, ids: Any) -> None:
        begin(self, step, shard, last=last, ids=ids)
        samples = ids.tolist()
        poison.choose(int(step), samples)
        spoilt.clear()
        match poison.among(samples):
            case (sample, "raises"):
                raise ValueError(f"chaos: sample {sample} cannot be used")
            case (_, _):
                spoilt.add(step)
            case None:
                pass

    def hooked_scale(self: Step, loss: torch.Tensor, weight: float | None = None) -> torch.Tensor:
        return scale(self, loss * float("nan") if self in spoilt else loss, weight)

    _replace(Run, "_begin_shard", hooked_begin)
    _replace(Step, "scale", hooked_scale)


def _replace(owner: type, name: str, by: Callable[..., Any]) -> None:
    setattr(owner, name, by)
