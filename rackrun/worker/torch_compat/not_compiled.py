"""Keeps ``torch.compile`` out of rackrun's own functions (torch 2.10 to 2.15)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from rackrun.errors import StepError

__all__ = ["is_compiled", "not_compiled", "not_traced", "read_eagerly", "refuse_compiled_step"]

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Decorator: ``torch.compile`` traces neither ``function`` nor what it calls.

    Where a compiled model or optimizer leaves its graph, dynamo traces every frame that follows, also one that C++ or a
    hook calls: a collective of a group written in Python, a work's wait, a hook of an optimizer. Dynamo accepts few
    members of a process group, and raises an error for any other.
    """
    return cast("F", torch.compiler.disable(function))


def not_traced(function: F) -> F:
    """Decorator: ``torch.compile`` does not trace ``function``, but what it calls. A call costs nothing more."""
    return cast("F", torch.compiler.disable(function, recursive=False))


def read_eagerly(function: F) -> F:
    """Decorator for what a script may read in a compiled function: the graph is left there, so the value is the current
    one. Under ``fullgraph=True`` dynamo raises, and its error says what to do."""
    name = function.__qualname__.lower()  # run.rank, step.loss
    why = (
        f"rackrun: {name} may change from step to step, and a graph would keep the old value. "
        "Remedy: read it before the compiled function is called, and pass it as an argument"
    )
    return cast("F", torch.compiler.disable(function, reason=why))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` is what ``torch.compile`` returns for a function."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


_STEP_FUNCTION = "a @run.step function cannot be compiled: a step is left when it breaks, and done again as a whole"
_INSTEAD = "compile the model, or a function that the step function calls."


@functools.partial(torch.compiler.disable, reason=f"rackrun: {_STEP_FUNCTION}. Remedy: {_INSTEAD}")
def refuse_compiled_step(name: str) -> None:
    """Raise `StepError`: ``torch.compile`` compiles the step function ``name``, or what calls it."""
    raise StepError(f"{name} is compiled, and {_STEP_FUNCTION}.", remedy=_INSTEAD)
