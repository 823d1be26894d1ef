"""Computes the global batch of every step: its size, and where in the data it begins.

With a constant batch that is arithmetic. With ``batch="scale_lr"`` it follows the world: every data-parallel rank keeps
as many micro-batches as it had when the run began. Committed batches are *history*. They are tracked state, restored
with the rest, so a step that is done again after a rollback has the batch that it had, on whichever rank. Batches to
come follow from the plan (`GenerationPlan.worlds`). So the batch of a step, its samples and its learning rates are a pure
function of the step and of what was committed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rackrun.core.placement.mesh_resize import Axes
from rackrun.errors import UsageError
from rackrun.topology.model.mesh import DATA_AXES
from rackrun.worker.batch.batch_runs import BatchRun, shards_before
from rackrun.worker.batch.lr_rule import ScaleLR, factor_at
from rackrun.worker.data.loader import BatchPlan, StepOrder

if TYPE_CHECKING:
    from rackrun.worker.membership.worker_membership import WorkerMembership

__all__ = ["Batches", "StepBatch", "Worlds", "check_rule", "data_ranks"]

Worlds = tuple[int, Sequence[tuple[int, int]]]
"""Number of ranks when the run began, and (first step, ranks) of all worlds, including the next (`GenerationPlan.full`,
`GenerationPlan.worlds`)."""


@dataclass(frozen=True)
class StepBatch:
    """The global batch of one step."""

    shards: int
    """Number of micro-batches in the global batch."""
    samples_before: int
    """Number of samples committed before this step."""
    lr_factor: float
    runs: tuple[BatchRun, ...]
    """The batches of all steps up to this one."""


class Batches:
    """The global batches of a run; a tracked object. ``data_ranks``: returns the number of data-parallel ranks in a
    world of the given size. ``worlds``: returns those of the newest plan."""

    def __init__(
        self,
        plan: BatchPlan,
        scale: ScaleLR | None,
        data_ranks: Callable[[int], int],
        worlds: Callable[[], Worlds],
        order: StepOrder | None = None,
    ) -> None:
        """``order``: says the size of every step's batch in place of ``plan``, without ``scale``."""
        self.plan, self.scale, self._order = plan, scale, order
        self._data_ranks, self._worlds = data_ranks, worlds
        self._per_rank = 0
        """Micro-batches of each data-parallel rank when the run began; 0 before anything is committed."""
        self._upto = -1
        """The last step in the history."""
        self._history: list[BatchRun] = []
        self._factors: dict[int, float] = {}

    @property
    def dealt_by_framework(self) -> bool:
        """Whether a framework decides about the micro-batches of every step, for one number of ranks."""
        return self._order is not None

    # -- tracked
    def state_dict(self) -> dict[str, Any]:
        """Return the sizes of the committed steps' batches, from which the samples of later steps follow."""
        return {"per_rank": self._per_rank, "upto": self._upto, "history": [list(run) for run in self._history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, which need not be of this number of ranks."""
        self._per_rank, self._upto = int(state["per_rank"]), int(state["upto"])
        self._history = [(int(first), int(shards)) for first, shards in state["history"]]

    # -- once
    def check(self, sizes: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """Check the rule at the start, for all numbers of ranks that the world may come to have, and return
        (micro-batches, factor) for each batch.

        Raises `UsageError` when the rule returns no valid factor, when there are more ranks than micro-batches, and
        when a new run has uneven shares.
        """
        if self.scale is None:
            return ()
        full = self._data_ranks(self._worlds()[0])
        if not self._per_rank and self.plan.shards % full:
            raise UsageError(
                f'batch="scale_lr" needs as many micro-batches on every data-parallel rank, but {full} ranks share {self.plan.shards} '
                f"(global batch {self.plan.global_batch}, micro-batch {self.plan.micro_batch}).",
                remedy="choose a global batch that is a multiple of micro-batch times ranks.",
            )
        self.plan.shards_of(0, full)
        found = sorted({self._shards_with(size) for size in (*sizes, self._worlds()[0])})
        return tuple((shards, self._target(shards)) for shards in found)

    # -- in every step
    def of(self, step: int) -> StepBatch:
        """Return the batch of ``step``. Raises `UsageError` when the rule returns no valid factor."""
        runs = self.runs(step)
        if self._order is not None:
            return StepBatch(self._order.shards(step), self._order.samples_before(step), 1.0, runs)
        if self.scale is None:
            return StepBatch(runs[0][1], step * self.plan.global_batch, 1.0, runs)
        factor = factor_at(runs, step, self._target, self.scale.warmup_steps)
        return StepBatch(runs[-1][1], shards_before(runs, step) * self.plan.micro_batch, factor, runs)

    def committed(self, step: int, batch: StepBatch) -> bool:
        """Add a committed step to the history, and return whether its global batch differs from that of the step
        before."""
        if self.scale is None:
            return False
        assert step == self._upto + 1, f"step {step} is committed after step {self._upto}"
        self._per_rank = self._per_rank or self._share()
        self._upto = step
        if self._history and self._history[-1][1] == batch.shards:
            return False
        self._history.append((step, batch.shards))
        return len(self._history) > 1 or batch.shards != self.plan.shards

    def runs(self, step: int) -> tuple[BatchRun, ...]:
        """Return the batches from step 0 up to ``step``: the committed ones, and then those that follow from past and
        planned worlds."""
        if self.scale is None:
            return ((0, self.plan.shards),)
        found = [run for run in self._history if run[0] <= step]
        _, worlds = self._worlds()
        after = self._upto + 1
        untils = [first for first, _ in worlds[1:]] + [step + 1]
        for (since, size), until in zip(worlds, untils, strict=True):
            first, shards = max(since, after), self._shards_with(size)
            if first < min(until, step + 1) and (not found or found[-1][1] != shards):
                found.append((first, shards))
        return tuple(found)

    def work(self, batch: StepBatch, world_size: int) -> float:
        """Return the possible work of a rank in this batch, relative to its usual micro-batches: above 1 where a step
        of a larger world is done again."""
        return max(-(-batch.shards // self._data_ranks(world_size)) / self._share(), 1.0)

    def summary(self, batch: StepBatch) -> tuple[int, float, str]:
        """Return, for a report: samples, the factor at the end of its warm-up, and the name of the rule."""
        assert self.scale is not None, "a constant batch is not told of"
        return batch.shards * self.plan.micro_batch, self._target(batch.shards), self.scale.named

    # -- helpers
    def _share(self) -> int:
        """Return the number of micro-batches of one data-parallel rank."""
        return self._per_rank or -(-self.plan.shards // self._data_ranks(self._worlds()[0]))

    def _shards_with(self, world_size: int) -> int:
        """Return the micro-batches of a world of this size: never more than the whole batch, which more ranks than at
        the beginning share."""
        return min(self._share() * self._data_ranks(world_size), self.plan.shards)

    def _target(self, shards: int) -> float:
        assert self.scale is not None, "asked for with a scale only"
        if shards not in self._factors:
            micro = self.plan.micro_batch
            self._factors[shards] = self.scale.factor(shards * micro, self.plan.global_batch)
        return self._factors[shards]


def data_ranks(axes: Axes, world_size: int) -> int:
    """Return how many ranks of a world of ``world_size`` have samples of their own."""
    return max(world_size // math.prod(size for name, size in axes if name not in DATA_AXES), 1)


def check_rule(factors: Sequence[tuple[int, float]], world: WorkerMembership) -> None:
    """Raise `UsageError` when not all ranks have the same ``factors``. Collective, before the first step."""
    if world.size == 1:
        return
    digest = hashlib.blake2b(repr(list(factors)).encode(), digest_size=7).digest()
    row = torch.tensor([int.from_bytes(digest)], dtype=torch.int64)
    if len({int(other.item()) for other in world.groups[0].gather_on_host(row)}) > 1:
        said = ", ".join(f"{factor:g}" for _, factor in factors)
        raise UsageError(
            f"the learning-rate rule does not say the same on all ranks: on rank {world.rank} it gives {said}.",
            remedy="let it depend on nothing but the two batches.",
        )
