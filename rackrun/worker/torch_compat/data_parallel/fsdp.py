"""Makes FSDP2 (``fully_shard``) and DeviceMesh elastic (torch 2.10 to 2.15): leaves a step in the middle, and gives a
built model another rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import debug

from rackrun.worker.tensors import module_walk

__all__ = [
    "PUTS_BACK",
    "WRITE_INTO",
    "begin",
    "clear_unreduced",
    "exchanged",
    "forget_meshes",
    "gradient_before_reduction",
    "has_meshes",
    "install",
    "is_gathered",
    "mesh_of_several_axes",
    "missing",
    "modules_of",
    "params",
    "promote_sharded",
    "reset",
    "reshard",
    "synchronise_gradients",
]

_meshes: list[weakref.ref[DeviceMesh]] = []
_beginnings = 0
"""How often the groups were forgotten."""


PUTS_BACK = "fully_shard keeps the parameters that it was given, and the next forward puts them back into their modules: the other would be dropped."
WRITE_INTO = (
    "write the new values into the parameter that there is: after optimizer.step(), with torch.no_grad(): module.weight.copy_(values); "
    "or exchange it in main, before fully_shard."
)


def missing() -> list[str]:
    """Return what this torch lacks, as messages."""
    known = "_coordinate_on_dim" in DeviceMesh.get_coordinate.__code__.co_names
    found = [] if known else ["DeviceMesh._coordinate_on_dim is gone"]
    return found + ([] if hasattr(_fsdp_param_group, "foreach_all_gather") else ["FSDP's foreach_all_gather is gone"])


def install() -> None:
    """Patch DeviceMesh and FSDP2.

    Every mesh is remembered, so that a promoted spare can be given its new place in each. And the gate learns which
    parameters are gathered: blocks have equal sizes, so nothing else would show that ranks gather different ones at a
    time.
    """
    init, gather = DeviceMesh.__init__, _fsdp_param_group.foreach_all_gather

    def remembered(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if getattr(self, "_thread_id", None) is not None:
            self._thread_id += _beginnings  # type: ignore[operator] # or it would equal one of former groups, in caches of any thread
        _meshes.append(weakref.ref(self))

    def told(params: list[Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() == group.world.size:
            group.world.order.add(f"{params[0]._param_fqn}")
        return gather(params, group, *args, **kwargs)

    DeviceMesh.__init__ = remembered  # type: ignore[method-assign]
    _fsdp_param_group.foreach_all_gather = told  # type: ignore[assignment]


def has_meshes() -> bool:
    """Whether a DeviceMesh was made and still exists."""
    return any(ref() is not None for ref in _meshes)


def mesh_of_several_axes() -> bool:
    """Whether such a mesh has more than one axis."""
    return any(mesh.ndim > 1 for ref in _meshes if (mesh := ref()) is not None)


def forget_meshes() -> None:
    """Forget all meshes, whose groups are gone. DTensor's caches are cleared as well, and no new mesh will equal an old
    one."""
    global _beginnings  # noqa: PLW0603 - of the process, as the groups are
    _beginnings += 1
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    _meshes.clear()


def modules_of(module: nn.Module) -> list[FSDPModule]:
    """Return the modules inside ``module`` on which ``fully_shard`` was called, as the other functions take them."""
    return [sub for _, sub in module_walk.modules(module) if isinstance(sub, FSDPModule)]


def begin(subs: Sequence[FSDPModule]) -> None:
    """Forget, before a unit, forward passes without a backward pass (an evaluation's). FSDP would prefetch for them in
    the next backward pass, and find its root gathered already: a newcomer, which has not evaluated, does not make those
    all-gathers."""
    if subs:
        found = params(subs)
        unsharded = [getattr(param, "_unsharded_param", None) for param in found]
        _begin(subs, [*[param.sharded_param for param in found], *[leaf for leaf in unsharded if leaf is not None]])


def reset(subs: Sequence[FSDPModule]) -> None:
    """Drop unsharded gradients and parameters, and the iteration's state, after an abandoned forward or backward
    pass."""
    _begin(subs, [param.sharded_param for param in params(subs)])
    for param in params(subs):
        if _accumulated(param) is not None:
            param.unsharded_accumulated_grad = None
        for leaf in _leaves(param)[1:]:
            leaf.grad = None


def _begin(subs: Sequence[FSDPModule], keep: Sequence[torch.Tensor]) -> None:
    """Reset the iteration. ``keep``: tensors whose gradients stay. torch 2.15 drops all gradients, and then a step that
    adds to the gradients of the one before would go unnoticed."""
    kept = [leaf.grad for leaf in keep]
    for state in _states(subs):
        if state._is_root:
            _forget_iteration(state)
    reshard(subs)
    for leaf, gradient in zip(keep, kept, strict=True):
        if leaf.grad is not gradient:
            leaf.grad = gradient


def gradient_before_reduction(param: Any) -> tuple[torch.Tensor | None, str]:
    """Return what backward passes without synchronisation have left for the whole parameter, or None, and the name of
    the attribute that holds this tensor-parallel rank's part of it."""
    held = _accumulated(param)
    if held is not None:
        return held, "unsharded_accumulated_grad_data"
    unsharded = _leaves(param)[1:]
    return (unsharded[0].grad if unsharded else None), "unsharded_grad_data"


def clear_unreduced(param: Any) -> None:
    """Set all these gradients to zero."""
    for gradient in (_accumulated(param), *(leaf.grad for leaf in _leaves(param)[1:])):
        if gradient is not None:
            gradient.zero_()


def _accumulated(param: Any) -> torch.Tensor | None:
    """Return the gradient that is not reduced yet, or None. Up to torch 2.14 it moves here from the unsharded
    parameter; later versions leave it there, and have a property of this name that cannot be set."""
    held: torch.Tensor | None = vars(param).get("unsharded_accumulated_grad")
    return held


def _leaves(param: Any) -> list[torch.Tensor]:
    """Return the tensors that hold a gradient: the shard, and the whole parameter once it was gathered."""
    unsharded = getattr(param, "_unsharded_param", None)
    return [param.sharded_param] if unsharded is None else [param.sharded_param, unsharded]


def reshard(subs: Sequence[FSDPModule]) -> None:
    """Make every parameter its local shard, as between units. (A forward pass without a backward pass leaves the root
    unsharded.)"""
    for sub in subs:
        sub.reshard()


def is_gathered(subs: Sequence[FSDPModule]) -> bool:
    """Whether any parameter is gathered now."""
    states = [param.sharded_state for param in params(subs)]
    return states.count(ShardedState.SHARDED) < len(states)


def exchanged(subs: Sequence[FSDPModule]) -> Iterator[tuple[nn.Module, str]]:
    """Yield module and name of each parameter that was put in the place of FSDP's own. The next forward pass drops
    it."""
    for param in params(subs):
        held_by = param._module_info
        own = (
            param.sharded_param,
            *(vars(param).get(name) for name in ("_unsharded_param", "_sharded_post_forward_param")),
        )
        modules, names = (held_by.module, *held_by.shared_modules), (held_by.param_name, *held_by.shared_param_names)
        for module, name in zip(modules, names, strict=True):
            held = module._parameters.get(name)
            if held is not None and not any(held is one for one in own):
                yield module, name


def synchronise_gradients(subs: Sequence[FSDPModule], last: bool) -> None:
    """Set whether the coming backward pass reduces gradients (``last``)."""
    for sub in subs:
        sub.set_requires_gradient_sync(last, recurse=False)
        sub.set_is_last_backward(last)


def promote_sharded(modules: Iterable[nn.Module], rank: int, meshes: Iterable[DeviceMesh] | None = None) -> None:
    """Give a model that was built as another rank the place of ``rank``: mesh coordinates, shard index, shard sizes.

    ``meshes``: by default all that this process has made. Its groups must have their new ranks already. The caller then
    copies or loads the shards' content.
    """
    for mesh in [mesh for ref in _meshes if (mesh := ref()) is not None] if meshes is None else meshes:
        mesh._rank = rank
        found = (mesh.mesh == rank).nonzero().tolist()
        mesh._coordinate_on_dim = tuple(found[0]) if found else None
    for module in modules:
        subs = modules_of(module)
        for group in _groups(_states(subs)):
            for info in {id(i): i for i in (group.mesh_info, group.post_forward_mesh_info) if i is not None}.values():
                if hasattr(info, "shard_process_group"):
                    info.shard_mesh_rank = info.shard_process_group.rank()
                if hasattr(info, "replicate_process_group"):
                    info.replicate_mesh_rank = info.replicate_process_group.rank()
        for param in params(subs):
            _reshape_shard(param)


def _forget_iteration(root: Any) -> None:
    if hasattr(root, "_reset_iter_state"):  # torch 2.13
        root._reset_iter_state()
        return
    stream, comm = root._device_handle.current_stream(), root._comm_ctx
    for in_flight in (comm.all_gather_state, comm.reduce_scatter_state):
        if in_flight is not None and in_flight.event is not None:
            stream.wait_event(in_flight.event)
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
    for group in _groups(root._state_ctx.all_states):
        group.finalize_backward()
        group._partial_reduce_output = None
        group._training_state = TrainingState.IDLE
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _reshape_shard(param: Any) -> None:
    """Resize a shard for the new rank, as a view of the padded shard: ranks at the end of an uneven dimension hold
    less."""
    dim = param.fsdp_placement.dim
    whole, padded = param._orig_size[dim], param.padded_sharded_param_size[dim]
    start = min(param.mesh_info.shard_mesh_rank * padded, whole)
    length = min(padded, whole - start)
    if param.sharded_size[dim] == length:
        return
    size = list(param.sharded_size)
    size[dim] = length
    local = param._sharded_param_data.view(param.padded_sharded_param_size).narrow(dim, 0, length)
    param.sharded_size = torch.Size(size)
    param.contiguous_sharded_stride = torch.empty(size, device="meta").stride()
    param.sharded_param._local_tensor = local
    param.sharded_param.grad = None


def _states(subs: Sequence[FSDPModule]) -> list[Any]:
    return [sub._get_fsdp_state() for sub in subs]


def _groups(states: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)  # a single group up to torch 2.12
        if several is not None:
            found += several
        elif state._fsdp_param_group:
            found.append(state._fsdp_param_group)
    return found


def params(subs: Sequence[FSDPModule]) -> list[Any]:
    """Return torch's own objects for all parameters that ``fully_shard`` manages."""
    return list(chain.from_iterable([group.fsdp_params for group in _groups(_states(subs))]))
