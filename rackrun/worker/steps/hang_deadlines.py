"""Measures how long steps and other units take, and limits how long one may go without progress before it counts as a
hang."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from rackrun.worker.steps.unit_times import Allowance, UnitTimes, compared_after_ms

__all__ = ["HangDeadlines"]

_WARM_UNITS = 5
_STALL_FACTOR, _STALL_FLOOR_S, _PATIENCE_MAX = 3.0, 1.0, 8.0
_FIRST_UNITS_S = 600.0
"""The limit for the first steps, in seconds; they may compile."""
_COLD_FLOOR_S = 30.0
_COPY_FACTOR = 4.0
_FIRST_COPY_BYTES_PER_S, _FIRST_COPY_S = 20e6, 60.0
"""The first copy uses new memory. It is assumed to be at least this fast (bytes per second), and is waited for no
longer than this (seconds)."""
_UNSURE_FLOOR_S = 20.0
"""The lowest limit right after a recovery, in seconds, when a step may be slow for good reasons, such as a newcomer's
first one."""


class HangDeadlines:
    """Times of this rank's steps and other units, and the limits that follow from them.

    ``constant``: whether the global batch stays when the number of ranks changes, so that each rank computes more or
    less.
    """

    def __init__(self, *, constant: bool = True) -> None:
        self._constant = constant
        self._seconds: deque[float] = deque(maxlen=100)
        self.median_s = 0.0
        """The median time of the recorded steps, in seconds; 0 when there are none."""
        self.slowest_s = 0.0
        """The longest time of the recorded steps, in seconds; 0 when there are none."""
        self._slow_s = 0.0
        """A time that one in a hundred of the recorded steps exceeds, in seconds; 0 when there are none."""
        self._expected_s = 0.0
        self._patience = 1.0
        self._copy_s = 0.0
        self._copied = False
        self._units_in_generation = 0
        self.first_step_of_generation = False
        self._cold = False
        """Whether ``main`` was entered again and no unit was committed since: the first unit may have to compile or
        allocate once more."""
        self._units: dict[str, UnitTimes] = {}
        """Times of all units but steps, by the unit's name."""

    def expect(self, seconds: float) -> None:
        """Allow the next unit ``seconds`` without progress."""
        self._expected_s = seconds

    def entered_again(self, before: int, after: int) -> None:
        """Adapt the times to a new entry of ``main``, with ``after`` ranks instead of ``before``."""
        self.resized(before, after)
        self._expected_s, self._cold = 0.0, True

    def committed(self) -> None:
        """Count a committed unit of this generation."""
        self._units_in_generation += 1
        self._cold = False

    def step_done(self) -> None:
        """Record that the first step of this generation, if this was it, is over."""
        self.first_step_of_generation = False

    def took(self, seconds: float) -> None:
        """Record the time of a step that ran without disturbance."""
        self._seconds.append(seconds)
        self._summarise()

    def new_generation(self, *, nobody_lost: bool) -> None:
        """Start the counts of a new generation. ``nobody_lost``: the recovery replaced no rank, so limits double, up to
        eight times."""
        self._units_in_generation = 0
        self.first_step_of_generation = True
        if nobody_lost:  # the apparent hang was slowness
            self._patience = min(2 * self._patience, _PATIENCE_MAX)

    def resized(self, before: int, after: int) -> None:
        """Scale the recorded times from ``before`` to ``after`` ranks: the same global batch on fewer ranks takes
        longer."""
        if not self._constant:
            return
        self._seconds = deque((seconds * before / after for seconds in self._seconds), maxlen=self._seconds.maxlen)
        self._summarise()
        for times in self._units.values():
            times.resized(max(before / after, 1.0))

    def copied(self, seconds: float) -> None:
        """Record that this rank waited ``seconds`` for a copy of its state that overlapped with a unit; the others may
        wait for it as long."""
        self._copied = True
        self._copy_s = max(self._copy_s, seconds)

    def unit_took(self, name: str, seconds: float) -> None:
        """Record the time of a phase or another unit that is not a step, and that ran without disturbance."""
        if name not in self._units:
            self._units[name] = UnitTimes()
        self._units[name].took(seconds)

    def allowance(self, name: str, *, between: bool = False) -> Allowance:
        """Return the limits for the unit ``name`` that begins now, which is not a step.

        ``between``: the unit is the script's code between two units. A duration announced by `expect` then also holds
        for the unit after it.
        """
        expected = self._expected_s
        if not between:
            self._expected_s = 0.0
        times = self._units.get(name) or UnitTimes()
        copies = _COPY_FACTOR * self._copy_s
        found = times.allowance(self.median_s, self._patience, mixed=between)
        return found.plus(math.ceil(1e3 * copies)).at_least(math.ceil(1e3 * expected))

    def unobserved(self, usual: Allowance) -> Allowance:
        """Return the limits for code of the script that runs once: ``usual``, or what `expect` announced if that is
        longer."""
        return usual.at_least(math.ceil(1e3 * self._expected_s))

    def step_allowance(self, *, copying_bytes: int = 0, work: float = 1.0) -> Allowance:
        """Return the limits for the step that begins now.

        ``copying_bytes``: how much each rank copies of its state meanwhile. ``work``: this step's micro-batches
        relative to the usual number.
        """
        expected, self._expected_s = self._expected_s, 0.0
        slowest, warm = self.slowest_s, len(self._seconds) >= _WARM_UNITS
        if not warm:
            floor = expected or (max(10 * slowest, _COLD_FLOOR_S) if slowest else _FIRST_UNITS_S)
        else:
            floor = _STALL_FLOOR_S if self._units_in_generation >= 2 else _UNSURE_FLOOR_S
        if self._cold:
            floor = max(floor, _FIRST_UNITS_S)
        slow = work * self._slow_s
        copies = self._copy_allowance_s(copying_bytes) if copying_bytes else 0.0
        idle_ms = math.ceil(1000 * max(self._patience * max(_STALL_FACTOR * slow, floor) + copies, expected))
        if warm and not self._cold:
            return Allowance(idle_ms, 0)
        # The comparison gets no extra time for copies: a rank that copies shows signs of life, and the ranks it is
        # compared with copy as much.
        least_ms = max(compared_after_ms(work * slowest, self._patience), math.ceil(1e3 * expected))
        return Allowance(idle_ms, 0, min(least_ms, idle_ms))

    def _copy_allowance_s(self, size: int) -> float:
        return _COPY_FACTOR * self._copy_s if self._copied else min(size / _FIRST_COPY_BYTES_PER_S, _FIRST_COPY_S)

    def recovery_deadline_ms(self) -> int:
        """Return how long a recovery may go without progress, in milliseconds."""
        return math.ceil(1000 * max(5 * self.median_s, 5.0))

    def _summarise(self) -> None:
        """Compute what is read of the times, several times in a step."""
        ascending = sorted(self._seconds)
        if ascending:
            self.median_s, self._slow_s = _quantile(ascending, 0.5), _quantile(ascending, 0.99)
            self.slowest_s = ascending[-1]


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Return the quantile ``share`` (0 to 1) of sorted values, linear between the two nearest.

    NumPy is avoided: it imports 90 ms of modules at its first call, in every rank's first step.
    """
    at = share * (len(ascending) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (at - below) * (ascending[above] - ascending[below])
