"""Find shared libraries that this process has loaded, by name.

Loading another copy would give it a state of its own.
"""

from __future__ import annotations

import ctypes

__all__ = ["loaded_library"]


def loaded_library(name: str) -> ctypes.CDLL | None:
    """Return the loaded library whose file name begins with ``name`` (``libcudart``); None when there is none.

    Raises OSError when its file is gone.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if f"/{name}" in line}
    return ctypes.CDLL(min(paths)) if paths else None
