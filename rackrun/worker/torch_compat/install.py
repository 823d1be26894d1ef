"""Checks the installed torch, and patches functions that a script calls before and while it builds its model."""

from __future__ import annotations

import torch

from rackrun.errors import UsageError
from rackrun.worker.torch_compat import c10d, data_access, feature_probe, symmetric_memory, unhooked_calls, zero_grad
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp

__all__ = ["REMEDY", "check", "install", "require"]

_TORCH_MIN = (2, 10)
REMEDY = "install torch 2.10 to 2.15."
"""The newest version is the last one in `docs/torch_versions.md`."""

_problems: dict[str, str] = {}


def check() -> None:
    """Try this torch (`rackrun.worker.torch_compat.feature_probe`). Raises `UsageError` when it lacks what every script
    needs. To be called before there is a default group."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    missing = [] if version >= _TORCH_MIN else [f"torch {torch.__version__} is older than 2.10"]
    missing += c10d.missing()
    if missing:
        raise UsageError(f"this torch cannot run elastic groups: {'; '.join(missing)}.", remedy=REMEDY)
    _problems.clear()
    _problems.update(feature_probe.known_problems())


def require(*needs: str) -> None:
    """Raise `UsageError` if this torch has failed a trial of ``needs``, which are keys of `TRIALS`. `check` has run the
    trials."""
    failed = [f"{feature_probe.TRIALS[need][0]}: {_problems[need]}" for need in needs if need in _problems]
    if failed:
        raise UsageError(
            f"torch {torch.__version__} does not work as rackrun needs it ({'; '.join(failed)}).", remedy=REMEDY
        )


def install() -> None:
    """Install all patches, once per process, before the default group is made."""
    c10d.install()
    ddp.install()
    fsdp.install()
    zero_grad.install()
    data_access.install()
    symmetric_memory.install()
    unhooked_calls.install()
