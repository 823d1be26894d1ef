"""Detects whether gradients were cleared (torch 2.10 to 2.15), as torch has no hook for zero_grad."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["backward_begins", "cleared", "cleared_in_place", "install", "nothing_is_left", "some_are_left"]

_calls = 0
_in_place = 0
_calls_at_backward = -1


def cleared() -> int:
    """Return how often zero_grad was called in this process, on any optimizer or module."""
    return _calls


def cleared_in_place() -> int:
    """Return how often zero_grad was called with arguments, which may keep the gradient tensors and write zeros into
    them."""
    return _in_place


def some_are_left() -> bool:
    """Whether a backward pass has begun since the last call of zero_grad."""
    return _calls == _calls_at_backward


def backward_begins() -> None:
    """Note that a backward pass begins."""
    global _calls_at_backward  # noqa: PLW0603 - of the process, as the functions are
    _calls_at_backward = _calls


def nothing_is_left() -> None:
    """Note that gradients are again what they were before the backward passes so far."""
    global _calls_at_backward  # noqa: PLW0603
    _calls_at_backward = -1


def install() -> None:
    for kind in (torch.optim.Optimizer, nn.Module):
        if not getattr(kind.zero_grad, "_rackrun_counts", False):
            _count_calls(kind)


def _count_calls(kind: Any) -> None:
    original = kind.zero_grad

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        global _calls, _in_place  # noqa: PLW0603 - of the process, as the methods are
        _calls += 1
        _in_place += bool(args or kwargs)
        original(self, *args, **kwargs)

    zero_grad._rackrun_counts = True  # type: ignore[attr-defined]
    zero_grad.__doc__ = original.__doc__
    kind.zero_grad = zero_grad
