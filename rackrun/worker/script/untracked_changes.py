"""Detects what a step function changes without tracking it: a process that takes over a rank has it as it was before
``run.steps()``.

Objects that are meant to be kept (modules, objects with ``state_dict`` and ``load_state_dict``) are refused if they
change. Changes of tensors, numbers and generators are only printed, because they may be there for display. Names come
from the function's closure, globals and arguments. A change counts when it is seen twice, because caches are filled
once. The state of a DDP communication hook is included, whoever wrote the hook.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from rackrun.worker.data.dataset_generators import GENERATORS, state_of
from rackrun.worker.script.user_line import line_of_name
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.freed_tensors import is_freed
from rackrun.worker.tensors.tensor_bytes import host_memory, local_part
from rackrun.worker.torch_compat.data_parallel import ddp

__all__ = ["UntrackedChange", "UntrackedChanges", "is_kept"]

_DEPTH_MAX = 4
_THINGS_MAX = 2000
_SPREAD_MAX = 64
_SAMPLED = 1024
"""The most elements of a tensor that are compared."""
_OF_ANY_MODULE = set(vars(nn.Module()))
_LIBRARIES = {"torch", "numpy", "rackrun", "msgspec"} | sys.stdlib_module_names - {"__main__"}
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)


@dataclass(frozen=True)
class UntrackedChange:
    """An object that was found changed twice."""

    name: str
    """The object's name, such as ``ema`` or ``trainer.seen['mean']``."""
    kind: str
    """The name of the object's class."""
    line: str
    """The line of the script where the step function first uses it."""
    meant_to_be_kept: bool


@dataclass
class _Seen:
    mark: object
    changes: int = 0
    told: bool = False


class UntrackedChanges:
    """Looks for changes after steps: after each of the first, and later ever more rarely."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._steps = 0
        self._seen: dict[str, _Seen] = {}
        self._some_once = False
        """Whether the last look found a first change of something, so that the next step decides."""

    def after_step(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[UntrackedChange]:
        """Look for changes after a step, and return those that were not reported yet."""
        self._steps += 1
        if self._steps > 4 and self._steps & (self._steps - 1) and not self._some_once:
            return []
        found, self._some_once = [], False
        for name, root, thing, kept in _Walk(self._state).of(function, args, kwargs):
            mark = _mark(thing, self._state)
            seen = self._seen.setdefault(name, _Seen(mark))
            if seen.mark == mark or _grown(seen.mark, mark):
                seen.mark = mark
                continue
            seen.mark, seen.changes = mark, seen.changes + 1
            self._some_once |= seen.changes == 1
            if seen.changes > 1 and not seen.told:
                seen.told = True
                found.append(UntrackedChange(name, type(thing).__name__, line_of_name(function, root), kept))
        return found


def is_kept(thing: object, state: TrackedState) -> bool:
    """Whether ``thing`` is tracked, or part of a tracked object."""
    is_it = partial(is_, thing)
    if any(map(is_it, state.structure().modules)):
        return True
    level: list[Any] = [*state.others.values(), *state.optimizers.values()]
    seen: set[int] = set()
    for _ in range(_DEPTH_MAX + 1):  # tracked objects themselves are found first, before any is opened
        if any(map(is_it, level)):
            return True
        inner: list[Any] = []
        for one in level:
            if id(one) in seen or isinstance(one, (torch.Tensor, *_PLAIN)):
                continue
            seen.add(id(one))
            if isinstance(one, list | tuple | deque):
                inner += one
            elif isinstance(one, dict):
                inner += one.values()
            else:
                inner += getattr(one, "__dict__", {}).values()
        level = inner
    return any(map(is_it, level))


class _Walk:
    def __init__(self, state: TrackedState) -> None:
        self._state, self._left = state, _THINGS_MAX
        self._home = ""
        """The module of the step function."""
        self._seen: dict[int, object] = {}
        self._tracked = {id(tensor) for tensor in state.parameters()}
        for module in state.modules.values():
            self._tracked |= {id(buffer) for buffer in nn.Module.buffers(module)}
        for other in state.others.values():
            self._tracked |= set(map(id, _saved_by_name(other)))

    def of(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, Any, bool]]:
        """Yield each object that ``function`` reaches: name, the variable that the name begins with, the object, and
        whether it is meant to be kept."""
        self._home = getattr(function, "__module__", None) or ""
        for name, value in _variables(function):
            for path, thing, kept in self._value(name, value, 0):
                yield path, name, thing, kept
        names = getattr(getattr(function, "__code__", None), "co_varnames", ())[1:]
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if not isinstance(value, (torch.Tensor, np.ndarray, *_PLAIN)):  # differs in each call
                for path, thing, kept in self._value(name, value, 0):
                    yield path, name, thing, kept
        for hook_state in (one for wrapper in self._state.wrappers() for one in ddp.hook_states(wrapper)):
            name = type(hook_state).__name__
            for key, value in () if is_kept(hook_state, self._state) else _attributes(hook_state):
                for path, thing, kept in self._value(f"{name}.{key}", value, 1):
                    yield path, name, thing, kept

    def _value(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, Any, bool]]:
        if depth > _DEPTH_MAX or self._left <= 0:
            return
        if isinstance(value, _PLAIN):
            self._left -= 1
            yield path, value, False
            return
        if id(value) in self._seen or id(value) in self._tracked:
            return
        self._seen[id(value)] = value
        self._left -= 1
        if isinstance(value, (torch.Tensor, np.ndarray, *GENERATORS)):
            if not is_kept(getattr(value, "bit_generator", value), self._state):
                yield path, value, False
        elif isinstance(value, types.FunctionType | types.MethodType):
            yield from self._function(path, value, depth)
        elif isinstance(value, dict | list | tuple | deque):
            yield from self._items(path, value, depth)
        elif isinstance(value, nn.Module):
            yield from self._module(path, value, depth)
        elif not isinstance(value, type | types.ModuleType) and _is_users(type(value).__module__):
            yield from self._object(path, value, depth)

    def _items(self, path: str, of: Any, depth: int) -> Iterator[tuple[str, Any, bool]]:
        if isinstance(of, dict):
            inner = [(repr(key), one) for key, one in list(of.items())]
        elif all(isinstance(one, _PLAIN) for one in of):
            yield path, _Listed(of), False
            return
        else:
            inner = [(str(index), one) for index, one in enumerate(list(of))]
        for key, one in inner if len(inner) <= _SPREAD_MAX else ():
            yield from self._value(f"{path}[{key}]", one, depth + 1)

    def _object(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, Any, bool]]:
        if is_kept(value, self._state) or isinstance(value, torch.optim.Optimizer | DataLoader):
            return
        if _is_keepable(value):
            yield path, value, True
            return
        for name, one in list(getattr(value, "__dict__", {}).items()):
            yield from self._value(f"{path}.{name}", one, depth + 1)

    def _function(self, path: str, function: Any, depth: int) -> Iterator[tuple[str, Any, bool]]:
        if not _is_users(function.__module__):
            return
        if isinstance(function, types.MethodType):
            yield from self._value(f"{path}.__self__", function.__self__, depth + 1)
            function = function.__func__
        # two modules may have a variable of one name
        prefix = "" if function.__module__ == self._home else f"{function.__module__}."
        for name, value in _variables(function):
            yield from self._value(f"{prefix}{name}", value, depth + 1)

    def _module(self, path: str, module: nn.Module, depth: int) -> Iterator[tuple[str, Any, bool]]:
        # Megatron's DistributedDataParallel has a list of its own called `buffers`
        mine = [*nn.Module.parameters(module), *nn.Module.buffers(module)]
        if any(id(tensor) not in self._tracked for tensor in mine) and not is_kept(module, self._state):
            yield path, module, True
            return
        for name, one in module.named_modules():
            # FSDP2 inserts a class of its own before the script's class
            if not any(_is_users(kind.__module__) for kind in type(one).__mro__):
                continue
            self._seen[id(one)] = one
            for key, value in list(vars(one).items()):
                if key not in _OF_ANY_MODULE:
                    yield from self._value(".".join(filter(None, (path, name, key))), value, depth + 1)


class _Listed:
    """A list of plain values, by its length and content."""

    def __init__(self, of: Any) -> None:
        self.length = len(of)
        self.content = repr(list(of)) if self.length <= _SPREAD_MAX else ""


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _saved_by_name(tracked: object) -> Iterator[object]:
    """Yield the objects that ``state_dict`` and ``load_state_dict`` of ``tracked`` both use by a variable's name, as a
    class within ``main`` may: ``dict(counters)``."""
    saves, loads = (
        dict(_variables(getattr(method, "__func__", method)))
        for method in (getattr(tracked, name, None) for name in ("state_dict", "load_state_dict"))
    )
    for name, value in saves.items():
        if loads.get(name) is value and isinstance(value, dict | list | deque):
            yield value


def _attributes(of: object) -> Iterator[tuple[str, Any]]:
    """Yield name and value of an object's attributes, including those in ``__slots__``."""
    slots = [name for one in type(of).__mro__ for name in getattr(one, "__slots__", ())]
    for name in [*slots, *getattr(of, "__dict__", ())]:
        if hasattr(of, name):
            yield name, getattr(of, name)


def _mark(thing: Any, state: TrackedState) -> object:
    """Return a value that differs when the object has changed."""
    if isinstance(thing, nn.Module):
        tracked = {id(parameter) for parameter in state.parameters()}
        mine = (*nn.Module.parameters(thing), *nn.Module.buffers(thing))
        return tuple(_sample(tensor) for tensor in mine if id(tensor) not in tracked)
    if isinstance(thing, _Listed):
        return thing.length, thing.content
    if isinstance(thing, GENERATORS):
        return _hash(state_of(thing))
    return _of_state(thing.state_dict() if _is_keepable(thing) else thing)


def _is_keepable(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _LIBRARIES


def _of_state(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return _sample(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _hash(value.reshape(-1)[:: max(value.size // _SAMPLED, 1)].tobytes())
    if isinstance(value, Mapping):
        return tuple((str(key), _of_state(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_of_state(one) for one in value)
    return repr(value)


def _grown(before: object, after: object) -> bool:
    """Whether the marks are of a list that has only grown: a history for display."""
    if not (isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after) == 2):
        return False
    (was, old), (now, new) = before, after
    if isinstance(was, int) and isinstance(now, int) and isinstance(old, str) and isinstance(new, str):
        return now > was and (not old or new.startswith(old[:-1]))
    return False


def _sample(tensor: torch.Tensor) -> object:
    """Return shape and digest of a tensor: of all elements of a small one, and of elements spread over a large one."""
    local = local_part(tensor)
    if local.layout is not torch.strided or local.is_meta or local.is_quantized or not local.numel() or is_freed(local):
        return tuple(local.shape)
    flat = local.reshape(-1) if local.is_contiguous() else local.flatten()
    part = flat[:: max(flat.numel() // _SAMPLED, 1)].cpu().contiguous()
    plain = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
    return tuple(local.shape), _hash(host_memory(plain.reshape(-1).view(torch.uint8)))


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
