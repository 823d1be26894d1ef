"""``optimizer.step(closure)``: the forward and backward passes of a step run inside of it, perhaps several times (LBFGS).

An optimizer changes nothing before it has called its closure once. So the gate of the step stands behind that first call, where all
gradients are complete, instead of at the beginning of ``optimizer.step()``. What further calls read has been counted already.
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
    """What ``optimizer.step`` was given to call, if anything; ``args`` as a hook of it gets them, the optimizer first."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def with_closure(
    args: Arguments, kwargs: Keywords, before: Callable[[int], None], after: Callable[[int], None]
) -> tuple[Arguments, Keywords]:
    """The same arguments, with ``before(n)`` and ``after(n)`` around the n-th call of the closure, from 0."""
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
    """Its step cannot be called without one."""
    given = inspect.signature(type(optimizer).step).parameters.get("closure")
    return given is not None and given.default is inspect.Parameter.empty
