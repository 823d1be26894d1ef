"""Multiplies the learning rates of an optimizer only while its ``step()`` runs.

A scheduler, a checkpoint and ``run.log`` see the script's own rates, so nothing is multiplied twice, and nothing is
lost when one of them writes a rate.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import torch

from rackrun.errors import StepError

__all__ = ["LearningRates"]


class LearningRates:
    """The learning rates that are scaled at the moment."""

    def __init__(self) -> None:
        self._scaled: dict[int, list[tuple[dict[str, Any], Any, Any]]] = {}
        """Optimizer (by ``id``) -> its groups, each with the script's own learning rate and the scaled one."""

    def check(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Raise `StepError` for an optimizer with a group without a learning rate."""
        for index, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            fits = isinstance(rate, numbers.Real) or (isinstance(rate, torch.Tensor) and rate.is_floating_point())
            if not fits:
                raise StepError(
                    f'{name!r} has no learning rate that batch="scale_lr" could scale: "lr" of group {index} is {rate!r}.',
                    remedy='give it one, or use batch="constant".',
                )

    def scale(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply the rates before the optimizer's ``step()``. Groups shared with an optimizer that is inside its
        ``step()`` already (a wrapper) are left alone."""
        if factor == 1.0 or id(optimizer) in self._scaled:
            return
        busy = {id(group) for groups in self._scaled.values() for group, _, _ in groups}
        found: list[tuple[dict[str, Any], Any, Any]] = []
        tensors: set[int] = set()
        for group in optimizer.param_groups:
            own = group["lr"]
            if id(group) in busy or id(own) in tensors:
                continue
            if isinstance(
                own, torch.Tensor
            ):  # in place, because a graph or kernel may refer to it, and groups may share it
                tensors.add(id(own))
                before = own.detach().clone()
                with torch.no_grad():
                    own.mul_(factor)
                found.append((group, before, own))
            else:
                group["lr"] = own * factor
                found.append((group, own, group["lr"]))
        self._scaled[id(optimizer)] = found

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the script's own rates after the optimizer's ``step()``."""
        _put_back(self._scaled.pop(id(optimizer), ()))

    def restore_all(self) -> None:
        """Restore the rates of all optimizers whose ``step()`` was interrupted."""
        for groups in self._scaled.values():
            _put_back(groups)
        self._scaled.clear()


def _put_back(groups: Iterable[tuple[dict[str, Any], Any, Any]]) -> None:
    for group, own, scaled in groups:
        if group["lr"] is not scaled:
            continue  # a hook of the script has written the rate meanwhile; its value stays
        if isinstance(scaled, torch.Tensor):
            with torch.no_grad():
                scaled.copy_(own)
        else:
            group["lr"] = own
