"""What a step function can reach and nobody tracks: what a process that takes over does not get from anywhere.

Values by name, as text: ``normaliser.mean`` -> ``0.25``; large ones as a digest. Names come from the function's closure and globals, attributes,
keys and places. Objects of torch's, numpy's and Python's own classes are not looked into, but for modules, schedulers and generators.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from rackrun.worker.data import Loader

__all__ = ["reached", "told"]

LOOKED_AT_MAX = 4000
DEPTH_MAX = 8
SPREAD_MAX = 16
"""Longer lists and dictionaries are one digest."""
CHARS_MAX = 60
_NOT_THE_USERS = {"torch", "numpy", "rackrun", "msgspec", "torchvision", "triton"} | set(sys.stdlib_module_names)
_NOT_THE_USERS.discard("__main__")
_OF_ANY_MODULE = set(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, range, itertools.count)


def reached(
    function: Callable[..., Any] | None, arguments: Mapping[str, Any], tracked: Iterable[torch.Tensor]
) -> dict[str, str]:
    """From ``function``, and what it is given; without ``tracked`` tensors. It calls nothing of the user's."""
    walk = _Walk({id(tensor) for tensor in tracked})
    with contextlib.suppress(RuntimeError, ReferenceError):  # a thread of the user's changes what is looked at
        walk.function(function, 0)
        for name, value in arguments.items():
            walk.value(name, value)
    return walk.found


def told(value: Any) -> str:
    """A plain value or a tensor, such that equal ones are told alike, bit for bit."""
    if isinstance(value, torch.Tensor):
        return _tensor_told(value.detach())
    if isinstance(value, np.ndarray):
        if value.size == 1:
            return repr(value.item())
        data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        return f"{value.dtype}{list(value.shape)} {_hash(data)}"
    text = repr(value.item()) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= CHARS_MAX else f"{text[: CHARS_MAX - 20]}... {_hash(text.encode())}"


def _tensor_told(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    what = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
    if local.layout is not torch.strided or local.is_meta or local.is_quantized:
        return f"{what} {local.layout}"  # its bits are not looked at
    if local.numel() == 1:
        return repr(local.item())
    plain = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    flat = plain.cpu().contiguous().reshape(-1)
    return f"{what} {_hash(flat.view(torch.uint8).numpy().tobytes())}"


class _Walk:
    def __init__(self, tracked: set[int], left: int = LOOKED_AT_MAX) -> None:
        self.found: dict[str, str] = {}
        self._tracked, self._left = tracked, left
        self._seen: dict[int, object] = {}
        """Held, so that no number is used twice."""

    def function(self, function: Any, depth: int) -> None:
        function = getattr(function, "__func__", function)
        if id(function) in self._seen or depth > DEPTH_MAX:
            return
        self._seen[id(function)] = function
        code = getattr(function, "__code__", None)
        if code is None:
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self.value(name, value, depth)
        names = list(dict.fromkeys(_names(code)))
        for name in names:
            if name in function.__globals__:
                value = function.__globals__[name]
                if isinstance(value, types.ModuleType):
                    self._module(name, value, names, depth)
                else:
                    self.value(name, value, depth)

    def _module(self, name: str, module: types.ModuleType, names: list[str], depth: int) -> None:
        """Of a module of the user's, what is asked of it."""
        if _is_users(module.__name__):
            for inner in names:
                if inner in vars(module):
                    self.value(f"{name}.{inner}", vars(module)[inner], depth + 1)

    def value(self, path: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, _PLAIN):
            self._tell(path, told(value))
            return
        if isinstance(value, types.FunctionType | types.MethodType):
            if _is_users(value.__module__):
                if isinstance(value, types.MethodType):
                    self.value(path, value.__self__, depth + 1)
                self.function(value, depth + 1)
            return
        if id(value) in self._seen or id(value) in self._tracked or depth > DEPTH_MAX or self._left <= 0:
            return
        self._seen[id(value)] = value
        if (text := _as_one(value)) is not None:
            self._tell(path, text)
            return
        match value:
            case list() | tuple() | deque():
                self._items(path, [(f"{path}[{index}]", one) for index, one in enumerate(value)], depth)
            case dict():
                self._items(path, [(f"{path}[{told(key)}]", one) for key, one in value.items()], depth)
            case type() | types.ModuleType():
                return
            case Loader():
                self.value(f"{path}.dataset", value._dataset, depth + 1)
            case DataLoader():
                self._attributes(path, {key: getattr(value, key) for key in ("dataset", "sampler", "generator")}, depth)
            case LRScheduler():
                self._attributes(path, {key: one for key, one in vars(value).items() if key != "optimizer"}, depth)
            case nn.Module():
                self._of_module(path, value, depth)
            case _ if _is_users(type(value).__module__):
                self._attributes(path, _attributes_of(value), depth)
            case _:
                return

    def _of_module(self, path: str, module: nn.Module, depth: int) -> None:
        inner = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if _is_users(type(module).__module__):
            inner |= {key: one for key, one in vars(module).items() if key not in _OF_ANY_MODULE}
        self._attributes(path, inner, depth)
        for name, child in module.named_children():
            if id(child) not in self._seen:
                self._seen[id(child)] = child
                self._of_module(f"{path}.{name}", child, depth)

    def _attributes(self, path: str, of: dict[str, Any], depth: int) -> None:
        for name, value in of.items():
            self.value(f"{path}.{name}", value, depth + 1)

    def _items(self, path: str, items: list[tuple[str, Any]], depth: int) -> None:
        if len(items) <= SPREAD_MAX:
            for name, value in items:
                self.value(name, value, depth + 1)
            return
        within = _Walk(self._tracked, self._left)
        within._seen = self._seen
        for name, value in items:
            within.value(name, value, depth + 1)
        self._left = within._left
        self._tell(path, f"{len(items)} things {_hash(repr(list(within.found.items())).encode())}")

    def _tell(self, path: str, text: str) -> None:
        if self._left > 0:
            self._left -= 1
            self.found.setdefault(path, text)


def _as_one(value: Any) -> str | None:
    """What is told by a digest of the whole; None: it is looked into."""
    match value:
        case torch.Tensor() | np.ndarray():
            return told(value)
        case torch.Generator():
            return told(value.get_state())
        case random.Random():
            return _hash(repr(value.getstate()).encode())
        case np.random.RandomState():
            return _hash(repr(value.get_state()).encode())
        case np.random.Generator():
            return _hash(repr(value.bit_generator.state).encode())
        case set() | frozenset():
            return _hash(repr(sorted(told(one) for one in value if isinstance(one, _PLAIN))).encode())
        case _:
            return None


def _names(code: types.CodeType) -> Iterator[str]:
    """Of globals and attributes, those in functions that it has inside, too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _attributes_of(value: object) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return () if "__getattr__" in vars(kind) else ((slots,) if isinstance(slots, str) else tuple(slots))


def _is_users(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in _NOT_THE_USERS


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
