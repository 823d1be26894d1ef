"""``reduction="exact"``: gradients are added as integers, so their sum does not depend on who computed which micro-batch.

The gradient of every logical shard is rounded to fixed point before anything is added to it: on one rank, over ranks, by
whatever algorithm. Integer addition is associative, so any map of shards to ranks and any number of ranks gives the same
bits. A parameter has one scale, a power of two, from the largest magnitude that its gradient had in earlier steps, over all
shards: tracked state, the same on all ranks at every world size.

A gradient that outgrows its scale's headroom, and the first of all, which has no scale yet, are seen by all ranks alike
before the gate: they do the step again, with a scale that fits. Gradients that are not finite come out as NaN everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import StepError, UsageError
from rackrun.worker.compat import ddp, fsdp, fsdp_reduce, norms
from rackrun.worker.data import Shard
from rackrun.worker.fixed_point import FixedPoint, fixed_point
from rackrun.worker.scales import Scales, Width, fit
from rackrun.worker.state import TrackedState
from rackrun.worker.step import Step
from rackrun.worker.world import Abandoned, World

__all__ = ["ExactReduction"]


class _Slot:
    """One parameter's part in the sum of this attempt."""

    def __init__(self, index: int, parameter: torch.Tensor) -> None:
        self.index, self.parameter = index, parameter
        self.sums: torch.Tensor | None = None
        self.fresh = True
        """Nothing of this attempt is in ``sums``."""


class ExactReduction:
    """Between a run's gradients and its collectives. ``shards`` is the number of micro-batches in the global batch."""

    def __init__(self, world: World, state: TrackedState, width: Width, shards: int) -> None:
        self._world, self._state, self._width, self._shards = world, state, width, shards
        self._bits = width.of_a_shard(shards)
        self._arithmetic: FixedPoint = fixed_point(world.device)
        self._slots: dict[int, _Slot] = {}
        self._scales = Scales(0)
        self._raised: tuple[int, torch.Tensor] | None = None
        """Larger scales for the next attempt in this generation. Another generation measures again: not everyone may have seen it."""
        self._fit = fit(self._scales.largest, width.headroom, self._bits)
        self._measured = torch.zeros(0)
        self._largest = torch.zeros(0)
        """Over the shards of this rank, in this attempt."""
        self._wires: dict[tuple[int, int], torch.Tensor] = {}
        self._wires_generation = -1
        self._step: Step | None = None
        self._shard: Shard | None = None
        self._added = self._data_ranks = 0
        self._reduced: set[Any] = set()
        self._unhook: list[Callable[[], None]] = []

    # -- once
    def attach(self) -> None:
        """At run.steps(), when everything is tracked. Raises `StepError` for what cannot be summed exactly, `UsageError` when torch
        lacks what that takes."""
        if missing := fsdp_reduce.missing() + norms.missing():
            raise UsageError(
                f'reduction="exact" does not know this torch: {"; ".join(missing)}.',
                remedy="install torch 2.10 to 2.13.",
            )
        reduced: set[int] = set()
        wrappers = list(self._state.wrappers())
        for wrapper in wrappers:
            reduced |= ddp.parameters_of(wrapper)
        for module in self._state.modules.values():
            fsdp.reshard(module)
            reduced |= fsdp_reduce.parameters_of(module)
        index = 0
        for name, module in self._state.modules.items():
            for path, parameter in module.named_parameters():
                if id(parameter) in self._slots:
                    continue
                if parameter.requires_grad:
                    _check(f"{name}.{path}", parameter, id(parameter) in reduced)
                self._slots[id(parameter)] = _Slot(index, parameter)
                index += 1
        self._scales = Scales(index)
        self._largest = torch.zeros(index, device=self._world.device)
        self._state.track("rackrun.scales", self._scales)
        for number, wrapper in enumerate(wrappers):
            self._unhook.append(ddp.hook(wrapper, functools.partial(self._reduce_bucket, number, wrapper)))
        if any(fsdp_reduce.parameters_of(module) for module in self._state.modules.values()):
            fsdp_reduce.divert(self._width.container, self._integers_of, self._sum, self._read_shard)
            norms.divert()
            for name, optimizer in self._state.optimizers.items():
                _check_optimizer(name, optimizer)

    def detach(self) -> None:
        """The model is to go."""
        for unhook in self._unhook:
            unhook()
        fsdp_reduce.restore()

    # -- in every step
    def begin(self, step: Step) -> None:
        """An attempt at ``step`` begins."""
        generation = self._world.generation
        if self._raised is not None and self._raised[0] != generation:
            self._raised = None
        if self._wires_generation != generation:  # what was left behind in a broken one may still be written to
            self._wires_generation = generation
            self._wires.clear()
            for slot in self._slots.values():
                slot.sums = None
        expected = self._raised[1] if self._raised is not None else self._scales.largest
        self._fit = fit(expected, self._width.headroom, self._bits)
        self._largest.zero_()
        for slot in self._slots.values():
            slot.fresh = True
        self._step, self._shard, self._added = step, None, 0
        self._reduced.clear()
        step.shard_losses = {}

    def next_shard(self, step: Step, shard: Shard, data_ranks: int) -> None:
        """The loader is about to yield ``shard``: the gradients of the one before are complete, and are added up. So many
        ranks share the global batch."""
        step.gradient_scale, self._data_ranks = step.weight, data_ranks
        if self._shard is not None:
            self._harvest(counts=not self._shard.ghost)
        self._shard = shard
        self._added += not shard.ghost
        if self._added > self._shards:
            raise StepError(
                f"more than the {self._shards} micro-batches of the global batch were computed in one step.",
                remedy='iterate over one loader, once, in a step with reduction="exact".',
            )

    def settle(self, step: Step) -> float:
        """Before the gate: what the ranks have seen, of all shards. Returns this rank's part of the loss.

        Raises `Abandoned`, on every rank, when a gradient has outgrown its scale."""
        losses = [-math.inf] * self._shards
        for index, loss in (step.shard_losses or {}).items():
            value = float(loss.item())
            losses[index] = value if math.isfinite(value) else math.inf
        offered = torch.cat([self._largest.double().cpu(), torch.tensor(losses, dtype=torch.float64)])
        if self._world.size > 1:
            on_device = offered.to(self._world.device)
            dist.all_reduce(on_device, dist.ReduceOp.MAX)
            offered = on_device.cpu()
        if self._world.broken or not self._world.generation:
            return 0.0  # the gate will not pass
        largest, seen = offered[: len(self._slots)].float(), offered[len(self._slots) :]
        outgrown = largest.isfinite() & (largest > self._fit.limits)
        if outgrown.any():
            expected = self._raised[1] if self._raised is not None else self._scales.largest
            self._raised = self._world.generation, torch.where(outgrown, largest, expected)
            raise Abandoned
        self._measured = largest
        if self._world.rank:
            return 0.0
        total = 0.0
        for loss in seen.tolist():  # always in this order
            total += 0.0 if loss == -math.inf else loss
        return total if total < math.inf else math.nan

    def committed(self) -> None:
        """The step counts: its gradients decide the scales of the next."""
        self._scales.seen(self._measured)
        self._raised = self._step = None

    # -- adding
    def _harvest(self, *, counts: bool) -> None:
        """Take over what backward has left in this rank, and clear it."""
        for module in self._state.modules.values():
            for parameter, gradient in fsdp_reduce.local_gradients(module) if counts else ():
                self._add(self._slots[id(parameter)], gradient.reshape(-1))
            fsdp_reduce.clear_local_gradients(module)
        for wrapper in self._state.wrappers():
            for parameter in wrapper.module.parameters():
                if counts and parameter.grad is not None:
                    self._add(self._slots[id(parameter)], _flat(parameter.grad, parameter))
                ddp.clear(wrapper, parameter)

    def _add(self, slot: _Slot, flat: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """Round the gradient of one shard, and add it to the sum of its parameter; or write it ``into`` integers of its own."""
        if into is not None:
            largest = self._arithmetic.add(flat, self._fit.scale[slot.index], into, fresh=True)
        else:
            if slot.sums is None:
                slot.sums = torch.empty(flat.numel(), dtype=self._width.dtype, device=flat.device)
            largest = self._arithmetic.add(flat, self._fit.scale[slot.index], slot.sums, fresh=slot.fresh)
            slot.fresh = False
        place = self._largest[slot.index]
        if isinstance(largest, torch.Tensor):
            torch.maximum(place, largest, out=place)
        elif largest > place.item():
            place.fill_(largest)

    def _last_shard(self, what: Any, ranks: int) -> bool:
        """Whether a gradient that is being reduced now, over so many ranks, counts: a ghost's does not. Raises `StepError` where it
        could not be undone, and where the sum could leave the integers' range."""
        if self._step is None or self._shard is None or self._world.unit_passed:
            raise StepError(
                'gradients were reduced where reduction="exact" cannot: before the first micro-batch, after optimizer.step(), or in a phase.',
                remedy="iterate over run.loader(...) in the @run.step function, and call every backward() before the first optimizer.step().",
            )
        if what in self._reduced:
            raise StepError(
                'gradients of one micro-batch were reduced twice, which reduction="exact" cannot add up.',
                remedy="call backward() once for each micro-batch, on the sum of the losses.",
            )
        if ranks > self._data_ranks:
            raise StepError(
                f'gradients are added over {ranks} ranks, but {self._data_ranks} share the global batch: reduction="exact" counts on one part for each micro-batch.',
                remedy='reduce over the data axes of the mesh only, or use reduction="fast".',
            )
        self._reduced.add(what)
        return not self._shard.ghost

    # -- DDP: all-reduce of buckets
    def _reduce_bucket(
        self, number: int, wrapper: DistributedDataParallel, bucket: Any
    ) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        counts = self._last_shard((number, bucket.index()), wrapper.process_group.size())
        if buffer.is_sparse:
            raise StepError(
                'reduction="exact" cannot add sparse gradients.', remedy="use nn.Embedding(..., sparse=False)."
            )
        slots = [self._slots[id(parameter)] for parameter in bucket.parameters()]
        wire = self._wire((number, bucket.index()), slots, buffer)
        start = 0
        for slot in slots:
            assert slot.sums is not None, "a part of the wire"
            stop = start + slot.sums.numel()
            if counts:
                self._add(slot, buffer[start:stop])
            elif slot.fresh:
                slot.sums.zero_()
            start = stop
        self._mark_unusable(slots, wire[start:])
        work = dist.all_reduce(wire, group=wrapper.process_group, async_op=True)
        assert work is not None, "it was asked for"

        def read(_: Any) -> torch.Tensor:
            self._read(slots, [slot.sums.numel() for slot in slots], wire, buffer)  # type: ignore[union-attr]
            return buffer

        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(read)
        return reduced

    def _wire(self, key: tuple[int, int], slots: Sequence[_Slot], buffer: torch.Tensor) -> torch.Tensor:
        """The integers of one bucket, in its order, and a mark for each parameter; made once in a generation."""
        wire = self._wires.get(key)
        if wire is None:
            wire = torch.empty(buffer.numel() + len(slots), dtype=self._width.dtype, device=buffer.device)
            self._wires[key] = wire
            start = 0
            for slot in slots:
                part = wire[start : start + slot.parameter.numel()]
                if slot.sums is not None and not slot.fresh:
                    part.copy_(slot.sums)
                slot.sums = part
                start += part.numel()
        return wire

    # -- FSDP2: reduce-scatter of what it gives, in its memory
    def _integers_of(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor], ranks: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The sums of this rank's shards, in floats of the same size, and a mark for each parameter."""
        slots = [self._slots[id(parameter)] for parameter in parameters]
        counts = self._last_shard(("fsdp", slots[0].index), ranks)
        found = []
        for slot, given in zip(slots, gradients, strict=True):
            gradient = given.contiguous()
            in_place = gradient.dtype == self._width.container
            carried = gradient if in_place else torch.empty_like(gradient, dtype=self._width.container)
            integers = carried.view(-1).view(self._width.dtype)
            if counts:
                self._add(slot, gradient.view(-1), into=integers)
            else:
                integers.zero_()
            if not slot.fresh and slot.sums is not None:
                integers.add_(slot.sums)
            found.append(carried)
        marks = torch.empty(len(slots), dtype=self._width.dtype, device=found[0].device)
        self._mark_unusable(slots, marks)
        return found, marks.view(self._width.container)

    def _sum(self, output: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
        """Reduce-scatter of ``whole``, as the integers that it holds; all-reduce where it is ``output`` itself."""
        integers = output.view(self._width.dtype)
        if whole is output:
            dist.all_reduce(integers, group=group)
        else:
            reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            reduce_scatter(integers, whole.view(self._width.dtype), group=group)

    def _read_shard(self, parameters: Sequence[nn.Parameter], sizes: Sequence[int], output: torch.Tensor) -> None:
        slots = [self._slots[id(parameter)] for parameter in parameters]
        self._read(slots, sizes, output.view(self._width.dtype), output)

    # -- both
    def _mark_unusable(self, slots: Sequence[_Slot], marks: torch.Tensor) -> None:
        found = torch.stack([self._largest[slot.index] for slot in slots])
        marks.copy_(found.isinf())

    def _read(self, slots: Sequence[_Slot], sizes: Sequence[int], sums: torch.Tensor, out: torch.Tensor) -> None:
        """Integers, and behind them the marks, to floats."""
        marks = sums[sum(sizes) :]
        if out.device.type == "cpu":
            unusable = marks[: len(slots)].tolist()
            inverse = [
                math.nan if bad else self._fit.inverse[slot.index] for slot, bad in zip(slots, unusable, strict=True)
            ]
        else:
            scales = torch.tensor([self._fit.inverse[slot.index] for slot in slots], device=out.device)
            inverse = torch.where(marks[: len(slots)] > 0, math.nan, scales).unbind()  # type: ignore[assignment]
        start = 0
        for factor, size in zip(inverse, sizes, strict=True):
            self._arithmetic.read(sums[start : start + size], factor, out[start : start + size])
            start += size


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("fused") and any(isinstance(p, DTensor) and p.device.type == "cpu" for p in group["params"]):
            raise StepError(
                f"{name!r} has fused=True, which on a CPU rounds the last elements of a shard unlike the others: "
                "where shards end depends on the number of ranks.",
                remedy="leave out fused=True.",
            )


def _flat(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In the order in which DDP lays it into a bucket: that of the parameter's memory."""
    if gradient.is_contiguous() and parameter.is_contiguous():
        return gradient.view(-1)
    laid = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return laid.as_strided((laid.numel(),), (1,))


def _check(path: str, parameter: torch.Tensor, reduced: bool) -> None:
    if not reduced:
        raise StepError(
            f'{path} is trained, but neither DDP nor FSDP2 reduces its gradient, so reduction="exact" cannot.',
            remedy="wrap the module in DistributedDataParallel or fully_shard, on one rank too; or freeze the parameter.",
        )
    if not parameter.dtype.is_floating_point:
        raise StepError(
            f'{path} is {parameter.dtype}: reduction="exact" adds floating-point gradients only.',
            remedy='use reduction="fast".',
        )
