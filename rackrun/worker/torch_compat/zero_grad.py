"""Detects whether gradients were cleared (torch 2.10 to 2.15), as torch has no hook for zero_grad."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from rackrun.worker.tensors.tensor_lists import versions

__all__ = [
    "backward_begins",
    "cleared",
    "cleared_in_place",
    "install",
    "nothing_is_left",
    "some_are_left",
    "version_when_cleared",
    "watch",
]

_calls = 0
_in_place = 0
_calls_at_backward = -1
_watched: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
"""By ``id``: gradients, and their versions when zero_grad last wrote zeros into them; -1 for not yet."""


def cleared() -> int:
    """Return how often zero_grad was called in this process, on any optimizer or module."""
    return _calls


def cleared_in_place() -> int:
    """Return how often zero_grad was called with arguments, which may keep the gradient tensors and write zeros into
    them."""
    return _in_place


def watch(gradients: Iterable[torch.Tensor]) -> None:
    """Have `version_when_cleared` know of ``gradients`` from now on, and of no others."""
    global _watched  # noqa: PLW0603 - of the process, as the functions are
    _watched = {id(one): (weakref.ref(one), version_when_cleared(one)) for one in gradients}


def version_when_cleared(gradient: torch.Tensor) -> int:
    """Return the version that a watched gradient had when zero_grad last wrote zeros into it; -1 if it has not."""
    watched, version = _watched.get(id(gradient), (None, -1))
    return version if watched is not None and watched() is gradient else -1


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
        if _watched and (args or kwargs):
            for parameter in _parameters(self):
                if (gradient := parameter.grad) is not None and id(gradient) in _watched:
                    _watched[id(gradient)] = weakref.ref(gradient), versions([gradient])[0]

    zero_grad._rackrun_counts = True  # type: ignore[attr-defined]
    zero_grad.__doc__ = original.__doc__
    kind.zero_grad = zero_grad


def _parameters(thing: nn.Module | torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if isinstance(thing, nn.Module):
        return thing.parameters()
    return chain.from_iterable(group["params"] for group in thing.param_groups)
