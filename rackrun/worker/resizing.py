"""Whether the world may change its size under this script, in place: without any process, model or optimizer being made anew.

It may when nothing that the script built depends on the number of ranks: models under DDP, whose replicas are whole, and groups
of all ranks. What FSDP2 builds has sizes of its own for each number of ranks.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from rackrun.worker.compat import ddp, fsdp
from rackrun.worker.state import TrackedState
from rackrun.worker.world import World

__all__ = ["fixed_because"]


def fixed_because(state: TrackedState, world: World) -> str:
    """What holds this script to its number of ranks; "" when nothing does."""
    reduced: set[int] = set()
    for wrapper in state.wrappers():
        reduced |= ddp.parameters_of(wrapper)
    for name, module in state.modules.items():
        for path, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                return f"{name}.{path} is sharded"
            if parameter.requires_grad and id(parameter) not in reduced:
                return f"{name}.{path} is trained outside of DDP"
    if part := world.families.part_of(world.size):
        return f"the script has made {part}"
    return "the script has made a DeviceMesh" if fsdp.has_meshes() else ""
