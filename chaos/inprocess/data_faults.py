"""Make samples raise, or make their loss NaN, on whichever rank computes them.

``poison/SAMPLE`` says what a sample does (``raises``, ``nan``), for all processes alike: the data is bad, not a rank.
The hooks are installed by `rackrun.chaos.inprocess.inprocess_faults`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackrun.chaos.faults.fault_row import HookPlace, HookVisit

if TYPE_CHECKING:
    import torch

    from rackrun.chaos.inprocess.inprocess_faults import _Hooks

__all__ = ["Poison", "install_data"]


class Poison:
    """The poisoned samples of a job."""

    def __init__(self, hooks: _Hooks, folder: Path) -> None:
        self._hooks, self._folder = hooks, folder / "poison"
        self._folder.mkdir(exist_ok=True)

    def choose(self, step: int, ids: list[int]) -> None:
        """If there is an order for this process, poison one of the samples ``ids`` from now on."""

        def poison(draw: random.Random, how: str, does: str) -> str:
            sample = draw.choice(ids)
            partial = self._folder / f".{sample}"
            partial.write_text(how)
            partial.rename(self._folder / str(sample))
            return f"sample {sample} {does}, from step {step} on"

        self._hooks.carry_out(HookVisit(HookPlace.SAMPLES), poison=poison)

    def among(self, ids: list[int]) -> tuple[int, str] | None:
        """Return the first poisoned sample among ``ids``, and what it does; None if there is none."""
        for sample in ids:
            with contextlib.suppress(FileNotFoundError):
                return sample, (self._folder / str(sample)).read_text()
        return None


def install_data(hooks: _Hooks, folder: Path) -> None:
    """Hook the beginning of each micro-batch and the scaling of its loss."""
    from rackrun.worker.loop.run import Run
    from rackrun.worker.steps.step import Step

    poison, begin, scale = Poison(hooks, folder), Run._begin_shard, Step.scale
    spoilt: set[Step] = set()
    """The steps whose current micro-batch has a sample that makes the loss NaN."""

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
