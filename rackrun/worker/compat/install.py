"""Checks the installed torch, and patches what a script calls before and while it builds its model."""

from __future__ import annotations

import torch

from rackrun.errors import UsageError
from rackrun.worker.compat import c10d, calls, ddp, fsdp, grads

__all__ = ["check", "install"]

_TORCH_MIN = (2, 10)


def check() -> None:
    """Raises `UsageError` when this torch lacks what rackrun needs."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    missing = [] if version >= _TORCH_MIN else [f"torch {torch.__version__} is older than 2.10"]
    missing += c10d.missing() + ddp.missing() + fsdp.missing()
    if missing:
        raise UsageError(
            f"this torch cannot run elastic groups: {'; '.join(missing)}.", remedy="install torch 2.10 to 2.13."
        )


def install() -> None:
    """Once per process, before the default group is made."""
    c10d.install()
    ddp.install()
    fsdp.install()
    grads.install()
    calls.install()
