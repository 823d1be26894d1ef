"""The tracked objects of a script, seen as named tensors and plain values.

The state has three uses. After an abandoned unit it is *restored*: what forward and backward may have changed is put
back as it was when the unit began. On a newcomer it is *filled*: tensors are copied straight into its own, which are
allocated by the source's manifest where they do not exist yet (an optimizer that has made no step has no state). And a
shard that exists only on this rank is *written out* (`rackrun.worker.snapshots.shard_snapshots`). No tensor is ever
pickled; everything else travels as msgpack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.plain_values import flatten, leaves, like, with_tensors, without_tensors
from rackrun.errors import StepError
from rackrun.worker.state.objects.module_structure import ModuleStructure, wrappers_among
from rackrun.worker.state.objects.optimizer_groups import OptimizerGroups
from rackrun.worker.state.objects.optimizer_state import (
    OUTSIDE,
    HeldObjects,
    held_objects,
    held_tensors,
    key_order,
    optimizer_state,
    plain_groups,
    plain_state,
    put_in_order,
)
from rackrun.worker.state.objects.scaler_state import ScalerState, scaler_as_tracked
from rackrun.worker.state.objects.trackable import refuse_untrackable
from rackrun.worker.state.objects.tracked_generators import as_tracked
from rackrun.worker.state.shardings import part_like, take_part
from rackrun.worker.state.state_manifest import Lineage, StateManifest, TensorInfo
from rackrun.worker.state.switched_modes import SwitchedModes
from rackrun.worker.state.tensor_infos import TensorInfos
from rackrun.worker.tensors.tensor_bytes import digests_by_path, local_part
from rackrun.worker.tensors.tensor_lists import local_parts
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp

__all__ = ["TrackedState"]


class TrackedState:
    """The objects given to ``run.track``, in the order given. A tensor's path is ``name/kind/...``, such as
    ``model/param/layer.weight``."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.others: dict[str, Any] = {}
        self._scripts: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        """``others`` in two parts: the script's objects and rackrun's own."""
        self._scalers: list[ScalerState] = []
        self._groups: dict[str, OptimizerGroups] = {}
        self._places_outside: dict[int, tuple[int, torch.Tensor]] = {}
        """By ``id``: FSDP2's shards that `_outside` has returned, with their places. While FSDP2 has gathered whole
        parameters, modules have others."""
        self._structure = ModuleStructure({})
        self.lineage = Lineage()
        self.numerics: Callable[[], Mapping[str, str]] = dict
        """Returns the hardware, libraries and settings that this process computes with now
        (`rackrun.worker.device.numerics`)."""
        self.filled = 0
        """How often the state was filled from outside. Such writes do not change tensors' versions."""
        self._infos = TensorInfos()
        self._modes = SwitchedModes()

    def track(self, name: str, thing: Any) -> None:
        """Add ``thing`` under ``name``. Raises `StepError` for a name in use and for an object that cannot be
        tracked."""
        if name in self.modules or name in self.optimizers or name in self.others:
            raise StepError(f"run.track was given {name!r} twice.", remedy="use another name for the second.")
        refuse_untrackable(name, thing)
        thing = scaler_as_tracked(as_tracked(thing))
        if isinstance(thing, nn.Module):
            self.modules[name] = thing
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers[name] = thing
            self._groups[name] = OptimizerGroups(thing)
        elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self.others[name] = thing
            (self._own if name.startswith("rackrun.") else self._scripts)[name] = thing
            if isinstance(thing, ScalerState):
                self._scalers.append(thing)
        else:
            raise StepError(
                f"run.track was given {name!r}, a {type(thing).__name__} without state_dict and load_state_dict.",
                remedy="give it both, or keep what it holds in a tracked object.",
            )

    def __bool__(self) -> bool:
        return bool(self.modules or self.optimizers or self._scripts)

    def check_complete(self) -> None:
        """Check, at ``run.steps``, that all is tracked. Raises `StepError` when a tracked optimizer trains a parameter
        of a module that is not."""
        self._modes.begin(self._parameters_by_path(), self.modules)
        known = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        for name, optimizer in self.optimizers.items():
            strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
            if strangers:
                raise StepError(
                    f"{name!r} trains {len(strangers)} parameter(s) of no tracked module (first: shape {tuple(strangers[0].shape)}).",
                    remedy="pass the module that owns them to run.track as well.",
                )

    def sharded(self) -> bool:
        """Whether any tracked parameter is a DTensor."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters())

    # -- gradients
    def divide_alike(self) -> None:
        """Make DDP divide summed gradients by the number of ranks in the same way on all ranks.

        With ``gradient_as_bucket_view=True`` torch divides a gradient that existed before the backward pass, and
        multiplies by the reciprocal where there was none, as on a rank that has just taken over. The two round
        differently.
        """
        for wrapper in self.wrappers():
            ddp.divide_alike(wrapper)

    def synchronise_gradients(self, last: bool) -> None:
        """Let the backward pass communicate gradients only in the last micro-batch of a step (gradient
        accumulation)."""
        known = self._structure  # it is current: the unit's beginning has read it
        for wrapper in known.wrappers:
            ddp.synchronise_gradients(wrapper, last)
        if known.fsdp:
            fsdp.synchronise_gradients(known.fsdp, last)

    # -- tensors
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return path -> this rank's part of each tracked tensor, as a plain tensor that may be written into."""
        parts = self.parts()
        return dict(zip(parts, local_parts(parts.values()), strict=True))

    def parts(self) -> dict[str, torch.Tensor]:
        """Return path -> tracked tensor. A sharded tensor is a DTensor, which knows which part of the whole it is."""
        fsdp.reshard(self.structure().fsdp)
        structure = self.structure()  # parameters are shards now
        found: dict[str, torch.Tensor] = dict(zip(structure.parameter_paths, structure.parameters, strict=True))
        for path, buffer in zip(structure.buffer_paths, structure.buffers, strict=True):
            name, _, rest = path.partition("/")
            found[f"{name}/buffer/{rest}"] = buffer
        for name, optimizer in self.optimizers.items():
            found |= held_tensors(name, optimizer, self._outside(name, structure))
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}/group/{index}/{key}"] = value
        for name, other in self.others.items():
            found.update(leaves(f"{name}/state", other.state_dict()))
        return found

    def is_settled(self, path: str) -> bool:
        """Whether forward and backward leave the tensor unchanged, because it is a parameter or held by an optimizer
        for one."""
        name, kind, _ = path.split("/", 2)
        return (name in self.modules and kind == "param") or (name in self.optimizers and kind == "state")

    def standing_until_gate(self, paths: Iterable[str]) -> set[str]:
        """Return those of ``paths`` that are settled (`is_settled`) and were not seen to change before a gate, nor at
        all when no optimizer trains them."""
        changes = self.lineage.changes
        changing = {*changes.early, *changes.moving}
        found = {path for path in paths if self.is_settled(path)}
        return {p for p in found if p not in changing and p.rpartition("@")[0] not in changing} if changing else found

    def is_listed(self, path: str) -> bool:
        """Whether the tensor is in a list or dictionary that an optimizer holds for a parameter; `put_plain` puts it
        into a new one."""
        name, kind, rest = path.split("/", 2)
        return name in self.optimizers and kind == "state" and rest.count("/") > 2

    def is_buffer(self, path: str) -> bool:
        """Whether the tensor is a buffer of a tracked module, in which replicas may differ."""
        name, kind, _ = path.split("/", 2)
        return name in self.modules and kind == "buffer"

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return path -> this rank's part of every buffer of the tracked modules."""
        structure = self.structure()
        return dict(zip(structure.buffer_paths, local_parts(structure.buffers), strict=True))

    def infos(self, parts: Mapping[str, torch.Tensor]) -> list[TensorInfo]:
        """Return the descriptions of ``parts``, which `parts` has just returned. The same object as long as nothing in
        them has changed."""
        return self._infos.of(parts, self._parameters_by_path(), self._like_parameters)

    def _like_parameters(self) -> set[str]:
        """Return the paths of optimizers' tensors that are sharded like their parameter."""
        return {
            f"{name}/{path}/{key}"
            for name, optimizer in self.optimizers.items()
            for path, parameter, key, value in optimizer_state(optimizer, self._outside(name))
            if "/" not in key  # a tensor in a list is created anew with the list
            and isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and _lie_alike(value, parameter)
        }

    def manifest(self, replica_class: str, infos: list[TensorInfo] | None = None) -> StateManifest:
        """Describe the state for another rank. ``infos``: the tensors' descriptions, if they are known already."""
        return StateManifest(
            self.infos(self.parts()) if infos is None else infos,
            self.encode_plain(),
            replica_class,
            self.lineage,
            modes=self._modes.switched(self._parameters_by_path(), self.modules),
            numerics=dict(self.numerics()),
            key_orders={name: key_order(optimizer) for name, optimizer in self.optimizers.items()},
        )

    def allocate(self, manifest: StateManifest) -> dict[str, torch.Tensor]:
        """Make this worker's tensors fit a source's ``manifest``, and return them by path, to be written into.

        Existing tensors are kept, so references to them stay valid. Raises `StepError` when the script has built a
        different model on this rank.
        """
        self._put_groups(msgspec.msgpack.decode(manifest.plain, strict=False))
        parts = self.parts()
        present = {path: local_part(part) for path, part in parts.items()}
        wanted: dict[str, torch.Tensor] = {}
        owned = {f"{name}/group/" for name in self.optimizers} | {f"{name}/" for name in self.modules}
        for info in manifest.tensors:
            tensor = present.get(info.path)
            if tensor is not None and tuple(tensor.shape) == info.shape and str(tensor.dtype) == f"torch.{info.dtype}":
                wanted[info.path] = tensor
            elif (part := self._other_part(info, parts.get(info.path))) is not None:
                wanted[info.path] = part
            elif any(info.path.startswith(prefix) for prefix in owned):
                here = f"{tuple(tensor.shape)} {tensor.dtype}" if tensor is not None else "nothing"
                raise StepError(
                    f"{info.path} is {info.shape} {info.dtype} on the rank that has the state, and {here} on the one that takes over.",
                    remedy="build the same model on every rank and spare; nothing may depend on the rank before run.steps().",
                )
            else:
                wanted[info.path] = self._allocate_one(info)
        self._forget_others(wanted)
        return wanted

    def _other_part(self, info: TensorInfo, held: torch.Tensor | None) -> torch.Tensor | None:
        """Return memory for this rank's part of a DTensor that a spare has created as another rank; None if ``held`` is
        no such DTensor."""
        if not isinstance(held, DTensor) or str(held.dtype) != f"torch.{info.dtype}":
            return None
        local = info.empty(held.device)
        return local if take_part(held, local) else None

    def fitted(self, manifest: StateManifest) -> StateManifest:
        """Return the ``manifest`` of a rank with other shards with the shapes that this rank has to allocate."""
        plain = msgspec.msgpack.decode(manifest.plain, strict=False)
        if missing := [name for name in (*self.optimizers, *self.others) if name not in plain]:
            raise LayoutMismatch(
                f"nothing is saved under the name{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}.",
                remedy="give run.track the same names as the run that has saved it.",
            )
        self._put_groups(plain)
        shapes = {path: tuple(tensor.shape) for path, tensor in self.tensors().items()}
        for name, optimizer in self.optimizers.items():
            for group, of in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(of["params"]):
                    shapes[f"{name}/state/{group}/{index}/"] = tuple(local_part(parameter).shape)
            for index, parameter in enumerate(self.parameters()):
                shapes[f"{name}/state/{OUTSIDE}/{index}/"] = tuple(local_part(parameter).shape)
        infos = []
        for info in manifest.tensors:
            shape = shapes.get(info.path)
            near = self._near(info)
            if shape is None and info.sharding is not None and near is not None:
                shape = info.sharding.local_shape(near)
            if shape is None and info.like_param:
                shape = shapes.get(info.path.rpartition("/")[0] + "/")
            infos.append(info if shape is None else msgspec.structs.replace(info, shape=shape, strides=()))
        return msgspec.structs.replace(manifest, tensors=infos)

    def load_plain(self, manifest: StateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Finish filling, after the tensors: load everything that is not a tensor, and the objects that are loaded as a
        whole."""
        self.put_plain(manifest.plain, {**tensors, **self._whole_of_others(manifest, tensors)})
        self._modes.put(manifest.modes, self._parameters_by_path(), self.modules)
        self._put_gradients({info.path for info in manifest.tensors if info.has_gradient})
        for name, optimizer in self.optimizers.items():
            put_in_order(optimizer, manifest.key_orders.get(name, ()))
        self.filled += 1

    def as_part(self, info: TensorInfo, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor of which ``local`` is this rank's part, if the manifest describes one; otherwise
        ``local``."""
        near = self._near(info)
        return local if near is None or info.sharding is None else info.sharding.whole(local, near)

    def _near(self, info: TensorInfo) -> DTensor | None:
        """Return the tracked DTensor on whose mesh the described tensor lies, or None."""
        if info.sharding is None:
            return None
        parameter = self._parameters_by_path().get(info.sharding.near)
        return parameter if isinstance(parameter, DTensor) else None

    def _parameters_by_path(self) -> dict[str, torch.Tensor]:
        structure = self.structure()
        return dict(zip(structure.parameter_paths, structure.parameters, strict=True))

    def _whole_of_others(self, manifest: StateManifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return, by path, what ``load_state_dict`` and lists of optimizers receive instead of local parts."""
        return {
            info.path: self.as_part(info, tensors[info.path]) for info in manifest.tensors if info.sharding is not None
        }

    def layout(self) -> str:
        """Return a hash that is equal on ranks whose parameters are the same shards of the same model."""
        digestible = hashlib.blake2b(digest_size=12)
        for name, module in self.modules.items():
            for path, parameter in module.named_parameters():
                digestible.update(
                    f"{name}/{path} {tuple(parameter.shape)} {parameter.dtype} {_shard_of(parameter)}\n".encode()
                )
        return digestible.hexdigest()

    @property
    def gathered(self) -> bool:
        """Whether FSDP holds whole parameters at the moment."""
        return fsdp.is_gathered(self._structure.fsdp)  # the structure is current: the unit's beginning has read it

    def content(self, *, buffers: bool = False) -> int:
        """Return a digest of all state, of 63 bits, equal on replicas with the same bits. ``buffers``: whether to
        include buffers."""
        mixed = hashlib.blake2b(self.encode_plain(), digest_size=8)
        tensors = {path: one for path, one in sorted(self.tensors().items()) if buffers or "/buffer/" not in path}
        for path, one in digests_by_path(tensors).items():
            mixed.update(f"{path}:{one}\n".encode())
        return int.from_bytes(mixed.digest(), "little") >> 1

    def content_by_name(self) -> dict[str, int]:
        """Return a digest of each tracked object by name, like `content`, without buffers."""
        plain = msgspec.msgpack.decode(self.encode_plain(), type=dict[str, msgspec.Raw])
        mixed = {name: hashlib.blake2b(plain.get(name, b""), digest_size=8) for name in self._names()}
        tensors = {path: one for path, one in sorted(self.tensors().items()) if "/buffer/" not in path}
        for path, one in digests_by_path(tensors).items():
            mixed[path.partition("/")[0]].update(f"{path}:{one}\n".encode())
        return {name: int.from_bytes(one.digest(), "little") >> 1 for name, one in mixed.items()}

    def settled(self) -> int:
        """Return a digest, of 63 bits, of this rank's part of what only optimizers change: equal on replicas with the
        same bits."""
        settled = {path: tensor for path, tensor in sorted(self.tensors().items()) if self.is_settled(path)}
        mixed = hashlib.blake2b(digest_size=8)
        for path, one in digests_by_path(settled).items():
            mixed.update(f"{path}:{one}\n".encode())
        return int.from_bytes(mixed.digest(), "little") >> 1

    # -- helpers
    def _put_gradients(self, paths: Collection[str]) -> None:
        """Give the parameters at ``paths`` zero gradients, and all others None.

        Ranks that differ in this call different collectives, for example one per gradient when a script computes the
        norm of gradients.
        """
        for path, parameter in self._parameters_by_path().items():
            if path not in paths:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            else:
                parameter.grad.zero_()

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a readable name for ``parameter``."""
        paths = (path for path, one in self._parameters_by_path().items() if one is parameter)
        return next(paths, "of no tracked module").replace("/param/", ".")

    def put_groups(self, encoded: bytes) -> None:
        """Have optimizers train what they trained when `encode_plain` returned ``encoded``; `put_plain` does the
        rest."""
        self._put_groups(msgspec.msgpack.decode(encoded, strict=False), drops=False)

    def _put_groups(self, plain: Mapping[str, Any], *, drops: bool = True) -> None:
        for name, groups in self._groups.items():
            if name in plain:
                of = plain[name]
                paths = self._parameters_by_path()
                outside = of.get(OUTSIDE, ()) if drops else None
                groups.put(len(of["groups"]), of.get("params", {}), paths, outside)

    def _outside(
        self, name: str, structure: ModuleStructure | None = None, *, changed: bool | None = None
    ) -> list[tuple[int, torch.Tensor]]:
        """Return the tracked parameters in no group of the optimizer ``name`` for which it has state, each after its
        place among all tracked ones. ``structure``: read just now; ``changed``: see `OptimizerGroups.outside`."""
        outside = self._groups[name].outside(changed)
        if not outside:
            return []
        structure = structure or self.structure()
        places = {id(parameter): index for index, parameter in enumerate(structure.parameters)}
        found = {id(one): (places[id(one)], one) for one in outside if id(one) in places}
        if structure.fsdp:
            self._places_outside |= found
            found = {id(one): self._places_outside[id(one)] for one in outside if id(one) in self._places_outside}
        return sorted(found.values(), key=itemgetter(0))

    def _holder(self, name: str, group: str, index: str) -> torch.Tensor:
        """Return the parameter for which the optimizer ``name`` holds what has the path ``name/state/group/index/...``."""
        if group == OUTSIDE:
            return self.parameters()[int(index)]
        parameter: torch.Tensor = self.optimizers[name].param_groups[int(group)]["params"][int(index)]
        return parameter

    def _names(self) -> list[str]:
        return [*self.modules, *self.optimizers, *self.others]

    def structure(self, *, glance: bool = False) -> ModuleStructure:
        """Return the structure of the tracked modules now: the same object as long as it is unchanged. ``glance``:
        check only what `ModuleStructure.seems_to_stand` does."""
        if not (self._structure.seems_to_stand() if glance else self._structure.stands(self.modules)):
            self._structure = ModuleStructure(self.modules)
        return self._structure

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters of all tracked modules, as `ModuleStructure` lists them."""
        return self.structure().parameters

    def trained(self) -> list[torch.Tensor]:
        """Return all parameters that tracked optimizers train, in their order."""
        groups = [group["params"] for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        return list(chain.from_iterable(groups))

    def trains(self, known: Sequence[torch.Tensor]) -> bool:
        """Whether ``known``, a former result of `trained`, is what it would return now."""
        groups = [group["params"] for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        return sum(map(len, groups)) == len(known) and all(map(is_, chain.from_iterable(groups), known))

    def trained_and_free(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Return path -> parameter twice: for those that tracked optimizers train, and for all others."""
        ids = set(map(id, self.trained()))
        structure = self.structure()
        found: tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]] = {}, {}
        for path, parameter in zip(structure.parameter_paths, structure.parameters, strict=True):
            found[id(parameter) not in ids][path] = parameter
        return found

    def held_by_optimizers(self) -> dict[str, torch.Tensor]:
        """Return path -> this rank's part of every tensor that optimizers hold for their parameters."""
        found: dict[str, torch.Tensor] = {}
        for name, optimizer in self.optimizers.items():
            found |= held_tensors(name, optimizer, self._outside(name))
        return dict(zip(found, local_parts(found.values()), strict=True))

    def put_owned(self, path: str, value: torch.Tensor) -> None:
        """Put back what an optimizer held for a parameter, where it has dropped or replaced it. Raises `StepError` for
        the path of a parameter, whose shape has changed."""
        name, kind, rest = path.split("/", 2)
        if kind != "state":
            raise StepError(
                f"the shape of {path} has changed since the step began.",
                remedy="do not resize parameters inside a step.",
            )
        group, index, key = rest.split("/", 2)
        optimizer = self.optimizers[name]
        parameter = self._holder(name, group, index)
        held = optimizer.state[parameter].get(key)
        if value.dim():
            value = part_like(value, parameter if held is None else held)
        optimizer.state[parameter][key] = value

    def optimizer_keys(self) -> dict[str, dict[int, set[str]]]:
        """Return, for each optimizer, what keys it holds for each parameter (by ``id``)."""
        return {
            name: {id(parameter): set(held) for parameter, held in optimizer.state.items()}
            for name, optimizer in self.optimizers.items()
        }

    def keep_optimizer_keys(self, keys: Mapping[str, Mapping[int, set[str]]]) -> None:
        """Delete from optimizers everything that `optimizer_keys` did not return in ``keys``."""
        for name, optimizer in self.optimizers.items():
            for parameter in list(optimizer.state):
                had = keys[name].get(id(parameter), set())
                for key in [key for key in optimizer.state[parameter] if key not in had]:
                    del optimizer.state[parameter][key]
                if id(parameter) not in keys[name]:
                    del optimizer.state[parameter]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU when there is none."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def wrappers(self) -> Sequence[DistributedDataParallel]:
        """Return the tracked DDP modules, also those inside what torch.compile returns."""
        return wrappers_among(self.modules)

    def _allocate_one(self, info: TensorInfo) -> torch.Tensor:
        """Create this rank's tensor for ``info``, store it in its optimizer, if it has one, and return the part to
        write into."""
        name, _, rest = info.path.partition("/")
        optimizer = self.optimizers.get(name)
        if optimizer is None:
            return info.empty()  # becomes an argument of load_state_dict
        _, group, index, key = rest.split("/", 3)
        parameter: Any = self._holder(name, group, index)  # a DTensor, where its tensors are to be alike
        device = torch.device("cpu") if info.on_host else parameter.device
        local = info.empty(device)
        if "/" in key:
            return local  # an item of a list, which put_plain creates
        value = self.as_part(info, local)
        if info.like_param:
            value = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        optimizer.state[parameter][key] = value
        return local_part(value)

    def _forget_others(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Delete the optimizers' tensors that are not in ``wanted``."""
        for name, optimizer in self.optimizers.items():
            for path, parameter, key, value in list(optimizer_state(optimizer, self._outside(name))):
                if isinstance(value, torch.Tensor) and "/" not in key and f"{name}/{path}/{key}" not in wanted:
                    del optimizer.state[parameter][key]

    def state_dicts(self, *, own: bool = False) -> dict[str, Any]:
        """Return the ``state_dict`` of each tracked object that is neither module nor optimizer. ``own``: of rackrun's
        own objects instead of the script's."""
        held = self._own if own else self._scripts
        return {name: other.state_dict() for name, other in held.items()} if held else {}

    def scaler_marks(self) -> list[Any]:
        """Return `ScalerState.marks` of all tracked scalers."""
        return [scaler.marks() for scaler in self._scalers] if self._scalers else []

    def held_objects(self) -> dict[str, HeldObjects]:
        """Return what each optimizer holds."""
        return {name: held_objects(optimizer) for name, optimizer in self.optimizers.items()}

    def encode_plain(
        self,
        given: Mapping[str, Any] | None = None,
        structure: ModuleStructure | None = None,
        held: Mapping[str, HeldObjects] | None = None,
    ) -> bytes:
        """Encode everything that is not a tensor as msgpack.

        ``given``, ``structure``, ``held``: what the caller has just obtained from `state_dicts`, `structure` and
        `held_objects`. The first two may take a while or wait for a device. Raises `StepError` for values that are not
        plain data.
        """
        plain: dict[str, Any] = {}
        structure = structure or self.structure()
        for name, optimizer in self.optimizers.items():
            changed = self._groups[name].has_changed()
            outside = self._outside(name, structure, changed=changed)
            objects = None if held is None else held[name]
            plain[name] = {"groups": plain_groups(optimizer), "state": plain_state(name, optimizer, outside, objects)}
            if outside:
                plain[name][OUTSIDE] = [structure.parameter_paths[index] for index, _ in outside]
            if changed:
                paths = dict(zip(map(id, structure.parameters), structure.parameter_paths, strict=True))
                plain[name]["params"] = self._groups[name].changed(paths, sharded=bool(structure.fsdp))
        if self.others:
            dicts = {**(self.state_dicts() if given is None else given), **self.state_dicts(own=True)}
            for name in self.others:
                plain[name] = without_tensors(f"{name}/state", dicts[name])
        for name, path, module in structure.with_extra_state:
            plain.setdefault(name, {})[path] = module.get_extra_state()
        try:
            return msgspec.msgpack.encode(plain)
        except (TypeError, OverflowError) as error:
            raise StepError(
                f"tracked state holds something that is neither a tensor nor plain data: {error}.",
                remedy="return only tensors, numbers, strings, lists, tuples and dicts from state_dict.",
            ) from error

    def put_plain(self, encoded: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what `encode_plain` returned. ``tensors``: by path, for the places where state dicts and lists hold
        tensors."""
        plain = msgspec.msgpack.decode(encoded, strict=False)
        self._put_groups(plain)
        for name, optimizer in self.optimizers.items():
            for group, values in zip(optimizer.param_groups, plain[name]["groups"], strict=True):
                for key, value in values.items():
                    group[key] = like(group.get(key), value)
            for path, parameter, key, old in list(optimizer_state(optimizer, self._outside(name))):
                if not isinstance(old, torch.Tensor) and f"{path}/{key}" not in plain[name]["state"]:
                    del optimizer.state[parameter][key]
            for parameter in [parameter for parameter, held in optimizer.state.items() if not held]:
                del optimizer.state[parameter]
            for path, value in plain[name]["state"].items():
                _, of_group, index, key = path.split("/", 3)
                held = optimizer.state[self._holder(name, of_group, index)]
                inside = flatten(f"{name}/{path}", held.get(key))
                held[key] = like(held.get(key), with_tensors(value, _over(inside, tensors)))
        for name, other in self.others.items():
            current = other.state_dict()
            filled = with_tensors(plain[name], _over(flatten(f"{name}/state", current), tensors))
            other.load_state_dict(like(current, filled))
        for name, module in self.modules.items():
            for path, value in plain.get(name, {}).items():
                module.get_submodule(path).set_extra_state(value)


def _over(present: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``present`` with ``tensors`` in place of its own, as DTensors where its own are."""
    return {**present, **{path: part_like(tensor, present.get(path)) for path, tensor in tensors.items()}}


def _lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether the two have the same mesh, placements and shape."""
    return (one.device_mesh, one.placements, one.shape) == (other.device_mesh, other.placements, other.shape)


def _shard_of(parameter: torch.Tensor) -> str:
    """Return the placements and coordinates of this rank's shard as text; "" for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return ""
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    return " ".join(f"{p}@{coordinate[axis]}" for axis, p in enumerate(parameter.placements) if not p.is_replicate())
