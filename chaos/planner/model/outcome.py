"""What a simulated run came to."""

from __future__ import annotations

import msgspec

__all__ = ["Outcome", "Where"]


class Where(msgspec.Struct, kw_only=True):
    """Where the wall time went, in seconds; they add up to it."""

    productive: float = 0.0
    """Steps that count, at the time that they take in the whole world."""
    between: float = 0.0
    """The script's own code between steps."""
    slowed: float = 0.0
    """What steps took longer in a smaller world."""
    saving: float = 0.0
    redone: float = 0.0
    """Steps that a rollback took back."""
    broken: float = 0.0
    """Of steps, or of saving, that did not end."""
    detecting: float = 0.0
    recovering: float = 0.0
    waiting: float = 0.0
    stopped: float = 0.0

    def total(self) -> float:
        return float(sum(getattr(self, name) for name in self.__struct_fields__))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    wall_s: float
    gpus: int
    ranks: int
    """Of the whole world."""
    steps: int
    where: Where
    strikes: int
    """Of all units, used or not."""
    breaks: int
    """How often the world stood still for one."""
    rungs: dict[str, int]
    """What was done; ``grow`` too."""
    events: int
    short_s: float
    """Time that the world was smaller than whole."""
    queued_max: int
    """Repairs that waited for a crew."""
    charged: dict[str, float] = {}
    """Seconds of recoveries that each cost (a field of `PlanCosts`) accounts for: what `rackrun.chaos.planner.analysis.sensitivity` scales."""

    @property
    def wall_goodput(self) -> float:
        """Productive time over wall time (ETTR)."""
        return self.where.productive / self.wall_s

    @property
    def goodput(self) -> float:
        """Productive GPU-time over all GPU-time that is paid for, spares and broken ones too."""
        return self.wall_goodput * self.ranks / self.gpus
