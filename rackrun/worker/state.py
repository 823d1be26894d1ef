"""What a worker trains: the tracked objects, seen as named tensors and plain values.

Three things are done with it. An abandoned unit is *discarded*: what forward and backward may have changed is put back to
where the unit began. A newcomer is *filled*: tensors are copied straight into its own, which the source's manifest
allocates where they do not exist yet (an optimizer that has made no step has no state). And a shard that exists only here
is *written out* (`rackrun.worker.snapshot`). No tensor is ever pickled; what is not a tensor travels as msgpack.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import StepError
from rackrun.worker.compat import ddp, fsdp, grads
from rackrun.worker.plain import flatten, like, with_tensors, without_tensors
from rackrun.worker.tensor_bytes import dense_bytes, digest

__all__ = ["Manifest", "TensorInfo", "TrackedState"]

_SMALL_BUFFER_BYTES = 2**20
_GRADS_LOOKED_AT = 3


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as it lies on a rank. ``shape`` is the local shard's."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    """On the CPU although the model is not (an optimizer's step counter)."""
    like_param: bool
    """An optimizer's tensor that is sharded as its parameter is."""
    strides: tuple[int, ...] = ()
    """Of one dense block that is not row-major (channels_last); its bytes travel in the order in which they lie."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        if self.strides:
            return torch.empty_strided(self.shape, self.strides, dtype=self.torch_dtype, device=device)
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's bytes as this tensor."""
        typed = flat.view(self.torch_dtype)
        return torch.as_strided(typed, self.shape, self.strides) if self.strides else typed.view(self.shape)


class Manifest(msgspec.Struct, frozen=True):
    tensors: list[TensorInfo]
    plain: bytes
    """Everything that is not a tensor, msgpack."""
    replica_class: str = ""


class TrackedState:
    """The objects given to ``run.track``, in the order given."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.others: dict[str, Any] = {}
        self._saved: dict[str, _Saved] = {}
        """Buffers, and tensors of other tracked objects and of parameter groups, as they were when the unit began."""
        self._norm_buffers: set[str] | None = None
        self._saved_plain = b""
        self._submodules: list[nn.Module] = []
        self._modes: list[bool] = []
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._grads_present: dict[int, bool] = {}
        self._grads_found: list[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = []
        self._cleared = -1

    def track(self, name: str, thing: Any) -> None:
        if name in self.modules or name in self.optimizers or name in self.others:
            raise StepError(f"run.track was given {name!r} twice.", remedy="use another name for the second.")
        _refuse(name, thing)
        if isinstance(thing, nn.Module):
            self.modules[name] = thing
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers[name] = thing
        elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self.others[name] = thing
        else:
            raise StepError(
                f"run.track was given {name!r}, a {type(thing).__name__} without state_dict and load_state_dict.",
                remedy="give it both, or keep what it holds in a tracked object.",
            )

    def __bool__(self) -> bool:
        return bool(self.modules or self.optimizers or any(not name.startswith("rackrun.") for name in self.others))

    def check_complete(self) -> None:
        """Raises `StepError` when a tracked optimizer trains a parameter of a module that is not tracked."""
        known = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        for name, optimizer in self.optimizers.items():
            strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
            if strangers:
                raise StepError(
                    f"{name!r} trains {len(strangers)} parameter(s) of no tracked module (first: shape {tuple(strangers[0].shape)}).",
                    remedy="pass the module that owns them to run.track as well.",
                )

    # -- discard
    def begin_unit(self) -> None:
        """Remember what forward and backward may change. Large constant buffers cost nothing: only changed ones are copied."""
        for wrapper in self._ddps():
            ddp.begin(wrapper)
        for module in self.modules.values():
            fsdp.begin(module)
        for path, tensor in self._unstable():
            saved = self._saved.get(path)
            if saved is None or not saved.stands(tensor) or self._changes_unseen(path, tensor):
                self._saved[path] = _Saved(tensor)
        self._versions = [(weakref.ref(p), p._version) for p in self._parameters() if not isinstance(p, DTensor)]
        if not self._submodules:
            self._submodules = [module for root in self.modules.values() for module in root.modules()]
        self._modes = [module.training for module in self._submodules]
        self._saved_plain = self._encode_plain()
        self._grads_present = {id(p): p.grad is not None for p in self._parameters()}
        found = (p for p in self._parameters() if p.grad is not None)
        self._grads_found = [
            (p, weakref.ref(p.grad)) for p in itertools.islice(found, _GRADS_LOOKED_AT) if p.grad is not None
        ]

    def check_unchanged(self) -> None:
        """Before the first optimizer step of a unit: raises `StepError` when parameters are not those it began with."""
        for ref, version in self._versions:
            parameter = ref()
            if parameter is not None and parameter._version != version:
                raise StepError(
                    f"a parameter (shape {tuple(parameter.shape)}) was changed in a step before optimizer.step(), where it could not be put back.",
                    remedy="change parameters after optimizer.step().",
                )

    def versions(self) -> list[int]:
        """Of all parameters, this rank's part: equal as long as nothing was written to them."""
        return [_local(parameter)._version for parameter in self._parameters()]

    def check_gradients(self) -> None:
        """Before the first optimizer step of a unit. Raises `StepError` when gradients of an older step are still in the sum: the
        unit could not be repeated, because nobody has kept them."""
        if grads.cleared() == self._cleared and any(
            parameter.grad is found() for parameter, found in self._grads_found
        ):
            raise StepError(
                "gradients of the step before were not cleared, so this step adds to them, and could not be repeated.",
                remedy="call optimizer.zero_grad() in every step; to accumulate, use smaller micro-batches of one global batch.",
            )
        self._cleared = grads.cleared()

    def discard_unit(self, *, backward_open: bool) -> None:
        """Put back what the abandoned unit changed: gradients, buffers, scaler, scheduler, FSDP's and DDP's intermediate state.

        ``backward_open``: it was left before all of its backward passes had ended.
        """
        for module, training in zip(self._submodules, self._modes, strict=True):
            module.training = training
        with torch.no_grad():
            for module in self.modules.values():
                fsdp.reset(module)
            for wrapper in self._ddps() if backward_open else ():
                ddp.reset(wrapper)
            for parameter in self._parameters():
                if parameter.grad is not None:
                    if self._grads_present.get(id(parameter)):
                        parameter.grad.zero_()
                    else:
                        parameter.grad = None
            changed = False
            for path, tensor in self._unstable():
                saved = self._saved.get(path)
                if saved is None or (saved.stands(tensor) and not self._changes_unseen(path, tensor)):
                    continue
                changed = True
                if saved.value.shape == tensor.shape:
                    tensor.copy_(saved.value)
                    self._saved[path] = _Saved(tensor, saved.value)
        for other in self.others.values():
            if hasattr(other, "_per_optimizer_states"):  # GradScaler keeps what it unscaled
                other._per_optimizer_states.clear()
        if changed or self._encode_plain() != self._saved_plain:
            self._load_plain(self._saved_plain, {path: saved.value.clone() for path, saved in self._saved.items()})

    def synchronise_gradients(self, last: bool) -> None:
        """Gradient accumulation: communicate in the backward of the last micro-batch of a step only."""
        for wrapper in self._ddps():
            wrapper.require_backward_grad_sync = last
        for module in self.modules.values():
            fsdp.synchronise_gradients(module, last)

    # -- tensors
    def tensors(self) -> dict[str, torch.Tensor]:
        """Path -> this rank's part, as a tensor that may be written into."""
        for module in self.modules.values():
            fsdp.reshard(module)
        found: dict[str, torch.Tensor] = {}
        for name, module in self.modules.items():
            for path, parameter in module.named_parameters():
                found[f"{name}/param/{path}"] = _local(parameter)
            for path, buffer in module.named_buffers():
                found[f"{name}/buffer/{path}"] = _local(buffer)
        for name, optimizer in self.optimizers.items():
            for path, _, key, value in _optimizer_state(optimizer):
                if isinstance(value, torch.Tensor):
                    found[f"{name}/{path}/{key}"] = _local(value)
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}/group/{index}/{key}"] = value
        for name, other in self.others.items():
            found.update(flatten(f"{name}/state", other.state_dict()))
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Path -> every buffer of the tracked modules, this rank's part."""
        return dict(self._buffers())

    def manifest(self, replica_class: str) -> Manifest:
        like = {
            f"{name}/{path}/{key}"
            for name, optimizer in self.optimizers.items()
            for path, parameter, key, value in _optimizer_state(optimizer)
            if isinstance(value, DTensor) and isinstance(parameter, DTensor)
        }
        tensors = [
            TensorInfo(
                path,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                t.device.type == "cpu",
                path in like,
                () if t.is_contiguous() or dense_bytes(t) is None else tuple(t.stride()),
            )
            for path, t in self.tensors().items()
        ]
        return Manifest(tensors, self._encode_plain(), replica_class)

    def allocate(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Make this worker's tensors fit ``manifest`` (a source's), and return them by path, to be written into.

        Existing tensors are kept, so references to them stay good. Raises `StepError` when the script has built another
        model here than there.
        """
        present = self.tensors()
        wanted: dict[str, torch.Tensor] = {}
        owned = {f"{name}/group/" for name in self.optimizers} | {f"{name}/" for name in self.modules}
        for info in manifest.tensors:
            tensor = present.get(info.path)
            if tensor is not None and tuple(tensor.shape) == info.shape and str(tensor.dtype) == f"torch.{info.dtype}":
                wanted[info.path] = tensor
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

    def load_plain(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """The last act of filling: everything that is not a tensor, and the objects that are loaded as a whole."""
        self._load_plain(manifest.plain, tensors)
        self._saved.clear()  # what was written from outside has counted no version up

    def layout(self) -> str:
        """A hash that is equal on ranks whose parameters are the same shards of the same model."""
        digestible = hashlib.blake2b(digest_size=12)
        for name, module in self.modules.items():
            for path, parameter in module.named_parameters():
                digestible.update(
                    f"{name}/{path} {tuple(parameter.shape)} {parameter.dtype} {_shard_of(parameter)}\n".encode()
                )
        return digestible.hexdigest()

    @property
    def gathered(self) -> bool:
        """FSDP holds whole parameters just now."""
        return any(fsdp.is_gathered(module) for module in self.modules.values())

    def content(self, *, buffers: bool = False) -> int:
        """A digest of all state, ``buffers`` only if asked for: equal, bit for bit, on true replicas. 63 bits."""
        mixed = hashlib.blake2b(self._encode_plain(), digest_size=8)
        for path, tensor in sorted(self.tensors().items()):
            if buffers or "/buffer/" not in path:
                mixed.update(f"{path}:{digest(tensor)}\n".encode())
        return int.from_bytes(mixed.digest(), "little") >> 1

    # -- helpers
    def _changes_unseen(self, path: str, buffer: torch.Tensor) -> bool:
        """torch's batch norm writes its statistics without counting up their version; and who knows what a custom kernel does.
        Only large buffers (masks, tables) are believed to be what their version says."""
        if buffer.nbytes <= _SMALL_BUFFER_BYTES:
            return True
        path = path.removeprefix("buffer:")
        if self._norm_buffers is None:
            norms = [(f"{name}/{at}", sub) for name, root in self.modules.items() for at, sub in root.named_modules()]
            self._norm_buffers = {
                f"{at}.{name}".replace("/.", "/")
                for at, sub in norms
                if isinstance(sub, _NormBase)
                for name, _ in sub.named_buffers()
            }
        return path in self._norm_buffers

    def _parameters(self) -> Iterator[torch.Tensor]:
        for module in self.modules.values():
            yield from module.parameters()

    def _ddps(self) -> Iterator[DistributedDataParallel]:
        """Also inside what torch.compile returns."""
        for module in self.modules.values():
            inner = getattr(module, "_orig_mod", module)
            if isinstance(inner, DistributedDataParallel):
                yield inner

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, module in self.modules.items():
            for path, buffer in module.named_buffers():
                yield f"{name}/{path}", _local(buffer)

    def _unstable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What may change before the gate, other than parameters and gradients."""
        for path, buffer in self._buffers():
            yield f"buffer:{path}", buffer
        for name, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{name}/group/{index}/{key}", value
        for name, other in self.others.items():
            if not name.startswith("rackrun."):
                yield from flatten(f"{name}/state", other.state_dict()).items()

    def _allocate_one(self, info: TensorInfo) -> torch.Tensor:
        name, _, rest = info.path.partition("/")
        optimizer = self.optimizers.get(name)
        if optimizer is None:
            return info.empty()  # handed to load_state_dict
        _, group_index, index, key = rest.split("/", 3)
        parameter = optimizer.param_groups[int(group_index)]["params"][int(index)]
        device = torch.device("cpu") if info.on_host else parameter.device
        local = info.empty(device)
        value: torch.Tensor = local
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
        return _local(value)

    def _forget_others(self, wanted: Mapping[str, torch.Tensor]) -> None:
        for name, optimizer in self.optimizers.items():
            for path, parameter, key, value in list(_optimizer_state(optimizer)):
                if isinstance(value, torch.Tensor) and f"{name}/{path}/{key}" not in wanted:
                    del optimizer.state[parameter][key]

    def _encode_plain(self) -> bytes:
        plain: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            plain[name] = {
                "groups": [
                    {k: v for k, v in g.items() if k != "params" and not isinstance(v, torch.Tensor)}
                    for g in optimizer.param_groups
                ],
                "state": {
                    f"{path}/{key}": v
                    for path, _, key, v in _optimizer_state(optimizer)
                    if not isinstance(v, torch.Tensor)
                },
            }
        for name, other in self.others.items():
            plain[name] = without_tensors(f"{name}/state", other.state_dict())
        for name, module in self.modules.items():
            extra = {path: sub.get_extra_state() for path, sub in module.named_modules() if _has_extra_state(sub)}
            if extra:
                plain[name] = extra
        try:
            return msgspec.msgpack.encode(plain)
        except (TypeError, OverflowError) as error:
            raise StepError(
                f"tracked state holds something that is neither a tensor nor plain data: {error}.",
                remedy="return only tensors, numbers, strings, lists, tuples and dicts from state_dict.",
            ) from error

    def _load_plain(self, encoded: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        plain = msgspec.msgpack.decode(encoded, strict=False)
        for name, optimizer in self.optimizers.items():
            for group, values in zip(optimizer.param_groups, plain[name]["groups"], strict=True):
                for key, value in values.items():
                    group[key] = like(group.get(key), value)
            for path, parameter, key, old in list(_optimizer_state(optimizer)):
                if not isinstance(old, torch.Tensor) and f"{path}/{key}" not in plain[name]["state"]:
                    del optimizer.state[parameter][key]
            for parameter in [parameter for parameter, held in optimizer.state.items() if not held]:
                del optimizer.state[parameter]
            for path, value in plain[name]["state"].items():
                _, group_index, index, key = path.split("/", 3)
                optimizer.state[optimizer.param_groups[int(group_index)]["params"][int(index)]][key] = value
        for name, other in self.others.items():
            current = other.state_dict()
            filled = with_tensors(plain[name], {**flatten(f"{name}/state", current), **tensors})
            other.load_state_dict(like(current, filled))
        for name, module in self.modules.items():
            for path, value in plain.get(name, {}).items():
                module.get_submodule(path).set_extra_state(value)


class _Saved:
    """A tensor, and what it was."""

    def __init__(self, tensor: torch.Tensor, value: torch.Tensor | None = None) -> None:
        self._tensor, self._version = tensor, tensor._version
        self.value = tensor.clone() if value is None else value

    def stands(self, tensor: torch.Tensor) -> bool:
        """As far as its version tells."""
        mine = self._tensor
        same = tensor.data_ptr() == mine.data_ptr() and tensor.shape == mine.shape and tensor.stride() == mine.stride()
        return same and tensor._version == self._version


def _refuse(name: str, thing: Any) -> None:
    """What cannot be given another rank, and so could not be swapped in, is said now."""
    if any(
        kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(thing).__mro__
    ):  # importing it warns, and is slow
        raise StepError(
            f"run.track was given {name!r}, a ZeroRedundancyOptimizer: which parameters it holds state for is fixed when it is made.",
            remedy="use fully_shard (FSDP2), which shards optimizer state too, or a plain optimizer.",
        )
    if isinstance(thing, nn.Module) and any(isinstance(module, FullyShardedDataParallel) for module in thing.modules()):
        raise StepError(
            f"run.track was given {name!r}, which uses FullyShardedDataParallel (FSDP1): its flat shards cannot be given another rank.",
            remedy="use fully_shard (FSDP2).",
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_of(parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return ""
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    return " ".join(f"{p}@{coordinate[axis]}" for axis, p in enumerate(parameter.placements) if not p.is_replicate())


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, str, Any]]:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            for key in sorted(optimizer.state.get(parameter, {})):
                yield f"state/{group_index}/{index}", parameter, key, optimizer.state[parameter][key]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
