"""``reduction="exact"``: adds gradients as integers, so that the sum does not depend on which rank computed which
micro-batch.

The gradient of every logical shard is rounded to fixed point before anything is added to it: on one rank, over ranks,
by whatever algorithm. Integer addition is associative, so any map of shards to ranks and any number of ranks gives the
same bits. A parameter has one scale, a power of two, from the largest magnitude that its gradient had in earlier steps
over all shards. The scales are tracked state, the same on all ranks at every world size.

All ranks alike see before the gate when a gradient outgrows its scale's headroom, and at the first gradient of all,
which has no scale yet. They do the step again then, with a scale that fits. Gradients that are not finite become NaN
everywhere.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rackrun.errors import StepError
from rackrun.worker.data.loader import Shard
from rackrun.worker.exact.exact_checks import (
    check_module,
    check_optimizer,
    check_parameter,
    check_without_gradients,
    has_running_statistics,
)
from rackrun.worker.exact.exactly_once import ExactlyOnce, ParameterSum
from rackrun.worker.exact.fixed_point import FixedPoint, fixed_point
from rackrun.worker.exact.fixed_point_scales import BitBudget, Scales, fit
from rackrun.worker.exact.parameter_segments import Factors, Segments
from rackrun.worker.membership.decisions.interruptions import Abandoned
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.reports import say
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from rackrun.worker.torch_compat import require
from rackrun.worker.torch_compat.data_parallel import ddp, fsdp, fsdp_reduce, grad_norms

__all__ = ["ExactReduction"]


class ExactReduction:
    """The exact reduction of one run, between its gradients and its collectives. ``shards``: number of micro-batches in
    the global batch."""

    def __init__(self, world: WorkerMembership, state: TrackedState, width: BitBudget, shards: int) -> None:
        self._world, self._state, self._width, self._shards = world, state, width, shards
        self._bits = width.of_a_shard(shards)
        self._arithmetic: FixedPoint = fixed_point(world.device)
        self._slots: dict[int, ParameterSum] = {}
        self._scales = Scales(0)
        self._not_trained: dict[str, nn.Parameter] = {}
        """Parameters that no optimizer trains and nobody reduces, such as an average of the weights (`AveragedModel`),
        by path."""
        self._raised: tuple[int, torch.Tensor] | None = None
        """Larger scales for the next attempt in this generation, and the generation. Another generation measures again,
        because not all ranks may have seen them."""
        self._fit = fit(self._scales.largest, width.headroom, self._bits)
        self._scale, self._inverse = Factors.all_of(world.device, self._fit.scale, self._fit.inverse)
        self._segments: dict[tuple[tuple[int, ...], tuple[int, ...]], Segments] = {}
        self._measured = torch.zeros(0)
        self._largest = torch.zeros(0)
        """Largest magnitude by slot over the shards of this rank in this attempt, fp32 on the device."""
        self._wires: dict[tuple[int, int], torch.Tensor] = {}
        self._wires_generation = -1
        self._once = ExactlyOnce()
        self.rescaled = 0
        """How many attempts at this step were abandoned because a gradient had no scale yet, or had outgrown it."""
        self._unhook: list[Callable[[], None]] = []

    # -- once
    def attach(self) -> None:
        """Install the hooks, at run.steps(), when everything is tracked. Raises `StepError` for what cannot be summed
        exactly, `UsageError` when this torch lacks what that needs."""
        reducers: Counter[int] = Counter()
        wrappers = list(self._state.wrappers())
        if wrappers:
            require("ddp exact")
        for wrapper in wrappers:
            reducers.update(map(id, ddp.reduced_by(wrapper)))
        sharded: set[int] = set()
        for module in self._state.modules.values():
            fsdp.reshard(fsdp.modules_of(module))
            sharded |= fsdp_reduce.parameters_of(module)
        reducers.update(sharded)
        trained = {
            id(p)
            for optimizer in self._state.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._not_trained.clear()
        index = 0
        for name, module in self._state.modules.items():
            check_module(name, module)
            for path, parameter in module.named_parameters():
                if id(parameter) in self._slots:
                    continue
                if parameter.requires_grad and not reducers[id(parameter)] and id(parameter) not in trained:
                    self._not_trained[f"{name}.{path}"] = parameter
                elif parameter.requires_grad:
                    check_parameter(f"{name}.{path}", parameter, reducers[id(parameter)])
                self._slots[id(parameter)] = ParameterSum(index, f"{name}.{path}", parameter)
                index += 1
        self._scales = Scales(index)
        self._largest = torch.zeros(index, device=self._world.device)
        self._state.track("rackrun.scales", self._scales)
        for number, wrapper in enumerate(wrappers):
            self._unhook.append(ddp.hook(wrapper, functools.partial(self._reduce_bucket, number, wrapper)))
        if sharded:
            require("fsdp exact", "norm exact")
            fsdp_reduce.divert(self._width.container, self._integers_of, self._sum, self._read_shard)
            grad_norms.divert()
            for name, optimizer in self._state.optimizers.items():
                check_optimizer(name, optimizer)
        if (
            self._world.generation
            and not self._world.rank
            and any(map(has_running_statistics, self._state.modules.values()))
        ):
            say(
                'with reduction="exact" losses and weights do not depend on the number of ranks, but the running statistics of batch norm, '
                "and what is computed in eval() with them, do."
            )

    def detach(self) -> None:
        """Remove the hooks, when the model is about to go."""
        for unhook in self._unhook:
            unhook()
        fsdp_reduce.restore()

    # -- in every step
    def begin(self, step: Step) -> None:
        """Begin an attempt at ``step``."""
        generation = self._world.generation
        if not step.attempt:
            self.rescaled = 0
        if self._raised is not None and self._raised[0] != generation:
            self._raised = None
        # collectives left behind in a broken generation may still write to the old ones
        if self._wires_generation != generation:
            self._wires_generation = generation
            self._wires.clear()
            for slot in self._slots.values():
                slot.sums = None
        expected = self._raised[1] if self._raised is not None else self._scales.largest
        self._fit = fit(expected, self._width.headroom, self._bits)
        self._scale, self._inverse = Factors.all_of(self._world.device, self._fit.scale, self._fit.inverse)
        self._largest.zero_()
        for slot in self._slots.values():
            slot.fresh, slot.reduced = True, False
        self._once.begin(step, self._local_gradients())
        step._shard_losses = {}

    def next_shard(self, shard: Shard, data_ranks: int) -> None:
        """Begin ``shard``, which the loader is about to yield. The gradients of the one before are complete, and are
        added up. ``data_ranks``: how many ranks share the global batch."""
        if not self._once.begun or self._world.updated:
            return  # nothing is trained in a phase, or after the gate
        if self._once.shard is not None:
            self._harvest(counts=not self._once.shard.ghost)
        self._once.next(shard, data_ranks)

    def settle(self, step: Step) -> float:
        """Exchange, before the gate, what all ranks have seen of all shards, and return this rank's part of the loss.

        Raises `Abandoned`, on every rank, when a gradient has outgrown its scale, and `StepError` when one was not
        reduced.
        """
        losses = [-math.inf] * self._shards
        for index, loss in (step._shard_losses or {}).items():
            value = float(loss.item())
            losses[index] = value if math.isfinite(value) else math.inf
        mine = self._largest.double().cpu()
        offered = torch.cat([mine, torch.tensor(losses, dtype=torch.float64)])
        if self._world.size > 1:
            offered = self._world.groups[0].largest(offered)
        if self._world.broken or not self._world.generation:
            return 0.0  # the gate will not pass
        self._once.check_complete(self._slots.values(), mine, self._local_gradients())
        check_without_gradients(self._not_trained)
        largest, seen = offered[: len(self._slots)].float(), offered[len(self._slots) :]
        outgrown = largest.isfinite() & (largest > self._fit.limits)
        if outgrown.any():
            expected = self._raised[1] if self._raised is not None else self._scales.largest
            self._raised = self._world.generation, torch.where(outgrown, largest, expected)
            self.rescaled += 1
            raise Abandoned
        self._measured = largest
        if self._world.rank:
            return 0.0
        total = 0.0
        for loss in seen.tolist():  # always in this order, for the same bits
            total += 0.0 if loss == -math.inf else loss
        return total if total < math.inf else math.nan

    def committed(self) -> None:
        """Update the scales from the gradients of the committed step."""
        self._scales.seen(self._measured)
        self._raised = None
        self._once.end()

    # -- adding
    def _harvest(self, *, counts: bool) -> None:
        """Add up the gradients that backward passes have left on this rank, and clear them. ``counts``: False for a
        ghost's."""
        any_new = False
        for module in self._state.modules.values():
            given: list[tuple[ParameterSum, torch.Tensor]] = []
            for parameter, gradient, part in fsdp_reduce.local_gradients(module):
                slot = self._slots[id(parameter)]
                if self._once.is_new(slot, gradient):
                    any_new = True
                    if counts:
                        given.append((slot, part().reshape(-1)))
            self._add(given)
            fsdp_reduce.clear_local_gradients(module)
        for wrapper in self._state.wrappers():
            new = [
                (slot, parameter)
                for parameter in wrapper.module.parameters()
                if parameter.grad is not None and self._once.is_new(slot := self._slots[id(parameter)], parameter.grad)
            ]
            any_new = any_new or bool(new)
            if counts:
                self._add([(slot, _flat(parameter.grad, parameter)) for slot, parameter in new])
            for _, parameter in new:
                ddp.clear(wrapper, parameter)
        self._once.taken(any_new=any_new)
        self._once.leave(self._local_gradients())

    def _local_gradients(self) -> Iterator[tuple[ParameterSum, torch.Tensor]]:
        """Yield the gradients on this rank that are not reduced yet, or belong to another step."""
        for module in self._state.modules.values():
            for parameter, gradient, _ in fsdp_reduce.local_gradients(module):
                yield self._slots[id(parameter)], gradient
        for wrapper in self._state.wrappers():
            for parameter in wrapper.module.parameters():
                if parameter.grad is not None:
                    yield self._slots[id(parameter)], parameter.grad

    def _add(self, given: Sequence[tuple[ParameterSum, torch.Tensor]]) -> None:
        """Round the gradients of one micro-batch, and add them to the sums of their parameters."""
        alike: dict[tuple[bool, torch.dtype], list[tuple[ParameterSum, torch.Tensor]]] = {}
        for slot, flat in given:
            if slot.sums is None:
                slot.sums = torch.empty(flat.numel(), dtype=self._width.dtype, device=flat.device)
            alike.setdefault((slot.fresh, flat.dtype), []).append((slot, flat))
            slot.fresh = False
        for (fresh, _), some in alike.items():
            slots, flats = [slot for slot, _ in some], [flat for _, flat in some]
            sums = [slot.sums for slot in slots if slot.sums is not None]
            self._add_apart(slots, flats, sums, fresh=fresh)

    def _add_apart(
        self, slots: Sequence[ParameterSum], flats: Sequence[torch.Tensor], into: Sequence[torch.Tensor], *, fresh: bool
    ) -> None:
        """Add ``flats``, which have one dtype, to ``into``."""
        segments = self._segments_of(slots, [flat.numel() for flat in flats])
        self._arithmetic.add_apart(flats, segments, self._scale, into, self._largest, fresh=fresh)

    # -- DDP: all-reduce of buckets
    def _reduce_bucket(
        self, number: int, wrapper: DistributedDataParallel, bucket: Any
    ) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        slots = [self._slots[id(parameter)] for parameter in bucket.parameters()]
        counts = self._once.reduces(slots, wrapper.process_group.size(), passed=self._world.updated)
        if buffer.is_sparse:
            raise StepError(
                'reduction="exact" cannot add sparse gradients.', remedy="use nn.Embedding(..., sparse=False)."
            )
        wire = self._wire((number, bucket.index()), slots, buffer)
        segments = self._segments_of(slots, [slot.parameter.numel() for slot in slots])
        fresh = counts and all(slot.fresh for slot in slots)
        for slot in slots:
            assert slot.sums is not None, "a part of the wire"
            if slot.fresh and not fresh:
                slot.sums.zero_()
        if counts:
            sums = wire[: segments.count]
            self._arithmetic.add_segments(buffer, segments, self._scale, sums, self._largest, fresh=fresh)
            for slot in slots:
                slot.fresh = False
        self._mark_unusable(segments, wire[segments.count :])
        work = dist.all_reduce(wire, group=wrapper.process_group, async_op=True)
        assert work is not None, "it was asked for"

        def read(_: Any) -> torch.Tensor:
            self._read(segments, wire, buffer)
            return buffer

        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(read)
        return reduced

    def _wire(self, key: tuple[int, int], slots: Sequence[ParameterSum], buffer: torch.Tensor) -> torch.Tensor:
        """Return the integers of one bucket, in the bucket's order, with a mark for each parameter after them. Created
        once in a generation."""
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
        """Return the sums of this rank's shards as floats of the same size, and a mark for each parameter."""
        slots = [self._slots[id(parameter)] for parameter in parameters]
        counts = self._once.reduces(slots, ranks, passed=self._world.updated)
        if ranks == self._world.size:  # otherwise collectives of equal size could be mixed up unnoticed
            self._world.order.add(f"reduces {[slot.index for slot in slots]}")
        container = self._width.container
        given = [gradient.contiguous() for gradient in gradients]
        found = [one if one.dtype == container else torch.empty_like(one, dtype=container) for one in given]
        integers = [one.view(-1).view(self._width.dtype) for one in found]
        if counts:
            for dtype in dict.fromkeys(one.dtype for one in given):
                of_it = [index for index, one in enumerate(given) if one.dtype == dtype]
                some, flats = [slots[index] for index in of_it], [given[index].view(-1) for index in of_it]
                self._add_apart(some, flats, [integers[index] for index in of_it], fresh=True)
        else:
            torch._foreach_zero_(integers)
        before = [
            (sums, slot.sums)
            for slot, sums in zip(slots, integers, strict=True)
            if not slot.fresh and slot.sums is not None
        ]
        if before:
            torch._foreach_add_([sums for sums, _ in before], [older for _, older in before])
        marks = torch.empty(len(slots), dtype=self._width.dtype, device=found[0].device)
        self._mark_unusable(self._segments_of(slots, [one.numel() for one in found]), marks)
        return found, marks.view(self._width.container)

    def _sum(self, output: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
        """Reduce-scatter ``whole`` into ``output`` as the integers that it holds; all-reduce where both are the same
        tensor."""
        integers = output.view(self._width.dtype)
        if whole is output:
            dist.all_reduce(integers, group=group)
        else:
            reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            reduce_scatter(integers, whole.view(self._width.dtype), group=group)

    def _read_shard(self, parameters: Sequence[nn.Parameter], sizes: Sequence[int], output: torch.Tensor) -> None:
        slots = [self._slots[id(parameter)] for parameter in parameters]
        self._read(self._segments_of(slots, sizes), output.view(self._width.dtype), output)

    # -- both
    def _segments_of(self, slots: Sequence[ParameterSum], sizes: Sequence[int]) -> Segments:
        """Return the segments for these slots, which are created once, as a bucket is the same in every step."""
        key = tuple(slot.index for slot in slots), tuple(sizes)
        if key not in self._segments:
            self._segments[key] = Segments(*key)
        return self._segments[key]

    def _mark_unusable(self, segments: Segments, marks: torch.Tensor) -> None:
        marks.copy_(self._largest[segments.places(self._largest.device)].isinf())

    def _read(self, segments: Segments, sums: torch.Tensor, out: torch.Tensor) -> None:
        """Convert sums (integers followed by the marks) to floats in ``out``."""
        count = segments.count
        marks = sums[count : count + len(segments.slots)]
        self._arithmetic.read_segments(sums[:count], segments, self._inverse, marks, out[:count])


def _flat(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient in the order in which DDP puts it into a bucket: that of the parameter's memory, if that has
    no gaps."""
    if gradient.is_contiguous() and parameter.is_contiguous():
        return gradient.view(-1)
    laid = torch.empty_like(parameter, dtype=gradient.dtype)
    if laid.stride() != parameter.stride():
        return gradient.reshape(-1)
    return laid.copy_(gradient).as_strided((laid.numel(),), (1,))
