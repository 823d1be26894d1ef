"""Keeps ``torch.compile`` out of rackrun's own functions (torch 2.10 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._guards import TracingContext

__all__ = ["CompiledPlaces", "not_compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Decorator: ``torch.compile`` traces neither ``function`` nor what it calls.

    Where a compiled model or optimizer leaves its graph, dynamo traces every frame that follows, also one that C++ or a
    hook calls: a collective of a group written in Python, a work's wait, a hook of an optimizer. Dynamo accepts few
    members of a process group, and raises an error for any other.
    """
    return cast("F", torch.compiler.disable(function))


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
