"""Decides whether the world may change its size under this script: in place, by entering ``main`` again, or not at all.

In place: no process, model or optimizer is made anew. This is possible when nothing that the script built depends on
the number of ranks: models under DDP, whose replicas are whole, and groups of all ranks. What FSDP2 builds has other
sizes for each number of ranks. It is made anew by entering ``main`` again in the same process, and filled from the old
ranks' shards, if the part of the whole tensor that each shard holds is known.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.tensor_entries import entries_of
from rackrun.worker.batch.mesh_axes import Axes
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp

__all__ = ["fixed_because", "held_because"]


def held_because(state: TrackedState, world: WorkerMembership, axes: Axes) -> str:
    """Return why ``main`` cannot be entered again with another number of ranks, for a message; "" when it can."""
    if not axes and (fsdp.mesh_of_several_axes() or world.group_registry.part_of(world.size)):
        return "it is not known which axes its groups lie along (@rackrun.elastic(mesh=...) would say)"
    for name, module in state.modules.items():
        for path, parameter in module.named_parameters():
            try:
                entries_of({path: parameter})
            except (LayoutMismatch, ValueError):
                return f"which part of {name}.{path} a rank has is not known"
    return ""


def fixed_because(state: TrackedState, world: WorkerMembership) -> str:
    """Return why the number of ranks cannot change in place under this script, for a message; "" when it can."""
    reduced: set[int] = set()
    for wrapper in state.wrappers():
        reduced.update(map(id, ddp.reduced_by(wrapper)))
    for name, module in state.modules.items():
        for path, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                return f"{name}.{path} is sharded"
            if parameter.requires_grad and id(parameter) not in reduced:
                return f"{name}.{path} is trained outside of DDP"
    if part := world.group_registry.part_of(world.size):
        return f"the script has made {part}"
    return "the script has made a DeviceMesh" if fsdp.has_meshes() else ""
