"""Drops compiled graphs that hold a rank or a world size that is no longer true (torch 2.10 to 2.15)."""

from __future__ import annotations

import torch
from torch._guards import TracingContext

__all__ = ["CompiledPlaces"]


class CompiledPlaces:
    """Drops compiled graphs when a rank or size that they hold has changed.

    Dynamo reads the rank and the size of a process group while it traces, and holds them as constants without a guard
    (torch 2.13, torch/distributed/device_mesh.py: members of a process group are USE_REAL).
    """

    def __init__(self) -> None:
        self._held = False

    def read(self) -> None:
        """Note that a rank or size is read, perhaps by dynamo."""
        if not self._held and TracingContext.try_get() is not None:
            self._held = True

    def changed(self, *, read: bool = False) -> None:
        """Note that a rank or size has changed. ``read``: dynamo may have read it in a way that `read` is not told of.
        Compiled functions are compiled again at their next call."""
        if self._held or read:
            torch.compiler.reset()
            self._held = False
