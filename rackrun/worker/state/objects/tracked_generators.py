"""Tracks random number generators of the script: newcomers receive their state, and an undone step restores it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["as_tracked"]


class _Stateful(Protocol):
    """An object whose state can be read and loaded."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _OfTorch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"].cpu())


class _OfNumpy:
    def __init__(self, bits: np.random.BitGenerator) -> None:
        self._bits = bits

    def state_dict(self) -> dict[str, Any]:
        # JSON text, because the state holds integers of 128 bits
        return {"state": json.dumps(self._bits.state, default=lambda array: {"array": array.tolist()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._bits.state = json.loads(
            state["state"],
            object_hook=lambda read: np.array(read["array"], dtype=np.uint64) if set(read) == {"array"} else read,
        )


class _OfOldNumpy:
    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = self._generator.get_state(legacy=True)
        return {"state": json.dumps([kind, np.asarray(keys).tolist(), *rest])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kind, keys, *rest = json.loads(state["state"])
        self._generator.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


class _OfPython:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": json.dumps(self._generator.getstate())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, numbers, gauss = json.loads(state["state"])
        self._generator.setstate((version, tuple(numbers), gauss))


def as_tracked(thing: Any) -> Any:
    """Return an object with ``state_dict`` for a generator of torch, NumPy or Python, and any other ``thing``
    unchanged."""
    if isinstance(thing, torch.Generator):
        return _OfTorch(thing)
    if isinstance(thing, np.random.Generator):
        return _OfNumpy(thing.bit_generator)
    if isinstance(thing, np.random.BitGenerator):
        return _OfNumpy(thing)
    if isinstance(thing, np.random.RandomState):
        return _OfOldNumpy(thing)
    if isinstance(thing, random.Random):
        return _OfPython(thing)
    return thing
