"""Measurements that decisions need and the core cannot make: step time, copy speed, checkpoints on disk.

They are sent to the core as an event, which is in the journal, so only when they have changed enough to matter.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from rackrun.protocol.events import CostsMeasured
from rackrun.protocol.ids import Step
from rackrun.protocol.wire import StateCopied, UnitCommitted

__all__ = ["SpeedMeasurements"]

_STEPS = 64
_STEPS_MIN = 3
"""Number of steps before a step time is known; the first few warm up."""
_CHANGE = 0.2


class SpeedMeasurements:
    """Measures step time, copy speed and checkpoints."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS)  # of one step each, on its first reporter
        self._rates: deque[float] = deque(maxlen=_STEPS)
        self._newest_step = -1
        self._state_bytes: float | None = None
        self._checkpoint: int | None = None
        self._checkpoint_ms: float | None = None
        self._every_s: float | None = None
        self._told = CostsMeasured()
        self._looked_at = 0

    @property
    def step_s(self) -> float | None:
        """Seconds of an undisturbed step; None: too few steps are known."""
        return median(self._seconds) if len(self._seconds) >= _STEPS_MIN else None

    def committed(self, unit: UnitCommitted) -> None:
        """Learn the seconds of a step from its first report; a repeated step teaches nothing."""
        if unit.at.phase == 0 and unit.at.step > self._newest_step:
            self._newest_step = unit.at.step
            if unit.attempt == 0 and unit.seconds > 0:
                self._seconds.append(unit.seconds)

    def copied(self, told: StateCopied, now_ms: float) -> None:
        """Learn state sizes, transfer rates and checkpoint intervals from a copy at ``now_ms``."""
        match told.kind, told.outcome:
            case ("snapshot", "done") if told.bytes:
                self._state_bytes = max(self._state_bytes or 0.0, float(told.bytes))
            case ("copy", "done") if told.bytes and told.seconds > 0:
                self._rates.append(told.bytes / told.seconds)
            case (("checkpoint" | "resume"), "done") if told.at.step > (
                -1 if self._checkpoint is None else self._checkpoint
            ):
                if self._checkpoint_ms is not None and told.kind == "checkpoint":
                    self._every_s = (now_ms - self._checkpoint_ms) / 1e3
                self._checkpoint, self._checkpoint_ms = told.at.step, now_ms
            case _:
                pass

    def news(self) -> CostsMeasured | None:
        """Return the measurements if they have changed enough, else None. Checks at most once a step."""
        if self._newest_step == self._looked_at and self._checkpoint == self._told.checkpoint:
            return None
        self._looked_at = self._newest_step
        now = CostsMeasured(
            step_s=self.step_s,
            copy_bytes_per_s=median(self._rates) if self._rates else None,
            state_bytes=self._state_bytes,
            checkpoint=None if self._checkpoint is None else Step(self._checkpoint),
            checkpoint_every_s=self._every_s,
        )
        told = self._told
        pairs = (
            (now.step_s, told.step_s),
            (now.copy_bytes_per_s, told.copy_bytes_per_s),
            (now.state_bytes, told.state_bytes),
        )
        if now.checkpoint == told.checkpoint and not any(_differ(new, old) for new, old in pairs):
            return None
        self._told = now
        return now


def _differ(new: float | None, old: float | None) -> bool:
    if new is None or old is None:
        return new is not old
    return abs(new - old) > _CHANGE * max(abs(old), 1e-9)
