"""Finds generators that a data set holds: with them a sample depends on which samples the process has drawn before."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch

__all__ = ["GENERATORS", "generators_of", "state_of"]

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_DEPTH_MAX = 3
_SPREAD_MAX = 64
_THINGS_MAX = 1000


def generators_of(dataset: object) -> dict[str, Any]:
    """Return name (such as ``rng`` or ``transform.rng``) -> generator, for those reached by attributes and short
    containers."""
    found: dict[str, Any] = {}
    waiting: deque[tuple[str, object, int]] = deque([("", dataset, 0)])
    seen: set[int] = set()
    while waiting and len(seen) < _THINGS_MAX:
        name, thing, depth = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, GENERATORS):
            found[name.removeprefix(".")] = thing
            continue
        if depth > _DEPTH_MAX or isinstance(thing, (torch.Tensor, np.ndarray, type)):
            continue
        if isinstance(thing, dict | list | tuple):
            parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
            inner = [(f"{name}[{key!r}]", one) for key, one in parts] if len(thing) <= _SPREAD_MAX else []
        else:
            inner = [(f"{name}.{key}", one) for key, one in list(getattr(thing, "__dict__", {}).items())]
        waiting += [(key, one, depth + 1) for key, one in inner]
    return found


def state_of(generator: Any) -> bytes:
    """Return the generator's state as bytes that differ when it has been drawn from."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state).encode()
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state()).encode()
