"""Imports of large libraries without garbage collection.

Nearly all that an import makes stays to the end, so collections during it find nothing to free. For torch and what
workers import with it they take a sixth of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_collections"]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Turn automatic garbage collection off, and afterwards on again if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
