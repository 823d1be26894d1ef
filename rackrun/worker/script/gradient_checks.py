"""Checks before optimizer.step() that the gradients were weighted by micro-batch, and reduced over the ranks.

Gradients of a loss that was not weighted are recorded in the backward pass (`GradientChecks.watch_unweighted`). Whether
gradients were reduced shows by the number of elements that went through collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rackrun.errors import StepError
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.script.user_line import user_line
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.torch_compat import zero_grad
from rackrun.worker.torch_compat.data_parallel import ddp

__all__ = ["GradientChecks", "has_gradient"]

_LITTLE = 64
"""Gradients count as not reduced if fewer elements than one in this many went through collectives, compressed or
not."""
_GRAD, _IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")


@dataclass(frozen=True)
class _Stray:
    """A gradient that contains a part that was not weighted."""

    line: str
    gradient: weakref.ref[torch.Tensor] | None
    """The gradient; None where it cannot be inspected (FSDP)."""
    cleared: int
    cleared_in_place: int

    def is_in(self, gradient: torch.Tensor | None) -> bool:
        if self.gradient is None:
            return self.cleared == zero_grad.cleared()
        return (
            gradient is not None
            and gradient is self.gradient()
            and self.cleared_in_place == zero_grad.cleared_in_place()
        )


class GradientChecks:
    """The checks of one entry of ``main``. ``data_ranks``: returns how many ranks share the global batch. ``reduced``:
    whether gradients must be reduced."""

    def __init__(
        self, world: WorkerMembership, state: TrackedState, data_ranks: Callable[[], int], *, reduced: bool
    ) -> None:
        self._world, self._state, self._data_ranks = world, state, data_ranks
        self._are_to_be_reduced = reduced
        self._strays: dict[int, tuple[weakref.ref[torch.Tensor], _Stray]] = {}
        self._stray_of_shards: _Stray | None = None
        self._reduced: set[int] = set()
        """Optimizers, by `id`, that were checked in this attempt."""

    def begin_attempt(self) -> None:
        """Forget what the attempt before has shown."""
        self._strays.clear()
        self._stray_of_shards = None
        self._reduced.clear()
        self._world.traffic = 0

    def watch_unweighted(self, leaves: Sequence[torch.Tensor], line: str) -> Callable[[], None]:
        """Return a function to be called after a backward pass at ``line`` whose loss was not weighted. It records the
        gradients of ``leaves``, which that pass has changed."""

        def over() -> None:
            mine = {id(parameter) for parameter in self._state.parameters()}
            for leaf in leaves:
                count = zero_grad.cleared(), zero_grad.cleared_in_place()
                if id(leaf) in mine and leaf.grad is not None:
                    self._strays[id(leaf)] = weakref.ref(leaf), _Stray(line, weakref.ref(leaf.grad), *count)
                elif id(leaf) not in mine and isinstance(leaf, nn.Parameter) and self._state.sharded():
                    self._stray_of_shards = _Stray(line, None, *count)

        return over

    def check_weighted(self, optimizer: Any, line: str) -> None:
        """Raise `StepError` if a gradient of ``optimizer`` contains a part that was not weighted. ``line``: the script's
        line if no loss of the attempt was weighted, or ""."""
        of_shards = self._stray_of_shards
        parameters = _with_gradients(optimizer) if self._strays or of_shards is not None else []
        for parameter in parameters:
            ref, stray = self._strays.get(id(parameter), (None, None))
            if stray is not None and ref is not None and ref() is parameter and stray.is_in(parameter.grad):
                line = stray.line
                break
        if of_shards is not None and any(isinstance(p, DTensor) for p in parameters):
            line = of_shards.line if of_shards.is_in(None) else line
        if line:
            raise StepError(
                f"{line}: a gradient comes from a loss that was not weighted by this micro-batch's part of the global batch, so the sum is not "
                "the gradient of the mean over it.",
                remedy="call step.backward(loss) in place of loss.backward(), for every loss; or step.scale(loss).backward().",
            )

    def check_reduced(self, optimizer: Any) -> None:
        """Raise `StepError` if gradients of ``optimizer`` were not reduced over the ranks. Each optimizer is checked once
        in an attempt."""
        machine = self._world.machine
        if (
            not self._are_to_be_reduced
            or id(optimizer) in self._reduced
            or self._data_ranks() < 2
            or machine.broken
            or not machine.generation
        ):
            return
        self._reduced.add(id(optimizer))
        parameters = _with_gradients(optimizer)
        self._check_none_outside(optimizer, parameters)
        elements = _elements([parameter for parameter in parameters if not isinstance(parameter, DTensor)])
        if self._world.traffic * _LITTLE < elements:
            frozen = [p for wrapper in self._state.wrappers() for p in ddp.reduced_by(wrapper) if not p.requires_grad]
            if frozen and self._held_by_ddp().issuperset(map(id, parameters)):
                raise StepError(
                    f"{user_line()}: the gradients of {type(optimizer).__name__} were not reduced over the ranks: DistributedDataParallel waits for "
                    f"that of {self._state.name_of(frozen[0])}, which was frozen after it was made.",
                    remedy="freeze parameters before DistributedDataParallel is made, or pass it find_unused_parameters=True.",
                )
            if self._held_by_ddp().issuperset(map(id, parameters)):
                raise StepError(
                    f"{user_line()}: the gradients of {type(optimizer).__name__} were not reduced over the ranks: DistributedDataParallel "
                    "reduces them in the backward pass of the last micro-batch, and this rank made none.",
                    remedy="call step.backward in every micro-batch, also in one that is to be skipped: with a loss of 0 that is computed from "
                    "other inputs; and leave no_sync() alone.",
                )
            raise StepError(
                f"{user_line()}: the gradients of {type(optimizer).__name__} were not reduced over the ranks before its step(), so each would train a model of its own.",
                remedy="wrap the model in DistributedDataParallel or fully_shard, or all_reduce its gradients before optimizer.step(). An optimizer that "
                "reduces them itself, and keeps a part of its state on each rank (ZeRO-1), cannot be restored: fully_shard shards that state too. "
                'Where ranks are to train apart: @rackrun.elastic(reduction="none").',
            )

    def _check_none_outside(self, optimizer: Any, parameters: Sequence[torch.Tensor]) -> None:
        """Raise `StepError` if DDP has reduced what it holds and nothing else was, so that some of this optimizer's
        parameters are trained outside of it."""
        known = self._held_by_ddp()
        outside = [p for p in parameters if not isinstance(p, DTensor) and id(p) not in known]
        if not outside:
            return
        used = [one for one in self._state.wrappers() if any(p.grad is not None for p in one.module.parameters())]
        reduced = sum(p.numel() for wrapper in used for p in ddp.reduced_by(wrapper))
        ignored = {id(p) for wrapper in used for p in ddp.ignored_by(wrapper)}
        outside = [p for p in outside if id(p) not in ignored]
        if outside and 0 < reduced <= self._world.traffic < reduced + _elements(outside) / 2:
            raise StepError(
                f"{user_line()}: the gradients of {len(outside)} parameter{'s' if len(outside) > 1 else ''} of {type(optimizer).__name__} were "
                f"not reduced over the ranks, so each would train its own (the first: {self._state.name_of(outside[0])}).",
                remedy="make DistributedDataParallel of a module that has them, and before a part of it is frozen: it leaves out what has "
                "requires_grad=False by then. Or all_reduce their gradients before optimizer.step().",
            )

    def _held_by_ddp(self) -> set[int]:
        return {id(p) for wrapper in self._state.wrappers() for p in ddp.reduced_by(wrapper)}


def has_gradient(optimizer: Any) -> bool:
    """Return whether some parameter of ``optimizer`` has a gradient."""
    return any(gradient is not None for gradient in map(_GRAD, _trained_by(optimizer)))  # usually the first one


def _trained_by(optimizer: Any) -> Iterator[torch.Tensor]:
    return chain.from_iterable([group["params"] for group in optimizer.param_groups])


def _with_gradients(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for parameter in _trained_by(optimizer) if parameter.grad is not None]


def _elements(parameters: Sequence[torch.Tensor]) -> int:
    """Return the number of elements of the parameters' gradients; of sparse ones, those that are stored."""
    gradients = list(map(_GRAD, parameters))
    if any(map(_IS_SPARSE, gradients)):
        return sum(
            [g._values().numel() if g.is_sparse else p.numel() for p, g in zip(parameters, gradients, strict=True)]
        )
    return sum(map(torch.Tensor.numel, parameters))
