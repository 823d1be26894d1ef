"""Find the state that a training script reaches but does not track, which a process that takes over does not get.

The result maps names to values as text: ``normaliser.mean`` -> ``0.25``; large values appear as a digest. The walk
begins at the step function and at the script's frames around its loop: local variables, closures, and the globals that
their code names. From there it follows attributes, keys and items, attributes of classes and functions, and the locals
of generators that are half consumed. It does not look into objects of torch, numpy, the standard library, and libraries
that only display something (progress bars, loggers), except those that hold state of the script's: modules, schedulers,
optimizers, scalers, random generators, namespaces, partial functions.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import datetime
import decimal
import fractions
import functools
import hashlib
import itertools
import operator
import pathlib
import random
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from rackrun.worker.data.loader import Loader

__all__ = ["SCRIPTS_OWN", "frames_of_script", "reached", "described"]

LOOKED_AT_MAX = 20_000
DEPTH_MAX = 8
SPREAD_MAX = 16
"""Lists and dictionaries longer than this are reported as one digest."""
CHARS_MAX = 60
SCRIPTS_OWN = "rackrun_scripts_own"
"""A method of objects of rackrun's adapters: returns name -> what the script itself has given to a framework."""
_NOT_THE_USERS = {"torch", "numpy", "rackrun", "msgspec", "torchvision", "triton", "pytest", "_pytest"}
_NOT_THE_USERS |= {"tqdm", "rich", "wandb", "tensorboard", "tensorboardX", "mlflow", "loguru", "absl", "typer", "click"}
"""Libraries that display what a script does; nothing that they hold influences the training."""
_NOT_THE_USERS |= {"transformers", "accelerate", "datasets", "evaluate", "tokenizers", "huggingface_hub", "peft", "trl"}
"""Libraries whose training loop an adapter of rackrun's drives: what that loop keeps is tracked by the adapter."""
_NOT_THE_USERS |= set(sys.stdlib_module_names)
_NOT_THE_USERS.discard("__main__")
_OF_ANY_MODULE = set(vars(nn.Module()))
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), np.generic, range, itertools.count)
_PLAIN += (decimal.Decimal, fractions.Fraction, datetime.timedelta, datetime.date, pathlib.PurePath)
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
"""Classes of the standard library that are made to hold a script's own values."""
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, property)
_ITERABLES: list[Any] = [[], (), "", b"", range(1), {}, {}.values(), {}.items(), set(), reversed([])]
_ITERATORS = tuple(type(iter(one)) for one in _ITERABLES)


def reached(
    function: Callable[..., Any] | None,
    arguments: Mapping[str, Any],
    tracked: Iterable[object],
    frames: Sequence[types.FrameType] = (),
    folder: str = "",
) -> dict[str, str]:
    """Return name -> value or digest, for all untracked state that the step function can reach.

    The walk starts from ``function``, its ``arguments``, and the variables of ``frames``; it skips the ``tracked``
    tensors and objects and calls no code of the user's. ``folder`` is that of this run: a text that contains it shows
    ``{out}`` instead, so that two runs can be compared.
    """
    walk = _Walk({id(one) for one in tracked}, folder=folder)
    with contextlib.suppress(RuntimeError, ReferenceError):  # a user's thread may change an object now
        walk.function(function, 0)
        for name, value in arguments.items():
            walk.value(name, value)
        for frame in frames:
            walk.frame(frame)
    return walk.found


def frames_of_script(frame: types.FrameType | None) -> list[types.FrameType]:
    """Return the script's frames, from ``frame`` outwards to the function that rackrun called.

    Of module bodies only that of the script itself is among them: where a framework owns the loop, nothing names its
    variables.
    """
    found = []
    while frame is not None and frame.f_globals.get("__name__") != "rackrun.worker.loop.main_entry":
        name = frame.f_globals.get("__name__")
        if _is_users(name) and (name == "__main__" or frame.f_code.co_name != "<module>"):
            found.append(frame)
        frame = frame.f_back
    return found


def described(value: Any, folder: str = "") -> str:
    """Return a plain value or a tensor as text, such that values that are equal bit for bit give the same text.

    ``folder``: as in `reached`.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_told(value.detach())
    if isinstance(value, np.ndarray):
        if value.size == 1:
            return repr(value.item())
        data = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
        return f"{value.dtype}{list(value.shape)} {_hash(data)}"
    text = repr(value.item()) if isinstance(value, np.generic) else repr(value)
    text = text.replace(folder, "{out}") if folder else text
    return text if len(text) <= CHARS_MAX else f"{text[: CHARS_MAX - 20]}... {_hash(text.encode())}"


def _tensor_told(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    what = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
    if local.layout is not torch.strided or local.is_meta or local.is_quantized:
        return f"{what} {local.layout}"  # its bits are not read
    if local.numel() == 1:
        return repr(local.item())
    plain = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    flat = plain.cpu().contiguous().reshape(-1)
    return f"{what} {_hash(flat.view(torch.uint8).numpy().tobytes())}"


class _Walk:
    def __init__(self, tracked: set[int], left: int = LOOKED_AT_MAX, folder: str = "") -> None:
        self.found: dict[str, str] = {}
        self._tracked, self._left, self._folder = tracked, left, folder
        self._classes: set[type] = set()
        self._seen: dict[int, object] = {}
        """Objects seen so far, by id; held so that no id is used again."""

    def function(self, function: Any, depth: int) -> None:
        """Follow the closure, the attributes and the named globals of a function."""
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
        for name, value in vars(function).items():
            self.value(f"{function.__name__}.{name}", value, depth + 1)
        self._globals(code, function.__globals__, depth)

    def frame(self, frame: types.FrameType) -> None:
        """Follow the local variables and the named globals of a frame."""
        for name, value in frame.f_locals.items():
            self.value(name, value)
        self._globals(frame.f_code, frame.f_globals, 0)

    def _globals(self, code: types.CodeType, of: Mapping[str, Any], depth: int) -> None:
        """Follow the globals that ``code`` names."""
        names = list(dict.fromkeys(_names(code)))
        for name in names:
            if name in of:
                value = of[name]
                if isinstance(value, types.ModuleType):
                    self._module(name, value, names, depth)
                else:
                    self.value(name, value, depth)

    def _module(self, name: str, module: types.ModuleType, names: list[str], depth: int) -> None:
        """Follow the attributes of a user's module that the code names."""
        if _is_users(module.__name__):
            for inner in names:
                if inner in vars(module):
                    self.value(f"{name}.{inner}", vars(module)[inner], depth + 1)

    def value(self, path: str, value: Any, depth: int = 0) -> None:
        """Record ``value`` under ``path`` if it is plain or has a digest as a whole; otherwise follow what it
        contains."""
        if isinstance(value, _PLAIN):
            self._tell(path, described(value, self._folder))
            return
        if isinstance(value, types.FunctionType | types.MethodType):
            if _is_users(value.__module__):
                if isinstance(value, types.MethodType):
                    self.value(path, value.__self__, depth + 1)
                self.function(value, depth + 1)
            return
        if id(value) in self._seen or id(value) in self._tracked or depth > DEPTH_MAX or self._left <= 0:
            return
        if isinstance(value, Enum):
            self._tell(path, repr(value))
            return
        self._seen[id(value)] = value
        if (text := _as_one(value)) is not None:
            self._tell(path, text)
            return
        self._into(path, value, depth)

    def _into(self, path: str, value: Any, depth: int) -> None:
        match value:
            case list() | tuple() | deque():
                self._items(path, [(f"{path}[{index}]", one) for index, one in enumerate(value)], depth)
            case dict():
                self._items(path, [(f"{path}[{described(key)}]", one) for key, one in value.items()], depth)
            case type():
                self._class(value, depth)
            case types.GeneratorType() if value.gi_frame and _is_users(value.gi_frame.f_globals["__name__"]):
                self._tell(f"{path} stands at", str(value.gi_frame.f_lasti))
                self._attributes(path, dict(value.gi_frame.f_locals), depth)
            case Loader():
                self.value(f"{path}.dataset", value._dataset, depth + 1)
            case _ if callable(scripts_own := getattr(type(value), SCRIPTS_OWN, None)):
                self._attributes(path, scripts_own(value), depth)
                self._class(type(value), depth)
            case _ if (held := _held_by(value)) is not None:
                self._attributes(path, held, depth)
            case nn.Module():
                self._of_module(path, value, depth)
            case _ if _is_users(type(value).__module__):
                self._attributes(path, _attributes_of(value), depth)
                self._class(type(value), depth)
            case _:
                return

    def _class(self, kind: type, depth: int) -> None:
        """Follow the attributes of a user's class, and what its methods name."""
        for base in kind.__mro__:
            if not _is_users(base.__module__) or base in self._classes:
                continue
            self._classes.add(base)
            for name, value in vars(base).items():
                inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(inner, types.FunctionType):
                    self.function(inner, depth + 1)
                elif not name.startswith("__") and not isinstance(inner, _DESCRIPTORS):
                    self.value(f"{base.__name__}.{name}", inner, depth + 1)

    def _of_module(self, path: str, module: nn.Module, depth: int) -> None:
        inner = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if _is_users(type(module).__module__):
            inner |= {key: one for key, one in vars(module).items() if key not in _OF_ANY_MODULE}
            self._class(type(module), depth)
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
        within = _Walk(self._tracked, self._left, self._folder)
        within._seen, within._classes = self._seen, self._classes
        for name, value in items:
            within.value(name, value, depth + 1)
        self._left = within._left
        self._tell(path, f"{len(items)} things {_hash(repr(list(within.found.items())).encode())}")

    def _tell(self, path: str, text: str) -> None:
        if self._left > 0:
            self._left -= 1
            self.found.setdefault(path, text)


def _held_by(value: Any) -> dict[str, Any] | None:
    """Return the state of a script's that an object of torch's or the standard library's holds; None for any other
    object."""
    match value:
        case functools.partial():
            return {"func": value.func, "args": value.args, "keywords": value.keywords}
        case _ if isinstance(value, _HOLDERS):
            return vars(value)
        case DataLoader():
            return {key: getattr(value, key) for key in ("dataset", "sampler", "generator")}
        case LRScheduler():
            return {key: one for key, one in vars(value).items() if key != "optimizer"}
        case torch.optim.Optimizer():
            groups = [{key: one for key, one in of.items() if key != "params"} for of in value.param_groups]
            return {
                "param_groups": groups,
                "state": {str(index): one for index, one in enumerate(value.state.values())},
            }
        case torch.amp.GradScaler():
            return {key: getattr(value, key, None) for key in ("_scale", "_growth_tracker", "_init_scale")}
        case _:
            return None


def _as_one(value: Any) -> str | None:
    """Return the digest of an object that is recorded as a whole; None if the walk has to look into it."""
    match value:
        case torch.Tensor() | np.ndarray():
            return described(value)
        case torch.Generator():
            return described(value.get_state())
        case random.Random() | np.random.RandomState():
            state = value.getstate() if isinstance(value, random.Random) else value.get_state()
            return _hash(repr(state).encode())
        case np.random.Generator():
            return _hash(repr(value.bit_generator.state).encode())
        case array.array() | bytearray():
            return _hash(bytes(value))
        case _ if isinstance(value, _ITERATORS):
            return f"an iterator with {operator.length_hint(value)} left"
        case set() | frozenset():
            return _hash(repr(sorted(described(one) for one in value if isinstance(one, _PLAIN))).encode())
        case _:
            return None


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in ``code`` and in the functions defined inside it."""
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
    """Whether a module is the user's, rather than of a library that the walk does not look into."""
    return module is not None and module.partition(".")[0] not in _NOT_THE_USERS


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
