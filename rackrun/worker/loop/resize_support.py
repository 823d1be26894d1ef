"""Whether the world may change its size under this script: in place, without any process, model or optimizer being made anew, or
by entering ``main`` again in the same process.

In place, when nothing that the script built depends on the number of ranks: models under DDP, whose replicas are whole, and groups
of all ranks. What FSDP2 builds has sizes of its own for each number of ranks: that is made anew, and its contents are put together
from the old ranks' shards, where it is known which part of the whole every shard is.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.tensor_entries import entries_of
from rackrun.worker.batch.mesh_axes import Axes
from rackrun.worker.membership.worker_membership import World
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp

__all__ = ["fixed_because", "held_because"]


def held_because(state: TrackedState, world: World, axes: Axes) -> str:
    """Why this script's ``main`` cannot be entered again with another number of ranks; "" when it can."""
    if not axes and (fsdp.mesh_of_several_axes() or world.families.part_of(world.size)):
        return "it is not known which axes its groups lie along (@rackrun.elastic(mesh=...) would say)"
    for name, module in state.modules.items():
        for path, parameter in module.named_parameters():
            try:
                entries_of({path: parameter})
            except (LayoutMismatch, ValueError):
                return f"which part of {name}.{path} a rank has is not known"
    return ""


def fixed_because(state: TrackedState, world: World) -> str:
    """What holds this script to its number of ranks, in place; "" when nothing does."""
    reduced: set[int] = set()
    for wrapper in state.wrappers():
        reduced.update(map(id, ddp.reduced_by(wrapper)))
    for name, module in state.modules.items():
        for path, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                return f"{name}.{path} is sharded"
            if parameter.requires_grad and id(parameter) not in reduced:
                return f"{name}.{path} is trained outside of DDP"
    if part := world.families.part_of(world.size):
        return f"the script has made {part}"
    return "the script has made a DeviceMesh" if fsdp.has_meshes() else ""
