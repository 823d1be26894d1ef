"""Keeps ``torch.compile`` out of rackrun's own functions (torch 2.10 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["not_compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Decorator: ``torch.compile`` traces neither ``function`` nor what it calls.

    Where a compiled model or optimizer leaves its graph, dynamo traces every frame that follows, also one that C++ or a
    hook calls: a collective of a group written in Python, a work's wait, a hook of an optimizer. Dynamo accepts few
    members of a process group, and raises an error for any other.
    """
    return cast("F", torch.compiler.disable(function))
