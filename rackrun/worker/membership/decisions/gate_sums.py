"""What all ranks know of a unit after its gate: sums over the world, in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

__all__ = ["ZERO_SUMS", "GateSums"]


class GateSums(NamedTuple):
    """Sums over all ranks of what each offers to the gate."""

    loss: float
    samples: float
    ids_digest: float
    draining: float
    """Number of ranks that were asked to end the run."""
    snapshot_cost_s: float
    step_s: float
    """Sum of each rank's median step time, in seconds."""
    changed_late: float
    """Number of ranks whose buffers have changed after the gate before."""
    mirroring: float
    """Number of ranks whose last snapshot is still being copied to another tray."""
    mirrored: float
    """Number of ranks whose last snapshot that was meant for another tray has arrived there."""
    writing: float
    """Number of ranks whose last checkpoint is still being written."""
    cut_short: float
    """Number of ranks that found the last checkpoint incomplete, after a loss."""
    ahead: float
    """Number of ranks that had begun a later unit already, before a rollback."""
    pausing: float
    """Number of ranks that were asked to pause for a planned swap."""
    shares_received: float
    """Number of ranks that have received the next change of shares (`rackrun.worker.batch.share_changes`)."""
    not_finite: float
    """Number of ranks whose part of the loss is inf or NaN (``--nan-probation``)."""
    tried: float
    """Number of ranks that computed this step before and refused it for a loss that is not finite, or that accept such
    a loss."""
    parts: float = 0.0
    """Number of ranks that have seen a step go on with collectives after its first ``optimizer.step()``
    (`rackrun.worker.steps.multi_part_steps`)."""
    rollback_incomplete: float = 0.0
    """Number of ranks that repeat the step and cannot restore the state that it began with."""
    changed_between: float = 0.0
    """Number of ranks whose state had changed between the unit before and this one."""
    shared: tuple[float, ...] = ()
    """The numbers that each rank shares with all others (`rackrun.worker.steps.step.Step._gather_with_gate`), in the order of
    ranks: as many from each."""

    @classmethod
    def of(cls, values: Sequence[float]) -> GateSums:
        """Return the sums whose `values` these are."""
        return cls._make((*values[:_SCALARS], tuple(values[_SCALARS:])))

    @property
    def scalars(self) -> tuple[float, ...]:
        """All sums but `shared`."""
        return cast("tuple[float, ...]", self[:_SCALARS])

    @property
    def values(self) -> tuple[float, ...]:
        """All sums as one sequence of numbers, `shared` last."""
        return (*self.scalars, *self.shared)


_SCALARS = len(GateSums._fields) - 1
ZERO_SUMS = GateSums.of([0.0] * _SCALARS)
"""The sums of ranks that offer nothing."""
