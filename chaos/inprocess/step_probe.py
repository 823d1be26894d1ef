"""Record the steps of a training script that torchrun starts, where no coordinator does.

The script needs one line:

::

    from rackrun.chaos import report_step
    ...
    report_step(rank=rank, step=step, loss=loss.item(), samples=ids)   # after optimizer.step()

The function does nothing without ``RACKRUN_CHAOS_TOLD`` in the environment, which `rackctl chaos run --launcher
torchrun` sets. The module imports neither torch nor the rest of rackrun's runtime.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

__all__ = ["FOLDER", "FinishedStep", "read_finished_steps", "report_step"]

FOLDER = "RACKRUN_CHAOS_TOLD"


class FinishedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a step that a rank has finished. ``at_s`` is Unix time."""

    rank: int
    step: int
    loss: str
    """The loss as `float.hex` writes it, so that every bit is kept."""
    samples: tuple[int, ...] = ()
    at_s: float
    pid: int


def report_step(*, rank: int, step: int, loss: float, samples: Sequence[int] = ()) -> None:
    """Record that this rank has finished a step, with its loss and the ids of its samples.

    The record is a single write, so a rank that is killed leaves a whole line or none.
    """
    folder = os.environ.get(FOLDER, "")
    if folder:
        told = FinishedStep(
            rank=rank, step=step, loss=float(loss).hex(), samples=tuple(samples), at_s=time.time(), pid=os.getpid()
        )
        fd = os.open(Path(folder) / f"{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, msgspec.json.encode(told) + b"\n")
        finally:
            os.close(fd)


def read_finished_steps(folder: Path) -> list[FinishedStep]:
    """Return the records of all ranks in ``folder``, in the order of time. Incomplete lines are left out."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    return sorted(
        (msgspec.json.decode(line, type=FinishedStep) for line in lines if line.endswith(b"\n")),
        key=lambda told: told.at_s,
    )
