"""What a script keeps in attributes of objects that a framework calls: a Trainer's subclass, a LightningModule, a callback.

Code of the script's changes them in a step, which may run again, and between two steps. So each step begins with those
that the loop had then, and keeps those that it has left, for a process that takes the rank over. Plain values are kept
(`rackrun.frameworks.plain_values`).
"""

from __future__ import annotations

import dis
import functools
import inspect
import json
import types
from collections.abc import Iterator
from typing import Any

import torch

from rackrun.frameworks import plain_values
from rackrun.frameworks.plain_values import Encoding, NotPlainError, TooLargeError, filled
from rackrun.worker.process.reports import say

__all__ = ["OwnAttributes", "own_attributes"]

_OUR_OWN = "_rackrun"
_STOCK = {"builtins", "lightning", "pytorch_lightning", "lightning_fabric", "rackrun", "torch", "transformers"}
"""Packages with the classes that the script has not written."""


class OwnAttributes:
    """The attributes of ``holder`` that no class of a framework's sets. Those that it holds now are what the script has
    built on each process; what counts is what has changed since. Those with plain values are brought to any process,
    others are put back in their own."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._large: dict[str, tuple[int, Any]] = {}
        """Name -> the length of a large attribute, and how it looked when it was built, or "told"."""
        self._objects: dict[str, Any] = {}
        """Name -> the value that is not plain, or large, as `changed` has seen it last."""
        self._built = self._encoded(built=True)
        self._changed: set[str] = set()
        """Names of attributes that have changed at any time."""

    @property
    def may_change(self) -> bool:
        """Whether the holder's class has code of the script's, which may change them."""
        return any(_package(one) not in _STOCK for one in type(self._holder).__mro__)

    def changed(self) -> str:
        """Return those that have changed since they were built as JSON, for any process; "" if there are none."""
        found = self._encoded()
        names = found.keys() | self._built.keys()
        self._changed |= {name for name in names if found.get(name, _GONE) != self._built.get(name, _GONE)}
        return json.dumps({name: found.get(name, _GONE) for name in sorted(self._changed)}) if self._changed else ""

    def restore(self, text: str) -> None:
        """Set what `changed` has returned as ``text``, in this process or another: all others are as they were built."""
        objects = dict(self._objects)
        now, target = self._encoded(), {**self._built, **(json.loads(text) if text else {})}
        self._changed |= target.keys() - self._built.keys()
        for name in now.keys() - target.keys():
            del vars(self._holder)[name]
        self._objects = objects
        self._set({name: value for name, value in target.items() if now.get(name, _GONE) != value})

    def _set(self, found: dict[str, Any]) -> None:
        held = vars(self._holder)
        for name, encoded in found.items():
            if encoded == _GONE:
                held.pop(name, None)
            elif encoded != _OBJECT:
                held[name] = filled(held.get(name), encoded)
            elif name in self._objects:
                held[name] = self._objects[name]

    def _encoded(self, *, built: bool = False) -> dict[str, Any]:
        """Return name -> encoded value."""
        found = {}
        for name, value in own_attributes(self._holder).items():
            try:
                if name in self._large and _length(value) * 2 >= self._large[name][0]:
                    raise TooLargeError
                found[name] = Encoding().encode(value)
                self._objects.pop(name, None)
                continue
            except NotPlainError:
                pass
            except TooLargeError:
                self._note_large(name, value, built=built)
            self._objects[name] = value
            found[name] = _OBJECT
        return found

    def _note_large(self, name: str, value: Any, *, built: bool) -> None:
        """Tell the user of a large attribute once it is no longer as it was built."""
        looks = _length(value), _looks(value) if built else None
        known = self._large.setdefault(name, looks)
        if known[1] == "told" or (known[1] is not None and known[1] == _looks(value)):
            return
        self._large[name] = known[0], "told"
        say(
            f"{type(self._holder).__name__}.{name} holds more than {plain_values.VALUES_MAX} values and has changed. "
            "A process that takes a rank over does not get it, and a step that is done again changes it again."
        )


def own_attributes(holder: Any) -> dict[str, Any]:
    """Return name -> value of the attributes that neither a class of a framework's nor an adapter sets."""
    kind: Any = type(holder)
    stock = _stock_names(kind)
    return {name: value for name, value in vars(holder).items() if name not in stock and not name.startswith(_OUR_OWN)}


_GONE: Any = ["gone", None]
"""Stands for an attribute that is not there."""
_OBJECT: Any = ["object", None]
"""Stands for a value that is not plain, or large."""


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0 else 0


def _looks(value: Any) -> tuple[Any, ...]:
    """Return by what a change of a large value can be seen at no cost."""
    version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None
    return id(value), _length(value), version


def _package(one: type) -> str:
    return one.__module__.partition(".")[0]


@functools.cache
def _stock_names(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the stock classes of ``kind`` set on themselves."""
    found: set[str] = set()
    for one in kind.__mro__:
        if _package(one) not in _STOCK:
            continue
        functions = (getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(one).values())
        plain = (inspect.unwrap(member) for member in functions if isinstance(member, types.FunctionType))
        found.update(name for function in plain for name in _set_on_self(function.__code__))
    if issubclass(kind, torch.nn.Module):
        found.update(vars(torch.nn.Module()))
    return frozenset(found)


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
