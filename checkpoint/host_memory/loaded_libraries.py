"""Shared libraries that this process has loaded already, by name: another copy of one would have a state of its own."""

from __future__ import annotations

import ctypes

__all__ = ["loaded_library"]


def loaded_library(name: str) -> ctypes.CDLL | None:
    """The one whose file's name begins with ``name`` (``libcudart``); None: there is none. OSError when its file is gone."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if f"/{name}" in line}
    return ctypes.CDLL(min(paths)) if paths else None
