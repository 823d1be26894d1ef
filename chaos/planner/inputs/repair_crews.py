"""The repair crews: a number of crews, first come, first served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.inputs.failures import UnitFailure

__all__ = ["Crews"]


@dataclass(slots=True)
class Crews:
    """The repair crews of one fleet."""

    count: int | None = None
    """The number of crews; None: always enough."""
    busy: int = 0
    queued_max: int = 0
    _queue: deque[UnitFailure] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise PlannerError(
                f"{self.count} repair crews cannot repair anything.", remedy="give --crews 1 or more, or leave it out."
            )

    def take(self, strike: UnitFailure) -> bool:
        """Return whether a crew begins this repair now; otherwise it waits for one."""
        if self.count is not None and self.busy >= self.count:
            self._queue.append(strike)
            self.queued_max = max(self.queued_max, len(self._queue))
            return False
        self.busy += 1
        return True

    def done(self) -> UnitFailure | None:
        """A crew has finished. Return the repair that it begins next, or None."""
        if self._queue:
            return self._queue.popleft()
        self.busy -= 1
        return None
