"""Computes a step again before its loss counts, if the loss is not finite (``--nan-probation``).

What a script computes repeats bit for bit; what a faulty GPU makes up does not. So at the first gate whose sum shows a
loss of inf or NaN no rank passes, and all ranks do the step again in place, once. If the loss is finite then, the one
rank whose part was not has a GPU that cannot be trusted, and reports that. If it repeats, the script produces it, and
training goes on with it as it would have without this check.

All ranks draw the same conclusion, because it follows from the sums of the gate alone: they also show who has computed
the step before.
"""

from __future__ import annotations

import math

from rackrun.protocol.ids import Position
from rackrun.worker.membership.decisions.gate_sums import GateSums
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.reports import Reports, say
from rackrun.worker.steps.step import Step

__all__ = ["NanProbation"]


class NanProbation:
    """Decides about gates with a loss that is not finite. ``on``: whether the check was asked for; otherwise nothing is
    ever refused."""

    def __init__(self, on: bool, world: WorkerMembership, reports: Reports) -> None:
        self.on, self._world, self._reports = on, world, reports
        self._tried: Position | None = None
        """The step whose gate was refused, until it is committed; None otherwise."""
        self._mine = self._suspect = False
        self._told_off = False

    def gate_values(self, step: Step, loss: float) -> tuple[float, float]:
        """Return this rank's `GateSums.not_finite` and `GateSums.tried`. ``loss``: this rank's part of the loss, 0
        where it has none."""
        if not self.on:
            return 0.0, 0.0
        before = self._world.gate
        # the script goes on with such losses: computing every step twice is of no use
        known = before is not None and before.not_finite > 0
        if step._at.phase:  # a phase has no loss, and passes on what is known of the step before it
            return float(known), float(known)
        self._mine = not math.isfinite(loss)
        return float(self._mine), float(self._tried == step._at or known)

    def refuses(self, at: Position, sums: GateSums) -> bool:
        """Whether no rank is to pass this gate: the same answer on all ranks that see it."""
        if not sums.not_finite or sums.tried:
            return False
        self._tried, self._suspect = at, self._mine and sums.not_finite == 1
        return True

    def committed(self, at: Position) -> None:
        """Draw the conclusion after a repeated step: report this rank's GPU, or print that the script produces the
        loss."""
        gate = self._world.gate
        if self._tried != at or gate is None:
            return
        if gate.not_finite and self._world.rank == 0 and not self._told_off:
            self._told_off = True
            say(
                f"the loss of step {at.step} is not finite, and again when it is computed once more: it is the script's"
            )
        elif self._suspect and not gate.not_finite:
            self._reports.not_repeated(at)
        self._tried, self._suspect = None, False
