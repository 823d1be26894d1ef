"""Plain values as JSON, and back: numbers, texts, small tensors, random generators, and containers of them.

They come back into the value that is there: containers and generators are changed in place, because code of the
script's may hold them elsewhere.
"""

from __future__ import annotations

import base64
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["VALUES_MAX", "Encoding", "NotPlainError", "TooLargeError", "filled"]

VALUES_MAX = 10_000
"""The most values of one attribute; a text counts for one value in every 64 characters."""
_PER_VALUE = 64


class NotPlainError(Exception):
    """The value is none that can be kept."""


class TooLargeError(Exception):
    """There are too many values to keep them with each step."""


class Encoding:
    """Encodes one value as JSON has it: plain values as themselves, everything else as ``[kind, content]``."""

    def __init__(self) -> None:
        self._left = VALUES_MAX

    def encode(self, value: Any) -> Any:
        """Return ``value`` encoded. Raises `NotPlainError` and `TooLargeError`."""
        self._left -= 1
        if self._left < 0:
            raise TooLargeError
        if value is None or type(value) in (bool, int, float):
            return value
        if type(value) is str:
            self._left -= len(value) // _PER_VALUE
            return value
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._tensor(value)
        if type(value) in _SEQUENCES:
            return [type(value).__name__, [self.encode(one) for one in value]]
        if type(value) in _MAPPINGS:
            kind = "dict" if type(value) is defaultdict else type(value).__name__
            return [kind, [[self.encode(key), self.encode(one)] for key, one in value.items()]]
        if isinstance(value, np.generic):
            return self._tensor(np.asarray(value), "scalar")
        for kind, (of_kind, get, _) in _GENERATORS.items():
            if isinstance(value, of_kind):
                return [kind, get(value)]
        raise NotPlainError

    def _tensor(self, value: Any, kind: str = "") -> Any:
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        if isinstance(value, torch.Tensor):
            of_parameter = value.requires_grad and value.is_leaf
            if type(value) is not torch.Tensor or of_parameter or value.layout is not torch.strided:
                raise NotPlainError
        elif type(value) is not np.ndarray or value.dtype.hasobject:
            raise NotPlainError
        self._left -= size
        if self._left < 0:
            raise TooLargeError
        if isinstance(value, torch.Tensor):
            return ["tensor", _tensor_text(value)]
        content = np.ascontiguousarray(value).tobytes()
        return [kind or "array", [value.dtype.str, list(value.shape), base64.b64encode(content).decode()]]


_texts: Any = WeakTensorKeyDictionary()
"""Tensor -> its version, and its values as `_tensor_text` returns them: of a list that grows, each is read once."""


def _tensor_text(tensor: torch.Tensor) -> list[Any]:
    """Return dtype, shape, values, and the type of the device. A tensor with a graph, such as a loss that is kept, is
    given without it."""
    version = -1 if tensor.is_inference() else tensor._version
    known = _texts.get(tensor)
    if known is not None and known[0] == version != -1:
        text: list[Any] = known[1]
        return text
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype, bits = str(tensor.dtype).removeprefix("torch."), base64.b64encode(content).decode()
    text = [dtype, list(tensor.shape), bits, tensor.device.type]
    _texts[tensor] = version, text
    return text


def filled(current: Any, encoded: Any) -> Any:
    """Return what ``encoded`` stands for: ``current`` itself, changed in place, where that is a container or generator
    of the same kind."""
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    if kind in _NEW_MAPPINGS:
        target = current if type(current) in _MAPPINGS else _NEW_MAPPINGS[kind]()
        keys = {filled(None, key): one for key, one in content}
        values = {key: filled(_item(target, key), one) for key, one in keys.items()}
        target.clear()
        target.update(values)
        return target
    if kind in ("list", "deque"):
        target = current if type(current).__name__ == kind else {"list": list, "deque": deque}[kind]()
        held = [*target, *[None] * len(content)]
        items = [filled(*pair) for pair in zip(held, content, strict=False)]
        target.clear()
        target.extend(items)
        return target
    if kind in ("tuple", "set", "frozenset"):
        of_kind: Callable[[Iterator[Any]], Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return of_kind(filled(None, one) for one in content)
    if kind in _GENERATORS:
        of_type, _, put = _GENERATORS[kind]
        if isinstance(current, of_type):  # one is made by the script on each process
            put(current, content)
        return current
    return _tensor(current, kind, content)


def _item(mapping: Any, key: Any) -> Any:
    """Return the value of ``key``; where a defaultdict has none, one that it makes."""
    if key in mapping or not isinstance(mapping, defaultdict) or mapping.default_factory is None:
        return mapping.get(key)
    return mapping.default_factory()


def _tensor(current: Any, kind: str, content: Any) -> Any:
    named, shape, data, *device = content
    raw = bytearray(base64.b64decode(data))
    if kind != "tensor":
        array = np.frombuffer(raw, dtype=np.dtype(named)).reshape(shape)
        return array[()] if kind == "scalar" else array
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(getattr(torch, named)).reshape(shape)
    return tensor.to(current.device if isinstance(current, torch.Tensor) else device[0])


_SEQUENCES = (list, tuple, deque, set, frozenset)
_NEW_MAPPINGS: dict[str, Callable[[], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_GENERATORS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "python": (
        random.Random,
        lambda one: one.getstate(),
        lambda one, state: one.setstate((state[0], tuple(state[1]), state[2])),
    ),
    "numpy": (
        np.random.Generator,
        lambda one: json.dumps(one.bit_generator.state, default=lambda array: array.tolist()),
        lambda one, state: setattr(one.bit_generator, "state", json.loads(state)),
    ),
    "torch": (
        torch.Generator,
        lambda one: one.get_state().tolist(),
        lambda one, state: one.set_state(torch.tensor(state, dtype=torch.uint8)),
    ),
}
