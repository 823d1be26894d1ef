"""Supports ``optimizer.step(closure)``, where forward and backward passes run inside the optimizer, perhaps several
times (LBFGS).

An optimizer changes nothing before it has called its closure once. So the gate of the step follows that first call,
when all gradients are complete, instead of preceding ``optimizer.step()``. The samples that further calls read have
been counted already.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["needs_closure", "of_step", "with_closure"]

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def of_step(args: Arguments, kwargs: Keywords) -> Callable[[], Any] | None:
    """Return the closure that ``optimizer.step`` was called with, or None. ``args`` and ``kwargs`` are as its hooks
    receive them, the optimizer first."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def with_closure(
    args: Arguments, kwargs: Keywords, before: Callable[[int], None], after: Callable[[int], None]
) -> tuple[Arguments, Keywords]:
    """Return the arguments with the closure wrapped: ``before(n)`` and ``after(n)`` run around its n-th call, counted
    from 0."""
    closure, calls = of_step(args, kwargs), 0
    assert closure is not None, "asked before"

    @functools.wraps(closure)
    def told() -> Any:
        nonlocal calls
        before(calls)
        result = closure()
        after(calls)
        calls += 1
        return result

    return ((args[0], told, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": told})


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's ``step`` cannot be called without a closure."""
    given = inspect.signature(type(optimizer).step).parameters.get("closure")
    return given is not None and given.default is inspect.Parameter.empty
