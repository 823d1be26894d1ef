"""Predicts how much state torch's optimizers will hold, before their first step."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Adam, NAdam, Optimizer, RAdam
from torch.optim.sgd import SGD

from rackrun.worker.tensors.tensor_bytes import local_part

__all__ = ["bytes_to_come"]

_ROOM = 2048
"""Bytes for an image's description of one tensor."""


def bytes_to_come(optimizers: Iterable[Optimizer]) -> int | None:
    """Return the bytes that optimizers without state will add to an image for the trained parameters, rather a little
    too much.

    Returns None if one of them is of an unknown class.
    """
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
                found += held * (local_part(parameter).nbytes + _ROOM) + _ROOM  # the last for its step counter
    return found


def _tensors_for_each(optimizer: Optimizer, group: dict[str, object]) -> int | None:
    """Return how many tensors of the parameter's size an optimizer holds for each parameter; None for an unknown
    class."""
    if isinstance(optimizer, Adam | NAdam | RAdam):  # AdamW is an Adam
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, SGD):
        return 1 if group["momentum"] else 0
    return None
