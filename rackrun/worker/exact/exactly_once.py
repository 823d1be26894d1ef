"""Checks that the gradient of every micro-batch enters the sum on its own, and exactly once, as ``reduction="exact"``
requires.

A script can do otherwise: one ``backward()`` for several micro-batches, none that is synchronised, a second pass over
the data. Then bits would depend on the number of ranks, or gradients would be left out, and nothing else would show it.
Here it raises `StepError`. The check follows which gradients a backward pass has touched, by their versions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from rackrun.errors import StepError
from rackrun.worker.data.loader import Shard
from rackrun.worker.steps.step import Step

__all__ = ["ExactlyOnce", "ParameterSum"]


class ParameterSum:
    """One parameter's part in the sum of this attempt."""

    def __init__(self, index: int, name: str, parameter: torch.Tensor) -> None:
        self.index, self.name, self.parameter = index, name, parameter
        self.sums: torch.Tensor | None = None
        self.fresh = True
        """Whether ``sums`` holds nothing of this attempt."""
        self.reduced = False
        """Whether the sums were reduced over ranks in this attempt."""


class ExactlyOnce:
    """The checks of one attempt at a step."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._shard: Shard | None = None
        self._data_ranks = 0
        self._delivered: set[int] = set()
        self._ahead: int | None = None
        """The first micro-batch of the attempt that had neither a loss nor a gradient when the next one was asked for."""
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    @property
    def begun(self) -> bool:
        """Whether an attempt is in progress."""
        return self._step is not None

    @property
    def shard(self) -> Shard | None:
        """The current micro-batch."""
        return self._shard

    def begin(self, step: Step, gradients: Iterable[tuple[ParameterSum, torch.Tensor]]) -> None:
        """Begin an attempt. ``gradients``: those that exist already, from another step."""
        self._step, self._shard, self._ahead = step, None, None
        self._delivered.clear()
        self.leave(gradients)

    def end(self) -> None:
        """End the attempt."""
        self._step = self._shard = None

    def next(self, shard: Shard, data_ranks: int) -> None:
        """Begin the micro-batch ``shard``; ``data_ranks`` ranks share the global batch. Raises `StepError` if it was
        delivered before in this step."""
        if not shard.ghost and shard.index in self._delivered:
            raise StepError(
                f"micro-batch {shard.index} was delivered twice in one step.",
                remedy='iterate over one loader, once, in a step with reduction="exact": put what belongs together into one data set.',
            )
        self._shard, self._data_ranks = shard, data_ranks
        if not shard.ghost:
            self._delivered.add(shard.index)

    # -- what a rank has computed alone
    def leave(self, gradients: Iterable[tuple[ParameterSum, torch.Tensor]]) -> None:
        """Remember these gradients as known."""
        self._left = {slot.index: (weakref.ref(gradient), gradient._version) for slot, gradient in gradients}

    def is_new(self, slot: ParameterSum, gradient: torch.Tensor) -> bool:
        """Whether a backward pass has added to the gradient since `leave`."""
        known = self._left.get(slot.index)
        return known is None or known[0]() is not gradient or known[1] != gradient._version

    def taken(self, *, any_new: bool) -> None:
        """Note that the gradients of the current micro-batch were taken over. Raises `StepError` when it has a loss and
        there were none."""
        assert self._step is not None, "inside of a step"
        assert self._shard is not None, "it had one in hand"
        if any_new or self._shard.ghost:
            return
        if self._shard.index not in (self._step._shard_losses or {}):
            self._ahead = self._shard.index if self._ahead is None else self._ahead
        else:
            raise StepError(
                f"micro-batch {self._shard.index} has a loss, but no gradient when the next one is asked for.",
                remedy='call backward() for each micro-batch, before the loader gives the next: reduction="exact" rounds each gradient by itself.',
            )

    # -- what all ranks have
    def reduces(self, slots: Sequence[ParameterSum], ranks: int, *, passed: bool) -> bool:
        """Note that ``slots`` are reduced now over ``ranks`` ranks, and return whether their gradients count: a ghost's
        do not.

        ``passed``: whether the gate has passed. Raises `StepError` where exact reduction is impossible.
        """
        if self._step is None or self._shard is None or passed:
            raise StepError(
                'gradients were reduced where reduction="exact" cannot: before the first micro-batch, after optimizer.step(), or in a phase.',
                remedy="iterate over run.loader(...) in the @run.step function, and call every backward() before the first optimizer.step(); "
                'where that cannot be, as in a GAN, use reduction="fast".',
            )
        if any(slot.reduced for slot in slots):
            if self._ahead is not None:
                raise StepError(
                    f"the micro-batch after micro-batch {self._ahead} was taken from run.loader before the backward pass of "
                    f'micro-batch {self._ahead}, so gradients of two were reduced as those of one: reduction="exact" rounds the '
                    "gradient of each micro-batch by itself, and takes it for that of the micro-batch that was taken last.",
                    remedy="call step.backward for a micro-batch before you take the next one, also through a generator of your own: "
                    "run.loader(..., num_workers=N) reads ahead in processes.",
                )
            raise StepError(
                'gradients were reduced twice after one micro-batch was taken from the loader, which reduction="exact" cannot add up.',
                remedy="call backward() once for each micro-batch, on the sum of its losses, before the next one is taken: no list(run.loader(...)), "
                "nor another way to read ahead. With FSDP2, call a sharded module once in a forward.",
            )
        if ranks != self._data_ranks:
            raise StepError(
                f'gradients are added over {ranks} ranks, but {self._data_ranks} share the global batch: reduction="exact" counts on one part for each micro-batch.',
                remedy='reduce over all data axes of the mesh and over no other, or use reduction="fast".',
            )
        for slot in slots:
            slot.reduced = True
        return not self._shard.ghost

    def check_complete(
        self, slots: Iterable[ParameterSum], largest: torch.Tensor, alone: Iterable[tuple[ParameterSum, torch.Tensor]]
    ) -> None:
        """Check, before the gate, that all computed gradients were reduced. Raises `StepError` otherwise.

        ``largest``: the largest magnitude added on this rank, by slot. ``alone``: existing gradients.
        """
        seen = largest.tolist()
        lost = next((slot for slot in slots if not slot.reduced and not slot.fresh and seen[slot.index] > 0), None)
        for slot, gradient in alone if lost is None else ():
            if not slot.reduced and slot.parameter.requires_grad and self.is_new(slot, gradient):
                lost = slot
                break
        if lost is not None:
            raise StepError(
                f"the gradient of {lost.name} was computed, but not reduced in the backward pass of this rank's last micro-batch.",
                remedy="use every model that is trained in every micro-batch, and leave no_sync() and set_requires_gradient_sync() alone. DDP does not "
                "reduce either while a parameter that it was made with is frozen: DistributedDataParallel(..., find_unused_parameters=True).",
            )
