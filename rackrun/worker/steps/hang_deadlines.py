"""How long units take, and how long one may take before that is called a hang."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from rackrun.worker.steps.unit_times import Allowance, UnitTimes, compared_after_ms

__all__ = ["Pace"]

_WARM_UNITS = 5
_STALL_FACTOR, _STALL_FLOOR_S, _PATIENCE_MAX = 3.0, 1.0, 8.0
_FIRST_UNITS_S = 600.0
"""Of the first; it may compile."""
_COLD_FLOOR_S = 30.0
_COPY_FACTOR = 4.0
_FIRST_COPY_BYTES_PER_S, _FIRST_COPY_S = 20e6, 60.0
"""The first copy, whose memory is new, is never slower than that, and is waited for so long at the most."""
_UNSURE_FLOOR_S = 20.0
"""Right after a recovery a step may be slow for good reasons (a newcomer's first)."""


class Pace:
    """``constant``: the global batch stays when the number of ranks changes, and each has more to do, or less."""

    def __init__(self, *, constant: bool = True) -> None:
        self._constant = constant
        self._seconds: deque[float] = deque(maxlen=100)
        self._ascending: list[float] | None = None
        """The same, in order; None: to be sorted when they are next asked for, which is several times in a step."""
        self._expected_s = 0.0
        self._patience = 1.0
        self._copy_s = 0.0
        self._copied = False
        self._units_in_generation = 0
        self.first_step_of_generation = False
        self._cold = False
        """``main`` was entered again: what the first unit needs may have to be made once more."""
        self._units: dict[str, UnitTimes] = {}
        """Of everything but steps, by its name."""

    def expect(self, seconds: float) -> None:
        """The next unit may take this long."""
        self._expected_s = seconds

    def entered_again(self, before: int, after: int) -> None:
        """With so many ranks instead of so many."""
        self.resized(before, after)
        self._expected_s, self._cold = 0.0, True

    def committed(self) -> None:
        self._units_in_generation += 1
        self._cold = False

    def step_done(self) -> None:
        self.first_step_of_generation = False

    def took(self, seconds: float) -> None:
        """An undisturbed step."""
        self._seconds.append(seconds)
        self._ascending = None

    def new_generation(self, *, nobody_lost: bool) -> None:
        self._units_in_generation = 0
        self.first_step_of_generation = True
        if nobody_lost:  # what looked like a hang was slowness
            self._patience = min(2 * self._patience, _PATIENCE_MAX)

    def resized(self, before: int, after: int) -> None:
        """The same batch on fewer ranks takes longer."""
        if not self._constant:
            return
        self._seconds = deque((seconds * before / after for seconds in self._seconds), maxlen=self._seconds.maxlen)
        self._ascending = None
        for times in self._units.values():
            times.resized(max(before / after, 1.0))

    def copied(self, seconds: float) -> None:
        """A copy of its state that overlapped with a unit has held this rank up for so long, which may hold up the others."""
        self._copied = True
        self._copy_s = max(self._copy_s, seconds)

    def unit_took(self, name: str, seconds: float) -> None:
        """A phase, or whatever else is no step, was not disturbed."""
        self._units.setdefault(name, UnitTimes()).took(seconds)

    def allowance(self, name: str, *, between: bool = False) -> Allowance:
        """Of such a unit, which begins now. ``between``: it is the script's code between two units, and what was
        expected (`expect`) holds for the unit after it too."""
        expected = self._expected_s
        if not between:
            self._expected_s = 0.0
        times = self._units.get(name) or UnitTimes()
        copies = _COPY_FACTOR * self._copy_s
        found = times.allowance(self.median_s, self._patience, mixed=between)
        return found.plus(math.ceil(1e3 * copies)).at_least(math.ceil(1e3 * expected))

    def unobserved(self, usual: Allowance) -> Allowance:
        """Of code of the script's that runs once, unless more was expected."""
        return usual.at_least(math.ceil(1e3 * self._expected_s))

    def step_allowance(self, *, copying_bytes: int = 0, work: float = 1.0) -> Allowance:
        """Of the step that begins now: so long without progress is a stall. ``copying_bytes``: all ranks copy so much beside it. ``work``:
        so many times the micro-batches that a rank usually has."""
        expected, self._expected_s = self._expected_s, 0.0
        slowest, warm = self.slowest_s, len(self._seconds) >= _WARM_UNITS
        if not warm:
            floor = expected or (max(10 * slowest, _COLD_FLOOR_S) if slowest else _FIRST_UNITS_S)
        else:
            floor = _STALL_FLOOR_S if self._units_in_generation >= 2 else _UNSURE_FLOOR_S
        if self._cold:
            floor = max(floor, _FIRST_UNITS_S)
        slow = work * _quantile(self._sorted(), 0.99) if self._seconds else 0.0
        copies = self._copy_allowance_s(copying_bytes) if copying_bytes else 0.0
        idle_ms = math.ceil(1000 * max(self._patience * max(_STALL_FACTOR * slow, floor) + copies, expected))
        if warm and not self._cold:
            return Allowance(idle_ms, 0)
        # No time for copies: whoever copies is not without any sign of life, and the other ranks, whose times are asked for, copy as much.
        least_ms = max(compared_after_ms(work * slowest, self._patience), math.ceil(1e3 * expected))
        return Allowance(idle_ms, 0, min(least_ms, idle_ms))

    def _copy_allowance_s(self, size: int) -> float:
        return _COPY_FACTOR * self._copy_s if self._copied else min(size / _FIRST_COPY_BYTES_PER_S, _FIRST_COPY_S)

    def recovery_deadline_ms(self) -> int:
        return math.ceil(1000 * max(5 * self.median_s, 5.0))

    @property
    def median_s(self) -> float:
        return _quantile(self._sorted(), 0.5) if self._seconds else 0.0

    @property
    def slowest_s(self) -> float:
        """Of the steps that are known; 0: none is."""
        return self._sorted()[-1] if self._seconds else 0.0

    def _sorted(self) -> list[float]:
        if self._ascending is None:
            self._ascending = sorted(self._seconds)
        return self._ascending


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Linear between the two nearest. (NumPy's imports 90 ms of modules at its first call, in every rank's first step.)"""
    at = share * (len(ascending) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (at - below) * (ascending[above] - ascending[below])
