"""What has to be the same on every host of a job: its computation is to be the same, bit for bit, wherever a rank runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Mapping

from rackrun.version import __version__

__all__ = ["own_versions", "unlike"]


@functools.cache
def own_versions() -> dict[str, str]:
    """By the name of the package; without those that are not installed."""
    found = {"rackrun": __version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def unlike(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """``rackrun 0.2.0 (here 0.1.0), torch 2.14.0 (here 2.13.0)``: of what both have said; "" when that is the same."""
    return ", ".join(
        f"{name} {theirs[name]} (here {ours[name]})" for name in ours if name in theirs and theirs[name] != ours[name]
    )
