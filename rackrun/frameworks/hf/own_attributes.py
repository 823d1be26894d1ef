"""What a subclass of the Trainer keeps in attributes of its own, such as the metrics of TRL's trainers.

``compute_loss`` changes them in a step, which may run again, and ``log`` empties them between two steps. So each step
begins with those that the loop had then, and keeps those that it has left, for a process that takes the rank over.
Plain values are kept: numbers, texts, small tensors, random generators, and containers of them.
"""

from __future__ import annotations

import base64
import dis
import functools
import inspect
import json
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers

from rackrun.worker.process.reports import say

__all__ = ["OwnAttributes", "own_attributes"]

VALUES_MAX = 10_000
"""An attribute with more values than this is not kept; a text counts for one value in every 64 characters."""
_OUR_OWN = "_rackrun"
_PER_VALUE = 64
_STOCK = ("builtins", "transformers", "rackrun")
"""Packages with the classes of a Trainer that the script has not subclassed."""


class OwnAttributes:
    """The attributes of ``trainer`` that are not those of transformers' ``Trainer`` and hold plain values. What they
    hold now is what the script has made of them on each process."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._too_large: set[str] = set()
        self._built = self._encoded()
        self._changed: set[str] = set()
        """Names of attributes that training has changed."""

    @property
    def may_change(self) -> bool:
        """Whether the trainer's class has code of its own, which may change them."""
        own = (one.__module__.partition(".")[0] for one in type(self._trainer).__mro__)
        return any(name not in _STOCK for name in own)

    def captured(self) -> str:
        """Return all of them as JSON, for this process."""
        return json.dumps(self._encoded())

    def changed(self) -> str:
        """Return those that training has changed as JSON, for any process; "" if there are none."""
        found = self._encoded()
        self._changed |= {name for name, value in found.items() if self._built.get(name, found) != value}
        return json.dumps({name: found[name] for name in sorted(self._changed & found.keys())}) if self._changed else ""

    def put_back(self, text: str) -> None:
        """Set what `captured` has returned in this process as ``text``, and remove attributes that came since."""
        found, now = json.loads(text), self._encoded()
        for name in now.keys() - found.keys():
            del vars(self._trainer)[name]
        self._set({name: value for name, value in found.items() if now.get(name, found) != value})

    def take_over(self, text: str) -> None:
        """Set what `changed` has returned, in this process or another, as ``text``."""
        if text and text != self.changed():
            found = json.loads(text)
            self._changed |= found.keys()
            self._set(found)

    def _set(self, found: dict[str, Any]) -> None:
        held = vars(self._trainer)
        for name, encoded in found.items():
            held[name] = _filled(held.get(name), encoded)

    def _encoded(self) -> dict[str, Any]:
        found = {}
        for name, value in own_attributes(self._trainer).items():
            if name in self._too_large:
                continue
            try:
                found[name] = _Encoding().encode(value)
            except _NotPlainError:
                continue
            except _TooLargeError:
                self._note_large(name)
        return found

    def _note_large(self, name: str) -> None:
        self._too_large.add(name)
        say(
            f"{type(self._trainer).__name__}.{name} holds more than {VALUES_MAX} values. If training changes it, a process that takes "
            "a rank over does not get it, and a step that is done again changes it again."
        )


def own_attributes(trainer: Any) -> dict[str, Any]:
    """Return name -> value of the attributes that neither transformers' ``Trainer`` nor the adapter sets."""
    return {
        name: value
        for name, value in vars(trainer).items()
        if name not in _stock_names() and not name.startswith(_OUR_OWN)
    }


class _NotPlainError(Exception):
    """The value is none that can be kept."""


class _TooLargeError(Exception):
    """There are too many values to keep them with each step."""


class _Encoding:
    """Encodes one value as JSON has it: plain values as themselves, everything else as ``[kind, content]``."""

    def __init__(self) -> None:
        self._left = VALUES_MAX

    def encode(self, value: Any) -> Any:
        """Return ``value`` encoded. Raises `_NotPlainError` and `_TooLargeError`."""
        self._left -= 1
        if self._left < 0:
            raise _TooLargeError
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
            return ["dict", [[self.encode(key), self.encode(one)] for key, one in value.items()]]
        if isinstance(value, np.generic):
            return self._tensor(np.asarray(value), "scalar")
        for kind, (of_kind, get, _) in _GENERATORS.items():
            if isinstance(value, of_kind):
                return [kind, get(value)]
        raise _NotPlainError

    def _tensor(self, value: Any, kind: str = "") -> Any:
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.requires_grad or value.layout is not torch.strided:
                raise _NotPlainError
            kind, content = "tensor", value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            named = str(value.dtype).removeprefix("torch.")
        else:
            if type(value) is not np.ndarray or value.dtype.hasobject:
                raise _NotPlainError
            kind, content, named = kind or "array", np.ascontiguousarray(value), value.dtype.str
        self._left -= size
        if self._left < 0:
            raise _TooLargeError
        return [kind, [named, list(value.shape), base64.b64encode(content.tobytes()).decode()]]


def _filled(current: Any, encoded: Any) -> Any:
    """Return what ``encoded`` stands for: ``current`` itself, changed in place, where that is a container or generator
    of the same kind."""
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    if kind == "dict":
        target = current if type(current) in _MAPPINGS else {}
        values = {_filled(None, key): one for key, one in content}
        filled = {key: _filled(_item(target, key), one) for key, one in values.items()}
        target.clear()
        target.update(filled)
        return target
    if kind in ("list", "deque"):
        target = current if type(current).__name__ == kind else {"list": list, "deque": deque}[kind]()
        filled_items = [_filled(None, one) for one in content]
        target.clear()
        target.extend(filled_items)
        return target
    if kind in ("tuple", "set", "frozenset"):
        of_kind: Callable[[Iterator[Any]], Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return of_kind(_filled(None, one) for one in content)
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
    named, shape, data = content
    raw = bytearray(base64.b64decode(data))
    if kind != "tensor":
        array = np.frombuffer(raw, dtype=np.dtype(named)).reshape(shape)
        return array[()] if kind == "scalar" else array
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(getattr(torch, named)).reshape(shape)
    return tensor.to(current.device) if isinstance(current, torch.Tensor) else tensor


_SEQUENCES = (list, tuple, deque, set, frozenset)
_MAPPINGS = (dict, defaultdict)
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


@functools.cache
def _stock_names() -> frozenset[str]:
    """Return the names of the attributes that transformers' ``Trainer`` sets itself."""
    functions = (getattr(one, "__func__", getattr(one, "fget", one)) for one in vars(transformers.Trainer).values())
    plain = (inspect.unwrap(one) for one in functions if isinstance(one, types.FunctionType))
    return frozenset(name for function in plain for name in _set_on_self(function.__code__))


def _set_on_self(code: types.CodeType) -> Iterator[str]:
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and (
            before == "self" or (isinstance(before, tuple) and before[-1] == "self")
        ):
            yield instruction.argval
        before = instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_on_self(constant)
