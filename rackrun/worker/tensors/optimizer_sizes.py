"""How much torch's optimizers will hold, before they have made their first step."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Adam, NAdam, Optimizer, RAdam
from torch.optim.sgd import SGD

from rackrun.worker.tensors.tensor_bytes import local_part

__all__ = ["bytes_to_come"]

_ROOM = 2048
"""For what an image says of a tensor, beside its bytes."""


def bytes_to_come(optimizers: Iterable[Optimizer]) -> int | None:
    """In an image, by optimizers that hold nothing yet, for the parameters that are trained; rather a little too much. None: one of them is of a
    class that is not known here."""
    found = 0
    for optimizer in optimizers:
        if optimizer.state:
            continue
        for group in optimizer.param_groups:
            held = _tensors_for_each(optimizer, group)
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if held is None:
                    return None
                found += held * (local_part(parameter).nbytes + _ROOM) + _ROOM  # and its count of steps
    return found


def _tensors_for_each(optimizer: Optimizer, group: dict[str, object]) -> int | None:
    """As large as the parameter."""
    if isinstance(optimizer, Adam | NAdam | RAdam):  # AdamW is an Adam
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, SGD):
        return 1 if group["momentum"] else 0
    return None
