"""Split a user's state into named tensors and plain values, and put both back.

Names do not depend on the world: ``model/<name in the module>``, ``optim/state/<module>/<parameter>/exp_avg``. Wrappers
of DDP and torch.compile are skipped. So any world finds its parts in the shards of any other.

Optimizers have no state before their first step; the saved entries say what to allocate. Values that are not tensors
are stored as msgpack, which has only lists and dicts; on restore they get the container types that their owner uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.image_layout import TensorEntry
from rackrun.checkpoint.image.plain_part import OptimizerPlain, Plain, pack_plain
from rackrun.checkpoint.image.plain_values import flatten, like, with_tensors, without_tensors
from rackrun.checkpoint.image.rank_image import Image, ImagePlanner
from rackrun.checkpoint.image.tensor_entries import entries_of, locals_of
from rackrun.errors import UsageError

__all__ = ["Contents"]


@runtime_checkable
class Stateful(Protocol):
    """An object with torch's state_dict interface."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Contents:
    """The prepared state of one rank: modules, optimizers, tensors, stateful objects and plain values, by name."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Sort the parts of ``state`` by kind. Raises `LayoutMismatch` for an empty name or one with a slash."""
        for name in state:
            if "/" in name or not name:
                raise LayoutMismatch(f"{name!r} cannot name a part of the state.", remedy="use a name without '/'.")
        self.modules = {name: _unwrapped(thing) for name, thing in state.items() if isinstance(thing, nn.Module)}
        self.optimizers = {name: thing for name, thing in state.items() if isinstance(thing, torch.optim.Optimizer)}
        self.tensors = {name: thing for name, thing in state.items() if isinstance(thing, torch.Tensor)}
        known = self.modules.keys() | self.optimizers.keys() | self.tensors.keys()
        self.objects = {n: thing for n, thing in state.items() if n not in known and isinstance(thing, Stateful)}
        self.values = {n: value for n, value in state.items() if n not in known | self.objects.keys()}
        self._known: dict[str, tuple[torch.Tensor, list[TensorEntry]]] = {}
        """Name -> the tensor, and its entry if this rank has a part of it."""
        self._planner = ImagePlanner()

    @property
    def device(self) -> torch.device:
        """The device that the state is trained on: a GPU if any tensor is on one."""
        devices = [tensor.device for tensor in self._parts().values()]
        return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))

    @property
    def complete(self) -> bool:
        """Whether every optimizer has state, so that the state will not grow at the first step."""
        return all(optimizer.state for optimizer in self.optimizers.values())

    def describe(self) -> Image:
        """Return the state as it is now. The layout is planned anew when the structure has changed.

        Raises `LayoutMismatch` for tensors whose part is no box, and values that are not plain data.
        """
        try:
            parts, plain = self._parts(), self._encode_plain()
        except LayoutMismatch:
            raise
        except UsageError as error:
            raise LayoutMismatch(error.what, remedy=error.remedy) from None
        return self._planner.image(self._entries_of(parts), locals_of(parts), plain)

    def settled(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of ``names`` that neither forward nor backward changes.

        They are parameters, and the optimizers' state for them.
        """
        return frozenset(name for name in names if self._is_settled(name))

    def _entries_of(self, parts: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
        """Return the entries of all tensors.

        Computing boxes takes longest, so those of unchanged tensors are reused.
        """
        known, self._known = self._known, {}
        for name, tensor in parts.items():
            former, entries = known.get(name, (None, []))
            same = former is tensor and all(
                (entry.global_shape, entry.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for entry in entries
            )
            self._known[name] = tensor, entries if same else entries_of({name: tensor})
        return [entry for _, entries in self._known.values() for entry in entries]

    # -- restore
    def targets(self, plain: Plain, saved: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        """Return the tensors to fill, by name, after allocating those that do not exist yet.

        They are DTensors where the state has DTensors. ``saved``: name -> entry of each saved tensor. Raises
        `LayoutMismatch` when the state was built in another way than the saved one.
        """
        for name, optimizer in self.optimizers.items():
            self._make_optimizer_state(name, optimizer, _of(plain.optimizers, name), saved)
        parts = self._parts()
        for name in self.objects:
            prefix = f"{name}/"
            held = {path: parts.pop(path) for path in [path for path in parts if path.startswith(prefix)]}
            for path, entry in saved.items():
                if path.startswith(prefix):
                    # A state_dict may be a copy, so the values are read into tensors of their own.
                    parts[path] = _like_held(held.get(path), entry)
        return parts

    def put(self, plain: Plain, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Write restored values into the user's objects: optimizers, extra state of modules, objects by their
        ``load_state_dict``, and plain values.

        ``plain``: the checkpoint's values that are no tensors. ``tensors``: those of `targets`, after they have been
        read from the checkpoint. Return name -> plain value. A value that cannot be changed in place, such as a number,
        is only there.
        """
        for name, optimizer in self.optimizers.items():
            saved = _of(plain.optimizers, name)
            for group, values in zip(optimizer.param_groups, saved.groups, strict=True):
                for key, value in values.items():
                    group[key] = like(group.get(key), value)
            for parameter_name, parameter in self._parameters_of(optimizer):
                for key, value in saved.state.get(parameter_name, {}).items():
                    optimizer.state[parameter][key] = value
        for name, module in self.modules.items():
            for path, value in _of(plain.values, name).items():
                module.get_submodule(path).set_extra_state(value)
        for name, thing in self.objects.items():
            thing.load_state_dict(like(thing.state_dict(), with_tensors(_of(plain.values, name), tensors)))
        return {name: self._put_value(name, _of(plain.values, name)) for name in self.values}

    def _put_value(self, name: str, saved: Any) -> Any:
        current = self.values[name]
        value = like(current, saved)
        if isinstance(current, MutableMapping):
            current.clear()
            current.update(value)
        elif isinstance(current, list):
            current[:] = value
        else:
            self.values[name] = value
        return value

    # -- helpers
    def _parts(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state, by name."""
        found: dict[str, torch.Tensor] = {}
        for name, module in self.modules.items():
            for sub in module.modules():
                if isinstance(sub, FSDPModule):  # a forward without a backward leaves the root gathered
                    sub.reshard()
            found.update((f"{name}/{path}", parameter) for path, parameter in module.named_parameters())
            found.update((f"{name}/{path}", buffer) for path, buffer in _persistent_buffers(module))
        for name, optimizer in self.optimizers.items():
            for parameter_name, parameter in self._parameters_of(optimizer):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}/state/{parameter_name}/{key}"] = value
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}/group/{index}/{key}"] = value
        for name, thing in self.objects.items():
            found.update(flatten(name, thing.state_dict()))
        return found | self.tensors

    def _is_settled(self, path: str) -> bool:
        """Whether the tensor at ``path`` is a parameter, or an optimizer's state for one.

        Forward and backward do not change these.
        """
        name, _, rest = path.partition("/")
        if name in self.modules:
            with contextlib.suppress(AttributeError):
                return isinstance(self.modules[name].get_parameter(rest), nn.Parameter)
        return name in self.optimizers and rest.startswith("state/")

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter of an optimizer with its name in a prepared module, or its index when there is none."""
        names = {
            id(p): f"{name}/{path}" for name, module in self.modules.items() for path, p in module.named_parameters()
        }
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield names.get(id(parameter), f"{index}.{position}"), parameter

    def _encode_plain(self) -> bytes:
        optimizers = {}
        for name, optimizer in self.optimizers.items():
            groups = [
                {k: v for k, v in group.items() if k != "params" and not isinstance(v, torch.Tensor)}
                for group in optimizer.param_groups
            ]
            saved = OptimizerPlain(groups, {}, {})
            for parameter_name, parameter in self._parameters_of(optimizer):
                state = optimizer.state.get(parameter, {})
                saved.state[parameter_name] = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
                saved.tensors[parameter_name] = {
                    k: (v.shape == parameter.shape, v.device.type == "cpu")
                    for k, v in state.items()
                    if isinstance(v, torch.Tensor)
                }
            optimizers[name] = saved
        values: dict[str, Any] = {
            name: {path: sub.get_extra_state() for path, sub in module.named_modules() if _has_extra_state(sub)}
            for name, module in self.modules.items()
        }
        values |= {name: without_tensors(name, thing.state_dict()) for name, thing in self.objects.items()}
        try:
            return pack_plain(Plain(optimizers, values | self.values))
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise LayoutMismatch(
                f"the state holds something that is neither a tensor nor plain data: {error}.",
                remedy="give tensors, numbers, strings, bytes, lists and dicts, or objects whose state_dict has only those.",
            ) from error

    def _make_optimizer_state(
        self, name: str, optimizer: torch.optim.Optimizer, plain: OptimizerPlain, saved: Mapping[str, TensorEntry]
    ) -> None:
        """Allocate the optimizer state that was saved and does not exist yet, and remove what was not saved."""
        if len(plain.groups) != len(optimizer.param_groups):
            raise LayoutMismatch(
                f"{name!r} has {len(optimizer.param_groups)} parameter groups, and was saved with {len(plain.groups)}.",
                remedy="build the optimizer as it was.",
            )
        for parameter_name, parameter in self._parameters_of(optimizer):
            wanted = plain.tensors.get(parameter_name, {})
            state = optimizer.state[parameter] if wanted or parameter in optimizer.state else {}
            for key in [key for key in state if key not in wanted]:
                del state[key]
            for key, (like_parameter, on_host) in wanted.items():
                entry = saved.get(f"{name}/state/{parameter_name}/{key}")
                if isinstance(state.get(key), torch.Tensor) or entry is None:
                    continue
                if like_parameter:
                    state[key] = torch.zeros_like(parameter.detach(), dtype=_dtype(entry))
                else:
                    device = torch.device("cpu") if on_host else parameter.device
                    state[key] = torch.zeros(entry.global_shape, dtype=_dtype(entry), device=device)
            if not state and not plain.state.get(parameter_name):
                optimizer.state.pop(parameter, None)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of DDP and torch.compile."""
    inner = getattr(module, "_orig_mod", module)
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    return cast("nn.Module", getattr(inner, "_orig_mod", inner))


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    transient = {
        f"{path}.{name}" if path else name
        for path, sub in module.named_modules()
        for name in sub._non_persistent_buffers_set
    }
    return ((path, buffer) for path, buffer in module.named_buffers() if path not in transient)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype


def _like_held(held: torch.Tensor | None, entry: TensorEntry) -> torch.Tensor:
    """Return an empty tensor to fill: a DTensor where the object holds one of this shape, otherwise a whole tensor."""
    if isinstance(held, DTensor) and tuple(held.shape) == entry.global_shape:
        return torch.empty_like(held, dtype=_dtype(entry))
    return torch.empty(entry.global_shape, dtype=_dtype(entry))


def _of(saved: Mapping[str, Any], name: str) -> Any:
    if name not in saved:
        raise LayoutMismatch(
            f"{name!r} was not saved; there are {', '.join(sorted(saved)) or 'no others'}.",
            remedy="prepare the same names as the run that saved.",
        )
    return saved[name]
