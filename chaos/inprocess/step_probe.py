"""What a training script tells of its steps where no coordinator does: one line in a script that torchrun starts.

::

    from rackrun.chaos import report_step
    ...
    report_step(rank=rank, step=step, loss=loss.item(), samples=ids)   # after optimizer.step()

Without ``RACKRUN_CHAOS_TOLD`` in the environment, which `rackctl chaos run --launcher torchrun` sets, it does nothing. Imports neither torch nor the
rest of rackrun's runtime.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

__all__ = ["FOLDER", "Told", "read_told", "report_step"]

FOLDER = "RACKRUN_CHAOS_TOLD"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has finished a step. ``at_s``: Unix time."""

    rank: int
    step: int
    loss: str
    """As `float.hex` has it: every bit."""
    samples: tuple[int, ...] = ()
    at_s: float
    pid: int


def report_step(*, rank: int, step: int, loss: float, samples: Sequence[int] = ()) -> None:
    """In one write, so that a rank that is killed leaves whole lines or none."""
    folder = os.environ.get(FOLDER, "")
    if folder:
        told = Told(
            rank=rank, step=step, loss=float(loss).hex(), samples=tuple(samples), at_s=time.time(), pid=os.getpid()
        )
        fd = os.open(Path(folder) / f"{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, msgspec.json.encode(told) + b"\n")
        finally:
            os.close(fd)


def read_told(folder: Path) -> list[Told]:
    """In the order of time."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    return sorted(
        (msgspec.json.decode(line, type=Told) for line in lines if line.endswith(b"\n")), key=lambda told: told.at_s
    )
