"""A loss that is not finite is computed once more before it counts (``--nan-probation``).

What a script computes comes again, bit for bit; what a GPU made up does not. So at the first gate whose sum tells of a loss that is
inf or NaN, nobody passes, and all do the step again in place, once. If it is finite then, the one rank whose part was not has a GPU
that cannot be trusted, and says so. If it comes again it is the script's own, and training goes on with it, as it would have.

All draw the same conclusion because it is drawn from the sums of the gate alone: they hold who has computed the step before, too.
"""

from __future__ import annotations

import math

from rackrun.protocol.ids import Position
from rackrun.worker.membership.gate import GateSums
from rackrun.worker.membership.worker_membership import World
from rackrun.worker.process.reports import Reports, say
from rackrun.worker.steps.step import Step

__all__ = ["NanProbation"]


class NanProbation:
    """``on``: asked for. Without that nothing is ever refused."""

    def __init__(self, on: bool, world: World, reports: Reports) -> None:
        self.on, self._world, self._reports = on, world, reports
        self._tried: Position | None = None
        """The step whose gate was refused, until it is committed."""
        self._mine = self._suspect = False
        self._told_off = False

    def offers(self, step: Step, loss: float) -> tuple[float, float]:
        """`GateSums.not_finite` and `GateSums.tried`, of this rank, whose part of the loss is ``loss`` (0 where it has none)."""
        if not self.on:
            return 0.0, 0.0
        before = self._world.gate
        known = before is not None and before.not_finite > 0  # it goes on so: computing everything twice helps nobody
        if step._at.phase:  # which has no loss, and hands on what is known of the step before it
            return float(known), float(known)
        self._mine = not math.isfinite(loss)
        return float(self._mine), float(self._tried == step._at or known)

    def refuses(self, at: Position, sums: GateSums) -> bool:
        """Whether nobody is to pass this gate. The same on all ranks that see it."""
        if not sums.not_finite or sums.tried:
            return False
        self._tried, self._suspect = at, self._mine and sums.not_finite == 1
        return True

    def committed(self, at: Position) -> None:
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
