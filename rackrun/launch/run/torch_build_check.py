"""Check, before anything starts, that torch was built for this host's GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.topology.health.ignored_checks import ignored_by

__all__ = ["check_gpus"]


def check_gpus(environment: Mapping[str, str], *, torch: str, accelerated: bool, devices: Path = Path("/dev")) -> None:
    """Check torch's build. Raises UsageError. ``torch`` is its version; ``accelerated``: it is built for CUDA or ROCm.

    A build for CPUs sees no GPU and reports nothing: the job would train on the host's cores, at a hundredth of the
    speed.
    """
    ignored_by(environment)
    if accelerated or environment.get("CUDA_VISIBLE_DEVICES", "all").strip() == "":
        return
    gpus = sorted(path.name for path in devices.glob("nvidia[0-9]*"))
    if gpus:
        raise UsageError(
            f"torch {torch} is built for CPUs, and this host has {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({gpus[0]}).",
            remedy="install a torch that is built for CUDA (pytorch.org/get-started), or hide the GPUs to train on CPUs "
            "(CUDA_VISIBLE_DEVICES=).",
        )
