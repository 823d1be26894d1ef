"""Lists the modules, parameters and buffers of the tracked modules, with their names.

A walk through a large model takes as long as some kernels, and a step needs these lists several times. So they are
computed once and later compared with every module's own dictionaries, name by name and object by object. Whatever a
script adds, drops, replaces or renames, in whichever way, shows in these dictionaries, and the lists are computed
again.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from rackrun.worker.tensors import module_walk
from rackrun.worker.tensors.tensor_lists import are_plain, same_objects, versions, versions_of_plain

__all__ = ["ModuleStructure", "wrappers_among"]

_DICTIONARIES = attrgetter("_modules", "_parameters", "_buffers")
_NAMES, _THINGS = methodcaller("keys"), methodcaller("values")


class ModuleStructure:
    """The modules, parameters and buffers of ``roots`` (tracked name -> module), with their paths, as they were when this
    was made. Callers must not change its lists. A module that two roots share is listed twice, a parameter or a buffer
    once."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = dict(roots)
        walked = {name: module_walk.modules(root) for name, root in roots.items()}
        self.modules: list[nn.Module] = []
        self.module_paths: list[str] = []
        """The modules in the order of ``modules()`` of each root."""
        self.parameters: list[nn.Parameter] = []
        """The parameters in the order of ``parameters()`` of each root."""
        self.parameter_paths: list[str] = []
        self.buffers: list[torch.Tensor] = []
        """The buffers in the order of ``buffers()`` of each root."""
        self.buffer_paths: list[str] = []
        """Paths of the buffers as ``name/path``, without the kind."""
        self._kept_buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.norm_buffers: set[str] = set()
        """Paths, with the kind, of the buffers of batch norm and similar layers, which mostly write them without a new
        version."""
        self.with_extra_state: list[tuple[str, str, nn.Module]] = []
        """Tracked name, path and module of each module with extra state."""
        self.fsdp: list[FSDPModule] = []
        self.wrappers = wrappers_among(roots)
        """The roots' DDP modules."""
        for name, found in walked.items():
            seen: set[int] = set()
            for path, module in found:
                prefix = f"{path}." if path else ""
                self.modules.append(module)
                self.module_paths.append(f"{name}.{path}" if path else name)
                for key, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        self.parameters.append(parameter)
                        self.parameter_paths.append(f"{name}/param/{prefix}{key}")
                for key, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        self.buffers.append(buffer)
                        self.buffer_paths.append(f"{name}/{prefix}{key}")
                        if key not in module._non_persistent_buffers_set:
                            self._kept_buffers[f"{name}.{prefix}{key}"] = tuple(buffer.shape), buffer.dtype
                        if isinstance(module, _NormBase):
                            self.norm_buffers.add(f"{name}/buffer/{prefix}{key}")
                if isinstance(module, FSDPModule):
                    self.fsdp.append(module)
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    self.with_extra_state.append((name, path, module))
        self._are_plain = are_plain(self.parameters)
        self._kinds = list(map(type, self.modules))
        self._dictionaries = self._held()
        self._full = tuple(filter(None, self._dictionaries))  # a tuple is passed on as arguments without a copy
        self._empty = [one for one in self._dictionaries if not one]
        self._plain = set(map(type, self._dictionaries)) <= {dict}
        """Whether all dictionaries are plain dicts; those of a scripted module are not."""
        self._names = self._names_now()
        self._counts, self._things = self._in_them()

    def stands(self, roots: Mapping[str, nn.Module]) -> bool:
        """Whether a new structure of ``roots`` would equal this one. Modules with unchanged children are the only
        modules that there are, so the known ones suffice."""
        return (
            list(roots) == list(self._roots)
            and same_objects(list(roots.values()), list(self._roots.values()))
            and same_objects(self._held(), self._dictionaries)
            and list(map(type, self.modules)) == self._kinds
            and self._names_now() == self._names
            and self.seems_to_stand()
        )

    def seems_to_stand(self) -> bool:
        """Whether the known dictionaries hold the same objects. Takes a third of the time of `stands`, which also
        detects replaced dictionaries and changed names."""
        counts, things = self._in_them()
        return counts == self._counts and not any(self._empty) and same_objects(things, self._things)

    def versions(self) -> list[int]:
        """Return the versions of all parameters (see `rackrun.worker.tensors.tensor_lists.versions`)."""
        return versions_of_plain(self.parameters) if self._are_plain else versions(self.parameters)

    def buffer_versions(self) -> list[int]:
        """Return the versions of all buffers, like `versions`."""
        return versions(self.buffers) if self.buffers else []

    def differs(self, before: ModuleStructure) -> str:
        """Return the first difference because of which a copy of this structure's tensors would not fit into
        ``before``, for a message.

        Returns "" when tensors and modules were at most replaced by others of the same kind.
        """
        was, now = (dict(zip(one.module_paths, one._kinds, strict=True)) for one in (before, self))
        for path, kind in now.items():
            old = was.get(path)
            if old is None:
                return f"{path} ({kind.__name__}) is new"
            if kind is not old:
                return f"{path} was a {old.__name__}, and is a {kind.__name__}"
        if gone := [path for path in was if path not in now]:
            return f"{gone[0]} is gone"
        of: dict[int, list[str]] = {}
        for path, parameter in zip(before.parameter_paths, before.parameters, strict=True):
            of.setdefault(id(parameter), []).append(path)  # there are several paths when two roots share it
        for path, parameter in zip(self.parameter_paths, self.parameters, strict=True):
            if path not in of.get(id(parameter), [path]):
                return f"{_shown(path)} is what {_shown(of[id(parameter)][0])} was"
        if moved := set(before.parameter_paths) ^ set(self.parameter_paths):
            return f"{_shown(min(moved))} is new, or gone"
        for path in before._kept_buffers.keys() | self._kept_buffers.keys():
            if before._kept_buffers.get(path) != self._kept_buffers.get(path):
                return f"the buffer {path} is new, or gone, or has another shape or type"
        return ""

    def name_of(self, module: nn.Module, key: str) -> str:
        """Return a readable name for what ``module`` holds as ``key``."""
        paths = (path for path, one in zip(self.module_paths, self.modules, strict=True) if one is module)
        return f"{next(paths, type(module).__name__)}.{key}"

    def _held(self) -> list[Any]:
        """Return the dictionaries of all known modules, empty ones included."""
        return list(chain.from_iterable(map(_DICTIONARIES, self.modules)))

    def _names_now(self) -> list[str]:
        return list(chain.from_iterable(self._full if self._plain else map(_NAMES, self._full)))

    def _in_them(self) -> tuple[list[int], list[Any]]:
        """Return the sizes of the dictionaries that were not empty at first, and the objects in them."""
        counts = list(map(len, self._full))
        if self._plain:
            return counts, gc.get_referents(*self._full)  # a dictionary's values, in their order, at once
        return counts, list(chain.from_iterable(map(_THINGS, self._full)))


def wrappers_among(roots: Mapping[str, nn.Module]) -> list[DistributedDataParallel]:
    """Return the DDP modules among ``roots``, also those inside what torch.compile returns."""
    inner = [getattr(root, "_orig_mod", root) for root in roots.values()]
    return [one for one in inner if isinstance(one, DistributedDataParallel)]


def _shown(path: str) -> str:
    return path.replace("/param/", ".")
