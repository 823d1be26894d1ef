"""The outcome of a simulated run."""

from __future__ import annotations

import msgspec

__all__ = ["FleetOutcome", "TimeBreakdown"]


class TimeBreakdown(msgspec.Struct, kw_only=True):
    """Where the wall time went, in seconds; the fields add up to it."""

    productive: float = 0.0
    """Steps that count, at the time that they take in the full world."""
    between: float = 0.0
    """The script's own code between steps."""
    slowed: float = 0.0
    """The additional time of steps in a smaller world."""
    saving: float = 0.0
    redone: float = 0.0
    """Steps that a rollback took back."""
    broken: float = 0.0
    """Steps, or saves, that were broken off."""
    detecting: float = 0.0
    recovering: float = 0.0
    waiting: float = 0.0
    stopped: float = 0.0

    def total(self) -> float:
        return float(sum(getattr(self, name) for name in self.__struct_fields__))


class FleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run."""

    wall_s: float
    gpus: int
    ranks: int
    """Ranks of the full world."""
    steps: int
    where: TimeBreakdown
    strikes: int
    """Failures of all units, used or not."""
    breaks: int
    """How many times a failure stopped the world."""
    rungs: dict[str, int]
    """How often each rung was taken, and ``grow``."""
    events: int
    short_s: float
    """Seconds for which the world was smaller than its full size."""
    queued_max: int
    """The most repairs that waited for a crew at the same time."""
    charged: dict[str, float] = {}
    """Seconds of recoveries by cost (a field of `PlanCosts`), which `rackrun.chaos.planner.analysis.sensitivity`
    scales."""

    @property
    def wall_goodput(self) -> float:
        """Productive time over wall time (ETTR)."""
        return self.where.productive / self.wall_s

    @property
    def goodput(self) -> float:
        """Productive GPU-time over all GPU-time that is paid for, including spares and broken GPUs."""
        return self.wall_goodput * self.ranks / self.gpus
