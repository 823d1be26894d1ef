"""Former names that still work: a warning for what is called by one, and functions that accept a renamed argument."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["renamed_argument", "warn_renamed"]

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(former: str, name: str) -> None:
    """Give a DeprecationWarning at the line that called the caller: ``former`` is called ``name`` now."""
    warnings.warn(f"{former} is deprecated: it is called {name} now.", DeprecationWarning, stacklevel=3)


def renamed_argument(former: str, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose argument ``former`` was renamed ``name``.

    The keyword ``former`` is still accepted, with a DeprecationWarning. Raises `TypeError` when both are given.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accept(*args: P.args, **kwargs: P.kwargs) -> R:
            if former in kwargs:
                warn_renamed(f"the argument {former} of {function.__name__}", name)
                if name in kwargs:
                    raise TypeError(f"{function.__name__}() got {former} and {name}, which are one argument")
                kwargs[name] = kwargs.pop(former)
            return function(*args, **kwargs)

        return accept

    return decorate
