"""Versions that must be equal on every host of a job, so that a rank computes the same bits wherever it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Mapping

from rackrun.version import __version__

__all__ = ["own_versions", "unlike"]


@functools.cache
def own_versions() -> dict[str, str]:
    """Return the versions of rackrun and torch on this host, by package name; packages that are not installed are left
    out."""
    found = {"rackrun": __version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def unlike(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Describe the packages whose versions differ, among those that both sides report; "" if none differs.

    For example ``rackrun 0.2.0 (here 0.1.0), torch 2.14.0 (here 2.13.0)``.
    """
    return ", ".join(
        f"{name} {theirs[name]} (here {ours[name]})" for name in ours if name in theirs and theirs[name] != ours[name]
    )
